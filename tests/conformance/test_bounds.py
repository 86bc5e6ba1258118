"""Bounds by hand: formats, counts, limits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kivi.conformance.bounds import Numerics, computed_bound, output_bound
from kivi.conformance.floats import fmt
from kivi.conformance.model import History
from kivi.conformance.oracle import attend


def history(q, k, v, visible=None) -> History:
    q, k, v = (np.asarray(a, np.float64)[None] for a in (q, k, v))
    n = q.shape[1]
    return History(q, k, np.abs(k), v, np.abs(v), np.arange(k.shape[1] - n + 1, k.shape[1] + 1) if visible is None else np.asarray(visible))


@pytest.mark.parametrize(("name", "kind"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16), ("float32", np.float32)])
def test_half_ulp_is_half_the_spacing(name, kind):
    """Against the formats themselves: for numbers inside a binade, at its start, and below the smallest normal one."""
    for x in (
        1.0,
        1.5,
        3.999,
        1e-3,
        100.0,
        float(ml_dtypes.finfo(kind).smallest_normal) * 0.6,
        float(ml_dtypes.finfo(kind).smallest_subnormal),
    ):
        low = np.array(x).astype(kind)
        high = np.nextafter(low.astype(np.float32), np.float32(np.inf)) if kind is np.float32 else np.nextafter(low, kind(np.inf))
        assert fmt(name).half_ulp(np.array(float(low))) == (float(high) - float(low)) / 2


def test_rounding_alone_is_half_an_ulp():
    """One token: the output is its value; in float64 nothing but the rounding of the output is left."""
    (exact,) = attend(history([[1.0]], [[1.0]], [[1.3]]), 1.0)
    bound = output_bound(exact, Numerics(accumulate="float64", exp_ulp=1.0), "float32")
    assert bound.rounding.item() == 2.0**-24
    assert bound.total.item() == pytest.approx(2.0**-24, rel=1e-6)


def test_a_shared_error_of_the_weights_cancels():
    """Equal values: however wrong the weights, the output is that value, so logits of 1000 cost nothing beyond sums."""
    exact = attend(history([[1000.0]], [[1.0], [1.0], [1.0]], [[2.0], [2.0], [2.0]]), 1.0)[0]
    calm = attend(history([[0.0]], [[1.0], [1.0], [1.0]], [[2.0], [2.0], [2.0]]), 1.0)[0]
    assert computed_bound(exact, Numerics()).item() < 1.5 * computed_bound(calm, Numerics()).item()


def test_bound_grows_with_what_is_declared():
    rng = np.random.default_rng(3)
    (exact,) = attend(history(rng.standard_normal((4, 16)), rng.standard_normal((20, 16)), rng.standard_normal((20, 8))), 0.25)
    double, single, half = (computed_bound(exact, n) for n in (Numerics("float64"), Numerics(), Numerics(operand="float16")))
    assert (double < single * 1e-6).all()
    assert (single < half * 1e-1).all()
    assert (computed_bound(exact, Numerics(probability="float16")) > single).all()
    assert (computed_bound(exact, Numerics(score="float16")) > single).all()
    assert (computed_bound(exact, Numerics(part="float16", parts=2)) > single).all()


def test_nothing_is_promised_where_errors_swallow_the_softmax():
    (exact,) = attend(history([[1.0] * 4], [[30000.0] * 4, [29999.0] * 4], [[1.0], [-1.0]]), 1.0)
    assert np.isinf(output_bound(exact, Numerics(operand="float16"), "float16").total).all()


def test_cancellation_in_folded_form_is_allowed_for():
    """A key of 1 stored as 1000 * 1 - 999: the bound follows the sizes of the terms, not their sum."""
    plain = history([[1.0]], [[1.0], [1.0]], [[1.0], [-1.0]])
    folded = History(plain.queries, plain.key, np.full_like(plain.key, 1999.0), plain.value, plain.value_size, plain.visible)
    assert computed_bound(attend(folded, 1.0)[0], Numerics()).item() > 50 * computed_bound(attend(plain, 1.0)[0], Numerics()).item()


def test_hidden_tokens_count_nothing():
    """NaN and huge numbers beyond a row's reach leave its output and its bound alone."""
    k, v = [[1.0], [2.0], [np.nan]], [[1.0], [3.0], [1e30]]
    seen = attend(history([[1.0], [1.0]], k, v, visible=[2, 3]), 1.0)[0]
    alone = attend(history([[1.0]], k[:2], v[:2]), 1.0)[0]
    assert seen.out[0] == alone.out[0]
    assert np.isnan(seen.out[1]).all()
    assert output_bound(seen, Numerics(), "float32").total[0] == output_bound(alone, Numerics(), "float32").total[0]
