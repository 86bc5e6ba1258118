"""Interpreter of the `kv` dialect: SPEC 2 to 8 in NumPy, in the order of its text.

Quantization rounds exactly as the spec says. Attention is taken in float64 and rounded once an operation to its result's element type, so
it lies well within the bound of SPEC 7.4. Values of a run: a tensor is an array, codes are uint8 [B, H, T, D], words are
[B, H, major, minor], rows are a tuple with one `History` a request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kivi.dtypes import np_dtype
from kivi.errors import InputError, MetadataOverflowError, NonFiniteError, ShapeError, UnknownOperationError
from kivi.ir import kv
from kivi.ir.kv import Axis, GridAttr, Numerics, Overflow, RowsType, WordsType, metadata_type, name_of
from kivi.ir.xdsl import ModuleOp, Operation, SSAValue, TensorType, func
from kivi.layout import Arrangement


@dataclass(frozen=True)
class History:
    """One side of one request, oldest token first: codes uint8 [H, S, D] of the S sealed rows, their scales and origins (SPEC 2.2.2,
    2.3.3 without the request), and floating rows [H, N - S, D]."""

    codes: np.ndarray
    scale: np.ndarray
    origin: np.ndarray
    floating: np.ndarray

    @property
    def tokens(self) -> int:
        return self.codes.shape[1] + self.floating.shape[1]


Rows = tuple[History, ...]


def run(module: ModuleOp, name: str, arguments: dict[str, Any]) -> list[Any]:
    """The results of function `name` for its arguments, given by name or, if they have no names, in order.

    Raises `NonFiniteError`, `MetadataOverflowError`, `UnknownOperationError`.
    """
    function = next(op for op in module.ops if isinstance(op, func.FuncOp) and op.sym_name.data == name)
    block = function.body.block
    labels = [argument.name_hint for argument in block.args]
    given = list(arguments.values()) if None in labels else [arguments[str(label)] for label in labels]
    if len(given) != len(arguments) or len(given) != len(labels):
        raise InputError(f"function {name!r} takes {len(labels)} arguments ({labels}), got {sorted(arguments)}")
    values: dict[SSAValue, Any] = dict(zip(block.args, given, strict=True))
    for op in block.ops:
        operands = [values[o] for o in op.operands]
        if isinstance(op, func.ReturnOp):
            return operands
        rule = RULES.get(type(op))
        if rule is None:
            raise UnknownOperationError(f"the kv interpreter has no rule for {op.name}")
        results = rule(op, *operands)
        values.update(zip(op.results, results if len(op.results) > 1 else (results,), strict=True))
    return []


def empty(kind: RowsType, batch: int) -> Rows:
    """A cache that holds no token."""
    heads, channels = kind.source.get_shape()[1], kind.source.get_shape()[3]
    none = np.zeros((heads, 0, channels), np.uint8)
    metadata = np.zeros((heads, 0, metadata_type(kind.source, kind.grid).get_shape()[3]), np_dtype(name_of(kind.grid.metadata)))
    return (History(none, metadata, metadata, none.astype(_dtype(kind.source))),) * batch


def _dtype(kind: Any) -> np.dtype:
    return np_dtype(name_of(kind.element_type))


# -- SPEC 2 and 3 -----------------------------------------------------------------------------------------------------


def quantized(x: np.ndarray, grid: GridAttr) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes, scale, origin) of x [..., T, D]."""
    group = grid.group.data
    if grid.axis.data is Axis.CHANNEL:
        if x.shape[-2] % group:
            raise ShapeError(f"{x.shape[-2]} tokens are not whole groups of {group} (SPEC 2.2.3)")
        split = x.reshape(*x.shape[:-2], -1, group, x.shape[-1])
        codes, scale, origin = _groups(np.moveaxis(split, -2, -1), grid)
        return np.moveaxis(codes, -1, -2).reshape(x.shape), scale, origin
    parts = [_groups(x[..., first : first + group], grid) for first in range(0, x.shape[-1], group)]
    return np.concatenate([p[0] for p in parts], -1), np.stack([p[1] for p in parts], -1), np.stack([p[2] for p in parts], -1)


