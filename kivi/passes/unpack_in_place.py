"""Rewrite `unpack_in_place`: a field of a packed word is masked where it lies and never shifted down.

    a * float((w >> k) & top)  =  (a 2^-k) * float(w & (top << k))

The shift of every word becomes one multiplication of the other factor of the product, a tile without the axis that the codes add.
It applies to products of a sum whose code has a constant place in its word; run `fold_scale` first, so that codes stand alone.

Bound. Codes have at most 8 bits, so the conversion is exact at any place, and multiplying by a power of two is exact unless
|a 2^-k| < 2^-126: then it is off by at most 2^-150, and the product by at most 2^(bits + k - 150). For words of 16 bits k is at most 15.
"""

from __future__ import annotations

from kivi.ir import tile
from kivi.ir.build import Tile
from kivi.ir.xdsl import ModuleOp, SSAValue, arith, f32
from kivi.passes.contraction import Spread, before, contractions, replace
from kivi.passes.fold_scale import is_code


def unpack_in_place(module: ModuleOp) -> int:
    """Rewrite every product it applies to; returns how many."""
    count = 0
    for found in contractions(module):
        for weight, code in ((found.lhs, found.rhs), (found.rhs, found.lhs)):
            field = _field(code)
            if field is not None and found.mask is None:
                word, place, mask = field
                with before(found.op):
                    kept = Tile(word) & (mask << place)
                    scaled = weight.again(Tile(weight.source) * 2.0**-place)
                    result = found.sums((scaled * code.again(kept.to(f32))).reduce("add", found.axis))
                replace(found.last, result)
                count += 1
                break
    return count


def _field(code: Spread) -> tuple[SSAValue, int, int] | None:
    """(word, place, mask) of a code float((word >> place) & mask) with constant place above 0, or None."""
    if not is_code(code):
        return None
    cast = code.source.owner
    assert isinstance(cast, tile.CastOp)
    masked = cast.source.owner
    if cast.sign.data is not tile.Sign.UNSIGNED or not isinstance(masked, arith.AndIOp):
        return None
    mask, shifted = constant_of(masked.rhs), masked.lhs.owner
    if mask is None or not isinstance(shifted, arith.ShRUIOp):
        return None
    place = constant_of(shifted.rhs)
    return (shifted.lhs, place, mask) if place else None


def constant_of(value: SSAValue) -> int | None:
    """The integer that a constant, or a tile of one constant, holds."""
    op = value.owner
    while isinstance(op, tile.SplatOp | tile.BroadcastOp):
        op = op.source.owner
    return op.value.value.data if isinstance(op, arith.ConstantOp) else None  # type: ignore[attr-defined]
