"""Index arithmetic of layouts: between a code's place (token, channel) in a page and its word and slot, as `tile` operations.

The digits of an `Arrangement` give both directions: a digit of an index is `(index / weight) mod extent`, and the index is the sum of
digits times weights. Divisions by constants are left to the target's compiler.
"""

from __future__ import annotations

from dataclasses import dataclass

from kivi.ir.build import Tile, full
from kivi.ir.xdsl import i32
from kivi.layout import Arrangement, Digit


@dataclass(frozen=True)
class Place:
    """Where a code lies: word = `major` * row + `minor`, with `row` words a major index; `slot` inside the unit.

    For 3-bit codes the word is the first of its unit, and `stride` words lie between the words of a unit.
    """

    major: Tile
    minor: Tile
    slot: Tile


def units(arrangement: Arrangement) -> int:
    """Units of a page: words, or triples of words for 3-bit codes."""
    out = 1
    for digit in arrangement.places:
        out *= 1 if digit.axis == "w" else digit.extent
    return out


def word_stride(arrangement: Arrangement) -> int:
    """Words between the words of one 3-bit unit; always within the minor axis."""
    stride = 1
    for digit in arrangement.places:
        if digit.axis == "w":
            return stride
        stride *= digit.extent
    return 0


def code_of(arrangement: Arrangement, unit: Tile, slot: Tile) -> tuple[Tile, Tile]:
    """(token, channel) of the code in `slot` of `unit`, both i32; indices of padding lanes lie beyond the page's extents."""
    tokens = channels = None
    for index, digits in ((unit, [d for d in arrangement.places if d.axis != "w"]), (slot, arrangement.slots)):
        for digit, value in zip(digits, _digits(index, digits), strict=True):
            term = value * digit.weight
            if digit.axis == "t":
                tokens = term if tokens is None else tokens + term
            else:
                channels = term if channels is None else channels + term
    zero = full(unit.shape, 0, i32)
    return (zero if tokens is None else tokens), (zero if channels is None else channels)


def place_of(arrangement: Arrangement, token: Tile, channel: Tile) -> Place:
    """Where the code of (token, channel) lies; i32 tiles of one shape."""
    minor_places = next(i for i, d in enumerate(arrangement.places) if d.star) + 1
    slot = _compose(arrangement.slots, token, channel)
    minor = _compose(arrangement.places[:minor_places], token, channel)
    major = _compose(arrangement.places[minor_places:], token, channel)
    return Place(major, minor, slot)


def unit_place(arrangement: Arrangement, unit: Tile) -> tuple[Tile, Tile]:
    """(major, minor) word index of a unit's first word."""
    minor_places = next(i for i, d in enumerate(arrangement.places) if d.star) + 1
    digits = [d for d in arrangement.places if d.axis != "w"]
    values = dict(zip(digits, _digits(unit, digits), strict=True))
    out = []
    for part in (arrangement.places[minor_places:], arrangement.places[:minor_places]):
        stride, total = 1, full(unit.shape, 0, i32)
        for digit in part:
            if digit.axis != "w":
                total = total + values[digit] * stride
            stride *= digit.extent
        out.append(total)
    return out[0], out[1]


def _digits(index: Tile, digits: list[Digit] | tuple[Digit, ...]) -> list[Tile]:
    """The digits of a mixed-radix number, least significant first; the last one takes what is left."""
    out = []
    for i, digit in enumerate(digits):
        out.append(index if i == len(digits) - 1 else index % digit.extent)
        index = index // digit.extent
    return out


def _compose(places: tuple[Digit, ...], token: Tile, channel: Tile) -> Tile:
    """The number whose digits, least significant first, are those of the two indices."""
    total, stride = full(token.shape, 0, i32), 1
    for digit in places:
        if digit.axis != "w":
            index = token if digit.axis == "t" else channel
            value = index // digit.weight
            total = total + (value if digit.star and digit is _top(places, digit) else value % digit.extent) * stride
        stride *= digit.extent
    return total


def _top(places: tuple[Digit, ...], digit: Digit) -> Digit | None:
    """`digit` if no digit of its axis weighs more, here or elsewhere; a star above a `^` digit must be reduced."""
    return digit if digit.axis == "t" else None
