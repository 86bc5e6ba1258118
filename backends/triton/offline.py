"""Compiling generated kernels for GPUs that are not there: no driver, no device, no torch.

Targets are named as their vendors name them: "sm_80", "sm_90", "sm_100" for NVIDIA, "gfx942", "gfx950" for AMD.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kivi import plugins
from kivi.backend import layout_for
from kivi.backends.triton.kernels import library, load, options
from kivi.backends.triton.schedule import schedules
from kivi.errors import BackendError, InputError
from kivi.geometry import Geometry
from kivi.ir import kv
from kivi.jit import Generated
from kivi.kernels.entries import entries as kernels_of
from kivi.kernels.request import Request, lower, module
from kivi.spec import CacheSpec

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")
#: What `emit` can show, from the first to the last; the last four need a target.
STAGES = ("kv", "tile", "source", "ptx", "cubin", "amdgcn", "hsaco")


def entries(spec: CacheSpec, g: Geometry) -> dict[str, Request]:
    """Every kernel of a cache of this shape, by entry point, as a GPU would run it."""
    return kernels_of(spec, g, layout_for(plugins.get("triton").manifest, spec), partial(schedules, "device"))


def emit(request: Request, stage: str, target: str = "sm_90") -> str | bytes:
    """What one stage of compilation makes of a kernel. Raises `InputError` for an unknown stage or one that the target does not have."""
    if stage not in STAGES:
        raise InputError(f"stage = {stage!r}; known are {', '.join(STAGES)}")
    if stage == "kv":
        return kv.text(module(request))
    if stage == "tile":
        return str(lower(request).module)
    generated, source = printed(request)
    if stage == "source":
        return generated.source
    compiled = compile_kernel(generated, source, target)
    if stage not in compiled.asm:
        raise InputError(f"target {target!r} has no stage {stage!r}; it has {', '.join(s for s in STAGES[3:] if s in compiled.asm)}")
    return compiled.asm[stage]


def resources(request: Request, target: str = "sm_90") -> dict[str, int]:
    """What a thread of a kernel takes on a target, by the compiler's tools: registers, and bytes that are spilled, the stack among them."""
    made = compile_kernel(*printed(request), target)
    return {name: getattr(made, name) for name in ("registers", "spilled_bytes")}


def printed(request: Request) -> tuple[Generated, Path]:
    """A kernel's text, and the file that holds it."""
    return library(importlib.metadata.version("triton"), False).printed(request)


@dataclass(frozen=True)
class Compiled:
    """What the vendor's compiler made of a kernel. `asm`: stage -> text or bytes ("ttir", "llir", "ptx", "cubin", "amdgcn", "hsaco")."""

    name: str
    target: str
    asm: dict[str, Any]
    registers: int
    spilled_bytes: int

    @property
    def assembly(self) -> str:
        """PTX, or AMD assembly."""
        return self.asm["ptx"] if "ptx" in self.asm else self.asm["amdgcn"]


def compile_kernel(generated: Generated, source: Path, target: str) -> Compiled:
    """Compile one kernel. Raises `InputError` for an unknown target, `BackendError` with the compiler's words and the source's path."""
    if target not in TARGETS:
        raise InputError(f"target = {target!r}; known are {', '.join(TARGETS)}")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    where = GPUTarget("cuda", int(target[3:]), 32) if target.startswith("sm_") else GPUTarget("hip", target, 64)
    # The caching launcher specializes aligned pointers in the same way; tensors of torch are always aligned.
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(generated.signature.values()) if kind.startswith("*")}
    text = ASTSource(fn=load(generated, source, False), signature=generated.signature, constexprs={}, attrs=aligned)
    try:
        out = triton.compile(text, target=where, options=options(generated))
    except Exception as error:
        raise BackendError(
            f"Triton could not compile kernel {generated.name!r} for {target}: {type(error).__name__}: {error}; its source is {source}"
        ) from error
    asm = dict(out.asm)
    registers, spilled = _nvidia(asm["cubin"]) if "cubin" in asm else _amd(asm["amdgcn"])
    return Compiled(generated.name, target, asm, registers, spilled)


def _nvidia(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes of stack and local memory) by the cuobjdump that Triton brings."""
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", done.stdout)
    if found is None:
        raise BackendError(f"{' '.join(command)} did not tell resource usage: {done.stderr or done.stdout}")
    return int(found[1]), int(found[2]) + int(found[3])


def _amd(assembly: str) -> tuple[int, int]:
    """(vector registers, bytes spilled) from the metadata at the end of the assembly."""
    counts = {name: int(value) for name, value in re.findall(r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count):\s+(\d+)", assembly)}
    return counts["vgpr_count"], 4 * (counts["vgpr_spill_count"] + counts["sgpr_spill_count"])
