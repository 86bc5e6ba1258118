"""The reference backend's numbers, each against a value worked out by hand or by exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

import kivi
from kivi.errors import DeviceError, DtypeError, MetadataOverflowError, NonFiniteError, ShapeError, SpecError

BE = kivi.get_backend("reference")
BF16 = np.dtype(ml_dtypes.bfloat16)


def one_group(values, dtype="float32", **changes):
    """Quantize one value group: (codes, scale, origin, dequantized)."""
    x = np.array(values, dtype)[None, None, None]
    spec = kivi.load_spec("teaching").override({"value.group": max(2, len(values)), **changes})
    qt = BE.quantize(x, spec, "value")
    return qt.codes().ravel().tolist(), float(qt.scale.ravel()[0]), float(qt.origin.ravel()[0]), qt.dequantize().ravel().tolist()


def test_a_group_by_hand():
    assert one_group([0.0, 1.0, 2.0, 3.0]) == ([0, 1, 2, 3], 1.0, 0.0, [0.0, 1.0, 2.0, 3.0])
    assert one_group([1.0, 2.0]) == ([0, 3], float(np.float32(1) / np.float32(3)), 1.0, [1.0, 2.0])


def test_halves_round_to_even():
    codes, scale, _, _ = one_group([0.0, 0.5, 1.5, 2.5, 3.0])
    assert (codes, scale) == ([0, 0, 2, 2, 3], 1.0)


def test_division_is_not_a_reciprocal():
    """Field report 9: division gives codes 2 and 7, a multiplied reciprocal 1 and 8."""
    assert one_group([0.0, 0.7744140625, 1.548828125])[0] == [0, 2, 3]
    assert one_group([0.0, 0.79296875, 1.5859375], **{"value.bits": 4})[0] == [0, 7, 15]


def test_dequantize_rounds_twice():
    """Field report 12: 3.2265625 with two roundings, 3.2265623 fused."""
    assert one_group([-3.0703125, 3.2265625])[3][1] == 3.2265625


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, 100.0, -3.25])
@pytest.mark.parametrize("numerics", ["portable", "staged"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_a_constant_group_comes_back(value, numerics, dtype, bits):
    """Field reports 1, 2, 3."""
    changes = {"numerics": numerics, "value.metadata": "input", "key.metadata": "input", "value.bits": bits}
    codes, scale, origin, back = one_group([value] * 4, BF16 if dtype == "bfloat16" else dtype, **changes)
    assert codes == [0] * 4
    assert scale == 1.0
    assert back == [value] * 4
    assert not np.signbit(origin) or value < 0


def test_a_scale_that_underflows_is_a_constant_group():
    codes, scale, origin, _ = one_group([0.0, 1e-8], **{"value.metadata": "float16"})
    assert (codes, scale, origin) == ([0, 0], 1.0, 0.0)


def test_subnormal_ranges_are_not_flushed():
    """Field report 7."""
    codes, scale, _, _ = one_group([0.0, 1e-39])
    assert codes == [0, 3]
    assert scale == float(np.float32(np.float32(1e-39) / np.float32(3))) > 0


def test_one_ulp_range():
    codes, _, _, back = one_group([100.0, 100.0625], "float16", **{"value.metadata": "float16"})
    assert codes == [0, 3]
    assert abs(back[1] - 100.0625) <= 0.0625 / 6 + 2**-11 * 0.0625


def test_portable_steps_are_correctly_rounded():
    """Scale, origin and codes against exact rational arithmetic on the stored numbers."""
    rng = np.random.default_rng(5)
    for dtype in ("float16", "float32", BF16):
        for bits in (1, 2, 3, 4, 8):
            x = rng.standard_normal((1, 1, 3, 8)).astype(dtype)
            spec = kivi.load_spec("teaching").override({"value.group": 8, "value.bits": bits, "value.metadata": "float16"})
            qt = BE.quantize(x, spec, "value")
            for row, scale, origin, codes in zip(x[0, 0], qt.scale[0, 0, :, 0], qt.origin[0, 0, :, 0], qt.codes()[0, 0], strict=True):
                low, high = (np.float32(f(row.astype(np.float32))) for f in (np.min, np.max))
                span = np.float32(float(Fraction(float(high)) - Fraction(float(low))))
                assert scale == np.float16(np.float32(span / np.float32(2**bits - 1)))
                assert origin == np.float16(low)
                for value, code in zip(row, codes, strict=True):
                    rise = np.float32(float(Fraction(float(value)) - Fraction(float(origin))))
                    step = np.float32(float(Fraction(float(rise)) / Fraction(float(scale))))
                    assert code == min(max(round(float(step)), 0), 2**bits - 1)


def test_the_last_value_group_may_be_short():
    x = np.array([[[[5.0, 6.0, 5.5, 7.0, 7.5]]]], np.float32)
    qt = BE.quantize(x, kivi.load_spec("teaching").override({"value.group": 3}), "value")
    assert qt.scale.shape == (1, 1, 1, 2)
    assert qt.origin.ravel().tolist() == [5.0, 7.0]
    assert qt.scale.ravel()[1] == np.float32(0.5) / np.float32(3)


def test_keys_group_tokens_and_values_group_channels():
    x = np.arange(4 * 4, dtype=np.float32).reshape(1, 1, 4, 4)
    key = BE.quantize(x, kivi.load_spec("teaching"), "key")
    value = BE.quantize(x, kivi.load_spec("teaching"), "value")
    assert key.origin[0, 0].tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert value.origin[0, 0].tolist() == [[0, 2], [4, 6], [8, 10], [12, 14]]


def test_an_outlier_beyond_the_metadata_is_refused_or_clamped():
    """Field report 4: the ordinary elements of other groups never change."""
    x = np.linspace(-1, 4, 128).astype(BF16).reshape(1, 1, 1, 128)
    x[0, 0, 0, 5] = -70000
    spec = kivi.load_spec("kivi-2bit")
    with pytest.raises(MetadataOverflowError, match=r"value\.metadata = 'bfloat16'"):
        BE.quantize(x, spec, "value")
    wide = BE.quantize(x, spec.override({"value.metadata": "float32"}), "value")
    clamped = BE.quantize(x, spec.override({"overflow": "saturate"}), "value")
    assert wide.origin.ravel()[0] == float(x[0, 0, 0, 5])
    assert clamped.origin.ravel()[0] == -65504
    assert np.isfinite(clamped.dequantize()).all()
    assert np.array_equal(clamped.codes()[..., 32:], wide.codes()[..., 32:])


def test_saturation_never_yields_an_infinity():
    x = np.array([[[[-3e38, 3e38, 0.0, 1.0]]]], np.float32)
    spec = kivi.load_spec("teaching").override({"value.group": 4, "overflow": "saturate"})
    for bits in (1, 2, 3, 4, 8):
        for metadata in ("float16", "bfloat16", "float32"):
            qt = BE.quantize(x, spec.override({"value.bits": bits, "value.metadata": metadata}), "value")
            assert np.isfinite(qt.scale.astype(np.float32)).all()
            assert np.isfinite(qt.dequantize()).all()
    with pytest.raises(MetadataOverflowError, match="saturate"):
        BE.quantize(x, spec.override({"overflow": "reject"}), "value")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_input(bad):
    """Field report 8: refused by name, or poisons exactly its group."""
    x = np.arange(16, dtype=np.float32).reshape(1, 2, 2, 4)
    x[0, 1, 0, 2] = bad
    spec = kivi.load_spec("teaching")
    with pytest.raises(NonFiniteError, match="request 0, head 1, token 0, channel 2"):
        BE.quantize(x, spec, "value")
    qt = BE.quantize(x, spec.override({"nonfinite": "propagate"}), "value")
    assert np.isnan(qt.origin).sum() == 1
    assert np.isnan(qt.origin[0, 1, 0, 1])
    assert qt.scale[0, 1, 0, 1] == 1
    assert qt.codes()[0, 1, 0, 2:].tolist() == [0, 0]
    assert np.isnan(qt.dequantize()).sum() == 2


def test_torch_in_torch_out():
    x = torch.randn(1, 2, 8, 6, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    spec = kivi.load_spec("teaching").override({"key.metadata": "input"})
    qt = BE.quantize(x, spec, "key")
    assert qt.scale.dtype == torch.bfloat16
    assert qt.codes().dtype == torch.uint8
    same = BE.quantize(x.view(torch.int16).numpy().view(ml_dtypes.bfloat16), spec, "key")
    assert np.array_equal(qt.codes().numpy(), same.codes())
    assert np.array_equal(qt.dequantize().numpy(), same.dequantize())
    assert qt.dequantize("bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("x", "which", "error"),
    [
        (np.zeros((1, 1, 6, 4), np.float32), "keys", DtypeError),
        (np.zeros((1, 1, 5, 4), np.float32), "key", ShapeError),
        (np.zeros((1, 5, 4), np.float32), "key", ShapeError),
        (np.zeros((1, 1, 4, 0), np.float32), "value", ShapeError),
        (np.zeros((1, 1, 4, 4)), "key", DtypeError),
        (np.zeros((1, 1, 4, 4), np.int32), "key", DtypeError),
        ([[1.0]], "key", DtypeError),
        (torch.zeros(1, 1, 4, 4, device="meta"), "key", DeviceError),
    ],
)
def test_what_cannot_be_quantized(x, which, error):
    with pytest.raises(error):
        BE.quantize(x, kivi.load_spec("teaching"), which)


def test_staged_numerics_need_the_inputs_metadata():
    spec = kivi.load_spec("kivi-2bit").override({"numerics": "staged"})
    with pytest.raises(SpecError, match="input"):
        BE.quantize(np.zeros((1, 1, 32, 4), np.float32), spec, "key")
    assert BE.quantize(np.zeros((1, 1, 32, 4), np.float16), spec, "key").scale.dtype == np.float16


@pytest.mark.parametrize("view", ["transposed", "sliced", "reversed", "padded"])
def test_strides_are_honoured(view):
    """Field report 35."""
    base = np.random.default_rng(1).standard_normal((2, 2, 16, 12)).astype(np.float16)
    strided = {
        "transposed": np.ascontiguousarray(base.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
        "sliced": np.repeat(base, 2, axis=3)[..., ::2],
        "reversed": np.ascontiguousarray(base[..., ::-1])[..., ::-1],
        "padded": np.pad(base, ((0, 0), (0, 0), (0, 3), (0, 5)))[:, :, :16, :12],
    }[view]
    assert not strided.flags.c_contiguous
    for which in ("key", "value"):
        a, b = BE.quantize(strided, kivi.load_spec("teaching"), which), BE.quantize(base, kivi.load_spec("teaching"), which)
        assert np.array_equal(a.words, b.words)
        assert np.array_equal(a.scale, b.scale)
