"""Honest backends in lower precision: every legal way to compute must pass with the roundoffs that it declares."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

import kivi
from kivi.backends.reference import attention as reference
from kivi.backends.reference.driver import ReferenceBackend
from kivi.backends.reference.quantize import spread
from kivi.conformance import Subject
from tests.meta.steps import Attention

F32, LOG2E = np.float32, np.float32(np.log2(np.e))


def subject(**numerics: Any) -> Subject:
    """The reference backend under another declaration of its roundoffs."""
    honest = kivi.get_backend("reference")
    declared = type(honest.manifest.numerics)(**numerics)
    return Subject(
        ReferenceBackend(msgspec.structs.replace(honest.manifest, numerics=declared), honest.mode, honest.device, honest.versions)
    )


class Pieces(Attention):
    """Keys and values in fp32 as (scale, code, origin), each [Hkv, T, D]; a floating element is code 1 at its own scale, origin 0."""

    def keys(self, k):
        return self._pieces("key", k)

    def values(self, v):
        return self._pieces("value", v)

    def _pieces(self, which, chunk):
        r, b = self.reading, self.b
        form = r.pool.format
        shape, group = (form.key, form.spec.key.group) if which == "key" else (form.value, form.spec.value.group)
        sealed = int(r.key_sealed[b] if which == "key" else r.value_sealed[b])
        window = r.windows.key if which == "key" else r.windows.value
        rows = [window[b][:, np.arange(sealed, int(r.stored[b])) % window.shape[2]], chunk[b][:, : int(r.chunk[b])]]
        rows = np.concatenate([x.astype(F32) for x in rows], 1)
        parts = []
        table = r.table[b, : int(r.pages[b])].tolist()
        ends = [first for _, first in table[1:]] + [int(r.key_sealed[b])]
        for (page, first), end in zip(table, ends, strict=False):
            end = min(end, sealed)
            if first < end:
                words, scale, origin = (r.pool.view(page, f"{which}.{part}") for part in ("words", "scale", "origin"))
                codes = shape.unpack(words)
                wide = spread(scale.astype(F32), codes, which, group), codes.astype(F32), spread(origin.astype(F32), codes, which, group)
                parts.append(tuple(a[:, : end - first] for a in wide))
        parts.append((rows, np.ones_like(rows), np.zeros_like(rows)))
        return np.stack([np.concatenate(x, 1) for x in zip(*parts, strict=True)])

    def request(self, q, keys, values, scale):
        heads, rows, _ = q.shape
        out = np.empty((heads, rows, values.shape[3]))
        for h in range(heads):
            kv = self.head(h, heads, keys.shape[1])
            for i in range(rows):
                seen = self.visible(i, rows, keys.shape[2])
                out[h, i] = self.one(q[h, i].astype(F32), keys[:, kv, :seen], values[:, kv, :seen], F32(scale))
        return out


class DequantizeFirst(Pieces):
    """scale * code + origin in fp32, sums from left to right."""

    def one(self, q, k, v, scale):
        keys, values = (x[0] * x[1] + x[2] for x in (k, v))
        s = np.add.accumulate(keys * q, axis=-1, dtype=F32)[:, -1] * scale
        p = np.exp(s - s.max())
        return np.add.accumulate(p[:, None] * values, axis=0, dtype=F32)[-1] / np.add.accumulate(p, dtype=F32)[-1]


class FoldedScale(Pieces):
    """(q * scale) . codes + q . origin, and the same for values; exp2 with log2(e) folded into the query; a reciprocal at the end."""

    def one(self, q, k, v, scale):
        q = q * (scale * LOG2E)
        s = np.add.accumulate((q * k[0]) * k[1], axis=-1, dtype=F32)[:, -1] + np.add.accumulate(q * k[2], axis=-1, dtype=F32)[:, -1]
        p = np.exp2(s - s.max())
        out = (
            np.add.accumulate((p[:, None] * v[0]) * v[1], axis=0, dtype=F32)[-1]
            + np.add.accumulate(p[:, None] * v[2], axis=0, dtype=F32)[-1]
        )
        return out * (F32(1) / np.add.accumulate(p, dtype=F32)[-1])


class Online(Pieces):
    """Online softmax over blocks of five tokens, last block first, pairwise sums."""

    def one(self, q, k, v, scale):
        keys, values = (x[0] * x[1] + x[2] for x in (k, v))
        s = (keys * q).sum(-1, dtype=F32) * scale
        top, total, out = F32(-np.inf), F32(0), np.zeros(values.shape[1], F32)
        for at in reversed(range(0, len(s), 5)):
            block = s[at : at + 5]
            new = np.maximum(top, block.max())
            fix, p = np.exp(top - new), np.exp(block - new)
            out, total, top = out * fix + (p[:, None] * values[at : at + 5]).sum(0, dtype=F32), total * fix + p.sum(dtype=F32), new
        return out / total


class EveryToken(Pieces):
    """Online softmax one token at a time: as many rescalings as tokens."""

    def one(self, q, k, v, scale):
        keys, values = (x[0] * x[1] + x[2] for x in (k, v))
        s = np.add.accumulate(keys * q, axis=-1, dtype=F32)[:, -1] * scale
        top, total, out = s[0], F32(1), values[0]
        for score, value in zip(s[1:], values[1:], strict=True):
            new = np.maximum(top, score)
            fix, p = np.exp(top - new), np.exp(score - new)
            out, total, top = out * fix + p * value, total * fix + p, new
        return out / total


class HalfOperands(Pieces):
    """Matrix units: operands rounded to fp16, sums in fp32."""

    def one(self, q, k, v, scale):
        half = lambda x: x.astype(np.float16).astype(F32)  # noqa: E731
        keys, values = (half(x[0] * x[1] + x[2]) for x in (k, v))
        s = (keys * half(q)).sum(-1, dtype=F32) * scale
        p = np.exp(s - s.max())
        return (half(p)[:, None] * values).sum(0, dtype=F32) / p.sum(dtype=F32)


HONEST = {
    "steps": (Attention, {"accumulate": "float64", "exp_ulp": 1.0}),
    "dequantize_first": (DequantizeFirst, {"accumulate": "float32"}),
    "folded_scale": (FoldedScale, {"accumulate": "float32"}),
    "online": (Online, {"accumulate": "float32"}),
    "every_token": (EveryToken, {"accumulate": "float32"}),
    "half_operands": (HalfOperands, {"accumulate": "float32", "operand": "float16"}),
}


def install(patch, name: str) -> Subject:
    """The subject that computes attention as `name` says, and declares it."""
    kind, numerics = HONEST[name]
    patch.setattr(reference, "attend", kind())
    return subject(**numerics)
