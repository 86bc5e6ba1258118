"""A selection that this machine has made before imports no vendor's package but the chosen one's, and starts no process."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kivi
from kivi import distributions, jit, plugins, records
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
    chosen = {"llvmlite"} if cold["backend"] == "cpu" else set()
    assert set(cold["modules"]) & PACKAGES == chosen  # packages of others are asked in other processes
    assert set(warm["modules"]) & PACKAGES == chosen
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


@pytest.mark.parametrize("data", [{"versions": []}, {"versions": {"numpy": 3}}, {"entry_points": {"kivi.backends": "x"}}, [], {"other": 1}])
def test_a_record_of_something_else_is_none(data):
    distributions.forget()
    assert version("numpy")
    [path] = (jit.cache_folder() / distributions.FOLDER).glob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "data": data}))
    distributions.forget()
    assert version("numpy") == importlib.metadata.version("numpy")
    assert [list(point) for point in entry_points("kivi.backends")] == [
        [point.name, point.value] for point in importlib.metadata.entry_points(group="kivi.backends")
    ]


@pytest.mark.parametrize("folder", [Path("nowhere"), os.fsdecode(b"/nowhere/caf\xe9")], ids=["path", "bytes"])
def test_whatever_lies_on_the_path(monkeypatch, folder):
    monkeypatch.setattr(sys, "path", [folder, *sys.path])
    try:
        distributions.forget()
        assert kivi.select("kivi-2bit", device="cpu").backend.mode == "device"
    finally:
        distributions.forget()


def test_threads_that_ask_at_once(monkeypatch):
    """Each finds the whole answer, while the folders change under all of them."""
    names = ["numpy", "msgspec", "packaging", "pytest"]
    right = [importlib.metadata.version(name) for name in names]
    states, read = itertools.count(), records.read
    monkeypatch.setattr(distributions, "_folders", lambda: f"state {next(states) // 3}")
    monkeypatch.setattr(records, "read", lambda *given: time.sleep(1e-3) or read(*given))  # from a slow disk
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: [version(name) for name in names], range(20)))
    distributions.forget()
    assert answers == [right] * 20
