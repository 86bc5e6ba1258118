"""Rewrite `fold_scale`: the scale of a group leaves the elements for the other factor of a product.

    sum a (s c + m)  =  sum (a s) c  +  sum a m          s and m vary along the summed axis only

For scores a is the query and one group of tokens shares s and m of a channel; for outputs a is the softmax weight and one group of
channels shares s and m of a token. A tile of codes then costs one multiplication an element and no addition, and the second sum is one
for all columns of the tile. It applies where c is an integer, so that a masked or a zero weight cannot meet a NaN in c.

Bound. With u = 2^-24 and n products: |error| <= (n + 1) u sum |a s c| + (n + 1) u sum |a m| to first order, against
(n + 2) u (sum |a s c| + sum |a m|) of the unfolded form: a rounding of s c and of their sum is traded for one of a s.
"""

from __future__ import annotations

from kivi.ir import tile
from kivi.ir.build import Tile, where
from kivi.ir.xdsl import IntegerType, ModuleOp, arith
from kivi.passes.contraction import Contraction, Spread, before, contractions, replace


def fold_scale(module: ModuleOp) -> int:
    """Rewrite every product it applies to; returns how many."""
    count = 0
    for found in contractions(module):
        for weight, element in ((found.lhs, found.rhs), (found.rhs, found.lhs)):
            affine = Affine.of(element, found.axis)
            if affine is not None and _may_move(found, weight):
                _rewrite(found, weight, element, affine)
                count += 1
                break
    return count


class Affine:
    """scale * code + origin, both varying along one axis of the products only."""

    def __init__(self, code: Spread, scale: Spread, origin: Spread) -> None:
        self.code, self.scale, self.origin = code, scale, origin

    @classmethod
    def of(cls, element: Spread, axis: int) -> Affine | None:
        total = element.source.owner
        if not isinstance(total, arith.AddfOp) or axis not in element.axes:
            return None
        for product, origin in ((total.lhs, total.rhs), (total.rhs, total.lhs)):
            if not isinstance(product.owner, arith.MulfOp):
                continue
            for scale, code in ((product.owner.lhs, product.owner.rhs), (product.owner.rhs, product.owner.lhs)):
                parts = cls(Spread.of(code), Spread.of(scale), Spread.of(origin))
                if is_code(parts.code) and parts._vary_along(element.axes.index(axis)):
                    return parts
        return None

    def _vary_along(self, axis: int) -> bool:
        return (self.scale.varies | self.origin.varies) <= {axis}


def is_code(element: Spread) -> bool:
    """Whether a tile was converted from integers."""
    op = element.source.owner
    return isinstance(op, tile.CastOp) and isinstance(tile.element_of(op.source.type), IntegerType)


def _may_move(found: Contraction, weight: Spread) -> bool:
    """Whether the weight, and the mask if there is one, have the summed axis."""
    return found.axis in weight.axes and (found.mask is None or found.mask.varies <= set(weight.axes))


def _rewrite(found: Contraction, weight: Spread, element: Spread, affine: Affine) -> None:
    with before(found.op):
        here, there = found.axis, element.axes.index(found.axis)
        scaled, shifts = (Tile(weight.source) * _aligned(weight, here, part, there) for part in (affine.scale, affine.origin))
        if found.mask is not None:
            mask = _aligned_mask(found.mask, weight)
            scaled, shifts = (where(mask, x, 0.0) for x in (scaled, shifts))
        code = element.again(Tile(affine.code.source).spread(tile.shape_of(element.source.type)))
        sums = found.sums((weight.again(scaled) * code).reduce("add", here))
        shift = shifts.reduce("add", weight.axes.index(here))  # one number for all columns that the weight lacks
        sizes = dict(zip(weight.axes, shift.shape, strict=True))
        kept = [axis for axis in range(len(found.shape)) if axis != here or not found.drops]
        result = sums + shift.reshape(*(sizes.get(axis, 1) for axis in kept)).spread(sums.shape)
    replace(found.last, result)


def _aligned(weight: Spread, axis: int, part: Spread, part_axis: int) -> Tile:
    """A scale or an origin, shaped to multiply the weight's source along the summed axis."""
    shape = [1] * len(weight.axes)
    if part_axis in part.varies:
        shape[weight.axes.index(axis)] = weight.shape[axis]
    source = Tile(part.source)
    return source.reshape(*shape) if source.shape else source.spread(shape)


def _aligned_mask(mask: Spread, weight: Spread) -> Tile:
    """A mask over the products, as one over the weight's source."""
    sizes = dict(zip(mask.axes, tile.shape_of(mask.source.type), strict=True))
    return Tile(mask.source).reshape(*(sizes.get(axis, 1) for axis in weight.axes))
