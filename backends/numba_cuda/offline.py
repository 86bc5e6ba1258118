"""Compiling generated kernels for GPUs that are not there: PTX by numba-cuda, registers and spills by ptxas. No driver, no device."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kivi import plugins
from kivi.backend import layout_for
from kivi.backends.numba_cuda.kernels import argument_types, function, library
from kivi.backends.numba_cuda.schedule import schedules
from kivi.errors import BackendError, InputError
from kivi.geometry import Geometry
from kivi.ir import kv
from kivi.jit import Generated
from kivi.kernels.entries import entries as kernels_of
from kivi.kernels.request import Request, lower, module
from kivi.passes.tile_to_simt import lower as lower_to_simt
from kivi.spec import CacheSpec

TARGETS = ("sm_80", "sm_90", "sm_100")
#: What `emit` can show, from the first to the last; the last two need a target.
STAGES = ("kv", "tile", "simt", "source", "ptx", "cubin")


def entries(spec: CacheSpec, g: Geometry) -> dict[str, Request]:
    """Every kernel of a cache of this shape, by entry point, as a GPU would run it."""
    return kernels_of(spec, g, layout_for(plugins.get("numba_cuda").manifest, spec), partial(schedules, "device"))


def emit(request: Request, stage: str, target: str = "sm_90") -> str | bytes:
    """What one stage of compilation makes of a kernel. Raises `InputError` for an unknown stage."""
    if stage not in STAGES:
        raise InputError(f"stage = {stage!r}; known are {', '.join(STAGES)}")
    if stage == "kv":
        return kv.text(module(request))
    if stage == "tile":
        return str(lower(request).module)
    generated, source = printed(request)
    if stage == "simt":
        return str(lower_to_simt(lower(request).module, generated.launch["threads"]))
    if stage == "source":
        return generated.source
    compiled = compile_kernel(generated, source, target)
    return compiled.ptx if stage == "ptx" else compiled.cubin


def resources(request: Request, target: str = "sm_90") -> dict[str, int]:
    """What a thread of a kernel takes on a target, by the assembler: registers, and bytes that are spilled and on the stack."""
    made = compile_kernel(*printed(request), target)
    return {name: getattr(made, name) for name in ("registers", "spilled_bytes", "stack_bytes")}


def printed(request: Request) -> tuple[Generated, Path]:
    """A kernel's text, and the file that holds it."""
    tools = tuple((name, importlib.metadata.version(name)) for name in ("xdsl", "numba-cuda"))
    return library(tools, simulate=False).printed(request)


@dataclass(frozen=True)
class Compiled:
    """What numba-cuda and ptxas made of a kernel; registers of a thread, bytes that it spills and stores on its stack."""

    ptx: str
    cubin: bytes
    registers: int
    spilled_bytes: int
    stack_bytes: int


def compile_kernel(generated: Generated, source: Path, target: str) -> Compiled:
    """Compile one kernel. Raises `InputError` for an unknown target, `BackendError` with the compilers' words and the source's path."""
    if target not in TARGETS:
        raise InputError(f"target = {target!r}; known are {', '.join(TARGETS)}")
    from numba import cuda as found

    cuda: Any = found  # its type does not list what compiles

    number = target.removeprefix("sm_")
    capability = (int(number[:-1]), int(number[-1]))
    try:
        ptx, _ = cuda.compile_ptx(function(generated, source), argument_types(generated), cc=capability)
    except Exception as error:  # typing, lowering and NVVM have errors of their own
        raise BackendError(
            f"numba-cuda could not compile kernel {generated.name!r} for {target}: {type(error).__name__}: {error}; its source is {source}"
        ) from error
    with tempfile.TemporaryDirectory() as folder:
        text, out = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        text.write_text(ptx)
        command = [assembler(), f"-arch={target}", "-v", str(text), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BackendError(f"{' '.join(command)} failed on kernel {generated.name!r}: {done.stderr}; its source is {source}")
        cubin = out.read_bytes()

    def number_of(pattern: str) -> int:
        return sum(int(found) for found in re.findall(pattern, done.stderr))

    spilled = number_of(r"(\d+) bytes spill (?:stores|loads)")
    return Compiled(ptx, cubin, number_of(r"Used (\d+) registers"), spilled, number_of(r"(\d+) bytes stack frame"))


def assembler() -> str:
    """The path of ptxas: that of the package nvidia-cuda-nvcc, or one of the system. Raises `BackendError`."""
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(place).glob("*/bin/ptxas")):
            return str(path)
    found = shutil.which("ptxas")
    if found is None:
        raise BackendError("no ptxas; pip install nvidia-cuda-nvcc, or put that of a CUDA toolkit on the PATH")
    return found
