"""The real model writes text on a kivi cache: what the issue calls the main job, end to end."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from kivi.demo import text
from kivi.integrations.transformers import KiviCache
from tests.model.fake_quant import fake_quant_cache

pytestmark = pytest.mark.model

CHAT = [
    "What is the capital of France?",
    "Write one sentence about a rabbit that owns a watch, and one about a girl who follows it.",
    "Hi!",
]


@pytest.fixture(scope="module")
def model(smollm2):
    model, _ = smollm2
    model.set_attn_implementation("kivi")
    return model


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return smollm2[1]


def chat(tokenizer, *questions):
    turns = [[{"role": "user", "content": question}] for question in questions]
    prompts = [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    return tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)


def test_short_prompt_answers_as_in_full_precision(model, tokenizer):
    """Prompt and answer fit into R, so nothing is sealed: the answer is that of the full cache, and it is right."""
    inputs = chat(tokenizer, CHAT[0])
    cache = KiviCache("kivi-2bit", model.config)
    out = model.generate(**inputs, cache=cache, max_new_tokens=12, do_sample=False)
    full = model.generate(**inputs, cache=DynamicCache(config=model.config), max_new_tokens=12, do_sample=False)
    assert out.tolist() == full.tolist()
    assert "Paris" in tokenizer.decode(out[0, inputs.input_ids.shape[1] :])
    assert cache.kv[0].lengths(0).key_sealed == 0


def test_left_padded_batch_of_three_equals_the_prompts_alone(model, tokenizer):
    batch = chat(tokenizer, *CHAT)
    cache = KiviCache("kivi-2bit", model.config)
    out = model.generate(**batch, cache=cache, max_new_tokens=12, do_sample=False)
    width = batch.input_ids.shape[1]
    for row, question in enumerate(CHAT):
        inputs = chat(tokenizer, question)
        n = inputs.input_ids.shape[1]
        alone = model.generate(**inputs, cache=KiviCache("kivi-2bit", model.config), max_new_tokens=12, do_sample=False)[0, n:].tolist()
        assert out[row, width : width + len(alone)].tolist() == alone
        assert cache.kv[29].lengths(row).tokens == cache.get_seq_length() - (width - n)


def test_long_prompt_greedy_and_sampled_equal_fake_quant(model, tokenizer):
    """A prompt longer than R, so the text is written on 2-bit history; the same as a fake-quant cache writes."""
    ids = text.alice_ids(tokenizer, 256, 200)
    for options in ({"do_sample": False}, {"do_sample": True, "temperature": 0.9, "top_p": 0.95}):
        texts = []
        for attention, make in (("kivi", lambda: KiviCache("kivi-2bit", model.config)), ("sdpa", lambda: fake_quant_cache(30, 2, 32, 128))):
            model.set_attn_implementation(attention)
            torch.manual_seed(3)
            cache = make()
            mask = torch.ones_like(ids)
            texts.append(model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=24, **options)[0, 200:].tolist())
        model.set_attn_implementation("kivi")
        assert texts[0] == texts[1]


def test_beam_search_on_the_real_model(model, tokenizer):
    ids = text.alice_ids(tokenizer, 256, 150)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "num_beams": 2}
    out = model.generate(ids, cache=KiviCache("kivi-4bit", model.config), **options)
    model.set_attn_implementation("sdpa")
    expected = model.generate(ids, cache=fake_quant_cache(30, 4, 32, 128), **options)
    model.set_attn_implementation("kivi")
    assert out.tolist() == expected.tolist()
