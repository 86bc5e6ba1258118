"""The ONNX Runtime backend passes the conformance suite: every case, none unsupported."""

from __future__ import annotations

import pytest

from tests.conform import check


@pytest.mark.parametrize("profile", ["quantize", "attention", "stream"])
def test_a_sample_of_quick(profile):
    check("onnxruntime", "device", profile, "quick", every=8)


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["quantize", "attention", "stream"])
def test_full(profile):
    check("onnxruntime", "device", profile, "full")
