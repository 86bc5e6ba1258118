"""The quantizer and the attention of the reference backend, taken apart: one method a decision, so that a mutant can change one.

Unchanged, both must pass the whole suite (`test_honest.py`).
"""

from __future__ import annotations

import numpy as np

from kivi.backends.reference import attention as reference
from kivi.dtypes import largest, largest_scale, np_dtype
from kivi.errors import MetadataOverflowError

F32 = np.dtype("float32")


class Steps:
    """`quantize_groups` of the reference backend."""

    def __call__(self, x, rule):
        self.rule, self.top = rule, (1 << rule.bits) - 1
        self.work = F32 if rule.numerics == "portable" else x.dtype
        self.metadata = np_dtype(rule.metadata)
        bad = self.bad(x)
        x = np.where(bad[..., None], self.work.type(0), x.astype(self.work))
        with np.errstate(all="ignore"):
            low, high = self.ends(x)
            scale = self.limit(self.store(self.span(low, high)), largest_scale(rule.metadata, rule.bits))
            origin = self.limit(self.plus_zero(self.store(self.origin(low, high, scale))), largest(rule.metadata))
            flat = self.flat(scale, low, high) | bad
            scale = np.where(flat, self.flat_scale(low), scale).astype(self.metadata)
            steps = self.divide(self.rise(x, low, origin), scale)
            codes = self.code(steps.astype(np.float32))
        codes[flat] = 0
        return codes, scale, np.where(bad, self.metadata.type(np.nan), origin).astype(self.metadata), 0

    def bad(self, x):
        return ~np.isfinite(x).all(axis=-1)

    def ends(self, x):
        return x.min(axis=-1), x.max(axis=-1)

    def span(self, low, high):
        return (high - low) / self.work.type(self.top)

    def origin(self, low, high, scale):
        return low

    def store(self, number):
        return number.astype(self.metadata)

    def plus_zero(self, origin):
        return origin + self.metadata.type(0)

    def limit(self, number, top):
        over = np.abs(number.astype(np.float32)) > top
        if over.any() and self.rule.overflow == "reject":
            raise MetadataOverflowError("metadata: use bfloat16")
        return np.where(over, np.copysign(np.float32(top), number.astype(np.float32)).astype(number.dtype), number)

    def flat(self, scale, low, high):
        return scale == 0

    def flat_scale(self, low):
        return self.metadata.type(1)

    def rise(self, x, low, origin):
        return x - origin.astype(self.work)[..., None]

    def divide(self, rise, scale):
        return rise / scale.astype(self.work)[..., None]

    def code(self, steps):
        return self.round(np.clip(steps, 0, self.top)).astype(np.uint8)

    def round(self, steps):
        return np.rint(steps)


class Attention:
    """`attend` of the reference backend."""

    def __call__(self, reading, q, k, v):
        self.reading, out = reading, np.zeros((*q.shape[:3], v.shape[3]), q.dtype)
        for b, count in enumerate(reading.counts):
            if count:
                self.b = b
                with np.errstate(all="ignore"):
                    keys, values = self.keys(k), self.values(v)
                    rows = self.request(q[b, :, :count].astype(np.float64), keys, values, self.scale())
                    out[b, :, :count] = self.output(rows, q.dtype)
        return out

    def keys(self, k):
        return reference.history(self.reading, self.b, "key", k)

    def values(self, v):
        return reference.history(self.reading, self.b, "value", v)

    def scale(self):
        return self.reading.scale

    def head(self, h, q_heads, kv_heads):
        return h // (q_heads // kv_heads)

    def visible(self, row, rows, tokens):
        return tokens - rows + row + 1

    def request(self, q, keys, values, scale):
        heads, rows, _ = q.shape
        out = np.empty((heads, rows, values.shape[2]))
        for h in range(heads):
            kv = self.head(h, heads, len(keys))
            for i in range(rows):
                seen = self.visible(i, rows, keys.shape[1])
                out[h, i] = self.row(self.scores(q[h, i], keys[kv, :seen]) * scale, values[kv, :seen])
        return out

    def scores(self, q, keys):
        return keys @ q

    def row(self, scores, values):
        return self.weights(scores) @ values

    def weights(self, scores):
        p = np.exp(scores - scores.max())
        return p / p.sum()

    def output(self, rows, dtype):
        return rows.astype(dtype)
