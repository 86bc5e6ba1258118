"""The naive quantizer: one function a numerics, written from the design's text, sharing no code with kivi.

Choice: arrays are `[..., n]` with one whole group along the last axis, so each line below is the formula of one group.
NumPy's float16 and float32 operations are correctly rounded; float16 and bfloat16 ones go through float32, which is
innocuous for + - * / because 24 >= 2 p + 2 (Figueroa 1995).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kivi.conformance.floats import NUMPY, cast, fmt
from kivi.spec import CacheSpec


class Overflow(ValueError):
    """A scale or origin exceeds the metadata format under `overflow = "reject"`."""


class NonFinite(ValueError):
    """A NaN or Inf under `nonfinite = "reject"`."""


@dataclass(frozen=True)
class Grid:
    """What is stored of some groups: codes uint8 [..., n], scale and origin [...] in the metadata dtype.

    `clamped`: how many scales and origins were saturated.
    """

    codes: np.ndarray
    scale: np.ndarray
    origin: np.ndarray
    clamped: int


@dataclass(frozen=True)
class Rule:
    """The part of a spec that decides numbers. `metadata` is a dtype's name, or "input"."""

    bits: int
    metadata: str = "float16"
    numerics: str = "portable"
    nonfinite: str = "reject"
    overflow: str = "reject"

    @classmethod
    def of(cls, spec: CacheSpec, which: str) -> Rule:
        side = getattr(spec, which)
        return cls(side.bits, side.metadata, spec.numerics, spec.nonfinite, spec.overflow)


def quantize(x: np.ndarray, rule: Rule) -> Grid:
    """Groups `x` [..., n] on their grids. Raises `NonFinite` or `Overflow` where the rule says reject."""
    name = next(k for k, v in NUMPY.items() if v == x.dtype)
    bad = np.asarray(~np.isfinite(x.astype(np.float32)).all(-1))
    if bad.any() and rule.nonfinite == "reject":
        raise NonFinite
    x = np.where(bad[..., None], np.zeros((), x.dtype), x)
    with np.errstate(all="ignore"):
        grid = _staged(x, rule, name) if rule.numerics == "staged" else _portable(x, rule, name)
    origin = np.where(bad, np.array(np.nan, grid.origin.dtype), grid.origin)
    scale = np.where(bad, np.array(1, grid.scale.dtype), grid.scale)
    return Grid(np.where(bad[..., None], np.uint8(0), grid.codes), scale, origin, grid.clamped)


def _portable(x: np.ndarray, rule: Rule, name: str) -> Grid:
    """fp32 steps, each correctly rounded, on the scale and origin as stored."""
    metadata = name if rule.metadata == "input" else rule.metadata
    x = x.astype(np.float32)
    low, high = x.min(-1), x.max(-1)
    scale, wide = _fit(cast((high - low) / np.float32(2**rule.bits - 1), metadata), scale_limit(metadata, rule.bits), rule)
    origin, far = _fit(cast(low, metadata), fmt(metadata).max, rule)
    flat = scale == 0
    scale = np.where(flat, np.array(1, scale.dtype), scale)
    steps = (x - origin.astype(np.float32)[..., None]) / scale.astype(np.float32)[..., None]
    return Grid(_code(steps, flat, rule), scale, _no_minus_zero(origin), wide + far)


def _staged(x: np.ndarray, rule: Rule, name: str) -> Grid:
    """Every step rounded to the input dtype, as the official packer does."""
    low, high = x.min(-1), x.max(-1)
    span = (high - low).astype(x.dtype)
    scale, wide = _fit((span / np.array(2**rule.bits - 1, x.dtype)).astype(x.dtype), scale_limit(name, rule.bits), rule)
    flat = scale == 0
    scale = np.where(flat, np.array(1, scale.dtype), scale)
    rise = (x - low[..., None]).astype(x.dtype)
    steps = (rise / scale[..., None]).astype(x.dtype)
    return Grid(_code(steps.astype(np.float32), flat, rule), scale, _no_minus_zero(low), wide)


def _code(steps: np.ndarray, flat: np.ndarray, rule: Rule) -> np.ndarray:
    clamped = np.clip(steps, 0.0, 2**rule.bits - 1)
    return np.where(flat[..., None], 0, np.rint(clamped)).astype(np.uint8)


def scale_limit(metadata: str, bits: int) -> float:
    """The largest scale: a number of the metadata dtype whose product with any code is finite in fp32 (SPEC 3.7.2)."""
    return min(fmt(metadata).max, fmt(metadata).max / 2**bits if metadata != "float16" else np.inf)


def _fit(stored: np.ndarray, limit: float, rule: Rule) -> tuple[np.ndarray, int]:
    """The numbers clamped to the limit, and how many were."""
    over = np.abs(stored.astype(np.float32)) > limit
    if over.any() and rule.overflow == "reject":
        raise Overflow
    clamped = np.where(over, np.copysign(np.float32(limit), stored.astype(np.float32)).astype(stored.dtype), stored)
    return clamped, int(over.sum())


def _no_minus_zero(x: np.ndarray) -> np.ndarray:
    return np.where(x == 0, np.zeros((), x.dtype), x)


def quantize_key(x: np.ndarray, rule: Rule, group: int) -> Grid:
    """Keys [..., T, D], T a multiple of `group`: codes [..., T, D], scale and origin [..., T/G, D]."""
    *lead, tokens, channels = x.shape
    by_group = np.moveaxis(x.reshape(*lead, tokens // group, group, channels), -2, -1)
    grid = quantize(by_group, rule)
    return Grid(np.moveaxis(grid.codes, -1, -2).reshape(x.shape), grid.scale, grid.origin, grid.clamped)


def quantize_value(x: np.ndarray, rule: Rule, group: int) -> Grid:
    """Values [..., T, D]: codes [..., T, D], scale and origin [..., T, ceil(D/G)]; the last group may be shorter."""
    parts = [quantize(x[..., at : at + group], rule) for at in range(0, x.shape[-1], group)]
    return Grid(
        np.concatenate([p.codes for p in parts], -1),
        np.stack([p.scale for p in parts], -1),
        np.stack([p.origin for p in parts], -1),
        sum(p.clamped for p in parts),
    )


def spread_key(meta: np.ndarray, group: int, tokens: int) -> np.ndarray:
    """Key scale or origin [..., ceil(T/G), D] repeated to one row a token: [..., T, D]."""
    return np.repeat(meta, group, -2)[..., :tokens, :]


def spread_value(meta: np.ndarray, group: int, channels: int) -> np.ndarray:
    """Value scale or origin [..., T, ceil(D/G)] repeated to one number a channel: [..., T, D]."""
    return np.repeat(meta, group, -1)[..., :channels]


def dequantize(codes: np.ndarray, scale: np.ndarray, origin: np.ndarray, dtype: str) -> np.ndarray:
    """`fp32(scale * code) + origin` in fp32, two roundings, cast last. Scale and origin already spread to codes' shape."""
    with np.errstate(all="ignore"):
        return cast(scale.astype(np.float32) * codes.astype(np.float32) + origin.astype(np.float32), dtype)
