"""How a kernel walks the channels of a token: as lanes, so that every packed word is loaded once and stays in registers.

In a layout whose slots select channels, a unit holds several channels of one token. Slot j of all units of a token is lane j: a tile of
channels that one shift and mask unpacks from the loaded words. Where slots select tokens instead, there is one lane of all channels,
each element finding its own word: correct for any layout, and slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kivi.ir.build import Tile, indices
from kivi.ir.xdsl import i64
from kivi.layout import Arrangement
from kivi.passes.address import place_of, word_stride
from kivi.passes.pages import Pages
from kivi.passes.quantize import field_at, power


@dataclass(frozen=True)
class Lanes:
    """The lanes of one side of a page."""

    arrangement: Arrangement

    @cached_property
    def split(self) -> bool:
        """Whether slots select channels."""
        return all(d.axis == "c" for d in self.arrangement.slots)

    @property
    def count(self) -> int:
        return self.arrangement.unit if self.split else 1

    @cached_property
    def units(self) -> int:
        """Units of a token, padding lanes included."""
        digits = [d.extent for d in self.arrangement.places if d.axis == "c"]
        return int(np.prod(digits, dtype=np.int64)) if self.split else self.arrangement.channels

    @cached_property
    def width(self) -> int:
        """Elements of a lane's tile: a power of two."""
        return power(self.units)

    def channels(self, lane: int) -> np.ndarray:
        """Channels of a lane, int64 [width]; padding lies beyond the last channel."""
        unit = np.arange(self.width)
        if not self.split:
            return unit
        total = np.zeros(self.width, np.int64)
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
        unit = indices(self.width, rank - 1, rank)
        if not self.split:
            return unit
        total, rest = unit * 0, unit
        for digit in (d for d in self.arrangement.places if d.axis == "c"):
            total = total + (rest % digit.extent) * digit.weight
            rest = rest // digit.extent
        total = total + rest * self.arrangement.padded_channels
        offset, slot = 0, lane
        for digit in self.arrangement.slots:
            offset += slot % digit.extent * digit.weight
            slot //= digit.extent
        return total + offset

    def groups(self, lane: int, group: int) -> np.ndarray:
        """Value groups of a lane's existing channels, without repetition."""
        channels = self.channels(lane)
        return np.unique(channels[channels < self.arrangement.channels] // group)

    def load(self, pages: Pages, base: Tile, token: Tile, mask: Tile) -> list[Tile]:
        """What `code` needs of rows `token` [T, 1] of a page: words as i32 [T, width], or for one lane the codes themselves."""
        channel = self.channel_tile(0, 2)
        shape = (token.shape[0], self.width)
        token, channel = token.spread(shape), channel.spread(shape)
        inside = mask.spread(shape) & (indices(self.width, 1, 2) < self.units)
        place = place_of(self.arrangement, token, channel)
        word = base + (place.major * self.arrangement.shape[1] + place.minor).to(i64)

        def load(at: Tile) -> Tile:
            return pages.load_word(at, inside)

        if not self.split:
            return [field_at(self.arrangement, load, word, place.slot)]
        parts = 3 if self.arrangement.bits == 3 else 1
        return [load(word + part * word_stride(self.arrangement)) for part in range(parts)]

    def code(self, words: list[Tile], lane: int) -> Tile:
        """Codes of a lane as i32."""
        if not self.split:
            return words[0]
        bits = self.arrangement.bits
        if bits != 3:
            return (words[0] >> bits * lane) & ((1 << bits) - 1)
        half = self.arrangement.unit // 2
        low = (words[lane // half] >> (lane % half * 2)) & 3
        return low | (((words[2] >> lane) & 1) << 2)
