"""Lowering of `quantize` and `pack`: two kernels, one for scales and origins, one for words.

Splitting there makes both embarrassingly parallel in any layout: the first reduces groups, the second owns whole words and asks, for
every slot of a word, which element belongs there. No two programs write one word, whatever permutation the layout is.

Elements come from a `Source` and results go to a `Sink`, so the same bodies serve whole tensors and pages of a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kivi.ir.build import Pointer, Tile, indices, where
from kivi.ir.xdsl import i32
from kivi.layout import Arrangement
from kivi.passes import numbers
from kivi.passes.address import code_of, unit_place, word_stride
from kivi.passes.numbers import Numbers

#: (token, channel, mask) -> element as float32; tokens count from the page's first row
Source = Callable[[Tile, Tile, Tile], Tile]


@dataclass(frozen=True)
class Extent:
    """What a program works on: rows [first, first + count) of a page, and the channels of a row."""

    first: Tile
    count: Tile
    channels: int

    def holds(self, token: Tile, channel: Tile) -> Tile:
        return (token >= self.first) & (token < self.first + self.count) & (channel < self.channels)


def power(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def group_extremes(x: Tile, mask: Tile, axis: int) -> tuple[Tile, Tile, Tile]:
    """(low, high, bad) of groups along `axis`; masked lanes never enter."""
    finite = numbers.is_finite(x)
    usable = mask & finite
    low = where(usable, x, float("inf")).reduce("min", axis)
    high = where(usable, x, float("-inf")).reduce("max", axis)
    bad = where(mask & finite.equals(False), 1, indices(1, 0, len(x.shape)) * 0).reduce("max", axis) > 0
    empty = low > high  # no usable element: a group of padding, or of NaN only
    return where(empty, 0.0, low), where(empty, 0.0, high), bad


def key_metadata(source: Source, extent: Extent, n: Numbers, groups: Tile, channels: Tile) -> tuple[Tile, Tile, Tile, Tile, Tile]:
    """(scale, origin, overflow, flat, mask), [groups, 1, channels] flattened to [groups, channels], of key groups.

    groups [N, 1] counts groups of a page, channels [1, C].
    """
    width = power(n.group)
    inner = indices(width, 1, 3)
    token = groups.expand(1) * n.group + inner
    channel = channels.expand(1)
    shape = (groups.shape[0], width, channels.shape[1])
    token, channel = token.spread(shape), channel.spread(shape)
    mask = extent.holds(token, channel) & (inner < n.group)
    low, high, bad = group_extremes(source(token, channel, mask), mask, 1)
    found = numbers.scale_and_origin(low, high, bad, n)
    size = (shape[0], shape[2])
    scale, origin, overflow, flat = (x.reshape(*size) for x in found)
    return scale, origin, overflow, flat, extent.holds((groups * n.group).spread(size), channels.spread(size))


def value_metadata(source: Source, extent: Extent, n: Numbers, tokens: Tile, groups: Tile) -> tuple[Tile, Tile, Tile, Tile, Tile]:
    """(scale, origin, overflow, flat, mask), [tokens, groups], of value groups. tokens [N, 1], groups [1, M]."""
    width = power(n.group)
    inner = indices(width, 2, 3)
    shape = (tokens.shape[0], groups.shape[1], width)
    token = tokens.expand(2).spread(shape)
    channel = (groups.expand(2) * n.group + inner).spread(shape)
    mask = extent.holds(token, channel) & (inner < n.group)
    low, high, bad = group_extremes(source(token, channel, mask), mask, 2)
    found = numbers.scale_and_origin(low, high, bad, n)
    size = shape[:2]
    scale, origin, overflow, flat = (x.reshape(*size) for x in found)
    return scale, origin, overflow, flat, extent.holds(tokens.spread(size), (groups * n.group).spread(size))


def pack_units(
    arrangement: Arrangement, unit: Tile, code: Callable[[Tile, Tile, Tile], Tile], extent: Extent
) -> tuple[list[Tile], list[Tile], Tile, Tile]:
    """(words, keep, major, minor) of units [W, 1]: their words as i32 [W, 1], and which bits of the old words stay.

    `code(token, channel, mask)` gives codes as i32. Bits of rows outside `extent` stay; padding lanes are 0.
    """
    slots = arrangement.unit
    slot = indices(slots, 1, 2)
    shape = (unit.shape[0], slots)
    token, channel = code_of(arrangement, unit.spread(shape), slot.spread(shape))
    mask = extent.holds(token, channel)
    value = where(mask, code(token, channel, mask), 0)
    other = (token < extent.first) | (token >= extent.first + extent.count)
    ones = where(other, (1 << arrangement.bits) - 1, unit.spread(shape) * 0)
    words, keep = [], []
    for part in range(3 if arrangement.bits == 3 else 1):
        words.append(_word(arrangement, value, slot, part))
        keep.append(_word(arrangement, ones, slot, part))
    major, minor = unit_place(arrangement, unit)
    return words, keep, major, minor


def _word(arrangement: Arrangement, codes: Tile, slot: Tile, part: int) -> Tile:
    """One word of each unit: fields in disjoint bits, so their sum is their union."""
    if arrangement.bits != 3:
        return (codes << (slot * arrangement.bits)).reduce("add", 1)
    half = arrangement.unit // 2
    if part == 2:
        return ((codes >> 2) << slot).reduce("add", 1)
    mine = (slot >= half) if part else (slot < half)
    return where(mine, (codes & 3) << ((slot % half) * 2), 0).reduce("add", 1)


def store_words(target: Pointer, offsets: list[Tile], words: list[Tile], keep: list[Tile], mask: Tile, partial: bool) -> None:
    """Write words [W, 1]; with `partial`, bits of other rows keep their value."""
    for offset, word, kept in zip(offsets, words, keep, strict=True):
        if partial:
            word = word | (target.load(offset, mask).to(i32) & kept)
        target.store(offset, word.to(target.element), mask)


def word_offsets(arrangement: Arrangement, major: Tile, minor: Tile, row: Tile | int) -> list[Tile]:
    """Offsets in words of all words of units at (major, minor), rows of `row` words."""
    first = major * row + minor
    return [first + part * word_stride(arrangement) for part in range(3 if arrangement.bits == 3 else 1)]


def field_at(arrangement: Arrangement, load: Callable[[Tile], Tile], word: Tile, slot: Tile) -> Tile:
    """The code in `slot` of the unit whose first word has offset `word`; `load(offset)` gives words as i32."""
    bits = arrangement.bits
    if bits != 3:
        return (load(word) >> (slot * bits)) & ((1 << bits) - 1)
    half, stride = arrangement.unit // 2, word_stride(arrangement)
    low = load(word + where(slot >= half, stride, slot * 0).to(word.element))
    high = load(word + 2 * stride)
    return ((low >> ((slot % half) * 2)) & 3) | (((high >> slot) & 1) << 2)
