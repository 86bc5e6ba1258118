"""KIVI by fake quantization: an independent computation of what the stored cache must do.

Written from the paper (arXiv:2402.02750, section 3), in torch, and importing nothing from kivi: keys and values are quantized
and at once dequantized, nothing is packed, and transformers' own attention reads the result. The frontiers are those of
attend_then_seal: attention sees a step's tokens floating; afterwards keys are sealed in blocks of R, and values down to the last R.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


def fake_quant(x: torch.Tensor, bits: int, dim: int, metadata: torch.dtype) -> torch.Tensor:
    """`x` quantized and dequantized, one group along `dim`; scale and origin rounded to `metadata`. A constant group has scale 1."""
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).to(metadata).to(x.dtype)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    origin = low.to(metadata).to(x.dtype)
    return ((x - origin) / scale).round().clamp(0, 2**bits - 1) * scale + origin


def fake_keys(k: torch.Tensor, bits: int, group: int, metadata: torch.dtype) -> torch.Tensor:
    """Per channel: groups of `group` tokens. k [B, H, T, D], T a multiple of `group`."""
    b, h, t, d = k.shape
    return fake_quant(k.reshape(b, h, t // group, group, d), bits, 3, metadata).reshape(k.shape)


def fake_values(v: torch.Tensor, bits: int, group: int, metadata: torch.dtype) -> torch.Tensor:
    """Per token: groups of `group` channels. v [B, H, T, D], D a multiple of `group`."""
    b, h, t, d = v.shape
    return fake_quant(v.reshape(b, h, t, d // group, group), bits, 4, metadata).reshape(v.shape)


class FakeQuantLayer(CacheLayerMixin):
    """One layer: `seen` keys and values as attention sees them, the first `ks` keys and `vs` values of them quantized."""

    is_sliding = False

    def __init__(self, bits: int, group: int, residual: int, metadata: torch.dtype) -> None:
        super().__init__()
        self.bits, self.group, self.residual, self.metadata = bits, group, residual, metadata
        self.ks = self.vs = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values, self.is_initialized = key_states[:, :, :0], value_states[:, :, :0], True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        seen = torch.cat([self.keys, key_states], 2), torch.cat([self.values, value_states], 2)
        self.keys, self.values = seen
        tokens = seen[0].shape[2]
        if (ks := tokens // self.residual * self.residual) > self.ks:
            self.keys = self.keys.clone()
            self.keys[:, :, self.ks : ks] = fake_keys(seen[0][:, :, self.ks : ks], self.bits, self.group, self.metadata)
            self.ks = ks
        if (vs := tokens - self.residual) > self.vs:
            self.values = self.values.clone()
            self.values[:, :, self.vs : vs] = fake_values(seen[1][:, :, self.vs : vs], self.bits, self.group, self.metadata)
            self.vs = vs
        return seen

    def get_seq_length(self) -> int:
        return self.keys.shape[2] if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


def fake_quant_cache(layers: int, bits: int, group: int, residual: int, metadata: torch.dtype = torch.float16) -> Cache:
    """A transformers cache of `layers` such layers. Give it to a model whose attention is sdpa or eager."""
    return Cache(layers=[FakeQuantLayer(bits, group, residual, metadata) for _ in range(layers)])


@torch.no_grad()
def teacher_forced(model: torch.nn.Module, ids: torch.Tensor, prefill: int, cache: Cache) -> torch.Tensor:
    """Log probabilities [steps, vocabulary] of the tokens after `prefill`, each predicted from the text before it, one at a time.

    ids [1, prefill + steps]. The first prediction comes from the prefill, each later one from a step through the cache.
    """
    logits = [model(ids[:, :prefill], cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]]
    logits += [model(ids[:, t : t + 1], cache=cache, use_cache=True).logits[0, -1] for t in range(prefill, ids.shape[1] - 1)]
    return torch.stack(logits).float().log_softmax(-1)


def perplexity(log_probs: torch.Tensor, targets: torch.Tensor) -> float:
    """exp of the mean negative log probability of `targets` [steps] under `log_probs` [steps, vocabulary]."""
    return float(torch.exp(-log_probs.gather(-1, targets[:, None]).mean()))
