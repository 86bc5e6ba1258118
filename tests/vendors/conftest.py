"""A fixture that installs fake vendor stacks for one test."""

from __future__ import annotations

import itertools
import sys

import pytest

from kivi import distributions, plugins, probing, selection
from tests.vendors.stack import Vendor

_numbers = itertools.count()


@pytest.fixture
def install(tmp_path, monkeypatch):
    """`install(Vendor(...), ...)`: these backends beside the reference, found by their entry points, with an empty cache folder and no
    configuration. Modules of a test's packages are forgotten after it."""
    monkeypatch.setenv("KIVI_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for variable in ("KIVI_BACKEND", "KIVI_MODE", "KIVI_STRICT", "KIVI_SELF_CHECK", "KIVI_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    in_tree = [place for place in plugins._in_tree() if place[0].endswith(".reference")]
    monkeypatch.setattr(plugins, "_in_tree", lambda: in_tree)
    monkeypatch.setattr(selection, "_said", set())
    before = set(sys.modules)

    def add(*vendors: Vendor) -> None:
        folder = tmp_path / f"site{next(_numbers)}"
        for vendor in vendors:
            vendor.write(folder)
        folder.mkdir(exist_ok=True)
        monkeypatch.syspath_prepend(str(folder))
        distributions.forget()
        plugins.scan.cache_clear()
        _forget_stamps()

    yield add
    distributions.forget()
    plugins.scan.cache_clear()
    _forget_stamps()
    for name in set(sys.modules) - before:
        if any(str(tmp_path) in str(getattr(sys.modules[name], where, "")) for where in ("__file__", "__path__")):
            del sys.modules[name]


def _forget_stamps() -> None:
    probing.driver_stamp.cache_clear()
    probing.source_stamp.cache_clear()
