"""What kivi does not serve is refused by name: models and layers at construction, masks and options before anything is stored."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import (
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    GptOssConfig,
    JambaConfig,
    MambaConfig,
    MptConfig,
    Qwen3NextConfig,
    RwkvConfig,
    T5Config,
)

import kivi
from kivi.errors import IntegrationError, UnknownBackendError, UnsupportedError
from kivi.integrations.transformers import KiviCache, kivi_attention
from tests.transformers.tiny import FAMILIES, SPEC, left_padded, model_of, prompt

UNSERVED = {
    "MLA": (DeepseekV3Config, r"'deepseek_v3' model uses multi-head latent attention \(MLA, kv_lora_rank = 512\)"),
    "encoder-decoder": (T5Config, "'t5' model is an encoder-decoder"),
    "mamba": (MambaConfig, "'mamba' model has no attention heads|'mamba' model keeps layer 0 in a LinearAttentionLayer"),
    "hybrid mamba": (JambaConfig, "'jamba' model keeps layer 0 in a LinearAttentionLayer"),
    "linear attention": (Qwen3NextConfig, "'qwen3_next' model keeps layer 0 in a LinearAttentionLayer"),
    "soft-cap": (Gemma2Config, r"'gemma2' model caps attention scores \(attn_logit_softcapping = 50.0\)"),
    "attention sinks": (GptOssConfig, r"'gpt_oss' model adds learned attention sinks to the softmax \(s_aux\)"),
    "ALiBi": (BloomConfig, r"'bloom' model adds a position bias to attention scores \(ALiBi\)"),
    "ALiBi by option": (lambda: FalconConfig(alibi=True), "'falcon' model adds a position bias"),
    "ALiBi in a nested option": (lambda: MptConfig(attn_config={"alibi": True}), "'mpt' model adds a position bias"),
    "shared keys and values": (Gemma3nTextConfig, "'gemma3n_text' model shares keys and values between layers"),
    "recurrent": (RwkvConfig, "'rwkv' model has no attention heads"),
}


@pytest.mark.parametrize("kind", UNSERVED)
def test_a_model_that_is_not_served(kind):
    config, message = UNSERVED[kind]
    with pytest.raises(IntegrationError, match=message) as caught:
        KiviCache(SPEC, config())
    assert "use transformers' own cache" in str(caught.value)


def test_a_bidirectional_model():
    config = FAMILIES["llama"]()
    config.is_causal = False
    with pytest.raises(IntegrationError, match="attends in both directions"):
        KiviCache(SPEC, config)


def test_the_backend_is_checked_at_construction(monkeypatch):
    """Field report 28: the answer comes when the cache is configured, not in the middle of a run."""
    with pytest.raises(UnknownBackendError, match="no backend is called 'cuda9'"):
        KiviCache(SPEC, FAMILIES["llama"](), backend="cuda9")
    config = FAMILIES["llama"]()
    config.head_dim = 4096
    with pytest.raises(UnsupportedError, match="head_dim = 4096"):
        KiviCache(SPEC, config)


@pytest.fixture(scope="module")
def model():
    return model_of(FAMILIES["llama"]())


def empty(cache):
    return cache.get_seq_length() == 0 and all(kv.lengths(b).tokens == 0 for kv in cache.kv.values() for b in range(kv.batch))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_another_attention_is_told(attention):
    model = model_of(FAMILIES["qwen3"](), attention=attention)
    cache = KiviCache(SPEC, model.config)
    with pytest.raises(IntegrationError, match=r"layer 0 .* its attention is not 'kivi'; call .*set_attn_implementation\('kivi'\)"):
        model.generate(prompt(5), cache=cache, max_new_tokens=2, do_sample=False)
    assert empty(cache)
    model.set_attn_implementation("kivi")
    assert model.generate(prompt(5), cache=cache, max_new_tokens=2, do_sample=False).shape == (1, 7)


def causal(n, total=None):
    total = total or n
    return torch.ones(n, total, dtype=torch.bool).tril(total - n)[None, None]


def hole(mask):
    mask[..., 3] = False
    return mask


def right(mask):
    mask[..., 7:] = False
    return mask


def prefix(mask):
    mask[..., :4, :4] = True
    return mask


def packed(mask):
    mask[..., 5:, :5] = False
    return mask


LOWEST = torch.finfo(torch.float32).min


def additive(mask, value=LOWEST):
    return torch.zeros(mask.shape).masked_fill(~mask, value)


MASKS = {
    "a hole": (hole(causal(10)), "a token in the middle is hidden"),
    "right padding": (right(causal(10)), r"right padding: set tokenizer.padding_side = 'left'"),
    "prefix attention": (prefix(causal(10)), "a token sees later ones"),
    "bidirectional": (torch.ones(1, 1, 10, 10, dtype=torch.bool), "a token sees later ones"),
    "packed sequences": (packed(causal(10)), "several sequences packed into one row"),
    "a window": (causal(10) & ~torch.ones(10, 10, dtype=torch.bool).tril(-4), r"does not see all earlier ones \(a window"),
    "a bias": (additive(causal(10)) - 0.5 * torch.arange(10.0), "adds a bias to some scores"),
    "one a head": (causal(10).expand(1, 4, 10, 10), r"has shape \(1, 4, 10, 10\) where \[1, 1, 10, 10\] was due"),
    "static cache size": (causal(10, 64), r"has shape \(1, 1, 10, 64\) where \[1, 1, 10, 10\] was due"),
}


@pytest.mark.parametrize("kind", MASKS)
def test_a_wrong_mask(model, kind):
    mask, message = MASKS[kind]
    cache = KiviCache(SPEC, model.config)
    with pytest.raises(IntegrationError, match=message), torch.no_grad():
        model(prompt(10), attention_mask=mask, cache=cache)
    assert empty(cache)


@pytest.mark.parametrize("fill", [LOWEST, float("-inf")])
def test_an_additive_causal_mask_is_served(model, fill):
    with torch.no_grad():
        plain = model(prompt(10), cache=KiviCache(SPEC, model.config)).logits
        assert torch.equal(plain, model(prompt(10), attention_mask=additive(causal(10), fill), cache=KiviCache(SPEC, model.config)).logits)


def test_right_padding_of_a_batch(model):
    ids, mask, _ = left_padded(8, 5)
    with pytest.raises(IntegrationError, match="request 1 is not causal with left padding: its last token is hidden"), torch.no_grad():
        model(ids.flip(1), attention_mask=mask.flip(1), cache=KiviCache(SPEC, model.config))


OPTIONS = {
    "softcap": (50.0, "a cap on attention scores"),
    "s_aux": (torch.zeros(4), "learned attention sinks"),
    "position_bias": (torch.zeros(1, 4, 3, 3), "a position bias"),
    "sliding_window": (4, "a sliding window on a layer that the configuration calls full attention"),
    "output_attentions": (True, "attention weights as output"),
    "is_causal": (False, "attends in both directions"),
    "dropout": (0.1, r"dropout = 0.1 .* call model.eval\(\)"),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_the_attention_call(model, option):
    value, message = OPTIONS[option]
    cache = KiviCache(SPEC, model.config)
    q, k = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16)
    handles = cache.update(k, k, 0)
    with pytest.raises(IntegrationError, match=message):
        kivi_attention(model.model.layers[0].self_attn, q, *handles, None, **{option: value})
    assert empty(cache)


def test_attending_twice_to_the_same_tokens(model):
    cache = KiviCache(SPEC, model.config)
    q, k = torch.ones(1, 4, 3, 16), torch.ones(1, 2, 3, 16)
    handles = cache.update(k, k, 0)
    attention = model.model.layers[0].self_attn
    assert torch.equal(kivi_attention(attention, q, *handles, None)[0], torch.ones(1, 3, 4, 16))
    with pytest.raises(IntegrationError, match="layer 0 attends twice to the same new tokens"):
        kivi_attention(attention, q, *handles, None)
    assert cache.kv[0].lengths(0).tokens == 3


USES = {
    "arithmetic": lambda new: torch.ones(1) @ new,
    "a torch function": lambda new: torch.cat([new, new]),
    "a method": lambda new: new.transpose(1, 2),
    "an index": lambda new: new[:, :, -1],
}


@pytest.mark.parametrize("use", USES)
def test_new_tokens_are_not_a_tensor(model, use):
    key, _ = KiviCache(SPEC, model.config).update(torch.ones(1, 2, 3, 16), torch.ones(1, 2, 3, 16), 0)
    with pytest.raises(IntegrationError, match=r"keys and values( of layer 0)? as if they were tensors.*set_attn_implementation"):
        USES[use](key)


@pytest.mark.parametrize("option", ["softcap", "s_aux"])
def test_what_sdpa_would_ignore_is_refused_for_plain_tensors_too(model, option):
    value, message = OPTIONS[option]
    q, k = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16)
    with pytest.raises(IntegrationError, match=message):
        kivi_attention(model.model.layers[0].self_attn, q, k, k, None, **{option: value})


def test_a_backward_pass_says_why(model):
    logits = model(prompt(5), cache=KiviCache(SPEC, model.config)).logits  # outside no_grad: the forward pass is served
    with torch.no_grad():
        assert torch.equal(logits, model(prompt(5), cache=KiviCache(SPEC, model.config)).logits)
    with pytest.raises(IntegrationError, match=r"has no gradient.*torch.no_grad\(\)"):
        logits.sum().backward()


def test_more_than_max_tokens_leaves_the_cache_as_it_was(model):
    cache = KiviCache(SPEC, model.config, max_tokens=12)
    assert cache.get_max_length() == 12
    with torch.no_grad():
        model(prompt(10), cache=cache)
        with pytest.raises(kivi.errors.CapacityError, match="12"):
            model(prompt(5), cache=cache)
        model(prompt(2), cache=cache)
    assert cache.get_seq_length() == 12


def test_nothing_is_logged_for_a_model_that_is_served_whole(caplog):
    with caplog.at_level(logging.INFO, "kivi"):
        cache = KiviCache(SPEC, FAMILIES["llama"]())
    assert caplog.records == []
    assert [(p.layer, p.store, p.reason) for p in cache.layer_plan] == [(0, "kivi", "full attention"), (1, "kivi", "full attention")]
