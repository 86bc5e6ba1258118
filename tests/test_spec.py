"""Specs: what is accepted, what is refused and in which words, and what the hash covers."""

from __future__ import annotations

import hashlib
import json

import jsonschema
import pytest

import kivi
from kivi import spec as specs
from kivi.errors import NotImplementedYetError, SpecError


def test_presets_load_and_have_distinct_hashes():
    assert {"kivi-2bit", "kivi-4bit", "kivi-official", "kivi-paper", "teaching"} <= set(kivi.presets())
    assert len({kivi.load_spec(name).hash for name in kivi.presets()}) == len(kivi.presets())
    assert all(kivi.load_spec(name).name == name for name in kivi.presets())


def test_hash_is_sha256_of_the_canonical_form_without_the_name():
    spec = kivi.load_spec("kivi-2bit")
    fields = spec.to_dict()
    del fields["name"]
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    assert spec.hash == hashlib.sha256(text.encode()).hexdigest()
    assert spec.override({"name": "other"}).hash == spec.hash
    assert spec.override({"key.bits": 4}).hash != spec.hash


def test_missing_keys_take_defaults(tmp_path):
    path = tmp_path / "bare.toml"
    path.write_text("")
    spec = kivi.load_spec(path)
    assert spec.hash == kivi.load_spec("kivi-2bit").hash
    assert kivi.load_spec(str(path)).hash == spec.hash


def test_override_returns_a_new_spec():
    spec = kivi.load_spec("kivi-2bit")
    other = spec.override({"key.bits": 4, "value.group": 64})
    assert (other.key.bits, other.value.group, spec.key.bits, spec.value.group) == (4, 64, 2, 32)
    assert other.key.residual == 128


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key.bits": 5}, ["key.bits", "5", "1, 2, 3, 4, 8"]),
        ({"key.bits": "2"}, ["key.bits"]),
        ({"key.bits": True}, ["key.bits"]),
        ({"key.group": 1}, ["key.group", ">= 2"]),
        ({"key.residual": 100}, ["100", "32", "96"]),
        ({"value.residual": 64}, ["value.residual = 64", "key.residual = 128", ">= 128"]),
        ({"numerics": "exact"}, ["numerics", "'portable', 'staged'"]),
        ({"packing.layout": "zigzag"}, ["zigzag", "official_int32"]),
        ({"key.colour": 1}, ["key.colour", "key.bits"]),
        ({"bits": 2}, ["bits", "key.bits"]),
        ({"kivi_spec": 2}, ["kivi_spec", "2"]),
        ({"key.shrink": 0.0}, ["key.shrink"]),
        ({"numerics": "staged", "key.metadata": "int8"}, ["key.metadata", "'int8'", "'input'"]),
        ({"layers": {"3-1": "full"}}, ["3-1", "ascending"]),
        ({"layers": {"1": "nope"}}, ["nope", "full"]),
    ],
)
def test_a_broken_rule_names_value_rule_and_remedy(changes, words):
    with pytest.raises(SpecError) as caught:
        kivi.load_spec("kivi-2bit").override(changes)
    assert not isinstance(caught.value, NotImplementedYetError)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"sink_tokens": 4},
        {"key.axis": "token"},
        {"value.axis": "channel"},
        {"key.grid": "symmetric"},
        {"value.grid": "symmetric"},
        {"key.shrink": 0.85},
        {"value.rotate": "hadamard"},
        {"key.metadata": "int8"},
        {"value.metadata": "float8_e4m3"},
        {"layers": {"0": "full", "1-3": "kivi-4bit"}},
    ],
)
def test_what_is_defined_but_not_built_says_so(changes):
    with pytest.raises(NotImplementedYetError, match="not implemented yet"):
        kivi.load_spec("kivi-2bit").override(changes)


@pytest.mark.parametrize(
    ("text", "word"),
    [("[key", "TOML"), ("kivi_spec = 1\ncolour = 2\n", "colour"), ("[key]\nbits = 'x'\n", "key.bits"), ("key = 3\n", "key")],
)
def test_a_bad_file_is_named(tmp_path, text, word):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(SpecError, match=word) as caught:
        kivi.load_spec(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("source", ["no-such-preset", "/", 3, None])
def test_what_is_not_a_spec(source):
    with pytest.raises(SpecError):
        kivi.load_spec(source)


def test_undecodable_file(tmp_path):
    path = tmp_path / "latin.toml"
    path.write_bytes(b"name = '\xff'")
    with pytest.raises(SpecError, match="UTF-8"):
        kivi.load_spec(path)


def test_a_layout_can_be_written_out_in_the_spec(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text('[packing.layout]\nname = "own"\nword = "uint8"\nkey = "c0 t0 t* c*"\nvalue = "t:slot t* c*"\n')
    spec = kivi.load_spec(path)
    assert spec.packing.layout.name == "own"
    with pytest.raises(SpecError, match="a unit of this width holds 8"):
        spec.override({"key.bits": 1})


def test_schema_accepts_the_presets_and_refuses_nonsense():
    for name in kivi.presets():
        jsonschema.validate(kivi.load_spec(name).to_dict(), specs.schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"key": {"bits": 5}}, specs.schema())


def test_a_spec_cannot_be_changed():
    with pytest.raises(AttributeError):
        kivi.load_spec("kivi-2bit").name = "x"
