"""One cache over several calls: what may continue, what is refused as stale, and the edits that transformers makes in between."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

import kivi
from kivi.errors import IntegrationError, NonFiniteError
from kivi.integrations.transformers import KiviCache
from tests.transformers.tiny import FAMILIES, FLOATING, LAYERS, RESIDUAL, SPEC, left_padded, model_of, prompt, rounding_bound


@pytest.fixture(scope="module")
def model():
    return model_of(FAMILIES["llama"]())


def greedy(model, ids, cache, new=10, **options):
    options = {"attention_mask": torch.ones_like(ids), **options}  # else generate() takes a generated token 0 for padding
    return model.generate(ids, cache=cache, max_new_tokens=new, do_sample=False, **options)


@torch.no_grad()
def step(model, ids, cache, **options):
    return model(ids, cache=cache, **options).logits


# -- field report 39 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [4, 12, 30], ids=["shorter", "as long as the first prompt", "as long as what is stored"])
def test_another_prompt_on_a_used_cache_raises(model, other):
    """`generate()` cuts what the cache holds off the prompt, and would go on from another sequence with nothing new to say."""
    cache = KiviCache(SPEC, model.config)
    greedy(model, prompt(12), cache, new=19)
    assert cache.get_seq_length() == 30
    before = [(cache.kv[i].lengths(0), cache.kv[i].residual(0)["key"].clone()) for i in range(LAYERS)]
    with pytest.raises(IntegrationError, match=r"(not longer than the|it holds an earlier) sequence.*new KiviCache.*reset\(\)"):
        greedy(model, prompt(other, seed=5), cache)
    for i, (lengths, key) in enumerate(before):
        assert cache.kv[i].lengths(0) == lengths
        assert torch.equal(cache.kv[i].residual(0)["key"], key)


def test_positions_that_start_again_raise(model):
    cache = KiviCache(SPEC, model.config)
    step(model, prompt(12), cache, position_ids=torch.arange(12)[None])
    with pytest.raises(IntegrationError, match=r"request 0 goes on at position 0, but the cache holds its tokens up to position 11"):
        step(model, prompt(5, seed=5), cache, position_ids=torch.arange(5)[None])
    assert cache.get_seq_length() == 12
    step(model, prompt(5, seed=5), cache, position_ids=torch.arange(12, 17)[None])
    assert cache.kv[1].lengths(0).tokens == 17


def test_a_new_cache_or_a_reset_one_equals_a_fresh_process(model):
    expected = greedy(model, prompt(15, seed=5), KiviCache(SPEC, model.config), new=20).tolist()
    used = KiviCache(SPEC, model.config)
    greedy(model, prompt(40), used)
    assert greedy(model, prompt(15, seed=5), KiviCache(SPEC, model.config), new=20).tolist() == expected
    used.reset()
    assert used.get_seq_length() == 0
    assert greedy(model, prompt(15, seed=5), used, new=20).tolist() == expected


def test_another_batch_raises_and_after_reset_is_served(model):
    cache = KiviCache(SPEC, model.config)
    greedy(model, prompt(12), cache)
    ids, mask, _ = left_padded(30, 25, 28)
    with pytest.raises(IntegrationError, match="holds 1 requests of 21 tokens and was given a batch of 3"):
        greedy(model, ids, cache, attention_mask=mask)
    cache.reset()
    expected = greedy(model, ids, KiviCache(SPEC, model.config), attention_mask=mask).tolist()
    assert greedy(model, ids, cache, attention_mask=mask).tolist() == expected
    assert cache.kv[0].batch == 3


def test_another_models_shape_raises(model):
    cache = KiviCache(SPEC, model.config)
    step(model, prompt(5), cache)
    half = copy.deepcopy(model).to(torch.float16)
    with pytest.raises(IntegrationError, match="dtype was float32 and is now float16"):
        step(half, prompt(3), cache)
    assert cache.kv[0].lengths(0).tokens == 5


@pytest.mark.parametrize("whole", [True, False], ids=["whole sequence", "new tokens only"])
def test_continuing_equals_one_run(model, whole):
    """A second generate() on the same sequences continues, whether it is given the whole sequence or the new tokens with a whole mask."""
    cache = KiviCache(SPEC, model.config)
    first = greedy(model, prompt(14), cache, new=12)
    second = torch.cat([first, prompt(6, seed=3)], 1)
    ids = second if whole else second[:, cache.get_seq_length() :]
    out = greedy(model, ids, cache, new=15, attention_mask=torch.ones_like(second))
    single = KiviCache(SPEC, model.config)
    step(model, prompt(14), single)  # the same steps by hand
    for t in range(14, 25):
        step(model, first[:, t : t + 1], single)
    logits = step(model, second[:, 25:], single)
    for token in out[0, -15:].tolist():
        assert token == int(logits[0, -1].argmax())
        logits = step(model, torch.tensor([[token]]), single)
    assert cache.kv[0].lengths(0).tokens == 32 + 14


def test_continuing_a_padded_batch(model):
    ids, mask, prompts = left_padded(20, 9)
    cache = KiviCache(SPEC, model.config)
    first = greedy(model, ids, cache, new=8, attention_mask=mask)
    extra = torch.cat([prompt(5, seed=s) for s in (3, 4)])
    whole, whole_mask = torch.cat([first, extra], 1), torch.cat([mask, torch.ones(2, 13, dtype=mask.dtype)], 1)
    out = greedy(model, whole, cache, new=8, attention_mask=whole_mask)
    for row, alone in enumerate(prompts):
        solo = KiviCache(SPEC, model.config)
        begun = greedy(model, alone, solo, new=8)
        assert greedy(model, torch.cat([begun, extra[row : row + 1]], 1), solo, new=8)[0, -8:].tolist() == out[row, -8:].tolist()
    with pytest.raises(IntegrationError, match="hides 0 of the 40 slots of request 1, but 11 were hidden"):
        step(model, extra[:, :1], cache)  # the mask of the padding is missing


# -- a step that fails -----------------------------------------------------------------------------------------------


def test_a_failed_forward_pass_is_noticed(model):
    broken = copy.deepcopy(model)
    cache = KiviCache(SPEC, model.config)
    step(model, prompt(20), cache)
    broken.model.layers[1].self_attn.k_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(NonFiniteError):
        step(broken, prompt(1), cache)
    assert [cache.kv[i].lengths(0).tokens for i in range(LAYERS)] == [21, 20]
    with pytest.raises(IntegrationError, match=r"different numbers of tokens \(20, 21\).*failed at layer 1.*reset\(\)"):
        step(model, prompt(1), cache)
    cache.reset()
    assert torch.equal(step(model, prompt(20), cache), step(model, prompt(20), KiviCache(SPEC, model.config)))


# -- crop, and assisted decoding -------------------------------------------------------------------------------------


def test_crop_inside_the_window_equals_never_seen(model):
    """Tokens that were never sealed leave no trace."""
    cache, other = KiviCache(SPEC, model.config), KiviCache(SPEC, model.config)
    step(model, prompt(20), cache)
    step(model, prompt(5, seed=8), cache)
    step(model, prompt(20), other)
    cache.crop(-5)
    # 25 tokens had sealed 9 values, 20 would have sealed 4: sealed values stay sealed
    assert cache.get_seq_length() == 20
    assert cache.kv[0].lengths(0).value_sealed == 9
    assert other.kv[0].lengths(0).value_sealed == 4
    wide, wide_other = KiviCache(FLOATING, model.config), KiviCache(FLOATING, model.config)
    step(model, prompt(25), wide)
    step(model, prompt(20), wide_other)
    wide.crop(-5)
    a, b = step(model, prompt(3, seed=9), wide), step(model, prompt(3, seed=9), wide_other)
    torch.testing.assert_close(a, b, rtol=0, atol=rounding_bound(a, 28))


def test_pending_tokens_are_kept_and_dropped_without_a_trace(model):
    cache, other = KiviCache(SPEC, model.config), KiviCache(SPEC, model.config)
    ids = prompt(20)
    cache.activate_past_recording()
    step(model, ids, cache)
    assert cache.kv[0].pending(0) == 20
    cache.crop(0)
    step(model, prompt(RESIDUAL + 3, seed=8), cache)  # a draft, longer than R
    cache.crop(-(RESIDUAL + 3))
    step(model, ids, other)
    assert [cache.kv[i].lengths(0) for i in range(LAYERS)] == [other.kv[i].lengths(0) for i in range(LAYERS)]
    assert torch.equal(step(model, prompt(1), cache), step(model, prompt(1), other))


def test_crop_below_pending_into_committed_tokens(model):
    cache = KiviCache(SPEC, model.config)
    step(model, prompt(30), cache)
    cache.activate_past_recording()
    step(model, prompt(4, seed=2), cache)
    cache.crop(-10)
    assert cache.get_seq_length() == 24
    assert (cache.kv[0].lengths(0).tokens, cache.kv[0].pending(0)) == (24, 0)


def test_crop_of_a_padded_batch(model):
    ids, mask, _ = left_padded(20, 3)
    cache = KiviCache(SPEC, model.config)
    step(model, ids, cache, attention_mask=mask)
    cache.crop(-5)
    assert [cache.kv[0].lengths(b).tokens for b in range(2)] == [15, 0]
    assert cache.get_seq_length() == 15


@pytest.mark.parametrize(("n", "message"), [(3, "pass a negative number"), (-21, "holds only 20 tokens")])
def test_a_wrong_crop_raises(model, n, message):
    cache = KiviCache(SPEC, model.config)
    step(model, prompt(20), cache)
    with pytest.raises(IntegrationError, match=message):
        cache.crop(n)
    assert cache.get_seq_length() == 20


def test_assisted_decoding_gives_the_greedy_text(model):
    """Drafts stay pending until transformers crops them; with R beyond the sequence the text is the plain greedy one, exactly."""
    ids = torch.cat([prompt(8)] * 3, 1)  # repetition, so that prompt lookup finds drafts
    for spec in (FLOATING, SPEC):
        cache = KiviCache(spec, model.config)
        out = greedy(model, ids, cache, new=30, prompt_lookup_num_tokens=4)
        assert all(cache.kv[i].pending(0) == 0 for i in range(LAYERS))
        tokens = cache.get_seq_length()
        assert tokens in (53, 54)
        assert cache.kv[0].lengths(0).tokens == tokens
        if spec is FLOATING:
            assert out.tolist() == greedy(model, ids, KiviCache(spec, model.config), new=30).tolist()
        else:
            assert cache.kv[0].lengths(0).key_sealed == tokens // RESIDUAL * RESIDUAL
            assert cache.kv[0].lengths(0).value_sealed == tokens - RESIDUAL


def test_assisted_decoding_with_an_assistant_model(model):
    assistant = model_of(FAMILIES["llama"](), attention="sdpa", seed=4)
    expected = greedy(model, prompt(30), KiviCache(FLOATING, model.config), new=20)
    assert greedy(model, prompt(30), KiviCache(FLOATING, model.config), new=20, assistant_model=assistant).tolist() == expected.tolist()


def test_plain_generate_after_assisted_decoding_seals_again(model):
    cache = KiviCache(SPEC, model.config)
    first = greedy(model, prompt(20), cache, new=6, prompt_lookup_num_tokens=3)
    greedy(model, first, cache, new=40)
    assert cache.kv[0].pending(0) == 0
    assert cache.kv[0].lengths(0).value_residual == RESIDUAL


# -- requests as rows ------------------------------------------------------------------------------------------------


def test_repeat_select_and_reorder(model):
    ids, mask, prompts = left_padded(20, 31)
    cache = KiviCache(SPEC, model.config)
    step(model, ids, cache, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(0))
    cache.batch_repeat_interleave(2)  # 0 0 1 1
    cache.batch_select_indices(torch.tensor([3, 0, 1]))  # 1 0 0
    cache.reorder_cache(torch.tensor([1, 0, 0]))  # 0 1 1
    row_mask = torch.cat([mask[[0, 1, 1]], torch.ones(3, 1, dtype=mask.dtype)], 1)
    token = torch.tensor([[7], [8], [9]])
    logits = step(model, token, cache, attention_mask=row_mask, position_ids=row_mask.sum(1, keepdim=True) - 1)
    for row, source in enumerate((0, 1, 1)):
        solo = KiviCache(SPEC, model.config)
        step(model, prompts[source], solo)
        expected = step(model, token[row : row + 1], solo)
        torch.testing.assert_close(logits[row], expected[0], rtol=0, atol=rounding_bound(expected, 32))


def test_a_deep_copy_is_another_cache(model):
    """transformers' recipe for a shared prompt: prefill once, copy the cache for each continuation."""
    shared = KiviCache(SPEC, model.config)
    step(model, prompt(40), shared)
    twins = [copy.deepcopy(shared) for _ in range(2)]
    outs = [step(model, prompt(9, seed=s), twin) for s, twin in zip((5, 6), twins)]
    assert shared.get_seq_length() == 40
    for seed, out in zip((5, 6), outs):
        fresh = KiviCache(SPEC, model.config)
        step(model, prompt(40), fresh)
        assert torch.equal(step(model, prompt(9, seed=seed), fresh), out)


