"""Sealed pages of one request read back as quantized tensors.

Pages that continue the group grid join into one segment; a page that was cut inside a key group ends one, since the next
group starts at a new token. Codes, scales and origins are the stored ones; words are laid out anew from the segment's start.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kivi import layout as layouts
from kivi.layout import Which
from kivi.pool import PagePool
from kivi.quantized import QuantizedTensor


def segments(
    pool: PagePool, rows: list[tuple[int, int, int]], sealed: int, which: Which, dtype: str, like: Any
) -> list[tuple[int, QuantizedTensor]]:
    """[(first token, tensor of batch 1)] for the tokens [0, sealed) of a request with pages `rows` = (page, first, end)."""
    out, run = [], []
    group = pool.format.spec.key.group if which == "key" else 1
    for page, first, end in rows:
        end = min(end, sealed)
        if first >= end:
            break
        run.append((page, first, end))
        if (end - first) % group:
            out.append(_segment(pool, run, which, dtype, like))
            run = []
    return [*out, _segment(pool, run, which, dtype, like)] if run else out


def page_fields(pool: PagePool, page: int, which: Which) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes [Hkv, R, D], scale, origin) of a page, on the host."""
    arrangement = pool.format.key if which == "key" else pool.format.value
    words, scale, origin = (pool.backend.to_host(pool.view(page, f"{which}.{part}")) for part in ("words", "scale", "origin"))
    return arrangement.unpack(words), scale, origin


def _segment(pool: PagePool, run: list[tuple[int, int, int]], which: Which, dtype: str, like: Any) -> tuple[int, QuantizedTensor]:
    form, backend = pool.format, pool.backend
    bits, group = (form.spec.key.bits, form.spec.key.group) if which == "key" else (form.spec.value.bits, 1)
    codes, scales, origins = [], [], []
    for page, first, end in run:
        c, s, o = page_fields(pool, page, which)
        codes.append(c[:, : end - first])
        scales.append(s[:, : -(-(end - first) // group)])
        origins.append(o[:, : -(-(end - first) // group)])
    joined = [np.concatenate(parts, axis=1)[None] for parts in (codes, scales, origins)]
    words = layouts.pack(joined[0], form.layout, which, bits, form.tokens)
    words, scale, origin = (backend.give(backend.from_host(np.ascontiguousarray(a)), like) for a in (words, *joined[1:]))
    _, heads, tokens, channels = joined[0].shape
    return run[0][1], QuantizedTensor(words, scale, origin, which, form.spec, form.layout, (1, heads, tokens, channels), dtype, backend)
