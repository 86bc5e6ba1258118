"""Finding contractions in `tile` IR: sums over one axis of products of two tiles, where each tile is spread over the axes it lacks.

    a [R, 1, W] * b [1, T, W], summed over W        scores
    p [R, T, 1] * v [1, T, W], summed over T        weighted values, here and there under a mask [R, T, 1]

Rewrites of attention are rewrites of these. A tile that is spread is seen as its source and where the source's axes went.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from kivi.ir import tile
from kivi.ir.build import Tile
from kivi.ir.tile import shape_of
from kivi.ir.xdsl import Builder, ImplicitBuilder, InsertPoint, ModuleOp, Operation, SSAValue, arith


@dataclass(frozen=True)
class Spread:
    """A tile that was expanded and broadcast: axis i of `source` is axis `axes[i]` of the result, of shape `shape`."""

    source: SSAValue
    axes: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, value: SSAValue) -> Spread:
        """`value` seen through every expand and broadcast above it."""
        shape = shape_of(value.type)
        axes = list(range(len(shape)))
        while True:
            op = value.owner
            if isinstance(op, tile.BroadcastOp):
                value = op.source
            elif isinstance(op, tile.ExpandOp):
                value = op.source
                del axes[op.axis.value.data]
            else:
                return cls(value, tuple(axes), shape)

    @property
    def varies(self) -> set[int]:
        """Axes of the result along which the source has more than one element."""
        return {axis for axis, n in zip(self.axes, shape_of(self.source.type), strict=True) if n > 1}

    def again(self, source: Tile) -> Tile:
        """Another tile of the source's shape, spread in the same way."""
        for axis in range(len(self.shape)):
            if axis not in self.axes:
                source = source.expand(axis)
        return source.spread(self.shape)


@dataclass(frozen=True)
class Contraction:
    """sum over `axis` of lhs * rhs, where `mask` holds if there is one.

    `op` is the reduction, `last` what gives the sums: the reduction, or a reshape that drops its axis and is its only user.
    """

    op: tile.ReduceOp
    last: Operation
    lhs: Spread
    rhs: Spread
    mask: Spread | None

    @property
    def axis(self) -> int:
        return self.op.axis.value.data

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the products."""
        return shape_of(self.op.source.type)

    @property
    def drops(self) -> bool:
        """Whether the sums lack the summed axis."""
        return self.last is not self.op

    def sums(self, reduced: Tile) -> Tile:
        """A reduction over `axis`, in the shape of the sums."""
        return reduced.reshape(*shape_of(self.last.results[0].type))


def contractions(module: ModuleOp) -> Iterator[Contraction]:
    """Every contraction of a module, each product with either factor first."""
    for op in [op for op in module.walk() if isinstance(op, tile.ReduceOp)]:
        found = match(op)
        if found is not None:
            yield found


def match(op: tile.ReduceOp) -> Contraction | None:
    """The contraction that a reduction is, or None."""
    if op.combine.data is not tile.Combine.ADD:
        return None
    product, mask = op.source.owner, None
    if isinstance(product, tile.SelectOp) and _is_zero(product.rhs):
        mask = Spread.of(product.condition)
        product = product.lhs.owner
    if not isinstance(product, arith.MulfOp):
        return None
    return Contraction(op, _last(op), Spread.of(product.lhs), Spread.of(product.rhs), mask)


def _last(op: tile.ReduceOp) -> Operation:
    uses = list(op.result.uses)
    user = uses[0].operation if len(uses) == 1 else None
    if not isinstance(user, tile.ReshapeOp):
        return op
    shape = list(shape_of(op.result.type))
    del shape[op.axis.value.data]
    return user if shape_of(user.result.type) == tuple(shape) else op


def before(op: Operation) -> AbstractContextManager[Any]:
    """Within this context, tiles are built in front of `op`."""
    return ImplicitBuilder(Builder(InsertPoint.before(op)))


def replace(op: Operation, new: Tile) -> None:
    """`op`, which has one result, gives way to a tile."""
    op.results[0].replace_all_uses_with(new.value)
    op.detach()
    op.erase()


def _is_zero(value: SSAValue) -> bool:
    op = value.owner
    while isinstance(op, tile.SplatOp | tile.BroadcastOp):
        op = op.source.owner
    return isinstance(op, arith.ConstantOp) and op.value.value.data == 0  # type: ignore[attr-defined]
