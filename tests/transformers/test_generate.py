"""`generate()` of random-weight models on a `KiviCache`: it is the same text as a fake-quant cache gives, alone or in a batch."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from kivi.integrations.transformers import KiviCache
from tests.model.fake_quant import fake_quant_cache
from tests.transformers.tiny import FAMILIES, FLOATING, GROUP, LAYERS, RESIDUAL, SPEC, left_padded, model_of, prompt, rounding_bound

NEW = 24
LENGTHS = (9, RESIDUAL, 40)  # shorter than R, exactly R, longer than R


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return model_of(FAMILIES[request.param]())


def generate(model, ids, cache, keyword="cache", **options):
    options = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True, **options}
    out = model.generate(ids, **{keyword: cache}, **options)
    return out.sequences, torch.stack(out.logits, 1) if out.logits else None


def fake_quant_run(model, ids, **options):
    model.set_attn_implementation("sdpa")
    try:
        return generate(model, ids, fake_quant_cache(LAYERS, 2, GROUP, RESIDUAL, torch.float32), **options)
    finally:
        model.set_attn_implementation("kivi")


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_equals_fake_quant(model, length):
    ids, cache = prompt(length), KiviCache(SPEC, model.config)
    sequence, logits = generate(model, ids, cache)
    expected, expected_logits = fake_quant_run(model, ids)
    assert sequence.tolist() == expected.tolist()
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=rounding_bound(logits, length + NEW))
    tokens = length + NEW - 1  # the last token is never fed back
    for layer in range(LAYERS):
        lengths = cache.kv[layer].lengths(0)
        assert (lengths.tokens, lengths.key_sealed, lengths.value_sealed) == (tokens, tokens // RESIDUAL * RESIDUAL, tokens - RESIDUAL)
    assert cache.get_seq_length() == tokens


def test_two_bits_are_really_stored(model):
    """The 2-bit text differs from the full-precision one, and the sealed history takes 2-bit words."""
    ids, cache = prompt(40), KiviCache(SPEC, model.config)
    _, logits = generate(model, ids, cache)
    _, full = generate(model, ids, DynamicCache(config=model.config))
    assert (logits[:, 1:] - full[:, 1:]).abs().max() > 100 * rounding_bound(logits, 64)
    ((start, sealed),) = cache.kv[0].sealed(0)["key"]
    assert start == 0
    assert sealed.words.numel() * sealed.words.element_size() * 8 == 2 * 2 * 48 * 16  # 2 bits, 2 heads, 48 tokens, 16 channels
    assert sealed.codes().unique().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("length", LENGTHS)
def test_sampled_equals_fake_quant_with_the_same_seed(model, length):
    ids = prompt(length)
    torch.manual_seed(7)
    sequence, _ = generate(model, ids, KiviCache(SPEC, model.config), do_sample=True, temperature=1.5, top_k=0)
    torch.manual_seed(7)
    expected, _ = fake_quant_run(model, ids, do_sample=True, temperature=1.5, top_k=0)
    torch.manual_seed(7)
    greedy, _ = generate(model, ids, KiviCache(SPEC, model.config))
    assert sequence.tolist() == expected.tolist()
    assert sequence.tolist() != greedy.tolist()


@pytest.mark.parametrize("lengths", [(5, 9, 7), (40, 21, 9), (17, 33, 1)])
def test_left_padded_rows_equal_the_prompts_alone(model, lengths):
    """Field report 26: padding joins neither softmax nor groups."""
    ids, mask, prompts = left_padded(*lengths)
    cache = KiviCache(SPEC, model.config)
    sequences, logits = generate(model, ids, cache, attention_mask=mask)
    for row, (alone, length) in enumerate(zip(prompts, lengths, strict=True)):
        solo = KiviCache(SPEC, model.config)
        sequence, expected = generate(model, alone, solo)
        assert sequences[row, -NEW:].tolist() == sequence[0, -NEW:].tolist()
        torch.testing.assert_close(logits[row], expected[0], rtol=0, atol=rounding_bound(expected, length + NEW))
        assert cache.kv[1].lengths(row) == solo.kv[1].lengths(0)
        for which in ("key", "value"):
            for (start, batched), (start_alone, single) in zip(cache.kv[0].sealed(row)[which], solo.kv[0].sealed(0)[which], strict=True):
                assert start == start_alone
                assert (batched.codes() != single.codes()).float().mean() < 1e-3  # the model's own rounding may flip a near tie


def test_padding_content_is_never_read():
    """Pad tokens that embed to huge keys and values change nothing, bit for bit."""
    model = model_of(FAMILIES["llama"]())
    ids, mask, _ = left_padded(30, 18)
    other = ids.clone()
    other[mask == 0] = 5
    first, logits = generate(model, ids, KiviCache(SPEC, model.config), attention_mask=mask)
    second, other_logits = generate(model, other, KiviCache(SPEC, model.config), attention_mask=mask)
    assert first[:, 30:].tolist() == second[:, 30:].tolist()
    assert torch.equal(logits, other_logits)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_cache_and_past_key_values_are_the_same(model):
    ids = prompt(40)
    by_cache, logits = generate(model, ids, KiviCache(SPEC, model.config))
    by_old_name, old_logits = generate(model, ids, KiviCache(SPEC, model.config), keyword="past_key_values")
    assert by_cache.tolist() == by_old_name.tolist()
    assert torch.equal(logits, old_logits)


@pytest.mark.parametrize("lengths", [(20,), (20, 11, 17)])
def test_beam_search_equals_fake_quant(model, lengths):
    """Reorder moves sealed codes and floating windows alike: field report 21."""
    ids, mask, _ = left_padded(*lengths)
    options = {"num_beams": 3, "attention_mask": mask, "output_scores": True, "output_logits": False}
    cache = KiviCache(SPEC, model.config)
    sequences, _ = generate(model, ids, cache, **options)
    assert cache.kv[0].batch == 3 * len(lengths)
    for row, n in enumerate(lengths):
        expected, _ = fake_quant_run(model, ids[row : row + 1, ids.shape[1] - n :], num_beams=3, output_logits=False)
        assert sequences[row, -NEW:].tolist() == expected[0, -NEW:].tolist()


def test_chunked_prefill_stores_the_same(model):
    """Field reports 18 and 19: what is sealed does not depend on the chunks."""
    ids = prompt(45)
    whole, chunked = KiviCache(SPEC, model.config), KiviCache(SPEC, model.config)
    with torch.no_grad():
        model(ids, cache=whole)
        for part in ids.split((20, 1, 7, 17), dim=1):
            model(part, cache=chunked)
    assert whole.kv[0].lengths(0) == chunked.kv[0].lengths(0)
    for which in ("key", "value"):
        ((_, a),) = whole.kv[0].sealed(0)[which]
        ((_, b),) = chunked.kv[0].sealed(0)[which]
        assert (a.codes() != b.codes()).float().mean() < 1e-3  # layer 0: the same inputs up to the order of matmul sums


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(dtype):
    model = model_of(FAMILIES["llama"]()).to(dtype)
    cache = KiviCache(SPEC, model.config)
    sequence, logits = generate(model, prompt(40), cache)
    assert sequence.shape == (1, 40 + NEW)
    assert cache.kv[0].residual(0)["key"].dtype == dtype
    assert torch.isfinite(logits.float()).all()
    big = KiviCache(FLOATING, model.config)
    full, full_logits = generate(model, prompt(40), DynamicCache(config=model.config))
    floating, floating_logits = generate(model, prompt(40), big)
    same = int((full == floating).long().cumprod(-1).sum()) - 40
    assert same >= 1
    bound = rounding_bound(full_logits.float(), 64) * torch.finfo(dtype).eps / 2.0**-23
    torch.testing.assert_close(full_logits[:, :same].float(), floating_logits[:, :same].float(), rtol=0, atol=bound)


def test_full_precision_window_equals_dynamic_cache(model):
    """With R beyond the sequence nothing is sealed, and logits are those of transformers' own cache and sdpa to 1e-4."""
    model.set_attn_implementation("sdpa")
    expected, expected_logits = generate(model, prompt(40), DynamicCache(config=model.config))
    model.set_attn_implementation("kivi")
    cache = KiviCache(FLOATING, model.config)
    sequence, logits = generate(model, prompt(40), cache)
    assert sequence.tolist() == expected.tolist()
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-4)
    assert cache.kv[0].sealed(0) == {"key": [], "value": []}


