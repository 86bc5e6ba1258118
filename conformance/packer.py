"""The naive packer: places one bit at a time by reading a layout's digit string, in plain Python integers.

It reads the layout files' text and nothing of `kivi.layout`. Digits run from the least to the most significant place of the
memory order; the first ones choose the slot inside a word, the rest choose the word (SPEC, layouts). Slow on purpose.
"""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from math import prod
from typing import NamedTuple

import numpy as np


class Digit(NamedTuple):
    """`index // weight % extent` of axis "t" (token), "c" (channel) or "w" (word of a three-word unit)."""

    axis: str
    weight: int
    extent: int
    star: bool = False


def layout_text(name: str, which: str) -> tuple[str, int]:
    """Digit string and word width in bits of a shipped layout."""
    data = tomllib.loads((resources.files("kivi") / "_spec" / "layouts" / f"{name}.toml").read_text("utf-8"))
    return data[which], {"uint8": 8, "uint16": 16, "uint32": 32, "int32": 32}[data["word"]]


def pack(codes: np.ndarray, name: str, which: str, bits: int, page: int) -> np.ndarray:
    """Words [major, minor] (uint64) of codes [T, C]; words restart at each page of `page` tokens."""
    text, width = layout_text(name, which)
    pages = [_pack_page(codes[start : start + page], text, width, bits) for start in range(0, len(codes), page)]
    return np.concatenate(pages, axis=0 if text.split()[-1] == "t*" else 1)


def _pack_page(codes: np.ndarray, text: str, width: int, bits: int) -> np.ndarray:
    in_unit = width if bits == 3 else width // bits
    tokens, channels = codes.shape
    digits = _digits(text, in_unit, tokens, channels, bits)
    cut = _slot_digits(digits, in_unit)
    words = [0] * prod(d.extent for d in digits[cut:])
    for (t, c), code in np.ndenumerate(codes):
        slot = _index(digits[:cut], {"t": t, "c": c, "w": 0})
        for bit in range(bits):
            if int(code) >> bit & 1:
                plane, at = _plane(slot, bit, in_unit) if bits == 3 else (0, bits * slot + bit)
                words[_index(digits[cut:], {"t": t, "c": c, "w": plane})] |= 1 << at
    minor = next(i for i, d in enumerate(digits) if d.star) + 1
    return np.array(words, np.uint64).reshape(prod(d.extent for d in digits[minor:]), -1)


def _plane(slot: int, bit: int, in_unit: int) -> tuple[int, int]:
    """3-bit codes: two words of low bit pairs, then one word of high bits."""
    half = in_unit // 2
    return (2, slot) if bit == 2 else (slot // half, 2 * (slot % half) + bit)


def _index(digits: list[Digit], at: dict[str, int]) -> int:
    value, scale = 0, 1
    for d in digits:
        value += at[d.axis] // d.weight % d.extent * scale
        scale *= d.extent
    return value


def _slot_digits(digits: list[Digit], in_unit: int) -> int:
    size = count = 0
    size = 1
    while size < in_unit:
        size *= digits[count].extent
        count += 1
    return count


def _digits(text: str, in_unit: int, tokens: int, channels: int, bits: int) -> list[Digit]:
    taken = {axis: {int(b) for b in re.findall(rf"\b{axis}(\d+)", text)} for axis in "tc"}
    out: list[Digit] = []
    for symbol in text.split():
        axis, rest = symbol[0], symbol[1:]
        if rest.startswith(":"):
            for _ in range(in_unit.bit_length() - 1 if rest == ":slot" else int(rest[1:])):
                bit = min(set(range(64)) - taken[axis])
                taken[axis].add(bit)
                out.append(Digit(axis, 2**bit, 2))
        elif rest.isdigit():
            out.append(Digit(axis, 2 ** int(rest), 2))
        elif symbol == "w":
            out += [Digit("w", 1, 3)] if bits == 3 else []
        else:  # a star or the topmost digit: weight and extent follow from what the others took
            out.append(Digit(axis, 0, in_unit if rest == "^slot" else 0, rest == "*"))
    length = {"t": tokens, "c": channels}
    top = {d.axis: d.extent for d in out if not d.weight and not d.star}
    for i, d in enumerate(out):
        if d.weight == 0:
            below = 2 ** len(taken[d.axis])
            star = max(1, -(-length[d.axis] // (below * top.get(d.axis, 1))))
            out[i] = Digit(d.axis, below, star, True) if d.star else Digit(d.axis, below * star, in_unit)
    if bits == 3 and not any(d.axis == "w" for d in out):
        out.insert(_slot_digits(out, in_unit), Digit("w", 1, 3))
    return out
