"""How a kernel walks the channels of a token: as lanes, so that every packed word is loaded once and stays in registers.

In a layout whose slots select channels, a unit holds several channels of one token, and there are two ways to walk it:

    lanes    slot j of all units of a token is lane j, a tile of its own: one shift and mask by constants, no data moves
    axis     slots become an axis of one wide tile: a sixteenth of the operations, which an interpreter feels, or one wide dot

Where slots select tokens instead, there is one lane of all channels, each element finding its own word: correct for any layout, slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kivi.ir.build import Tile, indices, where
from kivi.ir.xdsl import i64
from kivi.layout import Arrangement, Digit
from kivi.passes.address import place_of, word_stride
from kivi.passes.pages import Pages
from kivi.passes.quantize import field_at, power


@dataclass(frozen=True)
class Lanes:
    """The lanes of one side of a page. `walk`: "lanes" or "axis"; it is ignored where slots select tokens."""

    arrangement: Arrangement
    walk: str = "lanes"

    @cached_property
    def split(self) -> bool:
        """Whether slots select channels."""
        return all(d.axis == "c" for d in self.arrangement.slots)

    @property
    def wide(self) -> bool:
        """Whether slots are an axis of one tile."""
        return self.split and self.walk == "axis"

    @property
    def count(self) -> int:
        return self.arrangement.unit if self.split and not self.wide else 1

    @cached_property
    def units(self) -> int:
        """Units of a token, padding lanes included."""
        digits = [d.extent for d in self.arrangement.places if d.axis == "c"]
        return int(np.prod(digits, dtype=np.int64)) if self.split else self.arrangement.channels

    @cached_property
    def unit_width(self) -> int:
        """Units of a tile: a power of two."""
        return power(self.units)

    @property
    def width(self) -> int:
        """Elements of a lane's tile: a power of two."""
        return self.unit_width * (self.arrangement.unit if self.wide else 1)

    def channels(self, lane: int) -> np.ndarray:
        """Channels of a lane, int64 [width]; padding lies beyond the last channel."""
        if self.wide:
            narrow = Lanes(self.arrangement)
            return np.stack([narrow.channels(j) for j in range(self.arrangement.unit)], axis=1).reshape(-1)
        unit = np.arange(self.unit_width)
        if not self.split:
            return unit
        total = np.zeros(self.unit_width, np.int64)
        rest = unit
        for digit in (d for d in self.arrangement.places if d.axis == "c"):
            total += rest % digit.extent * digit.weight
            rest = rest // digit.extent
        total += rest * self.arrangement.padded_channels  # units that do not exist
        slot = lane
        for digit in self.arrangement.slots:
            total += slot % digit.extent * digit.weight
            slot //= digit.extent
        return total

    def channel_tile(self, lane: int, rank: int) -> Tile:
        """Channels of a lane as i32 along the last of `rank` axes."""
        if self.wide:
            shape = (self.unit_width, self.arrangement.unit)
            unit, slot = indices(shape[0], 0, 2), indices(shape[1], 1, 2)
            both = (self._of_units(unit).spread(shape) + _compose(self.arrangement.slots, slot).spread(shape)).reshape(self.width)
            for axis in range(rank - 1):
                both = both.expand(axis)
            return both
        unit = indices(self.unit_width, rank - 1, rank)
        return self._of_units(unit) + _compose(self.arrangement.slots, lane) if self.split else unit

    def _of_units(self, unit: Tile) -> Tile:
        """What the unit contributes to the channel; beyond the last channel for units that do not exist."""
        digits = tuple(d for d in self.arrangement.places if d.axis == "c")
        return _compose(digits, unit) + (unit // self.units) * self.arrangement.padded_channels

    def groups(self, lane: int, group: int) -> np.ndarray:
        """Value groups of a lane's existing channels, without repetition."""
        channels = self.channels(lane)
        return np.unique(channels[channels < self.arrangement.channels] // group)

    def load(self, pages: Pages, base: Tile, token: Tile, mask: Tile) -> list[Tile]:
        """What `code` needs of rows `token` [T, 1] of a page: words as i32 [T, width], or for one lane the codes themselves."""
        unit = indices(self.unit_width, 1, 2)
        shape = (token.shape[0], self.unit_width)
        inside = mask.spread(shape) if self.units == self.unit_width else mask.spread(shape) & (unit < self.units)

        def load(at: Tile) -> Tile:
            return pages.load_word(at, inside)

        if not self.split:
            token, channel = token.spread(shape), unit.spread(shape)
            place = place_of(self.arrangement, token, channel)
            word = base + (place.major * self.arrangement.shape[1] + place.minor).to(i64)
            return [field_at(self.arrangement, load, word, place.slot)]
        word = base + (self._words_below("t", token).spread(shape) + self._words_below("c", unit).spread(shape)).to(i64)
        parts = 3 if self.arrangement.bits == 3 else 1
        return [load(word + part * word_stride(self.arrangement)) for part in range(parts)]

    def _words_below(self, axis: str, index: Tile) -> Tile:
        """What a token, or a unit of a token, contributes to a word's offset in the page.

        Digits that lie side by side in memory as in the index are taken together, so that a compiler sees contiguous addresses.
        """
        stride, below = 1, 1
        runs: list[list[int]] = []  # [weight, extent, stride in words] of digits that are neighbours both ways
        for digit in self.arrangement.places:
            if digit.axis == axis:
                weight = digit.weight if axis == "t" else below  # units are counted in the order of memory
                below *= digit.extent
                if runs and (runs[-1][0] * runs[-1][1], runs[-1][2] * runs[-1][1]) == (weight, stride):
                    runs[-1][1] *= digit.extent
                else:
                    runs.append([weight, digit.extent, stride])
            stride *= digit.extent
        top = max(runs)
        offset = 0 * index
        for run in runs:
            value = index // run[0]
            offset = offset + (value if run is top else value % run[1]) * run[2]
        return offset

    def code(self, words: list[Tile], lane: int) -> Tile:
        """Codes of a lane as i32."""
        if not self.split:
            return words[0]
        bits, half = self.arrangement.bits, self.arrangement.unit // 2
        if not self.wide:
            if bits != 3:
                return (words[0] >> bits * lane) & ((1 << bits) - 1)
            low = (words[lane // half] >> (lane % half * 2)) & 3
            return low | (((words[2] >> lane) & 1) << 2)
        slot = indices(self.arrangement.unit, 2, 3)
        spread = [w.expand(2) for w in words]
        if bits != 3:
            codes = (spread[0] >> slot * bits) & ((1 << bits) - 1)
        else:
            codes = (where(slot < half, spread[0], spread[1]) >> (slot % half * 2)) & 3 | (((spread[2] >> slot) & 1) << 2)
        return codes.reshape(words[0].shape[0], self.width)


def _compose(digits: tuple[Digit, ...], index: Any) -> Any:
    """An index given by a mixed-radix number, least significant digit first; `index` is a tile or an int."""
    total: Any = index * 0
    for digit in digits:
        total = total + (index % digit.extent) * digit.weight
        index = index // digit.extent
    return total
