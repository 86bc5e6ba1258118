"""The attention oracle: float64 on the exact `scale * code + origin` and on floating rows as stored, one softmax over all.

Beside the output it keeps what the error analysis of `bounds.py` needs, so that a bound for another backend's arithmetic costs
no second run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kivi.conformance.model import History


@dataclass(frozen=True, eq=False)
class Attended:
    """Exact attention of r query rows over T tokens of one KV head.

    out [r, Dv]; score and score_size [r, T]: the logit and the sum of the sizes of its terms; weight [r, T]: the softmax;
    value and value_size [T, Dv]; visible [r]; depth: head_dim of the keys. Tokens beyond a row's `visible` have weight 0.
    """

    out: np.ndarray
    score: np.ndarray
    score_size: np.ndarray
    weight: np.ndarray
    value: np.ndarray
    value_size: np.ndarray
    visible: np.ndarray
    depth: int


def attend(history: History, scale: float) -> list[Attended]:
    """One `Attended` per query head, rows in the order of the chunk. Query head h reads KV head h // (Hq / Hkv)."""
    q_heads, kv_heads = len(history.queries), len(history.key)
    return [_head(history, h, h // (q_heads // kv_heads), scale) for h in range(q_heads)]


def _head(history: History, q_head: int, kv_head: int, scale: float) -> Attended:
    q = history.queries[q_head]
    hidden = np.arange(history.key.shape[1])[None, :] >= history.visible[:, None]
    with np.errstate(invalid="ignore"):
        score = np.where(hidden, -np.inf, scale * (q @ history.key[kv_head].T))
        size = np.where(hidden, 0.0, abs(scale) * (np.abs(q) @ history.key_size[kv_head].T))
        weight = np.exp(score - score.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        out = np.stack([w[:n] @ history.value[kv_head, :n] for w, n in zip(weight, history.visible)])
    return Attended(out, score, size, weight, history.value[kv_head], history.value_size[kv_head], history.visible, q.shape[1])