def test_plain_tensors_go_to_sdpa(model):
    """Attention "kivi" serves a DynamicCache and no cache at all, padded batches too, bit for bit as sdpa."""
    ids, mask, _ = left_padded(20, 12, 7)
    outs = []
    for attention in ("sdpa", "kivi"):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            logits = model(ids, attention_mask=mask, use_cache=False).logits
        outs.append((logits, generate(model, ids, DynamicCache(config=model.config), attention_mask=mask)))
    (plain, (tokens, logits)), (plain_kivi, (tokens_kivi, logits_kivi)) = outs
    assert torch.equal(plain, plain_kivi)
    assert tokens.tolist() == tokens_kivi.tolist()
    assert torch.equal(logits, logits_kivi)


def test_presets_and_paths_and_memory(model):
    cache = KiviCache("kivi-2bit", model.config)
    generate(model, prompt(200), cache, max_new_tokens=4)
    report = cache.memory()
    assert report["measured"] == cache.nbytes == sum(kv.nbytes for kv in cache.kv.values())
    assert report["formula"] + sum(report["padding"].values()) == report["measured"] == sum(report["by_kind"].values())
    assert report["full_precision"] == LAYERS * 2 * 2 * 203 * 16 * 4
    # head_dim 16, group 32: 128 sealed keys, 75 sealed values a layer and KV head, 2 bits and an fp16 pair a group
    formula = LAYERS * 2 * (16 * (128 * (2 / 8 + 4 / 32) + 75 * 4) + (75 * (16 * 2 / 8 + 4) + 128 * 16 * 4))
    assert abs(report["formula"] - formula) <= 75 * LAYERS * 2 * 4  # the formula counts a half group of values as half a pair
    assert cache.ran[0].backend == "reference"
    assert report["full_precision_layers"] == 0
