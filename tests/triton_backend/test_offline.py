"""Generated kernels compiled for real GPUs without one: rounding as promised, no spills, wide loads."""

from __future__ import annotations

import re

import pytest

import kivi
from kivi import jit
from kivi.backends.triton.kernels import Request, generate
from kivi.backends.triton.offline import TARGETS, compile_kernel
from kivi.backends.triton.schedule import schedules
from kivi.errors import BackendError, InputError
from kivi.layout import named_layout

BACKEND = kivi.get_backend("triton", mode="interpreter")


def requests(bits=2, q_heads=8, kv_heads=2, head_dim=128, dtype="float16") -> dict[str, Request]:
    """Every kernel of a cache of this shape, by entry point."""
    spec = kivi.load_spec("kivi-2bit").override({"key.bits": bits, "value.bits": bits})
    cache = kivi.KVCache(spec, batch=1, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, backend=BACKEND)
    form, layout = cache.pool.format, named_layout("hp16")
    out = {}
    for which in ("key", "value"):
        metadata = (("metadata", "float16"),)
        out |= {
            f"{which}.{entry}": Request(f"{which}.{entry}", spec, layout, dtype, head_dim, metadata) for entry in ("metadata", "encode")
        }
        out[f"{which}.decode"] = Request(f"{which}.decode", spec, layout, dtype, head_dim, (*metadata, ("out", "float32")))
        target = ("target", named_layout("official_int32"))
        out[f"{which}.repack"] = Request(f"{which}.repack", spec, layout, dtype, head_dim, (*metadata, target))
        for entry in ("seal_metadata", "seal_words"):
            out[f"{which}.{entry}"] = Request(f"{which}.{entry}", spec, layout, dtype, head_dim, (("form", form),))
    out["rows.keep_rows"] = Request("rows.keep_rows", spec, layout, dtype, head_dim, (("heads", kv_heads),))
    out["cache.merge"] = Request("cache.merge", spec, layout, dtype, head_dim, (("q_heads", q_heads),))
    for zone, schedule in schedules("device", form, q_heads, 1).items():
        options = (("form", form), ("q_heads", q_heads), ("schedule", schedule))
        out[f"cache.{zone}"] = Request(f"cache.{zone}", spec, layout, dtype, head_dim, options)
    return out


REQUESTS = requests()
#: Kernels whose every bit is specified; attention has bounds instead.
EXACT = [name for name in REQUESTS if name.split(".")[0] in ("key", "value")]


def build(request, target):
    generated, source = jit.generated(request.key(BACKEND.versions), lambda: generate(request))
    schedule = dict(request.options).get("schedule")
    return compile_kernel(generated, source, target, warps=schedule.warps if schedule else 4)


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
    generated, source = jit.generated(REQUESTS["rows.keep_rows"].key(BACKEND.versions), lambda: generate(REQUESTS["rows.keep_rows"]))
    with pytest.raises(InputError, match="sm_35"):
        compile_kernel(generated, source, "sm_35")
    with pytest.raises(BackendError, match=str(source)):
        compile_kernel(generated, source, "sm_90", warps=3)
