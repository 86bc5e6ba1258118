"""Generated kernels compiled by NVRTC for GPUs that are not there: rounding as promised, nothing spilled, registers known."""

from __future__ import annotations

import re

import pytest

import kivi
from kivi.backends.cupy import nvrtc, offline
from kivi.errors import BackendError, InputError
from kivi.geometry import geometry


def requests(bits=2, dtype="float16"):
    spec = kivi.load_spec("kivi-2bit").override({"key.bits": bits, "value.bits": bits})
    return offline.entries(spec, geometry(8, 2, 128, None, dtype, None, None, None))


REQUESTS = requests()
#: Kernels whose every bit is specified; attention has bounds instead.
EXACT = [name for name in REQUESTS if name.split(".")[0] in ("key", "value")]


def check(name, request, target, record_property):
    generated, _ = offline.printed(request)
    compiled = offline.compile_kernel(generated, target)
    record_property("registers", compiled.registers)
    assert (compiled.spilled_bytes, compiled.stack_bytes) == (0, 0), f"{name} on {target}: {compiled.registers} registers"
    assert compiled.registers > 0
    assert compiled.shared_bytes <= 48 << 10
    assert not re.search(r"\bdiv\.(full|approx)", compiled.ptx)
    if name in EXACT:
        assert not re.search(r"\bfma\.|\.ftz|\bmad\.\w*\.f", compiled.ptx)
        assert not re.search(r"\b(mul|add|sub)\.f32", compiled.ptx)  # no rounding named: ptxas may fuse
    if name.endswith((".metadata", ".encode", "seal_metadata", "seal_words")):
        assert "div.rn.f32" in compiled.ptx
    return compiled


@pytest.mark.parametrize("name", REQUESTS)
def test_kernels_for_hopper(name, record_property):
    compiled = check(name, REQUESTS[name], "sm_90a", record_property)
    if name in ("cache.history", "cache.tail"):
        assert "fma.rn.f32" in compiled.ptx  # what may be contracted is


@pytest.mark.parametrize("bits", [2, 4])
def test_packed_words_are_loaded_128_bits_wide(bits):
    generated, _ = offline.printed(requests(bits)["cache.history"])
    ptx = offline.compile_kernel(generated, "sm_90a").ptx
    assert len(re.findall(r"ld\.global[.\w]*\.v4\.u32", ptx)) == 2  # key words and value words
    assert generated.source.count("page_words[") == 2  # no other way


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize(("bits", "dtype"), [(2, "float16"), (4, "bfloat16"), (3, "float32")])
def test_every_kernel_for_every_target(target, bits, dtype, record_property):
    for name, request in requests(bits, dtype).items():
        check(name, request, target, record_property)


def test_every_stage_shows():
    request = REQUESTS["key.decode"]
    stages = {stage: offline.emit(request, stage) for stage in offline.STAGES}
    for stage, word in (
        ("kv", "kv.unpack"),
        ("tile", "tile.load"),
        ("simt", "simt.thread_id"),
        ("source", "__global__"),
        ("ptx", ".target sm_90a"),
    ):
        assert word in str(stages[stage])
    assert bytes(stages["cubin"])[:4] == b"\x7fELF"


def test_bad_requests():
    generated, _ = offline.printed(REQUESTS["rows.keep_rows"])
    with pytest.raises(InputError, match="sm_35"):
        offline.compile_kernel(generated, "sm_35")
    with pytest.raises(InputError, match="sass"):
        offline.emit(REQUESTS["rows.keep_rows"], "sass")
    with pytest.raises(BackendError, match=r"(?s)NVRTC failed on kernel 'k'.*nonsense"):
        nvrtc.compile_text('extern "C" __global__ void k() { nonsense; }', "k", "sm_90a")
