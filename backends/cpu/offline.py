"""Compiling generated kernels for processors that need not be here: no execution, only LLVM.

Targets are those of `kivi.passes.vector_target`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from kivi import plugins
from kivi.backend import layout_for
from kivi.backends.cpu import compile as compiler
from kivi.backends.cpu.driver import schedules
from kivi.backends.cpu.kernels import FINITE, library, lowered, tiled
from kivi.errors import InputError
from kivi.geometry import Geometry
from kivi.ir import kv
from kivi.jit import Generated
from kivi.kernels import entries as kernels
from kivi.kernels.request import Request, module
from kivi.passes.vector_target import TARGETS as KNOWN
from kivi.spec import CacheSpec

TARGETS = tuple(KNOWN)
#: What `emit` can show, from the first to the last.
STAGES = ("kv", "tile", "vec", "source", "asm", "object")


def entries(spec: CacheSpec, g: Geometry) -> dict[str, Request]:
    """Every kernel of a cache of this shape, by entry point."""
    out = kernels.entries(spec, g, layout_for(plugins.get("cpu").manifest, spec), schedules)
    for which in ("key", "value"):
        request = out[f"{which}.seal_words"]
        if request.option("form").seals_apart(which):
            out[f"{which}.seal"] = replace(request, entry=f"{which}.seal")
    out[FINITE] = replace(out["rows.keep_rows"], entry=FINITE, options=())
    return out


def emit(request: Request, stage: str, target: str = TARGETS[0]) -> str | bytes:
    """What one stage of compilation makes of a kernel. Raises `InputError` for an unknown stage or target."""
    if stage not in STAGES:
        raise InputError(f"stage = {stage!r}; known are {', '.join(STAGES)}")
    if request.entry == FINITE and stage in ("kv", "tile"):
        raise InputError(f"stage = {stage!r}: {FINITE} is written at level vec; its stages are {', '.join(STAGES[2:])}")
    if stage == "kv":
        return kv.text(module(request))
    if stage == "tile":
        return str(tiled(request).module)
    machine = _machine(target)
    if stage == "vec":
        return str(lowered(request, target).module)
    text = printed(request, target)[0].source
    if stage == "source":
        return text
    return compiler.assembly(text, machine) if stage == "asm" else compiler.object_code(text, machine)


def printed(request: Request, target: str) -> tuple[Generated, Path]:
    """The LLVM IR of a kernel, and its file."""
    return library(_machine(target)).printed(request)


SPILL = re.compile(r"\tv?mov\w+\t%[xyz]mm\d+, -?\d*\(%r[sb]p\)|\tst[rp]\tq\d+.*\[(?:sp|x29)")


@dataclass(frozen=True)
class Compiled:
    """Assembly of a kernel, and what its longest loop without a branch holds: instructions by name, and stores of vector registers that did
    not fit to a fixed place of the stack."""

    assembly: str
    instructions: dict[str, int]
    spills: int


def compile_kernel(generated: Generated, target: str) -> Compiled:
    """Compile one kernel. Raises `InputError` for an unknown target, `BackendError` with LLVM's words."""
    text = compiler.assembly(generated.source, _machine(target))
    blocks = re.split(r"\n(?=\.LBB\w+:)", text)
    loops = [
        b for b in blocks if (label := re.match(r"(\.LBB\w+):", b)) and re.search(rf"\t(j\w+|b\.\w+|cbn?z)\t.*{re.escape(label[1])}\b", b)
    ]
    longest = max(loops, key=lambda b: b.count("\n\t"), default="")
    counts: dict[str, int] = {}
    for name in re.findall(r"\n\t([a-z]\w*)", longest):
        counts[name] = counts.get(name, 0) + 1
    return Compiled(text, counts, len(SPILL.findall(longest)))


def _machine(target: str) -> compiler.Machine:
    if target not in TARGETS:
        raise InputError(f"target = {target!r}; known are {', '.join(TARGETS)}")
    return compiler.machine(target)
