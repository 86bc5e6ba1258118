"""Small random models of the families that kivi serves: two layers, grouped-query attention, real code paths.

Weights are drawn wider than a training run would, so that logits are far apart and a greedy choice does not hang on a rounding.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

import kivi
from kivi.integrations.transformers import register

VOCABULARY, LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 97, 2, 64, 4, 2, 16, 96
SIZES = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": INTERMEDIATE,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
}
# R = 16, G = 8: a prompt of 40 tokens has sealed both sides, one of 9 tokens neither. float32 metadata, because two runs that
# differ in the last bit of a float32 key may round an fp16 scale to different sides, 2^-11 apart.
RESIDUAL, GROUP = 16, 8
FIELDS = {"residual": RESIDUAL, "group": GROUP, "metadata": "float32"}
SPEC = kivi.load_spec("kivi-2bit").override({f"{side}.{name}": value for side in ("key", "value") for name, value in FIELDS.items()})
FLOATING = SPEC.override({"key.residual": 256, "value.residual": 256})  # seals nothing of the sequences here


def model_of(config, attention: str = "kivi", seed: int = 0):
    """A model with random weights in evaluation mode, float32, on the CPU."""
    register()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.set_attn_implementation(attention)
    return model.eval()


def prompt(length: int, seed: int = 1) -> torch.Tensor:
    """Random token ids [1, length]; none is the padding token."""
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def left_padded(*lengths: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """(ids, attention mask, the prompts alone): prompts of these lengths, padded in front to the longest."""
    prompts = [prompt(n, seed=10 + i) for i, n in enumerate(lengths)]
    width = max(lengths)
    ids = torch.cat([torch.nn.functional.pad(p, (width - p.shape[1], 0)) for p in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(p), (width - p.shape[1], 0)) for p in prompts])
    return ids, mask, prompts


def rounding_bound(logits: torch.Tensor, tokens: int) -> float:
    """How far two float32 runs of the same tiny model may be apart, to first order.

    A logit is reached through sums of at most N products in all: per layer q, k, v, o over HIDDEN, scores over HEAD_DIM, output over
    `tokens`, three MLP products, then the head. Each of the N roundings is at most 2^-24 of a number no larger than the
    largest logit's order; both runs have them, hence the factor 2.
    """
    roundings = LAYERS * (4 * HIDDEN + HEAD_DIM + tokens + 2 * HIDDEN + INTERMEDIATE) + HIDDEN
    return 2 * roundings * 2.0**-24 * float(logits.abs().max())
