"""How far a legal backend may be from the oracle: running error analysis, one bound per output element.

A backend declares the roundoffs of its pipeline in `[numerics]` of backend.toml; the bound follows from them, from the sizes
of the terms that are really summed, and from counts of operations (`bounds.toml`). Nothing is tuned.

Choice: the analysis admits every legal order of summation, dequantizing first as well as folding the scale into the other
operand, split and online softmax, and exp by any base. So it uses the sum of |q| (|scale| c + |origin|), not of |q k|, and
counts the longest path that a term can take.

Keys of `[numerics]`, all optional:

    accumulate   format of products, sums and the softmax             "float32"
    operand      format to which both operands of a product are rounded first (matrix units)
    score        format to which logits are stored before the softmax; `score_roundings` how often (default 1)
    probability  format to which the softmax is rounded before it meets V
    part         format of partial outputs that are added at the end; `parts` how many roundings (default 1)
    exp_ulp      error of one exp in ulp of `accumulate`
    flush        true when subnormals of `accumulate` are flushed to zero
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kivi.conformance.floats import constants, fmt
from kivi.conformance.oracle import Attended


@dataclass(frozen=True)
class Numerics:
    """The declared arithmetic of a pipeline; see the module's docstring."""

    accumulate: str = "float32"
    operand: str | None = None
    score: str | None = None
    score_roundings: int = 1
    probability: str | None = None
    part: str | None = None
    parts: int = 1
    exp_ulp: float = 2.0
    flush: bool = False

    @classmethod
    def declared(cls, manifest: Any) -> Numerics:
        """From a manifest; what it does not say takes the defaults of `bounds.toml`."""
        table = {**constants()["default"], **msgspec.to_builtins(manifest.numerics)}
        return cls(**table)


class Bound(NamedTuple):
    """Largest legal |output - exact|, [r, Dv], and the part of it that rounding the output to its dtype may take."""

    total: np.ndarray
    rounding: np.ndarray


@lru_cache(maxsize=65536)
def output_bound(exact: Attended, numerics: Numerics, dtype: str) -> Bound:
    """The bound of each element of `exact.out`; inf where the declared arithmetic promises nothing."""
    error = computed_bound(exact, numerics)
    error = error * (1.0 + fmt("float64").unit / fmt(numerics.accumulate).unit)  # the oracle's own float64 roundings
    size = np.abs(exact.out) + error
    known = np.isfinite(size)
    half = np.where(known, fmt(dtype).half_ulp(np.where(known, size, 0.0)), np.inf)
    through = fmt("float32").unit * size if fmt(dtype).p < 24 else 0.0  # a float64 result may pass through fp32 on its way out
    return Bound(error + half + through, half)


def computed_bound(exact: Attended, numerics: Numerics) -> np.ndarray:
    """The bound before the output is rounded to its dtype, [r, Dv].

    With weights p (1 + t), |t| <= a, terms p v off by a share g of their size W, and a sum of weights off by a share h,

        |o^ - o| <= (sum p a |v - o| + sum p (1 + a) g W + |o| sum p (1 + a) h) / (1 - sum p ((1 + a) (1 + h) - 1)),

    since an error that all weights share cancels. `lost` is what underflow may take from a weight, the largest being 1.
    """
    n, acc = constants()["count"], numerics.accumulate
    tokens = exact.visible[:, None].astype(np.float64)
    hidden = np.arange(exact.weight.shape[1])[None, :] >= exact.visible[:, None]
    out = np.abs(exact.out)
    value, size = (np.nan_to_num(a) for a in (exact.value, exact.value_size))  # rows that see a NaN are NaN themselves
    with np.errstate(all="ignore"):
        rounded = _rounds(1, numerics.probability)
        growth = np.expm1(weight_growth(exact, numerics) + rounded)
        term = np.expm1(_rounds(n["terms_per_token"] * tokens + n["output"], acc) + _rounds(2, numerics.operand) + rounded)
        total = np.expm1(_rounds(tokens, acc) + rounded)
        lost = np.where(hidden, 0.0, 2.0 ** fmt(acc).emin + _half_spacing(numerics.probability))
        shift = np.stack([w @ np.abs(value - o) for w, o in zip(exact.weight * growth, exact.out, strict=True)])
        numerator = shift + (exact.weight * (1 + growth) * term + lost) @ size + tokens * _tiny(numerics)
        numerator = numerator + out * (exact.weight * (1 + growth) * total + lost).sum(-1, keepdims=True)
        slack = (exact.weight * ((1 + growth) * (1 + total) - 1) + lost).sum(-1, keepdims=True)
        error = np.where(slack < 1.0, numerator / (1.0 - slack), np.inf)
        if numerics.part:
            part = exact.weight @ size + error
            error = error + np.expm1(_rounds(numerics.parts, numerics.part)) * part + numerics.parts * _half_spacing(numerics.part)
        return error + np.expm1(_rounds(n["normalise"], acc)) * (out + error)


def weight_growth(exact: Attended, numerics: Numerics) -> np.ndarray:
    """Bound on |log(computed / exact)| of the unnormalised weights, [r, T]."""
    n, acc = constants()["count"], numerics.accumulate
    roundings = _rounds(n["terms_per_channel"] * exact.depth + n["score"], acc) + _rounds(2, numerics.operand)
    score = np.expm1(roundings) * exact.score_size + exact.depth * _tiny(numerics) * np.maximum(1.0, exact.score_size)
    finite = np.where(np.isfinite(exact.score), exact.score, 0.0)
    score = score + np.expm1(_rounds(numerics.score_roundings, numerics.score)) * (np.abs(finite) + score)
    score = score + numerics.score_roundings * _half_spacing(numerics.score)
    top = exact.score.max(-1, keepdims=True)
    distance = np.where(np.isfinite(exact.score), top - exact.score, 0.0) + score + score.max(-1, keepdims=True)
    # One exp a token and one more for each rescaling of an online softmax, of which there are at most as many as tokens.
    exps = (exact.visible[:, None] + 1) * (np.log1p(2 * numerics.exp_ulp * fmt(acc).unit) + _rounds(1, acc))
    return score + np.expm1(_rounds(n["exponent"], acc)) * distance + exps


def _rounds(count: Any, name: str | None) -> Any:
    """`count` roundings as a logarithm: a number grows by at most exp of it. 0 for a rounding that does not happen."""
    return count * np.log1p(fmt(name).unit) if name else 0.0


def _half_spacing(name: str | None) -> float:
    return fmt(name).half_spacing if name else 0.0


def _tiny(numerics: Numerics) -> float:
    """Absolute error of one operation near the bottom of the range."""
    acc = fmt(numerics.accumulate)
    return (2.0**acc.emin if numerics.flush else acc.half_spacing) + _half_spacing(numerics.operand)
