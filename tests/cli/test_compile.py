"""`kivi compile` shows every stage without a device, and refuses what it cannot show."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from kivi.cli import cli


def invoke(*arguments):
    return CliRunner().invoke(cli, ["compile", *arguments])


def test_kernels_are_listed():
    result = invoke("--json")
    assert result.exit_code == 0
    listed = json.loads(result.output)
    assert {"key.encode", "value.seal_words", "cache.history", "cache.tail", "cache.merge"} <= set(listed["entries"])
    assert listed["targets"] == ["sm_80", "sm_90", "sm_100", "gfx942", "gfx950"]


def test_stages(tmp_path):
    whole = invoke("--entry", "cache.merge", "--emit", "kv")
    assert "kv.scores" in whole.output
    assert whole.output.index("kv.softmax") < whole.output.index("kv.output")
    ir = invoke("--entry", "cache.merge", "--emit", "tile")
    assert "func.func @merge(" in ir.output
    assert "tile.load" in ir.output
    source = invoke("--entry", "cache.merge", "--emit", "source")
    assert "\ndef merge(" in source.output
    ptx = invoke("--entry", "cache.merge", "--emit", "ptx", "--target", "sm_80")
    assert ".target sm_80" in ptx.output
    done = invoke("--entry", "cache.merge", "--emit", "hsaco", "--target", "gfx942", "--out", str(tmp_path / "merge.hsaco"))
    assert done.exit_code == 0
    assert (tmp_path / "merge.hsaco").read_bytes()[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    ("backend", "stage", "word"),
    [
        ("cupy", "simt", "simt.thread_id"),
        ("cupy", "ptx", ".target sm_90a"),
        ("numba_cuda", "source", "def keep_rows("),
        ("cpu", "asm", "retq"),
    ],
)
def test_every_backend_has_stages_and_a_target_of_its_own(backend, stage, word):
    result = invoke("--backend", backend, "--entry", "rows.keep_rows", "--emit", stage)
    assert result.exit_code == 0, result.output
    assert word in result.output


@pytest.mark.parametrize(("backend", "target"), [("triton", "sm_90"), ("triton", "gfx942"), ("cupy", "sm_80"), ("numba_cuda", "sm_100")])
def test_registers_are_reported(backend, target):
    shape = ("--head-dim", "64", "--q-heads", "2", "--kv-heads", "2")
    result = invoke("--backend", backend, "--entry", "rows.keep_rows", "--resources", "--target", target, *shape, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert (found["backend"], found["target"], list(found["resources"])) == (backend, target, ["rows.keep_rows"])
    assert found["resources"]["rows.keep_rows"]["registers"] > 0
    assert found["resources"]["rows.keep_rows"]["spilled_bytes"] == 0


def test_registers_of_every_kernel():
    result = invoke("--backend", "cupy", "--resources", "--head-dim", "64", "--q-heads", "2", "--kv-heads", "2")
    assert result.exit_code == 0, result.output
    assert "registers" in result.output
    assert all(name in result.output for name in ("cache.history", "key.encode", "rows.keep_rows"))


def test_what_cannot_be_shown():
    for arguments, words in (
        (("--entry", "nope"), "cache.merge"),
        (("--entry", "cache.merge", "--emit", "elf"), "kv, tile, source"),
        (("--entry", "cache.merge", "--emit", "ptx", "--target", "sm_35"), "sm_80"),
        (("--entry", "cache.merge", "--emit", "hsaco"), "has no stage 'hsaco'"),
        (("--entry", "cache.merge", "--emit", "cubin"), "--out"),
        (("--backend", "reference"), "no kernels"),
        (("--backend", "cpu", "--resources"), "no registers to count"),
        (("--backend", "cupy", "--resources", "--target", "sm_35"), "sm_80"),
        (("--resources", "--entry", "nope"), "cache.merge"),
        (("--resources", "--out", "figures"), "--json"),
        (("--backend", "nope"), "no backend"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert words in result.output + str(result.stderr)
