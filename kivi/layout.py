"""Layouts: where each code of a page lies in memory, as data.

A page of codes is indexed by a token `t` and a channel `c`. A layout lists the digits of both indices from the least to the
most significant place of the memory order; the first digits select the slot inside a word, the rest select the word. Packing
is then a reshape, a transposition and a shift-or, and the same digits give a code generator its address arithmetic
(SPEC section 8). A digit is written

    t3  c0      one bit of the index
    t:5 c:2     the next five (two) lowest bits that no other digit names
    t:slot      as many next lowest bits as a word has slots
    c^slot      the topmost digit, with as many values as a word has slots (channels that are far apart share a word)
    w           which word of a three-word unit (3-bit codes only; by default right above the slots)
    t*  c*      what is left of the index; each exactly once, and one of them last

Example, 2-bit keys, 32-bit words, `"t:slot t* c*"`: sixteen consecutive tokens of one channel share a word, words of one
channel are contiguous. `words` is always two-dimensional: the major star with the digits below it, the minor star with the
digits below it. Pages are joined along the token star.
"""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from importlib import resources
from typing import Literal

import msgspec
import numpy as np
from msgspec import Struct

from kivi.errors import SpecError

Which = Literal["key", "value"]
WordType = Literal["uint8", "uint16", "uint32", "int32"]


MOST_BITS = 12  # that a layout may name of an index


