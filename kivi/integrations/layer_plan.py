"""Which layers of a transformers model a kivi cache can hold, decided from the configuration alone.

transformers' own `DynamicCache(config=...)` says what each layer needs; this module reads its answer. Plain full-attention
layers go into kivi. Sliding-window and chunked layers keep transformers' own window, in full precision: it is bounded, and
kivi's sealed pages never forget a token. Everything else is refused by name, here, so that nothing fails in the middle of a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.cache_utils import DummyLayer, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kivi.errors import IntegrationError


@dataclass(frozen=True)
class LayerPlan:
    """Where one layer's keys and values live: `store` is "kivi", "full" (transformers' own layer) or "none" (no attention)."""

    layer: int
    store: str
    reason: str


#: Model types whose configuration does not tell that their softmax has a learned term.
SINKS = frozenset({"gpt_oss"})


def plan_layers(config: Any) -> tuple[list[LayerPlan], list[Any]]:
    """One `LayerPlan` a layer, and transformers' own cache layers for those that kivi does not store.

    `config` is a model's configuration; of a composite model its text decoder counts. Raises `IntegrationError` for a model or
    a layer that kivi cannot serve, naming it.
    """
    if not hasattr(config, "get_text_config"):
        raise IntegrationError(f"config is a {type(config).__name__}; pass the model's configuration, model.config")
    decoder = config.get_text_config(decoder=True)
    _refuse_model(config, decoder)
    try:
        own: list[Any] = DynamicCache(config=config).layers
    except KeyError as error:
        raise IntegrationError(_text(decoder, f"has layers of the kind {error}, whose cache is not plain keys and values")) from None
    plans = []
    for index, layer in enumerate(own):
        kind = type(layer)
        if kind is DynamicLayer:
            plans.append(LayerPlan(index, "kivi", "full attention"))
        elif kind is DynamicSlidingWindowLayer:
            plans.append(LayerPlan(index, "full", f"attention over a window of {layer.sliding_window} tokens"))
        elif kind is DummyLayer:
            plans.append(LayerPlan(index, "none", "no attention"))
        else:
            raise IntegrationError(_text(decoder, f"keeps layer {index} in a {kind.__name__}, which is not plain keys and values"))
    return plans, own


def _refuse_model(config: Any, decoder: Any) -> None:
    has = lambda name: bool(getattr(decoder, name, None))  # noqa: E731
    if getattr(config, "is_encoder_decoder", False):
        reason = "is an encoder-decoder, whose cross-attention keys and values belong to another sequence"
    elif has("kv_lora_rank"):
        reason = f"uses multi-head latent attention (MLA, kv_lora_rank = {decoder.kv_lora_rank}), whose cache is a latent vector a token"
    elif any(mode == "reuse" for mode in getattr(decoder, "kv_sharing_modes", None) or ()):
        reason = "shares keys and values between layers (kv_sharing_modes), so one layer's tokens would be read by several"
    elif has("attn_logit_softcapping"):
        reason = f"caps attention scores (attn_logit_softcapping = {decoder.attn_logit_softcapping})"
    elif decoder.model_type in SINKS:
        reason = "adds learned attention sinks to the softmax (s_aux)"
    elif has("alibi") or decoder.model_type == "bloom" or getattr(getattr(decoder, "attn_config", None), "alibi", False):
        reason = "adds a position bias to attention scores (ALiBi)"
    elif getattr(decoder, "is_causal", True) is False:
        reason = "attends in both directions (is_causal = False)"
    elif getattr(decoder, "num_attention_heads", None) is None:
        reason = "has no attention heads (num_attention_heads), so its state is not keys and values"
    else:
        return
    raise IntegrationError(_text(decoder, reason))


def _text(decoder: Any, reason: str) -> str:
    return f"the {decoder.model_type!r} model {reason}; kivi serves causal full attention only: use transformers' own cache for this model"
