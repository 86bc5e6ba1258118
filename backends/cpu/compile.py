"""From LLVM IR to a function of this process, through object code on disk.

llvmlite optimizes and assembles the text once; a later process reads the object code and needs neither the compiler's passes nor the
dialects. An object file is named by a hash of all that decides it: the text, the processor, its features, and the version of LLVM.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from kivi import jit
from kivi.errors import BackendError, InputError
from kivi.passes.vector_target import TARGETS

#: Triple of a target's architecture, and what LLVM is told of the processor when it is compiled for without being here.
TRIPLES = {"x86-64-v4": "x86_64-unknown-linux-gnu", "x86-64-v3": "x86_64-unknown-linux-gnu", "x86-64": "x86_64-unknown-linux-gnu"}
TRIPLES["aarch64"] = "aarch64-unknown-linux-gnu"
CPUS = {"x86-64-v4": "x86-64-v4", "x86-64-v3": "x86-64-v3", "x86-64": "x86-64", "aarch64": "generic"}
#: Features that a target promises to kernels, by LLVM's names.
PROMISED = {
    "x86-64-v4": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c"),
    "x86-64-v3": ("avx2", "fma", "f16c"),
    "x86-64": ("sse2",),
    "aarch64": ("neon",),
}


@dataclass(frozen=True)
class Machine:
    """What object code is made for: a target of `kivi.passes.vector_target`, and LLVM's triple, processor and features."""

    target: str
    triple: str
    cpu: str
    features: str


@cache
def host() -> Machine:
    """This processor, with the best target that it fulfils."""
    triple, features = llvm.get_process_triple(), llvm.get_host_cpu_features()
    family = "aarch64" if triple.startswith(("aarch64", "arm64")) else "x86" if triple.startswith("x86_64") else ""
    for name in TARGETS:
        if family and name.startswith(family) and all(features.get(f) for f in PROMISED[name]):
            return Machine(name, triple, llvm.get_host_cpu_name(), features.flatten())
    raise BackendError(f"backend 'cpu' has no target for {triple}; it has {', '.join(TARGETS)}")


def machine(name: str | None) -> Machine:
    """The machine of a named target, nothing beyond what it promises; this processor without a name. Raises `InputError`."""
    if name is None:
        return host()
    if name not in TARGETS:
        raise InputError(f"KIVI_CPU_TARGET = {name!r} is not a target; known are {', '.join(TARGETS)}")
    return Machine(name, TRIPLES[name], CPUS[name], "")


def missing(m: Machine) -> list[str]:
    """Features that a machine's target promises and this processor lacks, or its architecture."""
    here = host()
    if m.triple.split("-")[0] != here.triple.split("-")[0]:
        return [m.triple.split("-")[0]]
    features = llvm.get_host_cpu_features()
    return [f for f in PROMISED[m.target] if not features.get(f)]


def target_machine(m: Machine) -> Any:
    """A code generator of LLVM for a machine."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    found = llvm.Target.from_triple(m.triple)
    return found.create_target_machine(cpu=m.cpu, features=m.features, opt=3, reloc="pic", codemodel="jitdefault", jit=True)


def optimized(text: str, m: Machine) -> Any:
    """The module of a text after LLVM's passes. Raises `BackendError` with LLVM's words."""
    target = target_machine(m)
    try:
        module = llvm.parse_assembly(text)
        module.verify()
    except RuntimeError as error:
        raise BackendError(f"LLVM {'.'.join(map(str, llvm.llvm_version_info))} refuses a generated kernel: {error}") from error
    module.triple = m.triple
    module.data_layout = str(target.target_data)
    # Loops are vectors already; unrolling is decided by the lowering.
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    builder = llvm.create_pass_builder(target, options)
    builder.getModulePassManager().run(module, builder)
    return module


def object_code(text: str, m: Machine) -> bytes:
    """Object code of a text, from disk if it is there."""
    version = ".".join(map(str, (llvmlite.__version__, *llvm.llvm_version_info)))
    key = hashlib.sha256("\0".join((text, m.triple, m.cpu, m.features, version)).encode()).hexdigest()
    path = jit.cache_folder() / "cpu" / f"{key}.o"
    try:
        stored = path.read_bytes()
        if hashlib.sha256(stored[32:]).digest() == stored[:32]:
            return stored[32:]
    except OSError:
        pass
    code = target_machine(m).emit_object(optimized(text, m))
    with suppress(OSError):  # it is in memory
        jit.put(path, lambda part: part.write_bytes(hashlib.sha256(code).digest() + code))
    return code


def assembly(text: str, m: Machine) -> str:
    """Assembly of a text, for reading."""
    return str(target_machine(m).emit_assembly(optimized(text, m)))


_ENGINES: list[Any] = []  # they own the memory of the code, which is used as long as the process lives


def address(text: str, name: str, m: Machine) -> int:
    """Address of function `name` of a text, loaded into this process."""
    code = object_code(text, m)
    # An engine of its own, since texts share names; and it takes its code generator over, so that is its own, too.
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine(m))
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _ENGINES.append(engine)
    return int(engine.get_function_address(name))
