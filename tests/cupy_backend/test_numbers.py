"""Field reports on numbers, on kernels as printed: subnormal ranges are kept, and dequantization rounds twice."""

from __future__ import annotations

import re

import numpy as np
import pytest

import kivi
from kivi.backends.cupy import offline
from kivi.geometry import geometry

BE = kivi.get_backend("cupy", mode="shim")


def spec(bits):
    sides = {f"{side}.{name}": value for side in ("key", "value") for name, value in (("bits", bits), ("group", 2), ("residual", 2))}
    return kivi.CacheSpec(name="numbers").override({**sides, "key.metadata": "float32", "value.metadata": "float32"})


def tensor(*values):
    return np.array(values, np.float32).reshape(1, 1, -1, 1)


def test_a_subnormal_range_is_not_zero():
    """Field report 7: flushed to zero, this group would be a constant one, with scale 1 and codes 0."""
    x = tensor(0.0, 1e-39)
    qt = BE.quantize(x, spec(2), "key")
    assert qt.scale.item() == np.float32(1e-39) / np.float32(3)
    assert 0 < qt.scale.item() < np.finfo(np.float32).tiny
    assert qt.codes().reshape(-1).tolist() == [0, 3]
    assert qt.dequantize().reshape(-1).tolist() == [0, np.float32(3) * qt.scale.item()]


def test_half_the_least_normal_number():
    """Field report 7: float32 1.1754944e-38 / 2, by a 1-bit group from minus to plus a quarter of it."""
    low = np.float32(1.1754944e-38)
    qt = BE.quantize(tensor(0.0, low / np.float32(2)), spec(1), "key")
    assert qt.scale.item() == np.float32(5.877472e-39)


def test_dequantization_rounds_twice():
    """Field report 12: 3.2265625 with two roundings; fused, 3.2265623."""
    qt = BE.quantize(tensor(-3.0703125, 3.2265625), spec(2), "key")
    assert qt.origin.item() == np.float32(-3.0703125)
    assert qt.codes().reshape(-1).tolist() == [0, 3]
    assert qt.dequantize().reshape(-1).tolist() == [-3.0703125, 3.2265625]
    fused = np.float32(np.float64(qt.scale.item()) * 3 - 3.0703125)
    assert fused == np.float32(3.2265623)


@pytest.mark.parametrize("entry", ["key.metadata", "key.decode"])
def test_the_device_gets_the_same_arithmetic(entry):
    """Both reports for the text that a GPU runs: nothing flushed, nothing fused."""
    request = offline.entries(kivi.load_spec("kivi-2bit"), geometry(8, 2, 128, None, "float32", None, None, None))[entry]
    ptx = offline.emit(request, "ptx")
    assert not re.search(r"\.ftz|\bfma\.|div\.(approx|full)", str(ptx))
    assert "mul.rn.f32" in str(ptx) or "div.rn.f32" in str(ptx)
