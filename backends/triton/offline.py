"""Compiling generated kernels for GPUs that are not there: no driver, no device, no torch.

Targets are named as their vendors name them: "sm_80", "sm_90", "sm_100" for NVIDIA, "gfx942", "gfx950" for AMD.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kivi.errors import BackendError, InputError
from kivi.jit import Generated

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")


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


def compile_kernel(generated: Generated, source: Path, target: str, warps: int = 4) -> Compiled:
    """Compile one kernel. Raises `InputError` for an unknown target, `BackendError` with the compiler's words and the source's path."""
    if target not in TARGETS:
        raise InputError(f"target = {target!r}; known are {', '.join(TARGETS)}")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kivi.backends.triton.kernels import load

    where = GPUTarget("cuda", int(target[3:]), 32) if target.startswith("sm_") else GPUTarget("hip", target, 64)
    # The caching launcher specializes aligned pointers in the same way; tensors of torch are always aligned.
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(generated.signature.values()) if kind.startswith("*")}
    text = ASTSource(fn=load(generated, source, False).launch, signature=generated.signature, constexprs={}, attrs=aligned)
    try:
        out = triton.compile(text, target=where, options={"enable_fp_fusion": False, "num_warps": warps})
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
