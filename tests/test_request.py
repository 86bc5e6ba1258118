"""Which specs share a kernel: those that decode alike, and no others."""

from __future__ import annotations

import numpy as np
import pytest

import kivi
from kivi.kernels.request import decoding
from kivi.layout import named_layout

BASE = {"key.bits": 3, "value.bits": 4, "key.group": 8, "value.group": 16, "key.residual": 24, "value.residual": 24}


def request(which, out="float32", metadata="float16", channels=64, layout="hp16", **changed):
    spec = kivi.load_spec("kivi-2bit").override({**BASE, **{name.replace("_", "."): value for name, value in changed.items()}})
    return decoding(spec, which, named_layout(layout), channels, metadata, out)


@pytest.mark.parametrize("which", ["key", "value"])
def test_what_decoding_does_not_ask(which):
    other = "value" if which == "key" else "key"
    base = request(which)
    assert base == request(which, numerics="staged", order="seal_then_attend", nonfinite="propagate", overflow="saturate")
    assert base == request(which, **{f"{other}_bits": 8, f"{other}_group": 4})
    assert request(which, "uint8") == request(which, "uint8", "bfloat16", **{f"{which}_group": 4})  # codes have no scale


@pytest.mark.parametrize("which", ["key", "value"])
def test_what_decoding_asks(which):
    base = request(which)
    others = [
        request(which, **{f"{which}_bits": 8}),
        request(which, **{f"{which}_group": 4}),
        request(which, key_residual=48, value_residual=48),
        request(which, "float16"),
        request(which, metadata="float32"),
        request(which, channels=80),
        request(which, layout="lanes32"),
    ]
    assert len({base, *others}) == 8


@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("residual", [2, 4096, 8192, 65536])
def test_pages_of_any_length(which, residual):
    """A group has at most 4096 elements, a page more."""
    spec = kivi.load_spec("kivi-2bit").override({"key.group": 2, "key.residual": residual, "value.residual": residual})
    x = np.random.default_rng(0).standard_normal((1, 1, 16, 32)).astype(np.float16)
    got, expected = (kivi.get_backend(name).quantize(x, spec, which) for name in ("cpu", "reference"))
    assert np.array_equal(got.codes(), expected.codes())
    assert np.array_equal(got.dequantize(), expected.dequantize())