class Layout(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named layout: word type and one digit string each for keys and values. `arrangement` tells whether it can be applied."""

    name: str
    word: WordType = "uint32"
    key: str
    value: str

    @property
    def word_bits(self) -> int:
        return int(self.word[-2:].lstrip("t"))


@dataclass(frozen=True)
class Digit:
    """One digit: index of `axis` = sum over its digits of (digit value * weight)."""

    axis: Literal["t", "c", "w"]
    weight: int
    extent: int
    star: bool = False


@dataclass(frozen=True)
class Arrangement:
    """A layout applied to pages of `tokens` x `channels` codes of `bits` bits.

    `slots` and `places` are the digits below and above the word boundary, least significant first. For 1, 2, 4 and 8 bits a
    unit is one word of `unit` codes. For 3 bits a unit is three words of `unit` codes: two words with the low two bits of
    each code, then one with the high bits (SPEC 8.5).
    """

    word: str
    bits: int
    tokens: int
    channels: int
    slots: tuple[Digit, ...]
    places: tuple[Digit, ...]

    @property
    def word_bits(self) -> int:
        return int(self.word[-2:].lstrip("t"))

    @cached_property
    def unit(self) -> int:
        """Codes a unit holds."""
        return codes_per_unit(self.bits, self.word_bits)

    @cached_property
    def _spread(self) -> list[Digit]:
        """The digits of the token and then of the channel, most significant first: the shape of codes with an axis a digit."""
        return [d for axis in "tc" for d in sorted((d for d in self.slots + self.places if d.axis == axis), key=lambda d: -d.weight)]

    @cached_property
    def padded_tokens(self) -> int:
        return math.prod(d.extent for d in self._spread if d.axis == "t")

    @cached_property
    def padded_channels(self) -> int:
        return math.prod(d.extent for d in self._spread if d.axis == "c")

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Shape of a page's words: (major, minor)."""
        minor = next(i for i, d in enumerate(self.places) if d.star) + 1
        sizes = [d.extent for d in self.places]
        return math.prod(sizes[minor:]), math.prod(sizes[:minor])

    @property
    def token_axis(self) -> int:
        """The axis of `shape` along which pages are joined: 0 if the token star is the major one, else 1."""
        return 0 if self.places[-1].axis == "t" else 1

    @cached_property
    def token_step(self) -> int:
        """Tokens that one step of the token star covers: the granularity at which rows can be rewritten."""
        return next(d.weight for d in self.places if d.star and d.axis == "t")

    @cached_property
    def words_per_step(self) -> int:
        """Words along `token_axis` that one step of the token star takes."""
        star = next(d for d in self.places if d.star and d.axis == "t")
        return self.shape[self.token_axis] // star.extent

    # -- pack and unpack one page, NumPy ------------------------------------------------------------------------------

    def pack(self, codes: np.ndarray) -> np.ndarray:
        """Words [..., major, minor] of codes [..., tokens, channels] (uint8). Padding lanes hold code 0."""
        lead = codes.shape[:-2]
        pad = [(0, 0)] * len(lead) + [(0, self.padded_tokens - codes.shape[-2]), (0, self.padded_channels - codes.shape[-1])]
        spread = np.pad(codes, pad).reshape(*lead, *(d.extent for d in self._spread))
        units = np.transpose(spread, self._order(len(lead)))
        units = units.reshape(*units.shape[: len(lead) + self._unit_places], self.unit)
        words = self._words_of(units.astype(np.uint32)).astype(np.dtype(f"uint{self.word_bits}"))
        if self.bits == 3:
            at = len(lead) + self._unit_places - self._w_place
            words = np.moveaxis(words, -1, at)
        else:
            words = words[..., 0]
        return np.ascontiguousarray(words).reshape(*lead, *self.shape).view(self.word)

    def unpack(self, words: np.ndarray) -> np.ndarray:
        """Codes [..., tokens, channels] (uint8) of words [..., major, minor]."""
        lead = words.shape[:-2]
        unsigned = np.ascontiguousarray(words).view(f"uint{self.word_bits}")
        places = list(reversed(self.places))
        unsigned = unsigned.reshape(*lead, *(d.extent for d in places))
        if self.bits == 3:
            unsigned = np.moveaxis(unsigned, len(lead) + self._unit_places - self._w_place, -1)
        else:
            unsigned = unsigned[..., None]
        units = self._codes_of(unsigned).reshape(*unsigned.shape[:-1], *(d.extent for d in reversed(self.slots)))
        spread = np.transpose(units, np.argsort(self._order(len(lead))))
        codes = spread.reshape(*lead, self.padded_tokens, self.padded_channels)
        return codes[..., : self.tokens, : self.channels]

    def _order(self, lead: int) -> list[int]:
        """Axes of the spread codes in memory order, most significant first."""
        return [*range(lead), *(lead + i for i in self._memory_order)]

    @cached_property
    def _memory_order(self) -> list[int]:
        memory = [d for d in reversed(self.places) if d.axis != "w"] + list(reversed(self.slots))
        return [self._spread.index(d) for d in memory]

    @cached_property
    def _unit_places(self) -> int:
        return sum(d.axis != "w" for d in self.places)

    @property
    def _w_place(self) -> int:
        """How many places lie below the digit `w`."""
        return next((i for i, d in enumerate(self.places) if d.axis == "w"), 0)

    def _words_of(self, units: np.ndarray) -> np.ndarray:
        if self.bits != 3:
            return _shift_or(units, self.bits)[..., None]
        half = self.unit // 2
        low = units & 3
        return np.stack([_shift_or(low[..., :half], 2), _shift_or(low[..., half:], 2), _shift_or(units >> 2, 1)], axis=-1)

    def _codes_of(self, words: np.ndarray) -> np.ndarray:
        if self.bits != 3:
            return _fields(words[..., 0], self.bits, self.unit)
        half = self.unit // 2
        low = np.concatenate([_fields(words[..., 0], 2, half), _fields(words[..., 1], 2, half)], axis=-1)
        return low | _fields(words[..., 2], 1, self.unit) << np.uint8(2)


def codes_per_unit(bits: int, word_bits: int) -> int:
    """Codes in a unit: a word of 1, 2, 4 or 8-bit codes, or three words of 3-bit codes."""
    return word_bits if bits == 3 else word_bits // bits


@lru_cache(maxsize=1024)
def arrangement(layout: Layout, which: Which, bits: int, tokens: int, channels: int) -> Arrangement:
    """`layout` for pages of `tokens` x `channels` codes. Raises `SpecError` if the digit string is not a permutation."""
    text = getattr(layout, which)
    where = f"layout {layout.name!r}, {which} = {text!r}"
    unit = codes_per_unit(bits, layout.word_bits)
    slot_bits = unit.bit_length() - 1
    symbols = text.split()
    used: dict[str, set[int]] = {"t": set(), "c": set()}
    for symbol in symbols:
        match = re.fullmatch(r"([tc])(\d{1,2})", symbol)
        if match:
            if int(match[2]) in used[match[1]]:
                raise SpecError(f"{where} names bit {symbol} twice; each index bit has one place")
            used[match[1]].add(int(match[2]))
    if sorted(s for s in symbols if s.endswith("*")) != ["c*", "t*"] or not symbols[-1].endswith("*"):
        raise SpecError(f"{where} needs t* and c* once each, one of them last: they hold what is left of the indices")
    if symbols.count("w") > 1 or sum("^" in s for s in symbols) > 1:
        raise SpecError(f"{where} has more than one 'w' or more than one '^' digit")

    digits: list[tuple[str, int, int, str]] = []  # axis, weight (0: not known yet), extent, kind
    for symbol in symbols:
        if match := re.fullmatch(r"([tc])(\d{1,2})", symbol):
            digits.append((match[1], 1 << int(match[2]), 2, "bit"))
        elif match := re.fullmatch(r"([tc]):(slot|\d{1,2})", symbol):
            for _ in range(slot_bits if match[2] == "slot" else int(match[2])):
                bit = next(b for b in range(128) if b not in used[match[1]])
                used[match[1]].add(bit)
                digits.append((match[1], 1 << bit, 2, "bit"))
        elif symbol == "c^slot":
            digits.append(("c", 0, unit, "top"))
        elif symbol == "w":
            if bits == 3:
                digits.append(("w", 1, 3, "w"))
        elif symbol in ("t*", "c*"):
            digits.append((symbol[0], 0, 0, "star"))
        else:
            raise SpecError(f"{where}: {symbol!r} is not a digit; write t3, t:5, t:slot, c^slot, w, t* or c*")
    if max(used["t"] | used["c"] | {0}) >= MOST_BITS:
        raise SpecError(
            f"{where} names an index bit above {MOST_BITS - 1}: no page has so many tokens or channels; use t* and c* for the rest"
        )
    if bits == 3 and "w" not in symbols:
        digits.insert(_boundary(digits, unit, where), ("w", 1, 3, "w"))

    extents = {"t": tokens, "c": channels}
    resolved: list[Digit] = []
    for axis, weight, extent, kind in digits:
        if kind in ("star", "top"):
            low = len(used[axis])
            if used[axis] != set(range(low)):
                missing = min(set(range(low)) - used[axis])
                raise SpecError(f"{where} leaves out bit {axis}{missing} below bit {axis}{max(used[axis])}; name it too")
            top = unit if axis == "c" and any(k == "top" for *_, k in digits) else 1
            star = max(1, -(-extents[axis] // ((1 << low) * top)))
            weight = 1 << low if kind == "star" else (1 << low) * star
            extent = star if kind == "star" else extent
        resolved.append(Digit(axis, weight, extent, kind == "star"))  # type: ignore[arg-type]
    cut = _boundary(digits, unit, where)
    if any(kind in ("star", "w") for *_, kind in digits[:cut]):
        raise SpecError(f"{where}: the digits of the slot may not contain t*, c* or w")
    return Arrangement(layout.word, bits, tokens, channels, tuple(resolved[:cut]), tuple(resolved[cut:]))


def _boundary(digits: list[tuple[str, int, int, str]], unit: int, where: str) -> int:
    """How many leading digits make up the slot."""
    size = count = 0
    size = 1
    while size < unit and count < len(digits):
        axis, _, extent, kind = digits[count]
        if kind in ("star", "w"):
            break
        size *= extent
        count += 1
    if size != unit:
        raise SpecError(
            f"{where}: the first digits select among {size} codes, but a unit of this width holds {unit}; start with t:slot, c:slot "
            f"or c^slot"
        )
    return count


# -- whole tensors: pages of `page` tokens, the last one as long as what is left ------------------------------------------


def pack(codes: np.ndarray, layout: Layout, which: Which, bits: int, page: int) -> np.ndarray:
    """Words [..., major, minor] of codes [..., T, C]; words restart at each page of `page` tokens (SPEC 8.4)."""
    tokens, channels = codes.shape[-2:]
    parts = [
        arrangement(layout, which, bits, min(page, tokens - start), channels).pack(codes[..., start : start + page, :])
        for start in range(0, tokens, page)
    ]
    if not parts:
        empty = arrangement(layout, which, bits, page, channels)
        parts = [np.take(empty.pack(np.zeros((*codes.shape[:-2], page, channels), np.uint8)), [], axis=empty.token_axis - 2)]
    axis = arrangement(layout, which, bits, page, channels).token_axis
    return np.concatenate(parts, axis=axis - 2)


def unpack(words: np.ndarray, layout: Layout, which: Which, bits: int, page: int, tokens: int, channels: int) -> np.ndarray:
    """Codes [..., tokens, channels] (uint8) of words as `pack` arranges them."""
    parts, at = [], 0
    for start in range(0, tokens, page):
        one = arrangement(layout, which, bits, min(page, tokens - start), channels)
        size = one.shape[one.token_axis]
        take = [slice(None)] * words.ndim
        take[one.token_axis - 2] = slice(at, at + size)
        parts.append(one.unpack(words[tuple(take)]))
        at += size
    if not parts:
        return np.zeros((*words.shape[:-2], 0, channels), np.uint8)
    return np.concatenate(parts, axis=-2)


@cache
def named_layout(name: str) -> Layout:
    """A layout of spec/layouts. Raises `SpecError` for an unknown name."""
    if name not in layouts():
        raise SpecError(
            f"packing.layout = {name!r} is not a known layout; use 'auto', one of {', '.join(layouts())}, or write one out as a table"
        )
    text = (resources.files("kivi") / "_spec" / "layouts" / f"{name}.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text), Layout)


@cache
def layouts() -> tuple[str, ...]:
    """Names of the layouts that ship with kivi, sorted."""
    folder = resources.files("kivi") / "_spec" / "layouts"
    return tuple(sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml")))


def _shift_or(codes: np.ndarray, bits: int) -> np.ndarray:
    """Fields of `bits` bits along the last axis joined into one number, the first one lowest."""
    shifts = np.arange(codes.shape[-1], dtype=np.uint32) * np.uint32(bits)
    return np.bitwise_or.reduce(codes << shifts, axis=-1)


def _fields(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The inverse of `_shift_or`, as uint8 with a new last axis of `count`."""
    shifts = (np.arange(count) * bits).astype(words.dtype)
    return ((words[..., None] >> shifts) & words.dtype.type((1 << bits) - 1)).astype(np.uint8)