@np.errstate(over="ignore", under="ignore", invalid="ignore")
def _groups(x: np.ndarray, grid: GridAttr) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Groups along the last axis. Numbers are float32 throughout; `rd` rounds to the dtype in which staged numerics compute
    (SPEC 3.3.3), `meta` to that of the metadata."""
    metadata = np_dtype(name_of(grid.metadata))
    step = x.dtype if grid.numerics.data is Numerics.STAGED else np.dtype(np.float32)
    top = np.float32(2**grid.bits.data - 1)

    def rd(a: np.ndarray) -> np.ndarray:
        return a.astype(step).astype(np.float32)

    def meta(a: np.ndarray) -> np.ndarray:
        return a.astype(metadata).astype(np.float32)

    x = x.astype(np.float32)
    bad = np.asarray(~np.isfinite(x).all(-1))
    if bad.any() and grid.nonfinite.data is kv.NonFinite.REJECT:
        raise NonFiniteError("a group holds NaN or Inf; its grid says nonfinite = reject (SPEC 3.6.1)")
    x = np.where(bad[..., None], np.float32(0), x)
    low, high = x.min(-1), x.max(-1)
    scale = meta(rd(rd(high - low) / top))
    origin = meta(low)
    limit, most = _limits(grid)
    over = (scale > limit) | (np.abs(origin) > most)
    if over.any() and grid.overflow.data is Overflow.REJECT:
        at = tuple(int(i) for i in np.argwhere(over)[0])
        raise MetadataOverflowError(f"a group from {low[at]:g} to {high[at]:g} exceeds {grid.metadata}; its grid says overflow = reject")
    scale, origin = np.minimum(scale, limit), np.clip(origin, -most, most)
    degenerate = (scale == 0) | bad
    scale = np.where(degenerate, np.float32(1), scale)
    codes = np.rint(np.clip(rd(rd(x - origin[..., None]) / scale[..., None]), 0, top)).astype(np.uint8)
    codes[degenerate] = 0
    origin = np.where(bad, np.float32(np.nan), origin + np.float32(0))  # -0 is stored as +0
    return codes, scale.astype(metadata), origin.astype(metadata)


def _limits(grid: GridAttr) -> tuple[np.float32, np.float32]:
    """The largest scale, by the table of SPEC 3.7.2, and the largest finite number of the metadata dtype."""
    fraction, exponent = {"float16": (10, 15), "bfloat16": (7, 127), "float32": (23, 127)}[name_of(grid.metadata)]
    mantissa = 2 - 2.0**-fraction
    scale = exponent if exponent == 15 else exponent - grid.bits.data
    return np.float32(mantissa * 2.0**scale), np.float32(mantissa * 2.0**exponent)


def _each(a: np.ndarray, grid: GridAttr, shape: Sequence[int]) -> np.ndarray:
    """One number a group as one an element of [..., T, D]; a last group may be cut."""
    axis = -2 if grid.axis.data is Axis.CHANNEL else -1
    return np.repeat(a, grid.group.data, axis)[..., : shape[-2], : shape[-1]]


def _quantize(op: kv.QuantizeOp, x: np.ndarray) -> tuple[np.ndarray, ...]:
    return quantized(x, op.codes.type.grid)  # type: ignore[attr-defined]


@np.errstate(over="ignore", invalid="ignore")
def _dequantize(op: kv.DequantizeOp, codes: np.ndarray, scale: np.ndarray, origin: np.ndarray) -> np.ndarray:
    grid = op.codes.type.grid  # type: ignore[attr-defined]
    scale, origin = (_each(a.astype(np.float32), grid, codes.shape) for a in (scale, origin))
    return (scale * codes.astype(np.float32) + origin).astype(_dtype(op.result.type))


# -- SPEC 8 -----------------------------------------------------------------------------------------------------------


def packed(codes: np.ndarray, kind: Any) -> np.ndarray:
    """Words [..., major, minor] of codes [..., T, D], page by page; `kind`: a type with a grid and a layout."""
    parts = []
    for first, form in _pages(codes.shape[-2], codes.shape[-1], kind):
        page = codes[..., first : first + form.tokens, :].astype(np.uint32)
        words = np.zeros((*codes.shape[:-2], form.shape[0] * form.shape[1]), np.uint32)
        for word, shift, low, mask in _fields(form):
            place: Any = (..., word)
            np.bitwise_or.at(words, place, ((page >> np.uint32(low)) & np.uint32(mask)) << shift)
        parts.append(words.astype(f"uint{form.word_bits}").reshape(*codes.shape[:-2], *form.shape).view(form.word))
    return _joined(parts, codes.shape, kind)


def unpacked(words: np.ndarray, kind: Any, tokens: int, channels: int) -> np.ndarray:
    """Codes [..., T, D] of such words."""
    out = np.zeros((*words.shape[:-2], tokens, channels), np.uint32)
    at = 0
    for first, form in _pages(tokens, channels, kind):
        size = form.shape[form.token_axis]
        page = words[..., at : at + size, :] if form.token_axis == 0 else words[..., at : at + size]
        flat = np.ascontiguousarray(page).reshape(*words.shape[:-2], -1).view(f"uint{form.word_bits}").astype(np.uint32)
        for word, shift, low, mask in _fields(form):
            out[..., first : first + form.tokens, :] |= ((flat[..., word] >> shift) & np.uint32(mask)) << np.uint32(low)
        at += size
    return out.astype(np.uint8)


def _pages(tokens: int, channels: int, kind: Any) -> list[tuple[int, Arrangement]]:
    """(first token, arrangement) of each page; the last one is arranged for the tokens that are left (SPEC 8.4.2)."""
    page, bits = kind.layout.page.data, kind.grid.bits.data
    return [(first, kind.layout.arrangement(bits, min(page, tokens - first), channels)) for first in range(0, tokens, page)]


def _joined(parts: list[np.ndarray], shape: Sequence[int], kind: Any) -> np.ndarray:
    """Pages joined along the axis of the token star (SPEC 8.3.3)."""
    form = kind.layout.arrangement(kind.grid.bits.data, kind.layout.page.data, shape[-1])
    if not parts:
        none = [0 if axis == form.token_axis else size for axis, size in enumerate(form.shape)]
        return np.zeros((*shape[:-2], *none), form.word)
    return np.concatenate(parts, form.token_axis - 2)


def _fields(form: Arrangement) -> list[tuple[np.ndarray, np.ndarray, int, int]]:
    """(word, shift, first bit of the code, mask): the bit fields that hold the codes of a page, word and shift [T, D] (SPEC 8.2.3, 8.5)."""
    index = {"t": np.arange(form.tokens)[:, None], "c": np.arange(form.channels)[None, :]}

    def place(digits: Any) -> tuple[np.ndarray, int]:
        total, below, three = np.zeros((form.tokens, form.channels), np.int64), 1, 0
        for digit in digits:
            if digit.axis == "w":
                three = below
            else:
                total = total + index[digit.axis] // digit.weight % digit.extent * below
            below *= digit.extent
        return total, three

    (slot, _), (word, stride) = place(form.slots), place(form.places)
    if form.bits != 3:
        return [(word, (slot * form.bits).astype(np.uint32), 0, 2**form.bits - 1)]
    half = form.unit // 2
    low = (word + slot // half * stride, (slot % half * 2).astype(np.uint32), 0, 3)
    return [low, (word + 2 * stride, slot.astype(np.uint32), 2, 1)]


def _unpack(op: kv.UnpackOp, words: np.ndarray) -> np.ndarray:
    return unpacked(words, op.words.type, *_extents(op.words.type, words))


def _repack(op: kv.RepackOp, words: np.ndarray) -> np.ndarray:
    kind = op.source.type
    return packed(unpacked(words, kind, *_extents(kind, words)), op.words.type)


def _extents(kind: Any, words: np.ndarray) -> tuple[int, int]:
    """(tokens, channels) of words. A dynamic number of tokens is taken to fill the words, or the type says it."""
    assert isinstance(kind, WordsType)
    _, _, tokens, channels = kind.source.get_shape()
    if tokens >= 0:
        return tokens, channels
    form = kind.layout.arrangement(kind.grid.bits.data, kind.layout.page.data, channels)
    size = words.shape[form.token_axis - 2]
    if size % form.shape[form.token_axis]:
        raise ShapeError("words that do not fill their pages leave the number of tokens open; give the type a static one")
    return size // form.shape[form.token_axis] * form.tokens, channels


# -- SPEC 4 -----------------------------------------------------------------------------------------------------------


def _append(op: kv.AppendOp, rows: Rows, new: np.ndarray, counts: np.ndarray) -> Rows:
    kind = op.rows.type
    assert isinstance(kind, RowsType)
    out = []
    for old, x, count in zip(rows, new, counts.tolist(), strict=True):
        _check_finite(x[:, :count], kind.grid)
        out.append(History(old.codes, old.scale, old.origin, np.concatenate([old.floating, x[:, :count]], 1)))
    return tuple(out)


def _check_finite(x: np.ndarray, grid: GridAttr) -> None:
    if grid.nonfinite.data is kv.NonFinite.REJECT and not np.isfinite(x).all():
        raise NonFiniteError("a row holds NaN or Inf; the grid of this cache says nonfinite = reject (SPEC 3.6.1)")


def _seal(op: kv.SealOp, rows: Rows) -> Rows:
    kind, residual = op.rows.type, op.residual.value.data
    assert isinstance(kind, RowsType)
    block = op.policy.data is kv.Policy.BLOCK
    out = []
    for old in rows:
        while old.floating.shape[1] >= residual if block else old.floating.shape[1] > residual:
            due = residual if block else 1
            made = quantized(old.floating[:, :due], kind.grid)
            codes, scale, origin = (np.concatenate(pair, 1) for pair in zip((old.codes, old.scale, old.origin), made, strict=True))
            old = History(codes, scale, origin, old.floating[:, due:])
        out.append(old)
    return tuple(out)


# -- SPEC 5 -----------------------------------------------------------------------------------------------------------


def exact(h: History, grid: GridAttr) -> np.ndarray:
    """All rows of a request in float64, where scale * code is exact: [H, T, D]."""
    scale, origin = (_each(a.astype(np.float64), grid, h.codes.shape) for a in (h.scale, h.origin))
    return np.concatenate([scale * h.codes + origin, h.floating.astype(np.float64)], 1)


def _seen(tokens: int, count: int, rows: int) -> np.ndarray:
    """Which tokens the query rows see: bool [rows, tokens]."""
    row, token = np.arange(rows)[:, None], np.arange(tokens)[None, :]
    return (row < count) & (token <= tokens - count + row)


@np.errstate(invalid="ignore", over="ignore")
def _scores(op: kv.ScoresOp, q: np.ndarray, keys: Rows, counts: np.ndarray, scale: Any) -> np.ndarray:
    kind = op.keys.type
    assert isinstance(kind, RowsType)
    out = np.full((*q.shape[:3], max(h.tokens for h in keys)), -np.inf)
    for b, (h, count) in enumerate(zip(keys, counts.tolist(), strict=True)):
        _check_finite(q[b, :, :count], kind.grid)
        k = np.repeat(exact(h, kind.grid), q.shape[1] // h.codes.shape[0], 0)
        score = float(np.float32(scale)) * (q[b].astype(np.float64) @ np.swapaxes(k, -1, -2))
        out[b, :, :, : h.tokens] = np.where(_seen(h.tokens, count, q.shape[2]), score, -np.inf)
    return out.astype(_dtype(op.result.type))


@np.errstate(invalid="ignore", over="ignore", under="ignore")
def _softmax(op: kv.SoftmaxOp, scores: np.ndarray) -> np.ndarray:
    wide = scores.astype(np.float64)
    most = wide.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(wide - np.where(most == -np.inf, 0.0, most))
    total = weights.sum(-1, keepdims=True)
    return (weights / np.where(total == 0, 1.0, total)).astype(scores.dtype)


@np.errstate(invalid="ignore", over="ignore", under="ignore")
def _output(op: kv.OutputOp, p: np.ndarray, values: Rows, counts: np.ndarray) -> np.ndarray:
    kind, result = op.values.type, op.result.type
    assert isinstance(kind, RowsType)
    assert isinstance(result, TensorType)
    out = np.zeros((*p.shape[:3], kind.source.get_shape()[3]))
    for b, (h, count) in enumerate(zip(values, counts.tolist(), strict=True)):
        v = np.repeat(exact(h, kind.grid), p.shape[1] // h.codes.shape[0], 0)
        for i, seen in enumerate(_seen(h.tokens, count, p.shape[2])):
            out[b, :, i] = (p[b, :, i, : h.tokens][:, None, seen].astype(np.float64) @ v[:, seen])[:, 0]
    return out.astype(_dtype(result))


RULES: dict[type[Operation], Callable[..., Any]] = {
    kv.QuantizeOp: _quantize,
    kv.PackOp: lambda op, codes: packed(codes, op.words.type),
    kv.UnpackOp: _unpack,
    kv.RepackOp: _repack,
    kv.DequantizeOp: _dequantize,
    kv.AppendOp: _append,
    kv.SealOp: _seal,
    kv.ScoresOp: _scores,
    kv.SoftmaxOp: _softmax,
    kv.OutputOp: _output,
}
