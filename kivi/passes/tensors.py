"""Kernels on whole tensors: quantize, codes, dequantize, repack.

Tensors are [B, Hkv, T, D] with any strides; words, scales and origins are contiguous. A program belongs to one (request, head) and
one block of its tensor. Each function returns a module with one kernel and the grid that covers the tensor, as data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kivi.ir.build import Pointer, Tile, indices, kernel, pointer, program_id, where
from kivi.ir.xdsl import Attribute, ModuleOp, i8, i32, i64
from kivi.layout import Arrangement
from kivi.passes import numbers
from kivi.passes.address import code_of, place_of, units
from kivi.passes.numbers import Numbers, float_pointer
from kivi.passes.quantize import (
    Extent,
    field_at,
    key_metadata,
    pack_units,
    power,
    store_words,
    value_metadata,
    word_offsets,
)

ELEMENTS = 4096  # of the largest intermediate tile of a program


@dataclass(frozen=True)
class Kernel:
    """A generated kernel: its module, its name, and its grid.

    A grid axis is a list of (argument, divisor): the product over its entries of the argument's value divided by the divisor,
    rounded up. So the launch of a cached kernel needs no compiler.
    """

    name: str
    module: ModuleOp
    grid: list[list[tuple[str, int]]]
    arguments: list[str] = field(default_factory=list)


STRIDES: dict[str, Attribute] = {"x_batch": i64, "x_head": i64, "x_token": i64, "x_channel": i64}


def element_offset(heads: Tile, x_batch: Tile, x_head: Tile) -> Tile:
    """Offset of the program's (request, head) in a strided tensor; grid axis 0 counts them."""
    row = program_id(0)
    return (row // heads).to(i64) * x_batch + (row % heads).to(i64) * x_head


def metadata_kernel(which: str, n: Numbers, channels: int) -> Kernel:
    """Scales and origins of x, and which groups are flat. flag [programs] counts numbers that exceed the metadata dtype."""
    width = power(n.group)
    lanes = min(power(channels), 64) if which == "key" else power(-(-channels // n.group))
    rows = max(1, ELEMENTS // (width * lanes))
    rows = min(rows, 16 if which == "value" else 8)

    def body(
        x: Pointer,
        scale: Pointer,
        origin: Pointer,
        flat: Pointer,
        flag: Pointer,
        tokens: Tile,
        heads: Tile,
        x_batch: Tile,
        x_head: Tile,
        x_token: Tile,
        x_channel: Tile,
        blocks: Tile,
    ) -> None:
        base = element_offset(heads, x_batch, x_head)
        extent = Extent(tokens * 0, tokens, channels)

        def source(token: Tile, channel: Tile, mask: Tile) -> Tile:
            return numbers.load_float(x, n.dtype, base + token.to(i64) * x_token + channel.to(i64) * x_channel, mask)

        outer = program_id(1) * rows + indices(rows, 0, 2)
        if which == "key":
            lane = program_id(2) * lanes + indices(lanes, 1, 2)
            s, o, over, plain, mask = key_metadata(source, extent, n, outer, lane)
            offset = ((program_id(0) * (tokens // n.group) + outer).to(i64) * channels).spread(s.shape) + lane.to(i64).spread(s.shape)
        else:
            per_row = -(-channels // n.group)
            lane = indices(lanes, 1, 2)
            s, o, over, plain, mask = value_metadata(source, extent, n, outer, lane)
            offset = ((program_id(0) * tokens + outer).to(i64) * per_row).spread(s.shape) + lane.to(i64).spread(s.shape)
        numbers.store_float(scale, n.metadata, offset, s, mask)
        numbers.store_float(origin, n.metadata, offset, o, mask)
        flat.store(offset, where(plain, 1, over * 0).to(i8), mask)
        hit = where(mask, over, 0).reduce("add", 0).reduce("add", 1)
        number = (program_id(0) * blocks + program_id(1)) * (-(-channels // lanes) if which == "key" else 1)
        number = number + program_id(2) if which == "key" else number
        flag.store(number.spread((1, 1)), hit)

    arguments = {
        "x": float_pointer(n.dtype),
        "scale": float_pointer(n.metadata),
        "origin": float_pointer(n.metadata),
        "flat": pointer(i8),
        "flag": pointer(i32),
        "tokens": i32,
        "heads": i32,
        **STRIDES,
        "blocks": i32,
    }
    name = f"{which}_metadata"
    grid = [[("batch", 1), ("heads", 1)], [("tokens", rows * (n.group if which == "key" else 1))]]
    grid.append([("channels", lanes)] if which == "key" else [])
    return Kernel(name, kernel(name, arguments, body), grid, list(arguments))


def store_page(
    words: Pointer,
    arrangement: Arrangement,
    code: Callable[[Tile, Tile, Tile], Tile],
    first: Tile,
    tokens: Tile,
    block: int,
    row: Tile,
    total: Tile,
) -> None:
    """Write this program's share of the words of the page that starts at token `first`; `code` gives the codes of its rows."""
    extent = Extent(first * 0, (tokens - first).minimum(arrangement.tokens), arrangement.channels)
    unit = program_id(2) * block + indices(block, 0, 2)
    parts, keep, major, minor = pack_units(arrangement, unit, code, extent)
    lead, step = code_of(arrangement, unit, unit * 0)[0], arrangement.token_step
    mask = (unit < units(arrangement)) & (lead // step < (extent.count + (step - 1)) // step)
    shift = program_id(1) * arrangement.shape[arrangement.token_axis]
    major, minor = (major + shift, minor) if arrangement.token_axis == 0 else (major, minor + shift)
    offsets = [program_id(0).to(i64) * total + o.to(i64) for o in word_offsets(arrangement, major, minor, row)]
    store_words(words, offsets, parts, keep, mask, partial=False)


def encode_kernel(which: str, n: Numbers, arrangement: Arrangement) -> Kernel:
    """Words of x, given its scales and origins and which groups are flat."""
    block = max(1, min(power(units(arrangement)), ELEMENTS // 4 // arrangement.unit))

    def body(
        x: Pointer,
        scale: Pointer,
        origin: Pointer,
        flat: Pointer,
        words: Pointer,
        tokens: Tile,
        heads: Tile,
        x_batch: Tile,
        x_head: Tile,
        x_token: Tile,
        x_channel: Tile,
        row: Tile,
        total: Tile,
    ) -> None:
        base = element_offset(heads, x_batch, x_head)
        first = program_id(1) * arrangement.tokens

        def code(token: Tile, channel: Tile, mask: Tile) -> Tile:
            token = token + first
            element = numbers.load_float(x, n.dtype, base + token.to(i64) * x_token + channel.to(i64) * x_channel, mask)
            at = metadata_offset(which, n, arrangement.channels, tokens, token, channel)
            s = numbers.load_float(scale, n.metadata, at, mask, 1.0)
            o = numbers.load_float(origin, n.metadata, at, mask, 0.0)
            return numbers.codes(element, s, o, flat.load(at, mask).to(i32) > 0, n)

        store_page(words, arrangement, code, first, tokens, block, row, total)

    arguments = {
        "x": float_pointer(n.dtype),
        "scale": float_pointer(n.metadata),
        "origin": float_pointer(n.metadata),
        "flat": pointer(i8),
        "words": pointer(arrangement.word),
        "tokens": i32,
        "heads": i32,
        **STRIDES,
        "row": i32,
        "total": i64,
    }
    name = f"{which}_encode"
    grid = [[("batch", 1), ("heads", 1)], [("tokens", arrangement.tokens)], [("units", block)]]
    return Kernel(name, kernel(name, arguments, body), grid, list(arguments))


def metadata_offset(which: str, n: Numbers, channels: int, tokens: Tile, token: Tile, channel: Tile) -> Tile:
    """Offset of an element's scale in the metadata of the whole tensor; grid axis 0 counts (request, head)."""
    if which == "key":
        rows = (tokens + (n.group - 1)) // n.group
        return (program_id(0) * rows + token // n.group).to(i64) * channels + channel.to(i64)
    per_row = -(-channels // n.group)
    return (program_id(0) * tokens + token).to(i64) * per_row + (channel // n.group).to(i64)


def word_of(arrangement: Arrangement, token: Tile, channel: Tile, row: Tile, total: Tile) -> tuple[Tile, Tile]:
    """(offset of the unit's first word, slot) of elements of a whole tensor, pages joined along the token star."""
    page = token // arrangement.tokens
    place = place_of(arrangement, token % arrangement.tokens, channel)
    shift = page * arrangement.shape[arrangement.token_axis]
    major, minor = (place.major + shift, place.minor) if arrangement.token_axis == 0 else (place.major, place.minor + shift)
    return program_id(0).to(i64) * total + (major * row + minor).to(i64), place.slot


def decode_kernel(which: str, n: Numbers, arrangement: Arrangement, dtype: str) -> Kernel:
    """Elements of packed words: codes for dtype "uint8", else dequantized and cast."""
    channels = arrangement.channels
    lanes = min(power(channels), 128)
    rows = 16

    def body(words: Pointer, scale: Pointer, origin: Pointer, out: Pointer, tokens: Tile, row: Tile, total: Tile) -> None:
        token = (program_id(1) * rows + indices(rows, 0, 2)).spread((rows, lanes))
        channel = (program_id(2) * lanes + indices(lanes, 1, 2)).spread((rows, lanes))
        mask = (token < tokens) & (channel < channels)
        word, slot = word_of(arrangement, token, channel, row, total)
        code = field_at(arrangement, lambda at: _word(words, at, mask), word, slot)
        at = (program_id(0) * tokens + token).to(i64) * channels + channel.to(i64)
        if dtype == "uint8":
            out.store(at, code.to(i8), mask)
            return
        place = metadata_offset(which, n, channels, tokens, token, channel)
        s, o = (numbers.load_float(p, n.metadata, place, mask) for p in (scale, origin))
        numbers.store_float(out, dtype, at, numbers.dequantized(code, s, o), mask)

    arguments = {
        "words": pointer(arrangement.word),
        "scale": float_pointer(n.metadata),
        "origin": float_pointer(n.metadata),
        "out": pointer(i8) if dtype == "uint8" else float_pointer(dtype),
        "tokens": i32,
        "row": i32,
        "total": i64,
    }
    name = f"{which}_codes" if dtype == "uint8" else f"{which}_dequantize_{dtype}"
    grid = [[("batch", 1), ("heads", 1)], [("tokens", rows)], [("channels", lanes)]]
    return Kernel(name, kernel(name, arguments, body), grid, list(arguments))


def repack_kernel(which: str, source: Arrangement, target: Arrangement) -> Kernel:
    """Words of one layout as words of another."""
    block = max(1, min(power(units(target)), ELEMENTS // 4 // target.unit))

    def body(words: Pointer, out: Pointer, tokens: Tile, row: Tile, total: Tile, out_row: Tile, out_total: Tile) -> None:
        first = program_id(1) * target.tokens

        def code(token: Tile, channel: Tile, mask: Tile) -> Tile:
            word, slot = word_of(source, token + first, channel, row, total)
            return field_at(source, lambda at: _word(words, at, mask), word, slot)

        store_page(out, target, code, first, tokens, block, out_row, out_total)

    arguments = {
        "words": pointer(source.word),
        "out": pointer(target.word),
        "tokens": i32,
        "row": i32,
        "total": i64,
        "out_row": i32,
        "out_total": i64,
    }
    name = f"{which}_repack"
    grid = [[("batch", 1), ("heads", 1)], [("tokens", target.tokens)], [("units", block)]]
    return Kernel(name, kernel(name, arguments, body), grid, list(arguments))


def _word(words: Pointer, offset: Tile, mask: Tile) -> Tile:
    return words.load(offset, mask).to(i32)
