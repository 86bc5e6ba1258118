"""The conformance suite on this backend, compiled for a target that this processor can run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kivi.backends.cpu import compile as compiler
from kivi.passes.vector_target import TARGETS

RUNNABLE = [name for name in TARGETS if not compiler.missing(compiler.machine(name))]

runs_on = pytest.mark.parametrize(
    "target",
    [
        pytest.param(name, marks=() if name in RUNNABLE else pytest.mark.skip(reason=f"this processor does not run {name}"))
        for name in TARGETS
    ],
)


def python(code: str, **environment: str) -> str:
    """The last line that a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
