"""What Numba CUDA has no expression for: a run of 16 bytes moved at once. Imported by generated kernels."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic

WIDE = 16  # bytes of a run
LANES = ir.VectorType(ir.IntType(32), WIDE // 4)


@intrinsic  # type: ignore[untyped-decorator]
def copy_run(typing: Any, array: Any, place: Any, pointer: Any, offset: Any, mask: Any) -> Any:
    """`WIDE` bytes from element `offset` of `pointer` on to element `place` of `array` on, zeros if `mask` is false. Both are aligned."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = dict(zip(("array", "place", "pointer", "offset", "mask"), zip(signature.args, arguments, strict=True), strict=True))

        def address(which: str, index: str) -> Any:
            data = context.make_array(kinds[which][0])(context, builder, kinds[which][1]).data
            number = context.cast(builder, kinds[index][1], kinds[index][0], types.uint64)
            return builder.bitcast(builder.gep(data, [number]), LANES.as_pointer())

        target, source = address("array", "place"), address("pointer", "offset")
        with builder.if_else(kinds["mask"][1]) as (taken, not_taken):
            with taken:
                loaded, after_load = builder.load(source, align=WIDE), builder.block
            with not_taken:
                otherwise = builder.block
        run = builder.phi(LANES)
        run.add_incoming(loaded, after_load)
        run.add_incoming(ir.Constant(LANES, [0] * (WIDE // 4)), otherwise)
        builder.store(run, target, align=WIDE)
        return context.get_dummy_value()

    return types.void(array, place, pointer, offset, mask), generate
