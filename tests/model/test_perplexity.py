"""Perplexity of the real model on stored caches, one token at a time, against computations that know nothing of kivi."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import DynamicCache

import kivi
from kivi.demo import text
from kivi.integrations.transformers import KiviCache
from tests.model.fake_quant import fake_quant_cache, perplexity, teacher_forced

pytestmark = pytest.mark.model

START = 256  # past the title page of the book
QUICK = (384, 128)  # prefill, steps: keys are sealed at 384 and again at 512, values at every step
SLOW = (1024, 512)
FLOATING = kivi.load_spec("kivi-2bit").override({"key.residual": 4096, "value.residual": 4096})


class Runs:
    """Log probabilities of a stretch of alice29 through each cache, computed on first use."""

    def __init__(self, smollm2, prefill: int, steps: int) -> None:
        self.model, tokenizer = smollm2
        self.prefill, self.ids = prefill, text.alice_ids(tokenizer, START, prefill + steps)
        self.targets = self.ids[0, prefill:]
        self.known: dict[str, tuple[torch.Tensor, object]] = {}

    def __call__(self, name: str):
        if name not in self.known:
            self.model.set_attn_implementation("kivi" if name.startswith("kivi") else "sdpa")
            config = self.model.config
            make = {
                "dynamic": lambda: DynamicCache(config=config),
                "fake-2bit": lambda: fake_quant_cache(config.num_hidden_layers, 2, 32, 128),
                "fake-4bit": lambda: fake_quant_cache(config.num_hidden_layers, 4, 32, 128),
                "kivi-2bit": lambda: KiviCache("kivi-2bit", config),
                "kivi-4bit": lambda: KiviCache("kivi-4bit", config),
                "kivi-floating": lambda: KiviCache(FLOATING, config),
            }
            cache = make[name]()
            self.known[name] = teacher_forced(self.model, self.ids, self.prefill, cache), cache
        return self.known[name]

    def perplexity(self, name: str) -> float:
        return perplexity(self(name)[0], self.targets)


@pytest.fixture(scope="module", params=[pytest.param(QUICK, id="quick"), pytest.param(SLOW, id="slow", marks=pytest.mark.slow)])
def runs(request, smollm2):
    return Runs(smollm2, *request.param)


@pytest.mark.parametrize("bits", [2, 4])
def test_stored_cache_is_within_one_percent_of_fake_quant(runs, bits):
    stored, fake = runs.perplexity(f"kivi-{bits}bit"), runs.perplexity(f"fake-{bits}bit")
    assert abs(stored / fake - 1) < 0.01
    cache = runs(f"kivi-{bits}bit")[1]
    tokens = runs.ids.shape[1] - 1
    for kv in cache.kv.values():
        assert kv.lengths(0) == (tokens, tokens // 128 * 128, tokens % 128, tokens - 128, 128)
        assert all(qt.words.dtype == torch.int32 for segments in kv.sealed(0).values() for _, qt in segments)


def test_stored_cache_predicts_what_fake_quant_predicts(runs):
    """Stronger than the perplexity: the same distribution at every step, up to near ties that fall the other way."""
    stored, fake = runs("kivi-2bit")[0], runs("fake-2bit")[0]
    divergence = (fake.exp() * (fake - stored)).sum(-1)
    assert float(divergence.mean()) < 1e-3
    assert float((stored.argmax(-1) == fake.argmax(-1)).float().mean()) > 0.97


def test_full_precision_cache_equals_transformers_own(runs):
    """The same code with windows longer than the text: kivi's attention alone, against DynamicCache and sdpa."""
    assert runs.perplexity("kivi-floating") == pytest.approx(runs.perplexity("dynamic"), rel=1e-4)
    torch.testing.assert_close(runs("kivi-floating")[0], runs("dynamic")[0], rtol=1e-4, atol=1e-4)
    assert all(kv.lengths(0).value_sealed == 0 for kv in runs("kivi-floating")[1].kv.values())


def test_fewer_bits_cost_what_they_are_known_to_cost(runs):
    """2 bits lose visibly, 4 bits hardly: the perplexities of FACTS of the method, not a bug that quantizes nothing."""
    full, four, two = (runs.perplexity(name) for name in ("dynamic", "kivi-4bit", "kivi-2bit"))
    assert abs(four / full - 1) < 0.03
    assert 1.03 < two / full < 1.6


def test_bytes_are_those_of_the_formula(runs):
    """30 layers, 3 KV heads, head dimension 64, float32 windows: DESIGN's formula, L * Hkv * D * [...]."""
    tokens = runs.ids.shape[1] - 1
    for bits in (2, 4):
        report = runs(f"kivi-{bits}bit")[1].memory()
        rk, rv = tokens % 128, 128
        formula = 30 * 3 * 64 * ((2 * tokens - rk - rv) * (bits / 8 + 2 * 2 / 32) + (rk + rv) * 4)
        assert report["formula"] == formula
        assert report["measured"] == formula + sum(report["padding"].values())
        assert report["full_precision"] == 2 * 30 * 3 * tokens * 64 * 4


def test_fake_quant_imports_nothing_from_kivi():
    code = "import sys, tests.model.fake_quant; sys.exit(any(m.split('.')[0] == 'kivi' for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
