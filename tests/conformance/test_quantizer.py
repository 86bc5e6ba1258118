"""The naive quantizer against exact rational arithmetic: each step computed as a fraction and rounded once."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from kivi.conformance import quantizer
from kivi.conformance.floats import NUMPY, cast, fmt
from kivi.conformance.quantizer import Rule
from kivi.conformance.traces.degenerate import narrow, one_ulp
from kivi.conformance.traces.ties import midpoints, sharp


def rounded(x: Fraction, name: str) -> Fraction:
    """`x` rounded half-even to a format, subnormals included; no overflow in these tests."""
    form = fmt(name)
    if x == 0:
        return x
    exponent = 0
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    spacing = Fraction(2) ** (max(exponent, form.emin) - form.p + 1)
    return round(x / spacing) * spacing  # Fraction rounds half to even


def exactly(group: np.ndarray, rule: Rule, name: str) -> tuple[list[int], Fraction, Fraction]:
    """(codes, scale, origin) of one group."""
    x = [Fraction(float(v)) for v in group]
    metadata = name if rule.metadata == "input" or rule.numerics == "staged" else rule.metadata
    work = "float32" if rule.numerics == "portable" else name
    top = 2**rule.bits - 1
    low, high = min(x), max(x)
    scale = rounded(rounded(rounded(high - low, work) / top, work), metadata)
    origin = rounded(low, metadata)
    if scale == 0:
        return [0] * len(x), Fraction(1), origin
    quotients = [rounded(rounded(v - origin, work) / scale, work) for v in x]
    return [round(min(max(q, Fraction(0)), Fraction(top))) for q in quotients], scale, origin


CASES = [
    (numerics, name, metadata, bits)
    for numerics in ("portable", "staged")
    for name in NUMPY
    for metadata in (("float16", "bfloat16", "float32") if numerics == "portable" else ("input",))
    for bits in (1, 2, 3, 4, 8)
]


@pytest.mark.parametrize(("numerics", "name", "metadata", "bits"), CASES)
def test_every_step_is_correctly_rounded(numerics, name, metadata, bits):
    rule = Rule(bits, metadata, numerics)
    rng = np.random.default_rng(bits)
    groups = np.concatenate([
        rng.normal(0, 3, (6, 8)),
        rng.uniform(1000.3, 1000.6, (2, 8)),
        midpoints(bits)[:3],
        one_ulp(name),
        narrow(0.0, 6e-8),
        sharp(name, bits, metadata, numerics, 3, wanted=8),
    ])  # fmt: skip
    x = cast(groups, name)
    grid = quantizer.quantize(x, rule)
    for i, group in enumerate(x):
        codes, scale, origin = exactly(group, rule, name)
        assert (grid.codes[i].tolist(), Fraction(float(grid.scale[i])), Fraction(float(grid.origin[i]))) == (codes, scale, origin), group


def test_dequantize_rounds_twice():
    codes, scale, origin = np.array([3], np.uint8), np.array([2.0989582538604736], np.float32), np.array([-3.0703125], np.float32)
    assert quantizer.dequantize(codes, scale, origin, "float32")[0] == np.float32(3.2265625)


def test_reject_and_saturate():
    x = np.array([[-70000.0, 1.0]], NUMPY["bfloat16"])
    with pytest.raises(quantizer.Overflow):
        quantizer.quantize(x, Rule(2))
    grid = quantizer.quantize(x, Rule(2, overflow="saturate"))
    assert (float(grid.origin[0]), float(grid.scale[0])) == (-65504.0, 23376.0)  # bf16 holds -70144; (1 + 70144) / 3 in steps of 16
    with pytest.raises(quantizer.NonFinite):
        quantizer.quantize(np.array([[np.nan, 1.0]], np.float32), Rule(2))


def test_value_groups_may_be_short_and_key_groups_are_along_tokens():
    x = np.arange(20, dtype=np.float32).reshape(1, 1, 4, 5)
    value = quantizer.quantize_value(x, Rule(2, "float32"), 2)
    assert value.scale.shape == (1, 1, 4, 3)
    assert value.origin[0, 0, 0].tolist() == [0, 2, 4]
    key = quantizer.quantize_key(x, Rule(2, "float32"), 4)
    assert key.scale.tolist() == [[[[5.0] * 5]]]
    assert key.codes[0, 0, :, 0].tolist() == [0, 1, 2, 3]
