"""SPEC 3 and 8 as ONNX operators: quantize, dequantize, pack, unpack, on blocks of one page each.

A block is [blocks, tokens, channels] with the tokens of at most one page: every request, head and page is a block of its own. All
arithmetic is in float32, one operator for each operation of the spec, so each rounds once; staged numerics round to the input's dtype
and back after each. Nothing is rounded to an integer in half precision: a release of ONNX Runtime truncates there.
"""

from __future__ import annotations

import numpy as np

from kivi.backends.onnxruntime.graph import Value, join
from kivi.dtypes import largest, largest_scale
from kivi.layout import Arrangement, Digit
from kivi.passes.numbers import Numbers

F32 = "float32"


# -- SPEC 3 -----------------------------------------------------------------------------------------------------------


def quantize(x: Value, which: str, n: Numbers, channels: int) -> tuple[Value, Value, Value, Value]:
    """(codes uint8 [X, T, C], scale, origin, clamped) of x [X, T, C]: scale and origin [X, T/G, C] of keys, [X, T, ceil(C/G)] of values,
    clamped int64 [1], how many of them do not fit the metadata dtype."""
    g, top = x.graph, float((1 << n.bits) - 1)

    def rd(a: Value) -> Value:
        return a.to(n.dtype).to(F32) if n.numerics == "staged" else a

    groups, axis = grouped(x.to(F32), which, n.group, channels)
    bad = None
    if n.nonfinite == "propagate":
        bad = (g.op("IsNaN", groups) | g.op("IsInf", groups)).to(F32).reduce("Max", axis, keep=False) > 0.0
        groups = bad.unsqueeze(axis).where(0.0, groups)
    low, high = (groups.reduce(how, axis, keep=False) for how in ("Min", "Max"))
    scale = rd(rd(high - low) / top).to(n.metadata).to(F32)
    origin = low.to(n.metadata).to(F32)
    most_scale, most = largest_scale(n.metadata, n.bits), largest(n.metadata)
    over = [scale > most_scale, g.op("Abs", origin) > most]
    clamped = join([o.to("int64").reshape(-1) for o in over], 0).reduce("Sum", 0)
    if n.overflow == "saturate":
        scale, origin = scale.least(most_scale), origin.most(-most).least(most)
    flat = scale.equal(0.0) if bad is None else scale.equal(0.0) | bad
    scale = flat.where(1.0, scale)
    steps = rd(rd(groups - origin.unsqueeze(axis)) / scale.unsqueeze(axis)).most(0.0).least(top)
    codes = flat.unsqueeze(axis).where(0.0, g.op("Round", steps)).to("uint8")
    origin = origin.equal(0.0).where(0.0, origin)  # -0 is stored as +0
    if bad is not None:
        origin = bad.where(float("nan"), origin)
    return ungrouped(codes, which, n.group, channels), scale.to(n.metadata), origin.to(n.metadata), clamped


def dequantize(codes: Value, scale: Value, origin: Value, which: str, group: int, channels: int, whole: bool = False) -> Value:
    """float32 `scale * code`, then `+ origin`: [X, T, C]. `whole`: keys are whole groups of tokens, which after a crop they need not be."""
    tokens = codes.size(1)
    if which == "key" and not whole:
        codes = _padded(codes, 1, group)
    groups, axis = grouped(codes, which, group, channels)
    out = groups.to(F32) * scale.to(F32).unsqueeze(axis) + origin.to(F32).unsqueeze(axis)
    out = ungrouped(out, which, group, channels)
    return out if which == "value" or whole else out.slice(1, 0, tokens)


