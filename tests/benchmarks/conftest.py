"""Toy sizes: a machine of one processor whose caches are small, and no peer beyond torch and transformers."""

import pytest


@pytest.fixture
def toy(monkeypatch):
    from kivi.bench import machine, peers

    monkeypatch.setattr(machine, "last_level_cache", lambda: 1 << 18)
    monkeypatch.setattr(machine, "processors", lambda: 1)
    monkeypatch.setattr(peers, "MODULES", peers.MODULES | {"quanto": "no_such.quanto", "hqq": "no_such_hqq", "llama.cpp": "no_such_llama"})


@pytest.fixture
def plan():
    """A function that makes a plan of `kivi-2bit` on a backend, with fields replaced."""
    from dataclasses import replace

    import kivi
    from kivi.bench import plan as plans

    def make(backend="cpu", **fields):
        return replace(plans.quick((kivi.load_spec("kivi-2bit"),), kivi.get_backend(backend)), **{"budget": 0.0, **fields})

    return make
