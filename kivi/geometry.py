"""The shapes that a cache fixes for life, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

from kivi.dtypes import check_float, metadata_dtype, named
from kivi.errors import InputError, ShapeError
from kivi.pool import PageFormat
from kivi.spec import CacheSpec

if TYPE_CHECKING:
    from kivi.backend import Backend


@dataclass(frozen=True)
class Geometry:
    """Heads, dimensions, dtype, softmax scale and limits of a cache. The batch is not part of it: `select` changes it."""

    q_heads: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    dtype: str
    scale: float
    max_tokens: int | None = None
    max_pages: int | None = None


def geometry(
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    value_head_dim: int | None,
    dtype: Any,
    scale: Any,
    max_tokens: int | None,
    max_pages: int | None,
) -> Geometry:
    """A checked `Geometry`. Raises `ShapeError`, `DtypeError`, `InputError`."""
    heads, kv = positive(q_heads, "q_heads"), positive(kv_heads, "kv_heads")
    if heads % kv:
        raise ShapeError(f"q_heads = {heads} is not a multiple of kv_heads = {kv}: each KV head serves q_heads / kv_heads query heads")
    dim = positive(head_dim, "head_dim")
    value_dim = dim if value_head_dim is None else positive(value_head_dim, "value_head_dim")
    name = check_float(named(dtype), "dtype")
    if scale is None:
        scale = 1 / math.sqrt(dim)
    elif isinstance(scale, bool) or not isinstance(scale, Real) or not _is_finite(scale):
        raise InputError(f"scale = {str(scale)[:40]} is not a finite number; leave it out for 1/sqrt(head_dim)")
    tokens = None if max_tokens is None else positive(max_tokens, "max_tokens")
    pages = None if max_pages is None else positive(max_pages, "max_pages")
    return Geometry(heads, kv, dim, value_dim, name, float(scale), tokens, pages)


def _is_finite(x: Real) -> bool:
    try:
        return math.isfinite(float(x))
    except OverflowError:
        return False


def page_format(spec: CacheSpec, g: Geometry, backend: Backend) -> PageFormat:
    """What a page of this cache holds on `backend`, in its native layout or the one that the spec names."""
    metadata = [metadata_dtype(spec, which, g.dtype) for which in ("key", "value")]
    return PageFormat(spec, backend.layout_for(spec), g.kv_heads, g.head_dim, g.value_head_dim, *metadata)


def positive(value: Any, name: str) -> int:
    """`value` as an int of at least 1. Raises `InputError`."""
    try:
        number = value.__index__()
    except (AttributeError, TypeError):
        raise InputError(f"{name} = {value!r} is not an integer") from None
    if isinstance(value, bool) or number < 1:
        raise InputError(f"{name} = {value!r} must be an integer of at least 1")
    return int(number)
