"""Generated kernels compiled by numba-cuda for GPUs that are not there: rounding as promised, nothing spilled, registers known.

`numba.cuda` reads NUMBA_ENABLE_CUDASIM at import, so these tests need it unset, which they check.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest

import kivi
from kivi import plugins
from kivi.backends.numba_cuda import offline
from kivi.errors import BackendError, InputError
from kivi.geometry import geometry


def requests(bits=2, dtype="float16"):
    spec = kivi.load_spec("kivi-2bit").override({"key.bits": bits, "value.bits": bits})
    return offline.entries(spec, geometry(8, 2, 128, None, dtype, None, None, None))


REQUESTS = requests()
#: Kernels whose every bit is specified; attention has bounds instead.
EXACT = [name for name in REQUESTS if name.split(".")[0] in ("key", "value")]
#: One of each kind: numba-cuda takes seconds for each.
SOME = ["key.metadata", "key.encode", "value.decode", "rows.keep_rows", "cache.merge"]


def check(name, request, target, record_property):
    assert os.environ.get("NUMBA_ENABLE_CUDASIM", "0") in ("", "0")
    compiled = offline.compile_kernel(*offline.printed(request), target)
    record_property("registers", compiled.registers)
    assert (compiled.spilled_bytes, compiled.stack_bytes) == (0, 0), f"{name} on {target}: {compiled.registers} registers"
    assert compiled.registers > 0
    assert not re.search(r"\bdiv\.(full|approx)", compiled.ptx)
    if name in EXACT:
        assert not re.search(r"\bfma\.|\.ftz|\bmad\.\w*\.f", compiled.ptx)
        assert not re.search(r"\b(mul|add|sub)\.f32", compiled.ptx)  # no rounding named: ptxas may fuse
    if name.endswith((".metadata", ".encode", "seal_metadata", "seal_words")):
        assert "div.rn.f32" in compiled.ptx


@pytest.mark.parametrize("name", SOME)
def test_kernels_for_hopper(name, record_property):
    check(name, REQUESTS[name], "sm_90", record_property)


@pytest.mark.parametrize("bits", [2, 4])
def test_packed_words_are_loaded_128_bits_wide(bits):
    ptx = offline.compile_kernel(*offline.printed(requests(bits)["cache.history"]), "sm_90").ptx
    assert len(re.findall(r"ld\.global[.\w]*\.v4\.u32", ptx)) == 2  # key words and value words
    assert len(re.findall(r"st\.shared[.\w]*\.v4\.u32", ptx)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("target", offline.TARGETS)
@pytest.mark.parametrize(("bits", "dtype"), [(2, "float16"), (3, "bfloat16")])
def test_every_kernel_for_every_target(target, bits, dtype, record_property):
    for name, request in requests(bits, dtype).items():
        check(name, request, target, record_property)


def test_dequantization_is_not_fused():
    """Field report 12: numba-cuda contracts by itself; the calls of libdevice in the text keep it from that."""
    ptx = str(offline.emit(REQUESTS["value.decode"], "ptx"))
    assert "mul.rn.f32" in ptx
    assert "add.rn.f32" in ptx
    assert "fma" not in ptx
    exact = offline.printed(REQUESTS["value.decode"])[0]
    plain = re.sub(
        r"libdevice\.fadd_rn\((\w+), (\w+)\)", r"\1 + \2", re.sub(r"libdevice\.fmul_rn\((\w+), (\w+)\)", r"\1 * \2", exact.source)
    )
    assert plain != exact.source
    ptx = compile_text(replace(exact, source=plain)).ptx
    assert re.search(r"\bmul\.f32", ptx)  # without them no rounding is named, and ptxas may fuse
    assert re.search(r"\badd\.f32", ptx)


def compile_text(generated):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.py"
        path.write_text(generated.source)
        return offline.compile_kernel(generated, path, "sm_90")


def test_every_stage_shows():
    request = REQUESTS["rows.keep_rows"]
    stages = {stage: offline.emit(request, stage) for stage in offline.STAGES}
    for stage, word in (
        ("kv", "kv.append"),
        ("tile", "tile.load"),
        ("simt", "simt.thread_id"),
        ("source", "cuda.threadIdx"),
        ("ptx", ".target sm_90"),
    ):
        assert word in str(stages[stage])
    assert bytes(stages["cubin"])[:4] == b"\x7fELF"


def test_bad_requests():
    generated, source = offline.printed(REQUESTS["rows.keep_rows"])
    with pytest.raises(InputError, match="sm_35"):
        offline.compile_kernel(generated, source, "sm_35")
    with pytest.raises(InputError, match="sass"):
        offline.emit(REQUESTS["rows.keep_rows"], "sass")
    with pytest.raises(BackendError, match="numba-cuda could not compile kernel"):
        offline.compile_kernel(replace(generated, signature={"counts": "*i64"}), source, "sm_90")


def test_numbas_own_simulator_is_no_device(monkeypatch):
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    found = plugins.driver("numba_cuda").probe("device", "cuda:0")
    assert not found.available
    assert "NUMBA_ENABLE_CUDASIM is set" in found.reason
