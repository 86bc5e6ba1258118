"""Kernels at `vec` level for the rows of a call: whether they are finite, and those that a window keeps."""

from __future__ import annotations

from kivi.dtypes import np_dtype
from kivi.ir.build import TYPES
from kivi.ir.tile import PtrType
from kivi.ir.vector_build import Pointer, Vector, constant, index, kernel, loop, program_id, where
from kivi.ir.xdsl import Attribute, f32, i32, i64
from kivi.passes.tensors import Kernel
from kivi.passes.vector_attention import pieces
from kivi.passes.vector_numbers import float_pointer, load_float
from kivi.passes.vector_target import Target

ROWS = 64  # of a program that keeps rows
AXES = ("batch", "head", "token", "channel")


def finite_kernel(dtype: str, channels: int, target: Target) -> Kernel:
    """flag [B * H, n], int32: how many lanes of a row of x [B, H, n, channels] met a number outside `lowest` to `highest`, or NaN."""
    lanes = target.lanes

    def body(**g) -> None:
        program, row = program_id(0).to(i64), program_id(1).to(i64)
        heads = g["heads"].to(i64)
        base = program // heads * g["x_batch"] + program % heads * g["x_head"] + row * g["x_token"]

        def outside(at: Vector, width: int) -> Vector:
            x = load_float(g["x"], dtype, base + at, width, target)
            return where(x >= g["lowest"], where(x <= g["highest"], constant(0, i32), 1), 1)

        full = channels - channels % lanes
        start = [constant(0, i32, lanes)]
        [found] = loop(0, full, start, lambda c, sum_: [sum_ + outside(c, lanes)], step=lanes) if full else start
        total = found.reduce("add")
        for at, width in pieces(channels, lanes):
            total = total + outside(index(at), width).reduce("add")
        g["flag"].store(program * g["rows"].to(i64) + row, total)

    arguments: dict[str, Attribute] = {"x": float_pointer(dtype, target), **{f"x_{axis}": i64 for axis in AXES}}
    arguments |= {"heads": i32, "rows": i32, "lowest": f32, "highest": f32, "flag": PtrType(TYPES["int32"])}
    return Kernel("finite", kernel("finite", arguments, body), [[("batch", 1), ("heads", 1)], [("rows", 1)], []], list(arguments))


def keep_rows_kernel(dtype: str, heads: int, channels: int, target: Target) -> Kernel:
    """Rows into the target window, with the arguments and results of `kivi.passes.append.keep_rows_kernel`; copied as they are."""
    lanes = target.lanes * 4 // np_dtype(dtype).itemsize  # of a register

    def body(**g) -> None:
        program = program_id(0).to(i64)
        request, head = program // heads, program % heads
        stored, new, keep = (g["counts"].load(request * 3 + i) for i in range(3))
        start = keep.maximum(stored - stored * g["fresh"].to(i64)) + program_id(1).to(i64) * ROWS
        end = (start + ROWS).minimum(stored + new)
        chunk = request * g["x_batch"] + head * g["x_head"]

        def slot(token: Vector, capacity: Vector) -> Vector:
            """Offset of a token's row in a window."""
            return (program * capacity.to(i64) + (token.to(i32) % capacity).to(i64)) * channels

        def copy(token: Vector, source: Pointer, first: Vector) -> list[Vector]:
            target_row = slot(token, g["target_capacity"])

            def some(c: Vector, width: int) -> list[Vector]:
                g["target"].store(target_row + c, source.load(first + c, width))
                return []

            full = channels - channels % lanes
            if full:
                loop(0, full, [], lambda c: some(c, lanes), step=lanes)
            for at, width in pieces(channels, lanes):
                some(index(at), width)
            return []

        loop(start, end.minimum(stored), [], lambda t: copy(t, g["x_window"], slot(t, g["x_capacity"])))
        loop(start.maximum(stored), end, [], lambda t: copy(t, g["x"], chunk + (t - stored) * g["x_token"]))

    floats = float_pointer(dtype, target)
    arguments: dict[str, Attribute] = {"counts": PtrType(i64), "x_window": floats, "x_capacity": i32, "x": floats}
    arguments |= {f"x_{axis}": i64 for axis in AXES}
    arguments |= {"target": floats, "target_capacity": i32, "fresh": i32}
    grid = [[("batch", 1), ("heads", 1)], [("count", ROWS)], []]
    return Kernel("keep_rows", kernel("keep_rows", arguments, body), grid, list(arguments))