def test_batch_edits_before_the_first_tokens_do_nothing():
    """A beam search may reorder a cache that is still empty."""
    cache = KiviCache("teaching", FAMILIES["llama"]())
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_select_indices(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("config", [None, object()])
def test_a_configuration_is_needed(config):
    with pytest.raises(IntegrationError, match=r"model\.config"):
        KiviCache("teaching", config)


def test_a_cache_that_was_given_a_backend_is_copied():
    """Reuse of a prefix: the copy shares the backend, and nothing else."""
    model, backend = model_of(FAMILIES["llama"]()), kivi.get_backend("cpu")
    cache = KiviCache(SPEC, model.config, backend=backend)
    step(model, prompt(20), cache)
    twin = copy.deepcopy(cache)
    assert all(kv.backend is backend for kv in twin.kv.values())
    assert torch.equal(step(model, prompt(1), twin), step(model, prompt(1), cache))


def test_autocast():
    """Queries, keys and values in the dtype of the region, as sdpa casts them."""
    model, plain = model_of(FAMILIES["llama"]()), model_of(FAMILIES["llama"](), attention="sdpa")
    cache, own, ids = KiviCache(FLOATING, model.config), DynamicCache(config=model.config), prompt(12)
    with torch.autocast("cpu", torch.bfloat16):
        got = [step(model, part, cache) for part in (ids[:, :8], ids[:, 8:])]
        expected = [step(plain, part, own) for part in (ids[:, :8], ids[:, 8:])]
    assert {kv.geometry.dtype for kv in cache.kv.values()} == {"bfloat16"}
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=0.05 * float(b.abs().max()), rtol=0)
