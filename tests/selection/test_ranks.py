"""Ranking by measured speed: in the bucket that was measured and nowhere else, and only while what was measured is what runs."""

from __future__ import annotations

import json

import pytest

import kivi
from kivi import machine, ranks, tuning
from kivi.errors import InputError, UnsupportedError
from kivi.tuning import tune

SPEC = kivi.load_spec("kivi-2bit").override({"key.residual": 16, "value.residual": 16, "key.group": 8, "value.group": 8})
SHAPE = {"q_heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}


@pytest.fixture
def measured(only):
    """Two backends of which the one with the lower priority is the faster one, by a record as `tune` writes it."""
    only(slow={"priority": 9}, fast={})
    bucket, record, _ = tune(SPEC, tokens=256, rounds=1, **SHAPE)
    seconds = {"slow": 2e-3, "fast": 1e-3}
    entries = [ranks.Measured(m.backend, m.mode, m.device, seconds[m.backend], 1, m.identity) for m in record.measured]
    return ranks.write(SPEC, bucket, 256, entries)


def chosen(**changes):
    return kivi.select(changes.pop("spec", SPEC), **{**SHAPE, "tokens": 256, **changes})


def test_the_fastest_wins_in_its_bucket(measured):
    for tokens in (129, 200, 256):
        out = chosen(tokens=tokens)
        assert (out.backend.name, out.source) == ("fast", "measured")
        assert out.reason == "fastest of 2 measured at tokens 129-256, Hq/Hkv 2, D 16, batch 1, float32: 1 ms a decode step"
        [loser] = out.rejected
        assert loser.reason == "2 ms a decode step at tokens 129-256, Hq/Hkv 2, D 16, batch 1, float32, 2.00 times that of 'fast'"
        assert out.seconds == {("slow", "device"): 2e-3, ("fast", "device"): 1e-3}
    cache = kivi.KVCache(SPEC, batch=1, max_tokens=256, **SHAPE)
    assert cache.ran.backend == "fast"


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 128},
        {"tokens": 257},
        {"q_heads": 2},
        {"head_dim": 32},
        {"value_head_dim": 32},
        {"batch": 2},
        {"dtype": "float16"},
        {"spec": SPEC.override({"key.bits": 4})},
    ],
)
def test_it_is_not_used_at_another_shape(measured, changes):
    out = chosen(**changes)
    assert (out.backend.name, out.source) == ("slow", "priority")
    assert out.seconds == {}


def test_it_is_used_at_shapes_that_differ_in_nothing_that_matters(measured):
    assert chosen(q_heads=8, kv_heads=4).source == "measured"
    assert chosen(spec=SPEC.override({"name": "another name"})).source == "measured"


def test_an_explicit_choice_is_nearer(measured, monkeypatch):
    monkeypatch.setenv("KIVI_BACKEND", "slow")
    assert (chosen().backend.name, chosen().source) == ("slow", "environment")


def test_another_driver_makes_it_void(measured, monkeypatch):
    monkeypatch.setattr(machine, "drivers", lambda: {"cuda": ["NVRM version: 999"]})
    assert chosen().source == "priority"


def test_another_number_of_threads_makes_it_void(measured, monkeypatch):
    monkeypatch.setenv("KIVI_CPU_THREADS", "7")
    assert chosen().source == "priority"


def test_a_backend_that_was_not_measured_makes_it_void(measured, only):
    """Figures of one run are compared with one another, never with nothing."""
    only(slow={"priority": 9}, fast={}, fresh={"priority": 1})
    out = chosen()
    assert (out.backend.name, out.source) == ("slow", "priority")
    assert "only fast, slow was measured, run kivi tune" in out.reason
    only(fast={}, fresh={"bits": [4]})  # it cannot serve, so it is no contender; and one contender needs no ranking
    assert chosen().backend.name == "fast"


def test_a_damaged_record_is_none(measured, tmp_path):
    [path] = (tmp_path / "cache" / "ranks").glob("*.json")
    path.write_text(path.read_text()[:-20])
    assert chosen().source == "priority"
    assert ranks.latest() is None


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), None])
def test_a_record_of_what_is_no_time_is_none(measured, tmp_path, seconds):
    [path] = (tmp_path / "cache" / "ranks").glob("*.json")
    record = json.loads(path.read_text())
    record["data"]["measured"][0]["seconds"] = seconds
    path.write_text(json.dumps(record))
    out = chosen()
    assert (out.backend.name, out.source, out.seconds) == ("slow", "priority", {})
    assert ranks.latest() is None


def test_tuning_measures_whatever_can_serve(only, monkeypatch):
    only(a={"priority": 2}, b={"priority": 1}, narrow={"bits": [4]}, simulated={"modes": ["simulator"]})
    said = []
    monkeypatch.setattr(tuning, "HOPELESS", float("inf"))  # two alike, on a machine that does other things
    bucket, record, rejected = tune(SPEC, tokens=100, batch=2, rounds=3, progress=said.append, **SHAPE)
    assert (bucket.tokens, bucket.batch, bucket.group) == (128, 2, 2)
    assert {m.backend: m.rounds for m in record.measured} == {"a": 3, "b": 3}
    assert record.measured[0].seconds <= record.measured[1].seconds
    assert {r.name: r.state for r in rejected} == {"narrow": "cannot serve", "simulated": "no such mode"}
    assert chosen(tokens=100, batch=2).source == "measured"
    assert ranks.latest() == record
    assert said[0] == "a: filling 100 tokens"
    with pytest.raises(InputError, match="rounds"):
        tune(SPEC, rounds=0, **SHAPE)
    with pytest.raises(UnsupportedError, match=r"no backend can serve.*no device 'cpu:3'"):
        tune(SPEC, device="cpu:3", **SHAPE)


def test_a_hopeless_backend_is_measured_twice(only, monkeypatch):
    only(quick={}, hopeless={})
    step = tuning._step
    monkeypatch.setattr(tuning, "_step", lambda c, *a: (lambda: 9.0) if c.backend == "hopeless" else step(c, *a))
    _, record, _ = tune(SPEC, tokens=64, rounds=3, **SHAPE)
    assert [(m.backend, m.rounds) for m in record.measured] == [("quick", 3), ("hopeless", 2)]
