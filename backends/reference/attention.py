"""Attention over the mixed cache, as SPEC.md section 5 says it: one softmax over all visible tokens, in float64."""

from __future__ import annotations

import numpy as np

from kivi.backend import Reading
from kivi.backends.reference.quantize import exact
from kivi.layout import Which

ROWS = 64  # query rows at a time: scores take ROWS x tokens numbers a head, whatever the length of the chunk


def attend(reading: Reading, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Output [B, Hq, n, Dv] in the dtype of q [B, Hq, n, D]; rows past `reading.counts` are zero."""
    out = np.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    for b, count in enumerate(reading.counts):
        if count:
            keys, values = history(reading, b, "key", k), history(reading, b, "value", v)
            out[b, :, :count] = attend_request(q[b, :, :count].astype(np.float64), keys, values, reading.scale)
    return out


def attend_request(q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float) -> np.ndarray:
    """One request: q [Hq, n, D], keys [Hkv, T, D], values [Hkv, T, Dv], the queries being the last n of T -> [Hq, n, Dv].

    Query head h reads KV head h // (Hq / Hkv).
    """
    heads, rows, _ = q.shape
    kv_heads, tokens, _ = keys.shape
    grouped = q.reshape(kv_heads, heads // kv_heads, rows, -1)
    out = np.empty((*grouped.shape[:3], values.shape[2]))
    # NaN in a row that a query may not see must not reach it through 0 * NaN, so such histories go row by row.
    step = ROWS if np.isfinite(keys).all() and np.isfinite(values).all() else 1
    for at in range(0, rows, step):
        block = grouped[:, :, at : at + step]
        seen = tokens - rows + at + block.shape[2]
        scores = block @ np.swapaxes(keys[:, None, :seen], -1, -2) * scale
        position = np.arange(seen - block.shape[2], seen)
        scores[..., np.arange(seen) > position[:, None]] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[:, :, at : at + step] = weights @ values[:, None, :seen]
    return out.reshape(heads, rows, -1)


def history(reading: Reading, b: int, which: Which, chunk: np.ndarray) -> np.ndarray:
    """All keys or values that request b's last query sees, in token order: float64 [Hkv, T, D]."""
    window = reading.windows.key if which == "key" else reading.windows.value
    sealed = int(reading.key_sealed[b] if which == "key" else reading.value_sealed[b])
    floating = np.arange(sealed, int(reading.stored[b])) % window.shape[2]
    parts = [window[b][:, floating], chunk[b][:, : int(reading.chunk[b])]]
    return np.concatenate([sealed_rows(reading, b, which, sealed), *(p.astype(np.float64) for p in parts)], axis=1)


def sealed_rows(reading: Reading, b: int, which: Which, sealed: int) -> np.ndarray:
    """The exact values of tokens [0, sealed) of request b: float64 [Hkv, sealed, D]."""
    form = reading.pool.format
    shape, group = (form.key, form.spec.key.group) if which == "key" else (form.value, form.spec.value.group)
    table = reading.table[b, : int(reading.pages[b])]
    ends = np.append(table[1:, 1], reading.key_sealed[b])
    used = [(int(page), min(int(end), sealed) - int(first)) for (page, first), end in zip(table, ends) if first < sealed]
    if not used:
        return np.zeros((form.kv_heads, 0, shape.channels))
    words, scale, origin = (
        np.stack([reading.pool.view(page, f"{which}.{part}") for page, _ in used]) for part in ("words", "scale", "origin")
    )
    rows = exact(shape.unpack(words), scale, origin, which, group)
    return np.concatenate([rows[i, :, :length] for i, (_, length) in enumerate(used)], axis=1)
