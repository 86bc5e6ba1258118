"""Bytes of a cache: the formula, and what is allocated beyond it, item by item.

Formula, per layer, KV head and request (SPEC 9.6): sealed elements take `b/8 + 2e/G` bytes, floating ones `f`, with b code bits,
e bytes of one origin or scale, G the group and f bytes of one floating element. Everything else that a cache allocates is
padding and has a name.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from kivi.dtypes import metadata_dtype, np_dtype
from kivi.pool import PageFormat
from kivi.spec import CacheSpec


@dataclass(frozen=True)
class Side:
    """Keys or values of one spec: bytes per element, sealed and floating."""

    bits: int
    group: int
    metadata_bytes: int
    float_bytes: int
    head_dim: int

    @property
    def sealed_token(self) -> Fraction:
        """Bytes of one sealed token of one head."""
        return self.head_dim * (Fraction(self.bits, 8) + Fraction(2 * self.metadata_bytes, self.group))

    @property
    def floating_token(self) -> int:
        return self.head_dim * self.float_bytes


def sides(spec: CacheSpec, dtype: str, head_dim: int, value_head_dim: int) -> tuple[Side, Side]:
    """(keys, values)."""
    itemsize = np_dtype(dtype).itemsize
    return (
        Side(spec.key.bits, spec.key.group, np_dtype(metadata_dtype(spec, "key", dtype)).itemsize, itemsize, head_dim),
        Side(spec.value.bits, spec.value.group, np_dtype(metadata_dtype(spec, "value", dtype)).itemsize, itemsize, value_head_dim),
    )


def formula(
    spec: CacheSpec, dtype: str, kv_heads: int, head_dim: int, value_head_dim: int, lengths: list[tuple[int, int, int]]
) -> Fraction:
    """Bytes of one layer without padding; `lengths`: (tokens, key_sealed, value_sealed) of each request."""
    key, value = sides(spec, dtype, head_dim, value_head_dim)
    total = Fraction(0)
    for tokens, key_sealed, value_sealed in lengths:
        total += key_sealed * key.sealed_token + (tokens - key_sealed) * key.floating_token
        total += value_sealed * value.sealed_token + (tokens - value_sealed) * value.floating_token
    return kv_heads * total


def formula_of_length(spec: CacheSpec, dtype: str, kv_heads: int, head_dim: int, value_head_dim: int, tokens: int) -> Fraction:
    """Bytes of one layer and one request of `tokens` tokens that was never cropped (SPEC 4.2)."""
    key_sealed = tokens // spec.key.residual * spec.key.residual
    return formula(spec, dtype, kv_heads, head_dim, value_head_dim, [(tokens, key_sealed, max(0, tokens - spec.value.residual))])


def full_precision(dtype: str, kv_heads: int, head_dim: int, value_head_dim: int, tokens: int) -> int:
    """Bytes of one layer of a floating-point cache with `tokens` tokens in all."""
    return kv_heads * tokens * (head_dim + value_head_dim) * np_dtype(dtype).itemsize


def page_padding(form: PageFormat, dtype: str, pages: int, key_sealed: int, value_sealed: int) -> dict[str, Fraction]:
    """What `pages` pages hold beyond `key_sealed` and `value_sealed` sealed tokens, by kind."""
    key, value = sides(form.spec, dtype, form.head_dim, form.value_head_dim)
    heads, slots = form.kv_heads, pages * form.tokens
    stated = {name: Fraction(field.bytes) for name, field in form.fields.items()}
    words = stated["key.words"] + stated["value.words"]
    bare_words = form.tokens * Fraction(key.bits * key.head_dim + value.bits * value.head_dim, 8)
    groups = stated["value.scale"] + stated["value.origin"]
    bare_groups = Fraction(form.tokens * 2 * value.metadata_bytes * value.head_dim, value.group)
    return {
        "unsealed_rows_of_pages": heads * ((slots - key_sealed) * key.sealed_token + (slots - value_sealed) * value.sealed_token),
        "unfilled_words": heads * pages * (words - bare_words),
        "short_groups": heads * pages * (groups - bare_groups),
        "alignment": heads * pages * (form.bytes - sum(stated.values(), Fraction(0))),
    }


def whole(x: Fraction) -> int | float:
    """An int where the number is one."""
    return int(x) if x.denominator == 1 else float(x)


def window_padding(shape: tuple[int, ...], dtype: str, rows: int) -> Fraction:
    """Bytes of a window [B, Hkv, capacity, D] that hold no row; `rows`: floating rows of all requests, pending ones included."""
    batch, heads, capacity, dim = shape
    return Fraction(np_dtype(dtype).itemsize * heads * dim * (batch * capacity - rows))


def integers(a: np.ndarray) -> list[int]:
    return [int(i) for i in a]
