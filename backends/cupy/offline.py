"""Compiling generated kernels for GPUs that are not there, with NVRTC: no driver, no device."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from kivi import plugins
from kivi.backend import layout_for
from kivi.backends.cupy.kernels import library
from kivi.backends.cupy.nvrtc import Compiled, compile_text
from kivi.backends.cupy.schedule import schedules
from kivi.errors import InputError
from kivi.geometry import Geometry
from kivi.ir import kv
from kivi.jit import Generated
from kivi.kernels.entries import entries as kernels_of
from kivi.kernels.request import Request, lower, module
from kivi.passes.tile_to_simt import lower as lower_to_simt
from kivi.spec import CacheSpec

TARGETS = ("sm_80", "sm_90", "sm_90a", "sm_100")
#: What `emit` can show, from the first to the last; the last two need a target.
STAGES = ("kv", "tile", "simt", "source", "ptx", "cubin")


def entries(spec: CacheSpec, g: Geometry) -> dict[str, Request]:
    """Every kernel of a cache of this shape, by entry point, as a GPU would run it."""
    return kernels_of(spec, g, layout_for(plugins.get("cupy").manifest, spec), schedules)


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


def resources(request: Request, target: str = "sm_90a") -> dict[str, int]:
    """What a thread of a kernel takes on a target, by the assembler: registers, and bytes that are spilled and on the stack; and what a
    block shares."""
    made = compile_kernel(printed(request)[0], target)
    return {name: getattr(made, name) for name in ("registers", "spilled_bytes", "stack_bytes", "shared_bytes")}


def printed(request: Request) -> tuple[Generated, Path]:
    """A kernel's text, and the file that holds it."""
    return library((("xdsl", importlib.metadata.version("xdsl")),)).printed(request)


def compile_kernel(generated: Generated, target: str) -> Compiled:
    """Compile one kernel. Raises `InputError` for an unknown target, `BackendError` with the compiler's words."""
    if target not in TARGETS:
        raise InputError(f"target = {target!r}; known are {', '.join(TARGETS)}")
    return compile_text(generated.source, generated.name, target)
