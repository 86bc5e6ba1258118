"""The CPU backend passes the conformance suite on every instruction set that this processor has: every case, none unsupported."""

from __future__ import annotations

import pytest

from tests.conform import check
from tests.cpu_backend.conform import runs_on


@pytest.mark.parametrize("profile", ["quantize", "attention", "stream"])
def test_a_sample_of_quick(profile):
    check("cpu", "device", profile, "quick", every=15)


@pytest.mark.slow
@runs_on
@pytest.mark.parametrize("profile", ["quantize", "attention", "stream"])
def test_full(profile, target, monkeypatch):
    monkeypatch.setenv("KIVI_CPU_TARGET", target)
    check("cpu", "device", profile, "full")


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["quantize", "attention", "stream"])
def test_two_threads(profile, monkeypatch):
    """Every launch is shared, however short."""
    monkeypatch.setenv("KIVI_CPU_THREADS", "2")
    monkeypatch.setattr("kivi.backends.cpu.threads.WORTH", 0.0)
    check("cpu", "device", profile, "quick")
