"""Rewrite `split_kv`: the long loop of a kernel is shared by several programs, each of which leaves a partial result of its own.

A kernel for it has one loop with step 1 at its top, an argument `slot`, the place of its partial result, and `shares`. The loop's trips
[low, high) are cut into `shares` runs of equal length, the last ones shorter; the program at place s of a new grid axis takes run s and
writes to slot s. Programs past the end of a short loop find an empty run. What merges the partial results is another kernel.

Bound. None of its own: every trip runs once, in one program, in the same order; the merge adds its roundings (`attention.merge_kernel`).
"""

from __future__ import annotations

from kivi.errors import KiviError
from kivi.ir.build import Tile, program_id
from kivi.ir.xdsl import FunctionType, func, scf
from kivi.passes.contraction import before
from kivi.passes.tensors import Kernel

AXIS = 1


class RewriteError(KiviError, ValueError):
    """A rewrite was asked of a kernel that it does not apply to."""


def split_kv(kernel: Kernel) -> Kernel:
    """The kernel with its loop shared over grid axis 1. Raises `RewriteError` if it has no such loop, or a grid axis 1 already."""
    function = next(op for op in kernel.module.ops if isinstance(op, func.FuncOp))
    block = function.body.block
    arguments = dict(zip(kernel.arguments, block.args, strict=True))
    loops = [op for op in block.ops if isinstance(op, scf.ForOp)]
    if len(loops) != 1 or not {"slot", "shares"} <= set(arguments) or kernel.grid[AXIS]:
        raise RewriteError(
            f"split_kv takes a kernel with one loop, arguments slot and shares, and no grid axis {AXIS}; {kernel.name!r} has "
            f"{len(loops)} loops, arguments {', '.join(kernel.arguments)}, and {kernel.grid[AXIS]} there"
        )
    loop, slot = loops[0], arguments["slot"]
    with before(next(iter(block.ops))):
        place = program_id(AXIS)
    with before(loop):
        low, high, shares = Tile(loop.lb), Tile(loop.ub), Tile(arguments["shares"])
        run = (high - low + (shares - 1)) // shares
        start = (low + place * run).minimum(high)
        stop = (start + run).minimum(high)
    loop.operands[0], loop.operands[1] = start.value, stop.value
    slot.replace_all_uses_with(place.value)
    block.erase_arg(slot)
    function.function_type = FunctionType.from_lists([a.type for a in block.args], [])
    grid = [*kernel.grid]
    grid[AXIS] = [("shares", 1)]
    return Kernel(kernel.name, kernel.module, grid, [name for name in kernel.arguments if name != "slot"])
