"""Layers with a window stay in full precision, in transformers' own cache, next to quantized ones; and that is said."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import DynamicCache, Gemma3TextConfig, Llama4TextConfig, MistralConfig, Qwen2Config
from transformers.cache_utils import DynamicSlidingWindowLayer

from kivi.errors import IntegrationError
from kivi.integrations.transformers import KiviCache, KiviLayer
from tests.transformers.tiny import FLOATING, RESIDUAL, SIZES, SPEC, left_padded, model_of, prompt, rounding_bound

WINDOW = 12
LOWER_FULL = ["full_attention", "sliding_attention"]
CONFIGS = {
    "mistral, all sliding": lambda: MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma3, every second": lambda: Gemma3TextConfig(**SIZES, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]),
    "qwen2, upper half": lambda: Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, layer_types=LOWER_FULL),
}
FULL = {"mistral, all sliding": [0, 1], "gemma3, every second": [0], "qwen2, upper half": [1]}


@pytest.mark.parametrize("name", CONFIGS)
def test_windows_stay_in_full_precision_and_it_is_said_once(name, caplog):
    with caplog.at_level(logging.INFO, "kivi"):
        cache = KiviCache(SPEC, CONFIGS[name]())
    assert [p.layer for p in cache.layer_plan if p.store == "full"] == FULL[name]
    assert {p.reason for p in cache.layer_plan if p.store == "full"} == {f"attention over a window of {WINDOW} tokens"}
    (record,) = caplog.records
    assert f"{len(FULL[name])} of 2 layers" in record.getMessage()
    assert "stay in full precision" in record.getMessage()
    for index, layer in enumerate(cache.layers):
        assert type(layer) is (DynamicSlidingWindowLayer if index in FULL[name] else KiviLayer)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lengths", [(30,), (30, 9, 17)])
def test_windowed_models_equal_transformers_own_cache(name, lengths):
    model = model_of(CONFIGS[name]())
    ids, mask, _ = left_padded(*lengths)
    options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(ids, cache=DynamicCache(config=model.config), **options)
    cache = KiviCache(FLOATING, model.config)
    out = model.generate(ids, cache=cache, **options)
    assert out.sequences.tolist() == expected.sequences.tolist()
    logits = torch.stack(expected.logits)
    torch.testing.assert_close(torch.stack(out.logits), logits, rtol=0, atol=rounding_bound(logits, 50))
    assert cache.memory()["full_precision_layers"] == len(FULL[name]) * 2 * len(lengths) * 2 * (WINDOW - 1) * 16 * 4


def test_the_full_layers_of_a_windowed_model_are_quantized():
    model = model_of(CONFIGS["gemma3, every second"]())
    cache = KiviCache(SPEC, model.config)
    model.generate(prompt(40), cache=cache, max_new_tokens=10, do_sample=False)
    assert list(cache.kv) == [1]
    assert cache.kv[1].lengths(0) == (49, 48, 1, 49 - RESIDUAL, RESIDUAL)
    assert cache.get_seq_length() == 49
    assert cache.nbytes == cache.kv[1].nbytes + cache.memory()["full_precision_layers"]


def test_beam_search_moves_both_kinds_of_layers():
    model = model_of(CONFIGS["gemma3, every second"]())
    options = {"max_new_tokens": 20, "do_sample": False, "num_beams": 3}
    expected = model.generate(prompt(30), cache=DynamicCache(config=model.config), **options)
    assert model.generate(prompt(30), cache=KiviCache(FLOATING, model.config), **options).tolist() == expected.tolist()


def test_chunked_layers_are_windows_too():
    sizes = {**SIZES, "intermediate_size_mlp": 96, "num_local_experts": 2}
    config = Llama4TextConfig(**sizes, attention_chunk_size=16, layer_types=["chunked_attention", "full_attention"])
    cache = KiviCache(SPEC, config)
    assert [(p.store, p.reason) for p in cache.layer_plan] == [("full", "attention over a window of 16 tokens"), ("kivi", "full attention")]


def test_a_window_that_is_full_cannot_go_back():
    """Refused before any layer is cut."""
    config = CONFIGS["qwen2, upper half"]()
    model, cache = model_of(config), KiviCache(FLOATING, config)
    with torch.no_grad():
        model(input_ids=prompt(WINDOW + 4), past_key_values=cache)
        with pytest.raises(IntegrationError, match=f"layer 1 attends to a window of {WINDOW} tokens, which is full"):
            cache.crop(-2)
        assert [layer.get_seq_length() for layer in cache.layers] == [WINDOW + 4] * 2
        model(input_ids=prompt(1), past_key_values=cache)
        short = KiviCache(FLOATING, config)
        model(input_ids=prompt(WINDOW - 4), past_key_values=short)
        short.crop(-2)
    assert [layer.get_seq_length() for layer in short.layers] == [WINDOW - 6] * 2
