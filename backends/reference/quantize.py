"""Quantize and dequantize, as SPEC.md section 3 says it, in NumPy.

A group is the last axis of an array [..., G] in the input dtype. NumPy computes half and bfloat16 arithmetic by rounding the
float32 result of each single operation, which is the correctly rounded result for these widths, so `staged` numerics are
plain expressions.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from kivi.dtypes import largest_scale, np_dtype
from kivi.layout import Which
from kivi.spec import CacheSpec


class Overflow(Exception):
    """A group's scale or origin does not fit under `overflow = "reject"`; arguments: its least and greatest value."""


@dataclass(frozen=True)
class Rule:
    """How one side of a spec is quantized."""

    which: Which
    bits: int
    group: int
    numerics: str
    metadata: str
    nonfinite: str
    overflow: str


def rule_of(spec: CacheSpec, which: Which, metadata: str) -> Rule:
    part = spec.key if which == "key" else spec.value
    return Rule(which, part.bits, part.group, spec.numerics, metadata, spec.nonfinite, spec.overflow)


def quantize(x: np.ndarray, rule: Rule) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """(codes, scale, origin, clamped) of x [..., T, D].

    Keys: groups of G tokens of one channel, scale and origin [..., T/G, D]. Values: groups of G channels of one token, the
    last one shorter if G does not divide D, scale and origin [..., T, ceil(D/G)]. `clamped` counts saturated scales and
    origins. Raises `Overflow`.
    """
    tokens, channels = x.shape[-2:]
    if rule.which == "key":
        groups = np.moveaxis(x.reshape(*x.shape[:-2], tokens // rule.group, rule.group, channels), -2, -1)
        codes, scale, origin, clamped = quantize_groups(groups, rule)
        return np.moveaxis(codes, -1, -2).reshape(x.shape), scale, origin, clamped
    parts = [quantize_groups(x[..., None, c : c + rule.group], rule) for c in range(0, channels, rule.group)]
    codes = np.concatenate([p[0][..., 0, :] for p in parts], axis=-1)
    scale, origin = (np.concatenate([p[i] for p in parts], axis=-1) for i in (1, 2))
    return codes, scale, origin, sum(p[3] for p in parts)


def quantize_groups(x: np.ndarray, rule: Rule) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """(codes uint8 [..., G], scale [...], origin [...], clamped) of groups [..., G]: SPEC 3.2, 3.3."""
    top = (1 << rule.bits) - 1
    work = np_dtype("float32") if rule.numerics == "portable" else x.dtype
    metadata = np_dtype(rule.metadata)
    bad = ~np.isfinite(x).all(axis=-1)
    x = np.where(bad[..., None], work.type(0), x.astype(work))
    low, high = x.min(axis=-1), x.max(axis=-1)
    with np.errstate(over="ignore", under="ignore"):
        scale = ((high - low) / work.type(top)).astype(metadata)
        origin = low.astype(metadata) + metadata.type(0)  # -0 is stored as +0
    scale, origin, clamped = _fit(scale, origin, rule, x)
    flat = (scale == 0) | bad
    scale = np.where(flat, metadata.type(1), scale)
    with np.errstate(over="ignore", under="ignore"):
        steps = (x - origin.astype(work)[..., None]) / scale.astype(work)[..., None]
    codes = np.rint(np.clip(steps.astype(np.float32), 0, top)).astype(np.uint8)
    codes[flat] = 0
    return codes, scale, np.where(bad, metadata.type(np.nan), origin), clamped


def dequantize(codes: np.ndarray, scale: np.ndarray, origin: np.ndarray, which: Which, group: int, dtype: str) -> np.ndarray:
    """float32 `scale * code`, then `+ origin`, two roundings, cast last: SPEC 3.4. Shapes as in `quantize`."""
    with np.errstate(over="ignore", invalid="ignore"):
        product = spread(scale.astype(np.float32), codes, which, group) * codes.astype(np.float32)
        return (product + spread(origin.astype(np.float32), codes, which, group)).astype(np_dtype(dtype))


def exact(codes: np.ndarray, scale: np.ndarray, origin: np.ndarray, which: Which, group: int) -> np.ndarray:
    """`scale * code + origin` in float64, where the product is exact."""
    wide = codes * spread(scale.astype(np.float64), codes, which, group)
    wide += spread(origin.astype(np.float64), codes, which, group)
    return wide


def spread(a: np.ndarray, codes: np.ndarray, which: Which, group: int) -> np.ndarray:
    """One number per group as one per element of codes [..., T, D]; a last group may be cut."""
    axis, length = (-2, codes.shape[-2]) if which == "key" else (-1, codes.shape[-1])
    return np.take(np.repeat(a, group, axis=axis), range(length), axis=axis)


def _fit(scale: np.ndarray, origin: np.ndarray, rule: Rule, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Reject or clamp what the metadata dtype cannot hold: SPEC 3.7."""
    top = ml_dtypes.finfo(scale.dtype).max
    scale_top = scale.dtype.type(largest_scale(rule.metadata, rule.bits))
    over_scale, over_origin = scale > scale_top, ~np.isfinite(origin)
    if not over_scale.any() and not over_origin.any():
        return scale, origin, 0
    if rule.overflow == "reject":
        group = x[tuple(int(i) for i in np.argwhere(over_scale | over_origin)[0])]
        raise Overflow(float(group.min()), float(group.max()))
    clamped = int(over_scale.sum() + over_origin.sum())
    return np.minimum(scale, scale_top), np.clip(origin, -top, top).astype(origin.dtype), clamped