def grouped(x: Value, which: str, group: int, channels: int) -> tuple[Value, int]:
    """x [X, T, C] with an axis of its own for the elements of a group, and that axis. A last group of channels is filled up with its own
    last element, which changes neither its least nor its greatest."""
    if which == "key":
        return x.reshape(0, -1, group, channels), 2
    extra = -channels % group
    if extra:
        x = x.graph.op("Pad", x, x.graph.ints(0, 0, 0, 0, 0, extra), mode="edge")
    return x.reshape(0, 0, (channels + extra) // group, group), 3


def ungrouped(x: Value, which: str, group: int, channels: int) -> Value:
    """The inverse of `grouped`."""
    if which == "key":
        return x.reshape(0, -1, channels)
    flat = x.reshape(0, 0, -1)
    return flat.slice(2, 0, channels) if channels % group else flat


# -- SPEC 8 -----------------------------------------------------------------------------------------------------------


def pack(codes: Value, form: Arrangement) -> Value:
    """Words [X, major, minor] of codes uint8 [X, T, C]; they are unsigned, whatever the layout's word."""
    filled = _with_end(_padded(codes, 1, form.token_step), 2, form.padded_channels - form.channels)
    digits, memory = _spread(form), [*_slots(form), *_places(form)]
    units = filled.reshape(0, *_extents(digits)).transpose(0, *(1 + digits.index(d) for d in memory))
    units = units.reshape(0, form.unit, -1).to(_compute(form))
    if form.bits == 3:
        low, half = units & 3, form.unit // 2
        first, second = low.parts([half, half], 1)
        words = [_joined(first, 2, half), _joined(second, 2, half), _joined(units >> 2, 1, form.unit)]
        at = 1 + _place_of_w(form)
        joined = join([w.reshape(0, *_extents(_places(form))).unsqueeze(at) for w in words], at)
    else:
        joined = _joined(units, form.bits, form.unit)
    shape = [0, *form.shape]
    shape[1 + form.token_axis] = -1
    return joined.to(f"uint{form.word_bits}").reshape(*shape)


def unpack(words: Value, form: Arrangement) -> Value:
    """Codes uint8 [X, T, C] of such words; T fills them, so the caller cuts what is padding."""
    w = words.to(_compute(form))
    if form.bits == 3:
        at, half = 1 + _place_of_w(form), form.unit // 2
        w = w.reshape(0, *_extents(list(reversed(form.places))))
        first, second, high = (part.reshape(0, -1) for part in w.parts([1, 1, 1], at))
        low = join([_fields(first, 2, half), _fields(second, 2, half)], 1)
        units = low | (_fields(high, 1, form.unit) << 2)
    else:
        units = _fields(w.reshape(0, -1), form.bits, form.unit)
    memory, digits = [*_slots(form), *_places(form)], _spread(form)
    spread = units.to("uint8").reshape(0, *_extents(memory)).transpose(0, *(1 + memory.index(d) for d in digits))
    codes = spread.reshape(0, -1, form.padded_channels)
    return codes if form.padded_channels == form.channels else codes.slice(2, 0, form.channels)


def _spread(form: Arrangement) -> list[Digit]:
    """The digits of the token and then of the channel, most significant first."""
    digits = [d for d in form.slots + form.places if d.axis != "w"]
    return [d for axis in "tc" for d in sorted((d for d in digits if d.axis == axis), key=lambda d: -d.weight)]


def _places(form: Arrangement) -> list[Digit]:
    """The digits that number units, most significant first."""
    return [d for d in reversed(form.places) if d.axis != "w"]


def _slots(form: Arrangement) -> list[Digit]:
    """The digits that number codes of a unit, most significant first."""
    return list(reversed(form.slots))


def _place_of_w(form: Arrangement) -> int:
    """How many digits lie above the one that numbers the words of a unit."""
    return next(i for i, d in enumerate(reversed(form.places)) if d.axis == "w")


def _extents(digits: list[Digit]) -> list[int]:
    """A shape with an axis for each; how far the star of the token goes is known at run time."""
    return [-1 if d.star and d.axis == "t" else d.extent for d in digits]


def _compute(form: Arrangement) -> str:
    return "uint8" if form.word_bits == 8 else "uint32"


def _joined(fields: Value, bits: int, count: int) -> Value:
    """[X, N] of fields [X, count, N] of `bits` bits, the first one lowest. Fields are joined by halves, along an axis that is not the last
    one: the runtime takes an operand of many short rows element by element."""
    if count == 1:
        return fields.squeeze(1)
    joined = fields << _shifts(fields, bits, count)
    while count > 1:
        count //= 2
        low, high = joined.parts([count, count], 1)
        joined = low | high
    return joined.squeeze(1)


def _fields(words: Value, bits: int, count: int) -> Value:
    """The inverse of `_joined`."""
    wide = words.unsqueeze(1)
    return wide if count == 1 else (wide >> _shifts(words, bits, count)) & ((1 << bits) - 1)


def _shifts(words: Value, bits: int, count: int) -> Value:
    return words.graph.constant(np.arange(count).reshape(-1, 1) * bits, words.dtype)


def _padded(x: Value, axis: int, step: int) -> Value:
    """An axis of [X, T, C] filled up with 0 to a multiple of `step`, counted at run time."""
    if step == 1:
        return x
    g = x.graph
    extra = g.op("Mod", g.op("Sub", g.ints(0), x.size(axis)), g.ints(step))
    pads = [g.ints(*([0] * (3 + axis))), extra, *([g.ints(*([0] * (2 - axis)))] if axis < 2 else [])]
    return g.op("Pad", x, join(pads, 0), g.constant(0, x.dtype))


def _with_end(x: Value, axis: int, extra: int) -> Value:
    """`extra` zeros behind an axis of [X, T, C]."""
    if not extra:
        return x
    pads = [0] * 6
    pads[3 + axis] = extra
    return x.graph.op("Pad", x, x.graph.ints(*pads), x.graph.constant(0, x.dtype))
