"""Generated kernels compiled for real GPUs without one: rounding as promised, no spills, wide loads."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import kivi
from kivi.backends.triton.offline import TARGETS, compile_kernel, entries, printed
from kivi.errors import BackendError, InputError
from kivi.geometry import geometry
from kivi.kernels.request import Request


def requests(bits=2) -> dict[str, Request]:
    spec = kivi.load_spec("kivi-2bit").override({"key.bits": bits, "value.bits": bits})
    return entries(spec, geometry(8, 2, 128, None, "float16", None, None, None))


REQUESTS = requests()
#: Kernels whose every bit is specified; attention has bounds instead.
EXACT = [name for name in REQUESTS if name.split(".")[0] in ("key", "value")]


def build(request, target):
    return compile_kernel(*printed(request), target)


def check(name, compiled):
    assert compiled.spilled_bytes == 0, f"{name} on {compiled.target}: {compiled.registers} registers"
    text = compiled.assembly
    if compiled.target.startswith("sm_"):
        assert not re.search(r"\bdiv\.(full|approx)", text)
        if name in EXACT:
            assert not re.search(r"\bfma\.|\.ftz|\bmad\.\w*\.f", text)
        if name.endswith((".metadata", ".encode", "seal_metadata", "seal_words")):
            assert "div.rn.f32" in text
    elif name in EXACT:
        # AMD expands the correct division with fused operations of its own, so the promise is read off the LLVM flags.
        assert not re.search(r"= f(mul|add|sub|div) (?!float|<)\w*\b(fast|contract|reassoc|arcp|afn)\b", compiled.asm["llir"])
        assert "llvm.fma" not in compiled.asm["llir"]


@pytest.mark.parametrize("name", REQUESTS)
def test_kernels_for_hopper(name):
    check(name, build(REQUESTS[name], "sm_90"))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("bits", [2, 4])
def test_every_kernel_for_every_target(target, bits):
    for name, request in requests(bits).items():
        check(name, build(request, target))


@pytest.mark.parametrize("bits", [2, 4])
def test_packed_words_are_loaded_128_bits_wide(bits):
    ptx = build(requests(bits)["cache.history"], "sm_90").asm["ptx"]
    assert len(re.findall(r"ld\.global[.\w]*\.v4\.b32", ptx)) >= 2  # key words and value words


def test_bad_requests():
    generated, source = printed(REQUESTS["rows.keep_rows"])
    with pytest.raises(InputError, match="sm_35"):
        compile_kernel(generated, source, "sm_35")
    with pytest.raises(BackendError, match=str(source)):
        compile_kernel(replace(generated, launch={"threads": 96, "fusion": 0}), source, "sm_90")
