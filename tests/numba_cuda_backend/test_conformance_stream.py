"""The Numba CUDA backend under the simulator passes the conformance suite, streams of events: every case, none unsupported.

A pass without a GPU is not a device's: the report says which mode ran.
"""

from __future__ import annotations

import pytest

from tests.conform import check


@pytest.mark.parametrize("profile", ["stream"])
def test_quick(profile):
    check("numba_cuda", "simulator", profile, "quick")


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["stream"])
def test_full(profile):
    check("numba_cuda", "simulator", profile, "full")
