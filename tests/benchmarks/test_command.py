"""`kivi bench`: its options, its files, and what it refuses."""

import json

import pytest
from click.testing import CliRunner

from kivi.bench.result import read
from kivi.cli import cli
from kivi.errors import InputError

pytestmark = pytest.mark.usefixtures("toy")
TOY = ("--tokens", "256", "--head-dim", "64", "--group", "1", "--budget", "0", "--spec", "kivi-2bit")


def invoke(*args: str):
    return CliRunner().invoke(cli, ("bench", *args))


def test_what_is_printed_is_what_is_written(tmp_path):
    suites = ("--suite", "attention", "--suite", "overhead")
    result = invoke(*TOY, *suites, "--backend", "reference", "--out", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    written = read(tmp_path / "bench.json")
    assert written.to_dict() == printed
    assert printed["backend"] == printed["ran"]["backend"] == "reference"
    assert printed["mode"] == "device"
    assert set(printed["specs"]) == {"kivi-2bit"}
    assert {"python", "torch", "numpy", "kivi-kvcache"} <= set(printed["versions"])
    assert printed["machine"]["read_rate"]["1"] > 0
    assert [run["shape"]["tokens"] for run in printed["attention"]] == [256]
    assert {(n["suite"], n["contender"]) for n in printed["not_measured"]} == {("overhead", "kivi-2bit")}
    for name in ("attention", "roofline"):
        assert (tmp_path / f"{name}.svg").read_text().startswith("<?xml")


def test_the_table_names_contenders_and_those_left_out():
    result = invoke(*TOY, "--suite", "step", "--backend", "cpu")
    assert result.exit_code == 0, result.output
    for said in ("kivi-2bit append", "DynamicCache", "not measured", "no_such_hqq is not installed"):
        assert said in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--suite", "speed"), "attention, step"),
        (("--threads", "0"), "positive numbers"),
        (("--threads", "100000"), "processors"),
        (("--suite", "generate", "--context", "100"), "multiple of 32"),
        (("--suite", "generate", "--model-cache", "StaticCache"), "DynamicCache"),
        (("--spec", "no-such-spec"), "no-such-spec"),
    ],
)
def test_refusals(arguments, said):
    result = invoke("--backend", "reference", "--tokens", "256", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_damaged_file_is_no_result(tmp_path):
    (tmp_path / "bench.json").write_text('{"kivi_bench": 1, "machine": 3}')
    with pytest.raises(InputError, match="not a result"):
        read(tmp_path / "bench.json")
    with pytest.raises(InputError, match="not a result"):
        read(tmp_path / "absent.json")
