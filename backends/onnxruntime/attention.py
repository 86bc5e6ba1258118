"""SPEC 5 as ONNX operators: one softmax over all tokens, taken in parts that are merged exactly.

A part is a run of tokens; its graph takes what the parts before it have found and returns it with its own tokens included:

    top     greatest score so far         [H, rows, 1], at first minus infinity
    total   sum of exp(score - top)       [H, rows, 1], at first 0
    part    sum of exp(score - top) * v   [H, rows, Dv], at first 0

`rows` are the query rows of all heads that read one KV head: of head h, row i, at `(h mod Hq/Hkv) * n + i`. There is a graph for each
kind of run, and one for the end:

    history   whole pages, keys and values sealed, seen by every row
    page      some rows of one page, keys and values sealed
    open      some rows of one page, keys sealed, values floating
    floating  floating rows
    planes    for history: its words with all but one code of each masked
    output    part / total in the dtype of the cache

Pages are read where they lie: memory of the pool comes in as it is, once for each type of its fields, and is cut into the largest units
at which all fields of all records begin. `pages` are the units at which pages begin; gathering the units of one field of the pages wanted
reads nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kivi.backends.onnxruntime import tensors
from kivi.backends.onnxruntime.graph import Graph, Value, join
from kivi.backends.onnxruntime.planes import LANE, channels_of_plane, groups_of_planes, in_planes, masked_apart, masks
from kivi.backends.onnxruntime.runs import unit_bytes
from kivi.dtypes import np_dtype
from kivi.layout import Arrangement
from kivi.pool import PageFormat

F32 = "float32"
ZONES = ("history", "page", "open", "floating")


@dataclass(frozen=True)
class Carry:
    """What is known of the tokens so far."""

    top: Value
    total: Value
    part: Value


class Zone:
    """A graph under construction: one kind of run.

    fold     scales leave the codes for the query and the weights, where the layout allows it: less work when there are few rows
    given    sides of which the history comes as planes that were masked before
    finite   whether rows that some query does not see are known to hold no NaN
    """

    def __init__(self, zone: str, form: PageFormat, dtype: str, fold: bool, given: tuple[str, ...], name: str) -> None:
        self.zone, self.form, self.dtype, self.fold, self.given = zone, form, dtype, fold, given
        self.slabs: dict[str, Value] = {}  # by type of field
        self.finite = form.spec.nonfinite == "reject"
        self.graph = g = Graph(name)
        heads, dim = form.kv_heads, form.value_head_dim
        query = g.input("q", dtype, (heads, "rows", form.head_dim))
        self.q = query.to(F32) * g.input("scale", F32, ())
        self.before = Carry(*(g.input(n, F32, (heads, "rows", size)) for n, size in (("top", 1), ("total", 1), ("part", dim))))
        self.seen = g.input("seen", "int64", ("rows",)) if zone != "history" else None
        if zone != "floating":
            self.pages = g.input("pages", "int64", ("pages",) if zone == "history" else (1,))

    def build(self) -> Graph:
        g = self.graph
        if self.zone == "history":
            after = self._history()
        else:
            bounds = [g.input(n, "int64", (1,)) for n in ("first", "last")] if self.zone != "floating" else []
            keys = self._cut("key", *bounds) if bounds else self._window("key")
            values = self._cut("value", *bounds) if self.zone == "page" else self._window("value")
            after = self._run(keys, values)
        heads = self.form.kv_heads
        for name, size in (("top", 1), ("total", 1), ("part", self.form.value_head_dim)):
            g.output(f"{name}_out", getattr(after, name), (heads, "rows", size))
        return self.graph

    # where rows come from

    def _side(self, which: str) -> tuple[Arrangement, int]:
        form = self.form
        return (form.key, form.spec.key.group) if which == "key" else (form.value, form.spec.value.group)

    def _field(self, name: str) -> Value:
        """One field of the pages wanted: [pages * H, *shape]."""
        field = self.form.fields[name]
        dtype = "uint32" if field.dtype == "int32" else field.dtype
        if dtype not in self.slabs:
            self.slabs[dtype] = slab(self.graph, self.form, dtype)
        return gathered(self.slabs[dtype], self.pages, self.form, name).reshape(-1, *field.shape)

    def _sealed(self, which: str) -> Value:
        """Sealed rows of the pages wanted, decoded: [pages, H, R, C]."""
        shape, group = self._side(which)
        codes = tensors.unpack(self._field(f"{which}.words"), shape)
        if shape.padded_tokens != shape.tokens:
            codes = codes.slice(1, 0, shape.tokens)
        scale, origin = self._field(f"{which}.scale"), self._field(f"{which}.origin")
        rows = tensors.dequantize(codes, scale, origin, which, group, shape.channels, whole=True)
        return rows.reshape(-1, self.form.kv_heads, shape.tokens, shape.channels)

    def _cut(self, which: str, first: Value, last: Value) -> Value:
        """Rows first to last - 1 of one page, decoded: [H, n, C]. Where no word holds codes of two tokens, no other row is looked at."""
        shape, group = self._side(which)
        if shape.token_step > 1 or shape.token_axis != 0:
            return self._sealed(which).squeeze(0).slice(1, first, last)
        codes = tensors.unpack(self._field(f"{which}.words").slice(1, first, last), shape)
        scale, origin = self._field(f"{which}.scale"), self._field(f"{which}.origin")
        if which == "value":
            scale, origin = scale.slice(1, first, last), origin.slice(1, first, last)
            return tensors.dequantize(codes, scale, origin, which, group, shape.channels)
        one = self.graph.constant(1, "int64")
        groups = self.graph.op("Range", first.squeeze(0), last.squeeze(0), one) / group
        return codes.to(F32) * scale.take(groups, 1).to(F32) + origin.take(groups, 1).to(F32)

    def _window(self, which: str) -> Value:
        """Floating rows at the slots wanted: [H, n, C]."""
        channels = self.form.head_dim if which == "key" else self.form.value_head_dim
        window = self.graph.input(f"{which}_rows", self.dtype, (self.form.kv_heads, f"{which}_slots", channels))
        return window.take(self.graph.input(f"{which}_at", "int64", ("tokens",)), 1).to(F32)

    # runs

    def _run(self, keys: Value, values: Value) -> Carry:
        """One run of tokens: keys [H, n, D], values [H, n, Dv]; row i of the queries sees the first seen[i] of them."""
        g, before = self.graph, self.before
        assert self.seen is not None
        number = g.op("Range", g.constant(0, "int64"), keys.size(1).squeeze(0), g.constant(1, "int64"))
        visible = number.unsqueeze(0) < self.seen.unsqueeze(1)
        scores = visible.where(self.q @ keys.transpose(0, 2, 1), float("-inf"))
        top = before.top.most(scores.reduce("Max", 2))
        # A row that has seen nothing yet has no greatest score: its exponents are those of minus infinity.
        base = g.op("IsInf", top, detect_positive=0).where(0.0, top)
        weights, decay = g.op("Exp", scores - base), g.op("Exp", before.top - base)
        total = before.total * decay + weights.reduce("Sum", 2)
        return Carry(top, total, before.part * decay + self._output(weights, values, visible))

    def _output(self, weights: Value, values: Value, visible: Value) -> Value:
        """Weights times values. What a row does not see has no influence on it, not even through 0 * NaN (SPEC 5.4.3): where the spec
        lets NaN and Inf in, they are left out of the product and added for the rows that see them."""
        if self.finite:
            return weights @ values
        g, nothing = self.graph, float("nan")
        odd = g.op("IsNaN", values) | g.op("IsInf", values)
        out, seen = weights @ odd.where(0.0, values), visible.to(F32)
        kinds = (
            (g.op("IsNaN", values), nothing),
            (g.op("IsInf", values, detect_negative=0), float("inf")),
            (g.op("IsInf", values, detect_positive=0), float("-inf")),
        )
        for found, mark in kinds:
            out = out + ((seen @ found.to(F32)) > 0.0).where(mark, 0.0)
        return out

    def _history(self) -> Carry:
        g, before = self.graph, self.before
        scores = self._folded_scores() if self._folds("key") else self.q @ self._sealed("key").transpose(0, 1, 3, 2)
        top = before.top.most(scores.reduce("Max", 0, 3).squeeze(0))
        weights, decay = g.op("Exp", scores - top), g.op("Exp", before.top - top)
        total = before.total * decay + weights.reduce("Sum", 0, 3).squeeze(0)
        if self._folds("value"):
            out = self._folded_output(weights)
        else:
            out = (weights @ self._sealed("value")).reduce("Sum", 0, keep=False)
        return Carry(top, total, before.part * decay + out)

    # with scales folded into the other factor

    def _folds(self, which: str) -> bool:
        return self.fold and in_planes(self.form, which)

    def _planes(self, which: str) -> Value:
        """Codes of the pages wanted, those of plane i times 2^(bits * i): [pages, H, planes, R, channels of a plane]."""
        shape, _ = self._side(which)
        size = (shape.tokens, channels_of_plane(shape))
        if which in self.given:
            word = f"uint{shape.word_bits}"
            return self.graph.input(f"{which}_planes", word, ("pages", self.form.kv_heads, shape.unit, *size)).to(F32)
        wide = self._field(f"{which}.words").reshape(-1, self.form.kv_heads, 1, *size)
        return (wide & self.graph.constant(np.array(masks(shape)).reshape(-1, 1, 1), wide.dtype)).to(F32)

    def _weights_of_planes(self, shape: Arrangement, *after: int) -> Value:
        """2^-(bits * i) of plane i, with axes of one for what follows the planes."""
        return self.graph.constant((2.0 ** -(shape.bits * np.arange(shape.unit))).reshape(-1, *after), F32)

    def _folded_scores(self) -> Value:
        """Scores [pages, H, rows, R]: per group of tokens, (q * scale) . codes + q . origin."""
        shape, heads, group = self.form.key, self.form.kv_heads, self.form.spec.key.group
        plane, groups = channels_of_plane(shape), shape.tokens // group
        scale, origin = (self._field(f"key.{p}").to(F32).reshape(-1, heads, groups, shape.channels) for p in ("scale", "origin"))
        shift = self.q @ origin.transpose(0, 1, 3, 2)  # [pages, H, rows, groups]
        folded = self.q.unsqueeze(1) * scale.unsqueeze(3)  # [pages, H, groups, rows, D]
        extra = shape.padded_channels - shape.channels
        if extra:
            folded = self.graph.op("Pad", folded, self.graph.ints(*[0] * 9, extra))
        folded = join([f.unsqueeze(2) for f in folded.parts([plane] * shape.unit, 4)], 2) * self._weights_of_planes(shape, 1, 1, 1)
        codes = self._planes("key").reshape(0, 0, 0, groups, group, plane)
        scores = (folded @ codes.transpose(0, 1, 2, 3, 5, 4)).reduce("Sum", 2, keep=False)  # [pages, H, groups, rows, G]
        scores = scores + shift.transpose(0, 1, 3, 2).unsqueeze(4)
        merged = scores.transpose(0, 1, 3, 2, 4)
        return merged.reshape(0, 0, 0, shape.tokens)

    def _folded_output(self, weights: Value) -> Value:
        """[H, rows, Dv]: (weights * scale) . codes + weights . origin."""
        shape, heads, group = self.form.value, self.form.kv_heads, self.form.spec.value.group
        count = -(-shape.channels // group)
        scale, origin = (self._field(f"value.{p}").to(F32).reshape(-1, heads, shape.tokens, count) for p in ("scale", "origin"))
        of_plane = self.graph.ints(*(groups[0] for groups in groups_of_planes(self.form)))
        spread = scale.transpose(0, 1, 3, 2).take(of_plane, 2) * self._weights_of_planes(shape, 1)  # [pages, H, planes, R]
        folded = weights.unsqueeze(2) * spread.unsqueeze(3)
        out = (folded @ self._planes("value")).reduce("Sum", 0, keep=False)  # [H, planes, rows, channels of a plane]
        out = out.transpose(0, 2, 1, 3).reshape(0, 0, shape.padded_channels)
        if shape.padded_channels != shape.channels:
            out = out.slice(2, 0, shape.channels)
        shift = (weights @ origin).reduce("Sum", 0, keep=False)
        return out + shift.take(self.graph.ints(*(c // group for c in range(shape.channels))), 2)


def slab(g: Graph, form: PageFormat, dtype: str) -> Value:
    """Slabs of the pool as units of one type."""
    return g.input(f"slab_{dtype}", dtype, ("units", unit_bytes(form) // np_dtype(dtype).itemsize))


def gathered(units: Value, pages: Value, form: PageFormat, name: str) -> Value:
    """The elements of one field of pages that begin at these units: [pages * H, elements]."""
    unit, field, size = unit_bytes(form), form.fields[name], np_dtype(units.dtype).itemsize
    record, count = form.bytes // unit, -(-field.bytes // unit)
    places = np.arange(form.kv_heads)[:, None] * record + field.offset // unit + np.arange(count)
    index = pages.unsqueeze(1, 2) + units.graph.constant(places, "int64")
    found = units.take(index, 0).reshape(-1, count * unit // size)
    return found if field.bytes % unit == 0 else found.slice(1, 0, field.bytes // size)  # without the bytes between fields


def planes(form: PageFormat, name: str) -> Graph:
    """The planes of pages, masked `LANE` bytes at a time, which takes a fraction of the time that words take: of each side
    [pages, H, planes, bytes of words / LANE]. What comes out is read as words again (`Zone`, given)."""
    g = Graph(name)
    units, pages = slab(g, form, "uint64"), g.input("pages", "int64", ("pages",))
    for which in masked_apart(form):
        shape = form.key if which == "key" else form.value
        lanes, size = form.fields[f"{which}.words"].bytes // LANE, shape.word_bits // 8
        wide = gathered(units, pages, form, f"{which}.words").reshape(-1, form.kv_heads, 1, lanes)
        repeated = [int.from_bytes(mask.to_bytes(size, "little") * (LANE // size), "little") for mask in masks(shape)]
        out = wide & g.constant(np.array(repeated, np.uint64).reshape(-1, 1), "uint64")
        g.output(f"{which}_planes", out, ("pages", form.kv_heads, shape.unit, lanes))
    return g


def output(form: PageFormat, dtype: str, name: str) -> Graph:
    """part / total, rounded to the dtype of the cache."""
    g = Graph(name)
    total = g.input("total", F32, (form.kv_heads, "rows", 1))
    part = g.input("part", F32, (form.kv_heads, "rows", form.value_head_dim))
    g.output("out", (part / total).to(dtype), (form.kv_heads, "rows", form.value_head_dim))
    return g
