"""CUDA C compiled by NVRTC, for a device that is there or for one that is not: no driver is needed.

`cupy.RawKernel` is not enough: it appends `-ftz=true` to whatever options it is given, and the last one counts, so subnormals would
be flushed and quotients rounded otherwise than promised. A module that is loaded from machine code keeps its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kivi.errors import BackendError

HEADER = Path(__file__).parent / "device" / "kivi_half.h"
#: Sums print as calls that round once unless they may be contracted, so contraction as such is left on.
OPTIONS = ("--std=c++14", "-ftz=false", "-prec-div=true", "-prec-sqrt=true", "-fmad=true", "--ptxas-options=-v")


@dataclass(frozen=True)
class Compiled:
    """What NVRTC made of a text: `ptx`, `cubin`, and by the words of its assembler the registers of a thread, the bytes that
    it spills and stores on its stack, and the shared memory of a block in bytes."""

    ptx: str
    cubin: bytes
    registers: int
    spilled_bytes: int
    stack_bytes: int
    shared_bytes: int


def compile_text(text: str, name: str, target: str) -> Compiled:
    """The one kernel of a text for a target such as "sm_90a". Raises `BackendError` with the compiler's words and the text."""
    from cupy.cuda import nvrtc as found

    nvrtc: Any = found  # absent on some platforms, so its type says little

    options = (f"--gpu-architecture={target}", *OPTIONS)
    program = nvrtc.createProgram(text, f"{name}.cu", (HEADER.read_bytes(),), (HEADER.name.encode(),))
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise BackendError(f"NVRTC failed on kernel {name!r} with {' '.join(options)}: {error}\n{log}\n{text}") from None
        log, ptx, cubin = nvrtc.getProgramLog(program), nvrtc.getPTX(program), nvrtc.getCUBIN(program)
    finally:
        nvrtc.destroyProgram(program)

    def number(pattern: str) -> int:
        found = re.search(pattern, log)
        return int(found[1]) if found else 0

    spilled = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
    return Compiled(
        ptx.decode().rstrip("\0"),
        cubin,
        number(r"Used (\d+) registers"),
        spilled,
        number(r"(\d+) bytes stack frame"),
        number(r"(\d+) bytes smem"),
    )
