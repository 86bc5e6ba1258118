"""Kernels compiled for every target without running them: vector registers in use, no fused product where bits are promised."""

from __future__ import annotations

import re

import pytest

import kivi
from kivi.backends.cpu import offline
from kivi.errors import InputError
from kivi.geometry import geometry
from kivi.passes.vector_target import TARGETS

REGISTERS = {"x86-64-v4": r"%zmm\d+", "x86-64-v3": r"%ymm\d+", "x86-64": r"%xmm\d+", "aarch64": r"\b(v\d+\.4s|q\d+)\b"}
FUSED = r"\bv?f(n?m(add|sub)|ml[as])"


def requests(bits=2, q_heads=8):
    spec = kivi.load_spec("kivi-2bit").override({"key.bits": bits, "value.bits": bits})
    return offline.entries(spec, geometry(q_heads, 8, 128, None, "float16", None, None, None))


def build(request, target):
    return offline.compile_kernel(offline.printed(request, target)[0], target)


@pytest.mark.parametrize("target", TARGETS)
def test_exact_kernels_use_vectors_and_never_fuse(target):
    """The bits of quantize are specified: a product and a sum round twice."""
    for name in ("value.metadata", "key.encode", "key.seal", "value.seal"):
        text = build(requests()[name], target).assembly
        assert re.search(REGISTERS[target], text), name
        assert not re.search(FUSED, text), name


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_every_kernel_for_every_target(target, bits):
    for name, request in requests(bits, 32).items():
        text = build(request, target).assembly
        assert re.search(REGISTERS[target], text), name
        if not name.startswith("cache."):
            assert not re.search(FUSED, text), name


@pytest.mark.parametrize("q_heads", [8, 32])
@pytest.mark.parametrize("bits", [2, 4])
def test_the_hot_loop_looks_codes_up_and_spills_nothing(bits, q_heads):
    compiled = build(requests(bits, q_heads)["cache.history"], "x86-64-v4")
    assert compiled.spills == 0
    permutations = sum(compiled.instructions.get(name, 0) for name in ("vpermps", "vpermd"))
    assert permutations == 8 * 2 * (q_heads // 8)  # four bits of a word at a time, 32 lanes, every query head
    assert "vcvtdq2ps" not in compiled.instructions


@pytest.mark.parametrize("target", [t for t in TARGETS if not TARGETS[t].lookup])
def test_others_convert(target):
    compiled = build(requests()["cache.history"], target)
    assert any("cvt" in name for name in compiled.instructions)
    assert compiled.spills <= 12


def test_half_precision_needs_no_library():
    """Without conversions in hardware LLVM would call one and the process would abort."""
    for name, request in requests().items():
        text, _ = offline.printed(request, "x86-64")
        assert "half" not in text.source, name


def test_stages():
    request = requests()["cache.history"]
    assert offline.emit(request, "kv").startswith("#")
    assert "tile.load" in offline.emit(requests()["rows.keep_rows"], "tile")
    assert "tile.reduce" in offline.emit(requests()["key.seal"], "tile")
    assert "vec.lookup" in offline.emit(request, "vec", "x86-64-v4")
    assert "vec.lookup" not in offline.emit(request, "vec", "x86-64-v3")
    assert "define void @history" in offline.emit(request, "source", "aarch64")
    assert "fmla" in offline.emit(request, "asm", "aarch64")
    assert offline.emit(request, "object", "aarch64").startswith(b"\x7fELF")
    with pytest.raises(InputError, match="level vec"):
        offline.emit(requests()["rows.finite"], "tile")
    for stage, target, word in (("ptx", "x86-64", "ptx"), ("asm", "sm_90", "sm_90")):
        with pytest.raises(InputError, match=word):
            offline.emit(request, stage, target)
