"""What a processor offers, as data: from it lowerings to `vec` choose, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """Vector abilities of a processor.

    name        as compilers call it, e.g. "x86-64-v4"
    lanes       32-bit lanes of a register
    registers   vector registers
    fma         a * b + c rounded once is an instruction; elsewhere it is a slow call
    half        float16 converts to and from float32 by an instruction; elsewhere by integer arithmetic
    lookup      one instruction permutes 16 float32 entries
    """

    name: str
    lanes: int
    registers: int
    fma: bool
    half: bool
    lookup: bool


#: Targets by name, the better ones of an architecture first.
TARGETS = {
    t.name: t
    for t in (
        Target("x86-64-v4", lanes=16, registers=32, fma=True, half=True, lookup=True),
        Target("x86-64-v3", lanes=8, registers=16, fma=True, half=True, lookup=False),
        Target("x86-64", lanes=4, registers=16, fma=False, half=False, lookup=False),
        Target("aarch64", lanes=4, registers=32, fma=True, half=True, lookup=False),
    )
}
