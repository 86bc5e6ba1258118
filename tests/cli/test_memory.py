"""`kivi memory`: the formula by hand, and a measurement that differs from it by stated padding only."""

import json

import pytest
from click.testing import CliRunner

from kivi.cli import cli
from kivi.cli import memory as command


def memory(*args: str) -> dict:
    result = CliRunner().invoke(cli, ("memory", *args, "--json"))
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_the_figures_of_the_design():
    """D [(2T - rK - rV)(b/8 + 2e/G) + (rK + rV) f] with T=4096, D=128, b=2, e=f=2, G=32, rK=0, rV=128."""
    answer = memory("--preset", "kivi-2bit", "--tokens", "4096", "--head-dim", "128", "--kv-heads", "1", "--layers", "1", "--batch", "1")
    assert answer["formula"] == 128 * ((2 * 4096 - 128) * 3 // 8 + 128 * 2) == 419840
    assert answer["full_precision"] == 2 * 4096 * 128 * 2 == 2097152
    assert answer["measured"] - sum(answer["padding"].values()) == answer["formula"]
    assert answer["padding_total"] == sum(answer["padding"].values())
    assert answer["measured"] == sum(answer["by_kind"].values())


def test_layers_scale_one_measured_layer():
    one = memory("--tokens", "200", "--head-dim", "80", "--kv-heads", "2", "--batch", "2", "--dtype", "bfloat16")
    many = memory("--tokens", "200", "--head-dim", "80", "--kv-heads", "2", "--batch", "2", "--dtype", "bfloat16", "--layers", "5")
    for name in ("formula", "full_precision", "measured", "padding_total"):
        assert many[name] == 5 * one[name]
    assert many["measured_layers"] == 1
    assert "multiplied by 5" in many["reason"]
    assert one["measured"] - one["padding_total"] == one["formula"]


@pytest.mark.parametrize("preset", ["kivi-4bit", "kivi-official", "kivi-paper", "teaching"])
def test_padding_explains_the_difference(preset):
    """77 is no multiple of a group of 32: the last value group of each token is short."""
    answer = memory("--preset", preset, "--tokens", "301", "--head-dim", "77", "--value-head-dim", "50", "--kv-heads", "3", "--batch", "2")
    assert answer["measured"] - answer["padding_total"] == answer["formula"]


def test_the_length_is_what_matters_not_the_chunks(monkeypatch):
    whole = memory("--tokens", "300", "--head-dim", "16")
    monkeypatch.setattr(command, "SCORES", 1)  # chunks of one residual
    assert memory("--tokens", "300", "--head-dim", "16") == whole


def test_too_large_to_measure():
    answer = memory("--tokens", "1000000", "--head-dim", "128", "--kv-heads", "8", "--layers", "32")
    assert answer["measured"] is None
    assert answer["padding"] is None
    assert "more than" in answer["reason"]
    assert answer["full_precision"] == 2 * 32 * 8 * 1000000 * 128 * 2


def test_measuring_can_be_left_out():
    answer = memory("--tokens", "100", "--head-dim", "64", "--no-measure")
    assert answer["measured"] is None
    assert "--no-measure" in answer["reason"]


def test_the_table():
    result = CliRunner().invoke(cli, ("memory", "--tokens", "4096", "--head-dim", "128"))
    assert result.exit_code == 0
    assert "419,840" in result.stdout
    assert "410.0 KiB" in result.stdout
    assert "2,097,152" in result.stdout
    assert "full precision / formula = 5.00, 3.20 bits an element" in result.stdout
