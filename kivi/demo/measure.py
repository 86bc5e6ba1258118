"""What the demo measures on a transformers model with a cache: text, speed, predictions, and what attention alone loses.

Predictions are teacher-forced: the text is given, the model predicts each next token through the stored cache, one step at a
time, so every prediction after the prefill reads what is really stored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import kivi

Tick = Callable[[], None]


@dataclass(frozen=True)
class Continuation:
    """A generated text, its tokens, and decode steps a second (the prefill is not counted)."""

    text: str
    tokens: list[int]
    tokens_per_second: float


@dataclass(frozen=True)
class Score:
    """How a cache predicts a stretch: perplexity, and agreement and KL divergence (nats a token) with the full-precision cache."""

    perplexity: float
    top1: float
    kl: float


def continuation(model: Any, tokenizer: Any, ids: Any, cache: Any, new: int, tick: Tick) -> Continuation:
    """`new` tokens after `ids` [1, T], greedy. A repetition penalty keeps a model of this size from going in circles."""
    clock = _Clock(tick)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        cache=cache,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        repetition_penalty=1.2,
        streamer=clock,
    )
    tokens = out[0, ids.shape[1] :].tolist()
    seconds = clock.times[-1] - clock.times[0]
    return Continuation(tokenizer.decode(tokens), tokens, (len(clock.times) - 1) / seconds)


class _Clock:
    """A streamer that notes when each new token came. `generate` puts the prompt first."""

    def __init__(self, tick: Tick) -> None:
        self.times: list[float] = []
        self._tick, self._prompt = tick, True

    def put(self, value: Any) -> None:
        if not self._prompt:
            self.times.append(time.perf_counter())
            self._tick()
        self._prompt = False

    def end(self) -> None:
        """Nothing is buffered."""


@torch.no_grad()
def predictions(model: Any, ids: Any, prefill: int, cache: Any, tick: Tick) -> Any:
    """Log probabilities [T - prefill, vocabulary] of the tokens after `prefill` of `ids` [1, T], each through the cache."""
    logits = [model(ids[:, :prefill], cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]]
    tick()
    for t in range(prefill, ids.shape[1] - 1):
        logits.append(model(ids[:, t : t + 1], cache=cache, use_cache=True).logits[0, -1])
        tick()
    return torch.stack(logits).float().log_softmax(-1)


def score(log_probs: Any, full: Any, targets: Any) -> Score:
    """Compare log probabilities [n, vocabulary] with those of the full-precision cache, on the true tokens [n]."""
    nll = -log_probs.gather(-1, targets[:, None]).mean()
    kl = (full.exp() * (full - log_probs)).sum(-1).mean()
    top1 = (log_probs.argmax(-1) == full.argmax(-1)).float().mean()
    return Score(math.exp(float(nll)), float(top1), max(float(kl), 0.0))


@torch.no_grad()
def record(model: Any, ids: Any, layer: int) -> tuple[Any, Any, Any]:
    """q [1, Hq, T, D], k and v [1, Hkv, T, D] of one layer while the model reads `ids` [1, T] in full precision; after RoPE."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    seen: dict[str, Any] = {}

    def recorder(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        if module.layer_idx == layer:
            seen.update(q=query, k=key, v=value)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    before = model.config._attn_implementation
    AttentionInterface.register("kivi_demo_recorder", recorder)
    AttentionMaskInterface.register("kivi_demo_recorder", sdpa_mask)
    model.set_attn_implementation("kivi_demo_recorder")
    try:
        model(ids, use_cache=False, logits_to_keep=1)
    finally:
        model.set_attn_implementation(before)
    return seen["q"], seen["k"], seen["v"]


def attention_error(spec: Any, backend: Any, q: Any, k: Any, v: Any, start: int, tick: Tick) -> np.ndarray:
    """Relative error |o^ - o| / |o| of one layer's attention output at each step from `start` on, against float64: [T - start].

    The recorded q, k, v go through a `kivi.KVCache` of `spec` on `backend`: `start` tokens at once, then one at a time.
    """
    exact = _attention(q, k, v)
    cache = kivi.KVCache(spec, batch=1, q_heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[-1], dtype="float32", backend=backend)
    cache.attend(*(x[:, :, :start] for x in (q, k, v)))
    errors = np.empty(q.shape[2] - start)
    for t in range(start, q.shape[2]):
        out = cache.attend(*(x[:, :, t : t + 1] for x in (q, k, v)))
        errors[t - start] = float((out[:, :, 0].double() - exact[:, :, t]).norm() / exact[:, :, t].norm())
        tick()
    return errors


def axis_errors(q: Any, k: Any, v: Any, bits: int, group: int) -> dict[str, float]:
    """What either axis costs: relative error of the attention output of the last `group` queries when all keys, or all values,
    are quantized per channel or per token, and nothing else is. T and D must be multiples of `group`."""
    last = q[:, :, -group:]
    exact = _attention(last, k, v)

    def error(keys: Any, values: Any) -> float:
        return float((_attention(last, keys, values) - exact).norm() / exact.norm())

    return {
        "keys per channel": error(_fake_quant(k, bits, group, -2), v),
        "keys per token": error(_fake_quant(k, bits, group, -1), v),
        "values per channel": error(k, _fake_quant(v, bits, group, -2)),
        "values per token": error(k, _fake_quant(v, bits, group, -1)),
    }


def _attention(q: Any, k: Any, v: Any) -> Any:
    """Causal float64 attention of the last n positions: q [B, Hq, n, D], k and v [B, Hkv, T, D] -> [B, Hq, n, D]."""
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(repeat, 1) for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
    return torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ v


def _fake_quant(x: Any, bits: int, group: int, axis: int) -> Any:
    """Asymmetric min-max quantization of `x` in groups of `group` along `axis`, dequantized again."""
    parts = x.double().unflatten(axis, (-1, group))
    low, high = parts.amin(axis, keepdim=True), parts.amax(axis, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).clamp_min(torch.finfo(torch.float32).tiny)
    return (((parts - low) / scale).round() * scale + low).flatten(axis - 1, axis)
