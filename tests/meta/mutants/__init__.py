"""Deliberately wrong backends and caches, one fault each.

A mutant is a function that puts its fault in place with `patch` (pytest's MonkeyPatch), or returns a `Subject` that has it. Its
docstring says what is wrong. They stand on the reference backend and on `KVCache`, with which the naive model of the suite
shares no code. `python -m tests.meta.mutants` prints what stops each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kivi.conformance import CaseResult, Subject, run

Mutant = Callable[[pytest.MonkeyPatch], Subject | None]
MUTANTS: dict[str, Mutant] = {}


def mutant(function: Any) -> Any:
    """Register a mutant under its function's name."""
    assert function.__name__ not in MUTANTS, function.__name__
    assert function.__doc__, f"{function.__name__} does not say what is wrong"
    MUTANTS[function.__name__] = function
    return function


def every() -> dict[str, Mutant]:
    """All mutants by name."""
    from tests.meta.mutants import arrays, attention, cache, grouping, narrow, packing, quantize, shared, storage

    assert all((arrays, attention, cache, grouping, narrow, packing, quantize, shared, storage))
    return MUTANTS


def killed_by(wrong: Mutant, patch: pytest.MonkeyPatch) -> CaseResult | None:
    """The first case of the quick size that a mutant does not pass; None if it lives."""
    report = run("reference", subject=wrong(patch), stop_on_failure=True)
    return next(iter(report.failures()), None)
