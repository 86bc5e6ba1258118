"""Selections of a test know no configuration but its own, and find out everything anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kivi import plugins, selection
from kivi.backend import read_manifest

MANIFEST = dict(plugins._in_tree())["kivi.backends.reference"].read_text()


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    monkeypatch.setenv("KIVI_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for variable in ("KIVI_BACKEND", "KIVI_MODE", "KIVI_STRICT", "KIVI_SELF_CHECK", "KIVI_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(selection, "_said", set())


@pytest.fixture
def only(monkeypatch) -> Callable[..., None]:
    """`only(fast={"priority": 9}, ...)`: the reference under these names, and nothing else; `modes` and `bits` may be given, too."""

    def install(**given: dict[str, object]) -> None:
        found = {}
        for name, facts in given.items():
            text = MANIFEST.replace('name = "reference"', f'name = "{name}"')
            text = text.replace("priority = 0", f"priority = {facts.get('priority', 0)}")
            text = text.replace("bits = [1, 2, 3, 4, 8]", f"bits = {facts.get('bits', [1, 2, 3, 4, 8])}")
            text = text.replace('device = ["cpu"]', "\n".join(f'{mode} = ["cpu"]' for mode in facts.get("modes", ["device"])))  # type: ignore[attr-defined]
            found[name] = plugins.Found(read_manifest(text, name), "kivi.backends.reference")
        monkeypatch.setattr(plugins, "found", lambda: found)
        monkeypatch.setattr(plugins, "broken", dict)

    return install
