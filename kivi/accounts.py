"""The books of a cache: bytes that are allocated, bytes that the formula asks for, and a name for every byte between (SPEC 9.6)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from kivi import memory
from kivi.geometry import Geometry
from kivi.pool import PagePool
from kivi.spec import CacheSpec
from kivi.state import State


def table_bytes(state: State) -> int:
    """Bytes of counts and block table, on the host."""
    counts = (state.tokens, state.pending, state.key_sealed, state.value_sealed, state.pages)
    return int(state.table.nbytes + sum(a.nbytes for a in counts))


def nbytes(state: State, pool: PagePool) -> int:
    """Bytes of the pages that a state refers to, each once, of its windows and of its tables."""
    pages = {page for b in range(len(state.tokens)) for page, _ in state.table[b, : state.pages[b]].tolist()}
    windows = int(state.windows.key.nbytes + state.windows.value.nbytes)
    return len(pages) * pool.format.page_bytes + windows + table_bytes(state)


def account(state: State, spec: CacheSpec, geometry: Geometry, pool: PagePool) -> dict[str, Any]:
    """See `KVCache.memory`."""
    s, g, form = state, geometry, pool.format
    rows = [
        (page, end - first, max(0, min(end, int(s.value_sealed[b])) - first))
        for b in range(len(s.tokens))
        for page, first, end in s.rows(b)
    ]
    held: dict[int, tuple[int, int]] = {}
    for page, keys, values in rows:  # a page that two requests share holds the longer of the two views
        old = held.get(page, (0, 0))
        held[page] = (max(keys, old[0]), max(values, old[1]))
    keys, values = (sum(lengths[i] for lengths in held.values()) for i in (0, 1))
    shared_keys, shared_values = (sum(row[i + 1] for row in rows) - total for i, total in ((0, keys), (1, values)))
    key_side, value_side = memory.sides(spec, g.dtype, g.head_dim, g.value_head_dim)
    shared = g.kv_heads * (shared_keys * key_side.sealed_token + shared_values * value_side.sealed_token)
    lengths = list(zip(*(memory.integers(a) for a in (s.tokens, s.key_sealed, s.value_sealed))))
    formula = memory.formula(spec, g.dtype, g.kv_heads, g.head_dim, g.value_head_dim, lengths) - shared
    fields = {name: len(held) * g.kv_heads * field.bytes for name, field in form.fields.items()}
    tables = table_bytes(s)
    padding = {
        **memory.page_padding(form, g.dtype, len(held), keys, values),
        "key_window": memory.window_padding(s.windows.key.shape, g.dtype, int((s.tokens - s.key_sealed).sum())),
        "value_window": memory.window_padding(s.windows.value.shape, g.dtype, int((s.tokens - s.value_sealed).sum())),
        "tables": Fraction(tables),
    }
    tokens = memory.integers(s.tokens)
    return {
        "measured": nbytes(s, pool),
        "formula": memory.whole(formula),
        "padding": {name: memory.whole(x) for name, x in padding.items()},
        "by_kind": {
            **fields,
            "alignment": len(held) * (form.page_bytes - g.kv_heads * sum(f.bytes for f in form.fields.values())),
            "key_window": int(s.windows.key.nbytes),
            "value_window": int(s.windows.value.nbytes),
            "tables": tables,
        },
        "full_precision": memory.full_precision(g.dtype, g.kv_heads, g.head_dim, g.value_head_dim, sum(tokens)),
        "pool": pool.nbytes,
        "tokens": tokens,
        "clamped": s.clamped,
    }
