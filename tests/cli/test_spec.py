"""`kivi spec`: what it prints can be read back, and the committed schema is the one of the types."""

import json
import tomllib
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

import kivi
from kivi.cli import cli

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "spec" / "kivi-spec.schema.json"


def invoke(*args: str):
    return CliRunner().invoke(cli, ("spec", *args))


def test_list():
    listed = json.loads(invoke("list", "--json").stdout)
    assert [s["name"] for s in listed] == kivi.presets()
    assert {s["name"]: s["hash"] for s in listed} == {name: kivi.load_spec(name).hash for name in kivi.presets()}
    assert {s["name"]: s["spec"]["key"]["bits"] for s in listed}["kivi-4bit"] == 4
    table = invoke("list").stdout
    assert all(name in table for name in kivi.presets())


@pytest.mark.parametrize("name", ["kivi-2bit", "kivi-4bit", "kivi-official", "kivi-paper", "teaching"])
def test_show_prints_a_spec_that_loads_as_the_same(name, tmp_path):
    path = tmp_path / "shown.toml"
    path.write_text(invoke("show", name).stdout)
    assert kivi.load_spec(path).hash == kivi.load_spec(name).hash
    assert kivi.load_spec(path).name == name
    assert json.loads(invoke("show", str(path), "--json").stdout)["spec"] == kivi.load_spec(name).to_dict()


def test_show_prints_a_layout_that_is_written_out(tmp_path):
    path, again = tmp_path / "own.toml", tmp_path / "again.toml"
    path.write_text('name = "say \\"hi\\""\n[packing.layout]\nname = "own"\nword = "uint8"\nkey = "t:slot t* c*"\nvalue = "c:slot c* t*"\n')
    again.write_text(invoke("show", str(path)).stdout)
    assert kivi.load_spec(again).to_dict() == kivi.load_spec(path).to_dict()
    assert kivi.load_spec(again).packing.layout.word == "uint8"


def test_validate_accepts(tmp_path):
    path = tmp_path / "good.toml"
    path.write_text("[key]\nbits = 3\n")
    result = invoke("validate", "kivi-2bit", str(path), "--json")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert answer["valid"] is True
    assert [s["hash"] for s in answer["specs"]] == [kivi.load_spec("kivi-2bit").hash, kivi.load_spec(path).hash]


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("[key]\nbits = 5\n", "SpecError", "key.bits = 5"),
        ("[key]\nresidual = 100\n", "SpecError", "not a multiple of key.group = 32"),
        ("[key]\nbitz = 2\n", "SpecError", "bitz"),
        ("[key\n", "SpecError", "TOML"),
        ("sink_tokens = 4\n", "NotImplementedYetError", "not implemented yet"),
    ],
)
def test_validate_refuses(text, kind, says, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    result = invoke("validate", "kivi-2bit", str(path), "--json")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert [s["valid"] for s in answer["specs"]] == [True, False]
    assert answer["valid"] is False
    assert answer["specs"][1]["error"]["type"] == kind
    assert says in answer["specs"][1]["error"]["message"]
    plain = invoke("validate", str(path))
    assert plain.exit_code == 1
    assert says in " ".join(plain.stdout.split())


def test_validate_of_no_file_is_wrong_usage():
    assert invoke("validate", "no-such-file.toml").exit_code == 2


def test_the_committed_schema_is_current():
    """Written by `kivi spec schema > spec/kivi-spec.schema.json`."""
    result = invoke("schema")
    assert result.exit_code == 0
    assert result.stdout == SCHEMA.read_text()
    assert json.loads(result.stdout) == kivi.schema()


@pytest.mark.parametrize("path", sorted((ROOT / "spec" / "presets").glob("*.toml")), ids=lambda path: path.stem)
def test_presets_fit_the_schema(path):
    jsonschema.validate(tomllib.loads(path.read_text()), json.loads(SCHEMA.read_text()))


@pytest.mark.parametrize(
    "text", ["kivi_spec = 2", "[key]\nbits = 5", "[key]\ngroup = 1", "[value]\ngrid = 'round'", "colour = 'red'", "[key]\nshrink = 0.0"]
)
def test_the_schema_refuses(text):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tomllib.loads(text), json.loads(SCHEMA.read_text()))
