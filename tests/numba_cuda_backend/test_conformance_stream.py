"""The Numba CUDA backend under the simulator passes the conformance suite, streams of events: every case, none unsupported."""

from __future__ import annotations

import pytest

from tests.numba_cuda_backend.conform import check


def test_quick():
    check("stream", "quick")


@pytest.mark.slow
def test_full():
    check("stream", "full")
