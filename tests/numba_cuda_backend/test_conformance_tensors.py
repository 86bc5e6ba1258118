"""The Numba CUDA backend under the simulator passes the conformance suite, whole tensors and attention: every case, none unsupported."""

from __future__ import annotations

import pytest

from tests.numba_cuda_backend.conform import check


@pytest.mark.parametrize("profile", ["quantize", "attention"])
def test_quick(profile):
    check(profile, "quick")


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["quantize", "attention"])
def test_full(profile):
    check(profile, "full")
