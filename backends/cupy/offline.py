"""Compiling generated kernels for GPUs that are not there, with NVRTC: no driver, no device."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from kivi import plugins
from kivi.backend import layout_for
from kivi.backends.cupy.kernels import library
from kivi.backends.cupy.nvrtc import Compiled, compile_text
from kivi.backends.cupy.schedule import schedules
from kivi.dtypes import metadata_dtype
from kivi.errors import InputError
from kivi.geometry import Geometry
from kivi.ir import kv
from kivi.jit import Generated
from kivi.kernels.request import Request, lower, module
from kivi.layout import named_layout
from kivi.passes.tile_to_simt import lower as lower_to_simt
from kivi.pool import PageFormat
from kivi.spec import CacheSpec

TARGETS = ("sm_80", "sm_90", "sm_90a", "sm_100")
#: What `emit` can show, from the first to the last; the last two need a target.
STAGES = ("kv", "tile", "simt", "source", "ptx", "cubin")


def entries(spec: CacheSpec, g: Geometry) -> dict[str, Request]:
    """Every kernel of a cache of this shape, by entry point."""
    layout = layout_for(plugins.get("cupy").manifest, spec)
    metadata = [metadata_dtype(spec, which, g.dtype) for which in ("key", "value")]
    form = PageFormat(spec, layout, g.kv_heads, g.head_dim, g.value_head_dim, *metadata)
    target = named_layout("official_int32")
    out: dict[str, Request] = {}
    for which, channels, stored in (("key", g.head_dim, metadata[0]), ("value", g.value_head_dim, metadata[1])):
        tensor: tuple[tuple[str, object], ...] = (("metadata", stored),)
        for entry, options in (
            ("metadata", tensor),
            ("encode", tensor),
            ("decode", (*tensor, ("out", "float32"))),
            ("repack", (*tensor, ("target", target))),
            ("seal_metadata", (("form", form),)),
            ("seal_words", (("form", form),)),
        ):
            out[f"{which}.{entry}"] = Request(f"{which}.{entry}", spec, layout, g.dtype, channels, options)
    out["rows.keep_rows"] = Request("rows.keep_rows", spec, layout, g.dtype, g.head_dim, (("heads", g.kv_heads),))
    for zone, schedule in schedules(form, g.q_heads, 1).items():
        cache = (("form", form), ("q_heads", g.q_heads), ("schedule", schedule))
        out[f"cache.{zone}"] = Request(f"cache.{zone}", spec, layout, g.dtype, g.head_dim, cache)
    out["cache.merge"] = Request("cache.merge", spec, layout, g.dtype, g.value_head_dim, (("q_heads", g.q_heads),))
    return out


def emit(request: Request, stage: str, target: str = "sm_90a") -> str | bytes:
    """What one stage of compilation makes of a kernel. Raises `InputError` for an unknown stage."""
    if stage not in STAGES:
        raise InputError(f"stage = {stage!r}; known are {', '.join(STAGES)}")
    if stage == "kv":
        return kv.text(module(request))
    if stage == "tile":
        return str(lower(request).module)
    generated, _ = printed(request)
    if stage == "simt":
        return str(lower_to_simt(lower(request).module, generated.launch["threads"]))
    if stage == "source":
        return generated.source
    compiled = compile_kernel(generated, target)
    return compiled.ptx if stage == "ptx" else compiled.cubin


def printed(request: Request) -> tuple[Generated, Path]:
    """A kernel's text, and the file that holds it."""
    return library((("xdsl", importlib.metadata.version("xdsl")),)).printed(request)


def compile_kernel(generated: Generated, target: str) -> Compiled:
    """Compile one kernel. Raises `InputError` for an unknown target, `BackendError` with the compiler's words."""
    if target not in TARGETS:
        raise InputError(f"target = {target!r}; known are {', '.join(TARGETS)}")
    return compile_text(generated.source, generated.name, target)
