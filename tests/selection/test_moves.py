"""A live cache moves from backend to backend in the middle of a generation: sealed bits and the text stay what they are."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import kivi
from kivi import plugins
from kivi.errors import BackendUnavailableError, UnsupportedError
from kivi.integrations.transformers import KiviCache
from tests.transformers.tiny import FAMILIES, LAYERS, SPEC, model_of, prompt

# NumPy warns where a number overflows on purpose; Triton's interpreter does not silence it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

#: In this order, and back to the first.
PLACES = [("reference", "device"), ("cpu", "device"), ("triton", "interpreter"), ("onnxruntime", "device"), ("reference", "device")]
STEPS = 9  # tokens between two moves: across them, both sides seal


def stored(cache):
    """What every layer has sealed and keeps floating, as bytes, in a layout that does not depend on the backend."""
    out = []
    for kv in cache.kv.values():
        out.append(kv.lengths(0))
        for which, segments in kv.sealed(0).items():
            for first, qt in segments:
                parts = (qt.repack("official_int32").words, qt.scale, qt.origin)
                out.append((which, first, *(part.numpy().tobytes() for part in parts)))
        out += [rows.numpy().tobytes() for rows in kv.residual(0).values()]
    return out


def greedy(model, cache, places):
    """Tokens of a greedy generation that moves to the next place every `STEPS` tokens; what is stored must survive each move."""
    ids, out = prompt(40), []
    with torch.no_grad():
        for before, after in [*pairwise(places), (places[-1], None)]:
            assert {(ran.backend, ran.mode) for ran in cache.ran.values()} <= {before}
            for _ in range(STEPS):
                logits = model(ids, past_key_values=cache, use_cache=True).logits
                ids = logits[:, -1:].argmax(-1)
                out.append(int(ids))
            if after is not None:
                held = stored(cache)
                assert any(entry[0] == "value" for entry in held if isinstance(entry, tuple))
                cache.to(after[0], mode=after[1])
                assert stored(cache) == held
                assert {(ran.backend, ran.mode) for ran in cache.ran.values()} == {after}
    return out


@pytest.fixture(scope="module")
def model():
    return model_of(FAMILIES["qwen3"]())


def test_a_generation_survives_every_move(model):
    places = [place for place in PLACES if place[0] in plugins.found()]
    moving = KiviCache(SPEC, model.config, backend="reference")
    tokens = greedy(model, moving, places)
    assert tokens == greedy(model, KiviCache(SPEC, model.config, backend="reference"), [("reference", "device")] * len(places))
    assert len(tokens) == STEPS * len(places)
    lengths = moving.kv[0].lengths(0)
    assert (lengths.tokens, lengths.key_sealed) == (40 + len(tokens) - 1, (40 + len(tokens) - 1) // 16 * 16)
    assert {s.backend for s in moving.ran[0].served.values()} <= {name for name, _ in places}


def test_all_layers_move_or_none(model, monkeypatch):
    cache = KiviCache(SPEC, model.config, backend="reference")
    greedy(model, cache, [("reference", "device")])
    held, last = stored(cache), cache.kv[LAYERS - 1]
    monkeypatch.setattr(last, "to", lambda *a, **k: (_ for _ in ()).throw(BackendUnavailableError("gone")))
    with pytest.raises(BackendUnavailableError, match="gone"):
        cache.to("cpu")
    assert {ran.backend for ran in cache.ran.values()} == {"reference"}
    assert stored(cache) == held


def test_an_explicit_choice_holds_for_every_layer(model, monkeypatch):
    """Whatever the environment says: the argument is nearer."""
    monkeypatch.setenv("KIVI_BACKEND", "reference")
    cache = KiviCache(SPEC, model.config, backend="cpu")
    with torch.no_grad():
        model(prompt(20), past_key_values=cache, use_cache=True)
    assert [ran.backend for ran in cache.ran.values()] == ["cpu"] * LAYERS
    with torch.no_grad():
        cache = KiviCache(SPEC, model.config)
        model(prompt(20), past_key_values=cache, use_cache=True)
    assert [ran.backend for ran in cache.ran.values()] == ["reference"] * LAYERS
    with pytest.raises(UnsupportedError, match="no mode 'shim'"):
        KiviCache(SPEC, model.config, backend="cpu", mode="shim")


def test_a_cache_that_was_moved_starts_its_next_sequence_where_it_is(model, monkeypatch):
    monkeypatch.setenv("KIVI_BACKEND", "reference")
    cache = KiviCache(SPEC, model.config, backend="reference")
    greedy(model, cache, [("reference", "device")])
    cache.to("cpu")
    cache.reset()
    with torch.no_grad():
        model(prompt(20).repeat(2, 1), past_key_values=cache, use_cache=True)  # another batch: the layers' caches are made anew
    assert {ran.backend for ran in cache.ran.values()} == {"cpu"}
    assert kivi.select("kivi-2bit").backend.name == "reference"
