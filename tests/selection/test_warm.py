"""A selection that this machine has made before imports no vendor's package but the chosen one's, and starts no process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from kivi import distributions, plugins
from kivi.distributions import entry_points, version

PACKAGES = {
    "torch", "triton", "cupy", "numba", "llvmlite", "xdsl", "onnx", "onnxruntime", "transformers", "greenlet", "jinja2",
}  # fmt: skip
SELECT = """
import json, subprocess, sys
started = []
popen = subprocess.Popen.__init__
subprocess.Popen.__init__ = lambda self, *a, **k: started.append(1) or popen(self, *a, **k)
import kivi
chosen = kivi.select("kivi-2bit", backend={backend!r})
modules = sorted({{name.partition(".")[0] for name in sys.modules}})
reasons = {{r.name: [r.state, r.reason] for r in chosen.rejected}}
print(json.dumps({{"backend": chosen.backend.name, "modules": modules, "started": len(started), "reasons": reasons}}))
"""


def select(backend=None):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SELECT.format(backend=backend)], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_warm_selection_imports_nothing_that_it_does_not_choose():
    cold, warm = select(), select()
    assert cold["backend"] == warm["backend"]
    assert cold["reasons"] == warm["reasons"]
    assert warm["started"] == 0
    assert set(cold["modules"]) & PACKAGES == set()  # packages are asked in other processes
    assert set(warm["modules"]) & PACKAGES == set()
    assert "kivi.conformance" not in warm["modules"]


def test_it_does_import_what_it_chooses(monkeypatch):
    if plugins.missing_packages("cpu"):
        pytest.skip("llvmlite is not installed")
    monkeypatch.setenv("KIVI_SELF_CHECK", "0")  # its kernels would have to be compiled first
    select("cpu")
    warm = select("cpu")
    assert warm["started"] == 0
    assert "llvmlite" in warm["modules"]
    assert set(warm["modules"]) & PACKAGES <= {"llvmlite"}


def test_what_is_installed_is_remembered_until_it_changes(tmp_path, monkeypatch):
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(str(site))

    def install(number):
        info = site / f"remembered-{number}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: remembered\nVersion: {number}\n")
        (info / "entry_points.txt").write_text(f"[kivi.test]\none = value{number}\n")

    try:
        for number in (1, 2):
            shutil.rmtree(site, ignore_errors=True)
            install(number)
            distributions.forget()  # as another process, or a second later
            assert version("remembered") == str(number)
            assert entry_points("kivi.test") == [("one", f"value{number}")]
            with monkeypatch.context() as context:
                context.setattr(distributions.importlib.metadata, "version", lambda package: 1 / 0)
                distributions.forget()
                assert version("remembered") == str(number)  # from disk
        assert version("no-such-package") is None
    finally:
        distributions.forget()
