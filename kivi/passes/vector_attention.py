"""Attention at `vec` level over pages in layout `lanes32`, and over floating rows: the kernels `history` and `tail` of
`kivi.passes.attention` with the same arguments and results, as a processor with vector registers wants them.

In `lanes32` 32 neighbouring words are 32 lanes: tokens for keys, channels for values. A word holds the codes that one lane sums over:
channels of a token for keys, tokens of a channel for values. So one micro-kernel serves both: it walks blocks of words, and for every code
position of a word adds code * coefficient to the lanes, where the coefficient is the same for all lanes of a group: query * scale of a
channel for keys, weight * scale of a token for values. No code is dequantized and nothing moves across lanes. Origins are folded as in
`kivi.passes.attention`.

Two ways to get from codes to a sum, by the abilities of the target:

    lookup   a table of 16 sums for four bits of a word, built from the coefficients: one permutation adds as many codes as four bits hold
    convert  shift, mask, convert to float, multiply and add

A program owns one (request, KV head), a block of query positions of all heads that share it, and one share of the pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kivi.dtypes import np_dtype
from kivi.ir.build import TYPES
from kivi.ir.tile import PtrType
from kivi.ir.vector import TABLE
from kivi.ir.vector_build import Pointer, Vector, buffer, constant, index, iota, kernel, loop, program_id, when, where
from kivi.ir.xdsl import Attribute, f32, i32, i64
from kivi.layout import named_layout
from kivi.passes.attention import COUNTS
from kivi.passes.tensors import Kernel
from kivi.passes.vector_math import exp2_below_one
from kivi.passes.vector_numbers import float_pointer, load_float, multiply_add, signed_float
from kivi.passes.vector_target import Target
from kivi.pool import PageFormat

LANES = 32  # of a block of words in layout lanes32
LINE = 64  # bytes of a line of the processor's caches
TILE = 64  # floating rows of a step
AHEAD = 16  # rows of a window that are asked for before they are read
INF = float("inf")


@dataclass(frozen=True)
class Schedule:
    """Choices that change speed and not results.

    queries   query positions of a program
    rows      query rows that are computed together, so that a word is unpacked once for them
    vectors   registers of lanes that are computed together, so that a coefficient or table is made once for them
    lookup    codes are looked up, not converted; only for targets that can
    """

    queries: int = 1
    rows: int = 4
    vectors: int = 2
    lookup: bool = False


def serves(form: PageFormat) -> bool:
    """Whether the pages of a cache are laid out as these kernels read them."""
    ours = named_layout("lanes32")
    return form.layout.word_bits == 32 and (form.layout.key, form.layout.value) == (ours.key, ours.value)


def schedule_for(target: Target, group_heads: int, rows: int) -> Schedule:
    """A schedule for calls with `rows` query positions."""
    queries = 1
    while queries < rows and queries * 2 * group_heads <= 16:
        queries *= 2
    together = min(target.registers // 4, group_heads * queries)
    sums = target.registers // 2 // together  # the other half of the registers is for words, codes and coefficients
    vectors = max(1, min(LANES // target.lanes, sums))
    return Schedule(queries=queries, rows=together, vectors=vectors, lookup=target.lookup)


@dataclass(frozen=True)
class Field:
    """Bits of a nibble of a word that belong to one slot: `code += (nibble >> shift & mask) * weight`."""

    slot: int
    shift: int
    mask: int
    weight: int


def nibbles(bits: int) -> list[tuple[int, int, list[Field]]]:
    """(word of the unit, shift of the nibble, its fields) of all nibbles of a unit."""
    if bits == 8:
        return [(0, 8 * slot + 4 * half, [Field(slot, 0, 15, 16**half)]) for slot in range(4) for half in range(2)]
    if bits != 3:
        per = 4 // bits
        mask = (1 << bits) - 1
        return [(0, 4 * n, [Field(per * n + i, bits * i, mask, 1) for i in range(per)]) for n in range(8)]
    low = [(part, 4 * n, [Field(16 * part + 2 * n + i, 2 * i, 3, 1) for i in range(2)]) for part in range(2) for n in range(8)]
    return low + [(2, 4 * n, [Field(4 * n + i, i, 1, 4) for i in range(4)]) for n in range(8)]


class MicroKernel:
    """Sums of code * coefficient over blocks of words, for `lanes` neighbouring lanes."""

    def __init__(self, bits: int, schedule: Schedule, target: Target) -> None:
        self.bits, self.target = bits, target
        self.lookup = schedule.lookup and target.lookup and bits != 8
        self.parts = 3 if bits == 3 else 1
        self.unit = 32 if bits == 3 else 32 // bits
        if self.lookup:
            number = iota(TABLE)
            fields = {f for _, _, fs in nibbles(bits) for f in fs}
            kinds = {(f.shift, f.mask, f.weight) for f in fields}
            self.patterns = {k: signed_float(((number >> k[0]) & k[1]) * k[2]) for k in sorted(kinds)}

    def __call__(
        self,
        words: Pointer,
        first: Vector,
        step: int,
        blocks: int,
        coefficient: Callable[[int, Vector, int], Vector],
        sums: list[list[Vector]],
        beside: Callable[[Vector], None] = lambda block: None,
    ) -> list[list[Vector]]:
        """`sums` [rows][vectors] with the sums of `blocks` blocks of words added. `beside` adds what else is to be done at each block.

        first   offset of the first lane's word
        step    words from a block to the next
        coefficient(row, block, slot) -> scalar
        """
        rows, vectors, width = len(sums), len(sums[0]), sums[0][0].lanes
        spare = 2 if self.lookup and rows == 1 else 1  # one row has too few chains of sums to hide an addition
        start = [x for row in sums for x in row] + [constant(0.0, f32, width)] * (rows * vectors * (spare - 1))

        def body(block: Vector, *carried: Vector) -> list[Vector]:
            beside(block)
            at = first + block * step
            load = [[words.load(at + (part * LANES + v * width), width) for v in range(vectors)] for part in range(self.parts)]
            state = list(carried)
            add = self._look_up if self.lookup else self._convert
            add(load, lambda row, slot: coefficient(row, block, slot), state, rows, vectors, spare)
            return state

        done = loop(0, blocks, start, body)
        total = [done[i] + done[i + rows * vectors] if spare == 2 else done[i] for i in range(rows * vectors)]
        return [total[row * vectors : (row + 1) * vectors] for row in range(rows)]

    def _look_up(self, words: list, coefficient: Callable, state: list, rows: int, vectors: int, spare: int) -> None:
        for number, (part, shift, fields) in enumerate(nibbles(self.bits)):
            positions = [w >> shift for w in words[part]]
            for row in range(rows):
                table = None
                for f in fields:
                    pattern, c = self.patterns[f.shift, f.mask, f.weight], coefficient(row, f.slot).spread(TABLE)
                    table = pattern * c if table is None else multiply_add(pattern, c, table, self.target)
                for v in range(vectors):
                    at = row * vectors + v + (number % spare) * rows * vectors
                    state[at] = state[at] + table.lookup(positions[v])  # type: ignore[union-attr]

    def _convert(self, words: list, coefficient: Callable, state: list, rows: int, vectors: int, spare: int) -> None:
        for slot in range(self.unit):
            codes = [signed_float(self._code([part[v] for part in words], slot)) for v in range(vectors)]
            for row in range(rows):
                c = coefficient(row, slot).spread(codes[0].lanes)
                for v in range(vectors):
                    at = row * vectors + v
                    state[at] = multiply_add(codes[v], c, state[at], self.target)

    def _code(self, parts: list[Vector], slot: int) -> Vector:
        if self.bits != 3:
            return (parts[0] >> self.bits * slot) & ((1 << self.bits) - 1)
        half = self.unit // 2
        return ((parts[slot // half] >> slot % half * 2) & 3) | (((parts[2] >> slot) & 1) << 2)


def pieces(count: int, lanes: int) -> list[tuple[int, int]]:
    """(first, lanes) of vectors that cover what is left of `count` elements after the full ones, powers of two."""
    out, at = [], count - count % lanes
    while at < count:
        width = 1 << (count - at).bit_length() - 1
        out.append((at, width))
        at += width
    return out


class Attend:
    """The body of one attention kernel."""

    def __init__(self, form: PageFormat, group_heads: int, dtype: str, schedule: Schedule, target: Target, given: dict) -> None:
        self.form, self.dtype, self.target, self.given = form, dtype, target, given
        self.poison = form.spec.nonfinite == "propagate"
        self.group_heads, self.schedule = group_heads, schedule
        self.lanes = target.lanes
        self.real = group_heads * schedule.queries
        self.together = min(schedule.rows, self.real)
        self.rows = -(-self.real // self.together) * self.together
        self.keys = MicroKernel(form.spec.key.bits, schedule, target)
        self.values = MicroKernel(form.spec.value.bits, schedule, target)
        self.tokens = form.tokens
        self.width = max(self._up(form.tokens, self.lanes), TILE)  # of a row of scores
        self.per_token = -(-form.value_head_dim // form.spec.value.group)
        self.key_channels = form.key.padded_channels
        self.value_channels = self._up(form.value.padded_channels, self.lanes)
        self.value_coefficients = form.value.padded_tokens * self.per_token

        program = program_id(0).to(i64)
        self.request, self.head = program // form.kv_heads, program % form.kv_heads
        self.n = {name: given["counts"].load(self.request * len(COUNTS) + i) for i, name in enumerate(COUNTS)}
        self.query_block = program_id(2).to(i64) * schedule.queries

        self.q = buffer(self.rows * self.key_channels, f32)
        self.score = buffer(self.rows * self.width, f32)
        self.sum = buffer(self.rows * self.value_channels, f32)
        self.key_coefficient = buffer(self.together * self.key_channels, f32)
        self.value_coefficient = buffer(self.together * self.value_coefficients, f32)
        self.wide = self.per_token >= 8  # a token has enough groups to fill vectors
        self.origin_step = 1 if self.wide else min(self.lanes, form.tokens & -form.tokens)  # tokens whose origins are summed apart
        self.origin_sum = buffer(self.rows * self.origin_step * self.per_token, f32)
        self.top = buffer(self.rows, f32)
        self.total = buffer(self.rows, f32)
        self.last = buffer(self.rows, i64)  # the last token that a query sees
        self._start()

    @staticmethod
    def _up(n: int, multiple: int) -> int:
        return -(-n // multiple) * multiple

    # beginning and end

    def _each_row(self, body: Callable[[Vector, Vector, Vector], None]) -> None:
        """body(row, query, head) for the rows that a call fills; query counts positions of the call, head query heads."""

        def one(row: Vector) -> list[Vector]:
            body(row, self.query_block + row // self.group_heads, self.head * self.group_heads + row % self.group_heads)
            return []

        self._repeat(self.real, 1, one)

    def _blocks(self, body: Callable[[Vector], None]) -> None:
        """body(first row) for every `together` rows."""
        self._repeat(self.rows, self.together, lambda r0: body(r0) or [])

    @staticmethod
    def _repeat(count: int, step: int, body: Callable[[Vector], list[Vector]]) -> None:
        """A loop, or its only turn."""
        if count <= step:
            body(index(0))
        else:
            loop(0, count, [], body, step=step)

    def _start(self) -> None:
        self._fill(self.q, self.rows * self.key_channels, 0.0)
        self._fill(self.sum, self.rows * self.value_channels, 0.0)
        self._fill(self.origin_sum, self.rows * self.origin_step * self.per_token, 0.0)
        self._fill(self.key_coefficient, self.together * self.key_channels, 0.0)  # padding stays 0
        self._fill(self.value_coefficient, self.together * self.value_coefficients, 0.0)
        self._fill(self.top, self.rows, -INF)
        self._fill(self.total, self.rows, 0.0)
        for row in range(self.real, self.rows):
            self.last.store(row, constant(-1, i64))
        g = self.given

        def one_row(row: Vector, query: Vector, head: Vector) -> None:
            base = self.request * g["q_batch"] + head * g["q_head"] + query * g["q_token"]
            self.last.store(row, self.n["stored"] + self.n["chunk"] - self.n["count"] + query)

            def copy(c: Vector, lanes: int) -> None:
                x = load_float(g["q"], self.dtype, base + c, lanes, self.target)
                self.q.store(row * self.key_channels + c, x * g["scale"])

            when(query < self.n["count"], lambda: self._over(self.form.head_dim, copy))

        self._each_row(one_row)

    def _fill(self, target: Pointer, count: int, value: float) -> None:
        self._over(count, lambda at, lanes: target.store(at, constant(value, f32, lanes)))

    def _over(self, count: int, body: Callable[[Vector, int], None]) -> None:
        """body(first, lanes) for vectors that cover `count` elements."""
        full = count // self.lanes
        if full == 1:
            body(index(0), self.lanes)
        elif full:
            loop(0, full * self.lanes, [], lambda i: body(i, self.lanes) or [], step=self.lanes)
        for at, width in pieces(count, self.lanes):
            body(index(at), width)

    def store(self, slot: Vector, q_heads: int) -> None:
        """Maxima, sums and outputs of this program's rows, as partial result `slot`."""
        g, dim, group = self.given, self.form.value_head_dim, self.form.spec.value.group

        def one_row(row: Vector, query: Vector, head: Vector) -> None:
            when(query < g["rows"].to(i64), lambda: write(row, query, head))

        def write(row: Vector, query: Vector, head: Vector) -> None:
            at = slot * g["outputs"] + (self.request * q_heads + head) * g["rows"].to(i64) + query
            g["top"].store(at, self.top.load(row))
            g["total"].store(at, self.total.load(row))

            def one_group(number: Vector, count: int) -> None:
                base = row * (self.origin_step * self.per_token) + number

                def add(i: Vector, shift: Vector) -> list[Vector]:
                    return [shift + self.origin_sum.load(base + i * self.per_token)]

                [shift] = loop(0, self.origin_step, [constant(0.0, f32)], add)
                first = number * group

                def channels(c: Vector, lanes: int) -> None:
                    x = self.sum.load(row * self.value_channels + first + c, lanes)
                    g["part"].store(at * dim + first + c, x + shift)

                self._over(count, channels)

            whole = dim // group
            if whole:
                loop(0, whole, [], lambda number: one_group(number, group) or [])
            if dim % group:
                one_group(index(whole), dim % group)

        self._each_row(one_row)

    # scores of a page's keys

    def _base(self, record: Vector, field: str) -> Vector:
        """Offset of a field's first element, in elements of its type."""
        place = self.form.fields[field]
        size = np_dtype(place.dtype).itemsize
        return (record + place.offset) >> (size.bit_length() - 1)

    def prefetch(self, record: Vector | None, number: Vector, count: int) -> None:
        """Ask for share `number` of `count` of a record.

        The records of one head lie a page apart and are walked field by field, which no hardware prefetcher follows.
        """
        if record is None:
            return
        lines = -(-self.form.bytes // LINE // count)
        first = (record >> 2) + number * (lines * LINE // 4)
        for line in range(lines):
            self.given["page_words"].prefetch(first + line * LINE // 4)

    def sealed_scores(self, record: Vector, following: Vector | None = None) -> None:
        """Scores of all rows of a page, visible or not. Half of the record `following` is prefetched meanwhile."""
        group, dim = self.form.spec.key.group, self.form.head_dim
        words = self._base(record, "key.words")
        scales, origins = (self._base(record, f"key.{name}") for name in ("scale", "origin"))
        lanes = math.gcd(group, LANES)  # neighbouring lanes of one group
        row_words = self.form.key.shape[1]

        def one_group(number: Vector) -> list[Vector]:
            at = number * dim

            def some_rows(r0: Vector) -> None:
                shifts = self._key_coefficients(r0, scales + at, origins + at)

                def some_tokens(i: Vector) -> list[Vector]:
                    token = number * group + i
                    first = words + (token // LANES) * row_words + token % LANES
                    self._key_tokens(r0, first, token, lanes, shifts, following)
                    return []

                self._repeat(group, lanes, some_tokens)

            self._blocks(some_rows)
            return []

        loop(0, self.tokens // group, [], one_group)

    def _key_coefficients(self, r0: Vector, scales: Vector, origins: Vector) -> list[Vector]:
        """query * scale of `together` rows into the buffer; query . origin of each."""
        metadata, rows, dim = self.form.key_metadata, range(self.together), self.form.head_dim

        def body(c: Vector, lanes: int, shifts: list[Vector]) -> list[Vector]:
            s = load_float(self.given["page_key_metadata"], metadata, scales + c, lanes, self.target)
            o = load_float(self.given["page_key_metadata"], metadata, origins + c, lanes, self.target)
            out = []
            for r in rows:
                q = self.q.load((r0 + r) * self.key_channels + c, lanes)
                self.key_coefficient.store(c + r * self.key_channels, q * s)
                out.append(multiply_add(q, o, shifts[r], self.target))
            return out

        full = dim - dim % self.lanes
        sums = [constant(0.0, f32, self.lanes) for _ in rows]
        if full:
            sums = loop(0, full, sums, lambda c, *s: body(c, self.lanes, list(s)), step=self.lanes)
        shifts = [s.reduce("add") for s in sums] if full else [constant(0.0, f32) for _ in rows]
        for at, width in pieces(dim, self.lanes):
            rest = body(index(at), width, [constant(0.0, f32, width) for _ in rows])
            shifts = [a + b.reduce("add") for a, b in zip(shifts, rest, strict=True)]
        return shifts

    def _key_tokens(self, r0: Vector, first: Vector, token: Vector, lanes: int, shifts: list[Vector], following: Vector | None) -> None:
        """Scores of `lanes` tokens whose words begin at `first`."""
        width, vectors = self._split(lanes)
        blocks = self.key_channels // self.keys.unit
        shares = self.tokens // lanes * blocks

        def beside(block: Vector) -> None:
            self.prefetch(following, token // lanes * blocks + block, 2 * shares)

        def coefficient(row: int, block: Vector, slot: int) -> Vector:
            return self.key_coefficient.load(block * self.keys.unit + (row * self.key_channels + slot))

        for lane in range(0, lanes, width * vectors):
            start = [[shifts[r].spread(width)] * vectors for r in range(self.together)]
            more = [beside] if lane == 0 else []
            sums = self.keys(self.given["page_words"], first + lane, self.keys.parts * LANES, blocks, coefficient, start, *more)
            for r in range(self.together):
                for v in range(vectors):
                    self.score.store((r0 + r) * self.width + token + (lane + v * width), sums[r][v])

    def _split(self, lanes: int) -> tuple[int, int]:
        """(width, vectors) that are computed together of `lanes` lanes of one group."""
        width = min(self.lanes, lanes)
        return width, max(1, min(self.schedule.vectors, lanes // width))

    # softmax

    def softmax(self, first: Vector, end: Vector, count: int) -> None:
        """Scores of tokens first + i, i < count, as weights; those at `end` and later and those that a query may not see weigh 0."""
        padded = self._up(count, self.lanes)
        lane = iota(self.lanes)

        def one_row(row: Vector) -> list[Vector]:
            last = (self.last.load(row).minimum(end - 1) - first).maximum(-1).minimum(count - 1).to(i32)
            base = row * self.width

            def seen(i: Vector) -> Vector:
                return lane + i.to(i32) <= last

            def highest(i: Vector, most: Vector) -> list[Vector]:
                s = where(seen(i), self.score.load(base + i, self.lanes), -INF)
                self.score.store(base + i, s)
                return [where(s > most, s, most)]

            [most] = loop(0, padded, [constant(-INF, f32, self.lanes)], highest, step=self.lanes)
            old = self.top.load(row)
            new = old.maximum(most.reduce("max"))
            safe = where(new.equals(-INF), 0.0, new)

            def weigh(i: Vector, total: Vector) -> list[Vector]:
                p = exp2_below_one(self.score.load(base + i, self.lanes) - safe, self.target)
                self.score.store(base + i, p)
                return [total + p]

            [total] = loop(0, padded, [constant(0.0, f32, self.lanes)], weigh, step=self.lanes)
            shrink = exp2_below_one((old - safe).spread(self.lanes), self.target)
            one = exp2_below_one(old - safe, self.target)
            self.total.store(row, self.total.load(row) * one + total.reduce("add"))
            self.top.store(row, new)

            def rescale() -> None:
                self._scale(self.sum, row * self.value_channels, self.value_channels, shrink)
                count = self.origin_step * self.per_token
                self._scale(self.origin_sum, row * count, count, shrink)

            when((new > old), rescale)
            return []

        loop(0, self.rows, [], one_row)

    def _scale(self, target: Pointer, base: Vector, count: int, factor: Vector) -> None:
        def body(at: Vector, lanes: int) -> None:
            by = factor if lanes == factor.lanes else factor.shuffle(range(lanes))
            target.store(base + at, target.load(base + at, lanes) * by)

        self._over(count, body)

    # sums of a page's values

    def sealed_values(self, record: Vector, first: Vector, sealed: Vector | None = None, following: Vector | None = None) -> None:
        """Weights of a page times its values, added to the sums. `sealed`: values at this row of the page and later are still floating.
        The other half of the record `following` is prefetched meanwhile.
        """
        words = self._base(record, "value.words")
        scales, origins = (self._base(record, f"value.{name}") for name in ("scale", "origin"))
        group, dim = self.form.spec.value.group, self.form.value_head_dim
        lanes = math.gcd(group, LANES)
        row_words, parts = self.form.value.shape[1], self.values.parts

        def some_rows(r0: Vector) -> None:
            self._value_coefficients(r0, scales, origins, first, sealed)

            def some_channels(c: Vector) -> list[Vector]:
                at = words + (c // LANES) * (parts * LANES) + c % LANES
                self._value_channels(r0, at, c, c // group, lanes, row_words, following)
                return []

            loop(0, dim, [], some_channels, step=lanes)

        self._blocks(some_rows)

    def _value_coefficients(self, r0: Vector, scales: Vector, origins: Vector, first: Vector, sealed: Vector | None) -> None:
        """weight * scale of every (token, group) into the buffer, `together` rows; weight * origin summed over tokens.

        A vector holds neighbouring (token, group) pairs as metadata lies in the page; a shuffle spreads the weights of its tokens.
        """
        if self.wide:
            self._wide_value_coefficients(r0, scales, origins, first, sealed)
            return
        step, per, rows, metadata = self.origin_step, self.per_token, range(self.together), self.form.value_metadata
        page = self.given["page_value_metadata"]
        orders = [[(i * step + lane) // per for lane in range(step)] for i in range(per)]

        def body(token: Vector, *sums: Vector) -> list[Vector]:
            at, out = token * per, list(sums)
            weights = [self.score.load((r0 + r) * self.width + token, step) for r in rows]
            for i, order in enumerate(orders):
                s = load_float(page, metadata, scales + at + i * step, step, self.target)
                o = load_float(page, metadata, origins + at + i * step, step, self.target)
                here = iota(step).shuffle(order) + token.to(i32)
                for r in rows:
                    p, visible = weights[r].shuffle(order), None
                    if sealed is not None:
                        p = where(here < sealed.to(i32), p, 0.0)
                    product = p * o
                    if self.poison:  # NaN of a token that a query may not see must not reach it as 0 * NaN
                        last = self.last.load(r0 + r) - first
                        visible = here <= (last if sealed is None else last.minimum(sealed - 1)).to(i32)
                        product = where(visible, product, 0.0)
                    self.value_coefficient.store(at + (r * self.value_coefficients + i * step), p * s)
                    out[r * per + i] = out[r * per + i] + product
            return out

        places = [(r0 + r) * (step * per) + i * step for r in rows for i in range(per)]
        start = [self.origin_sum.load(at, step) for at in places]
        for at, x in zip(places, loop(0, self.tokens, start, body, step=step), strict=True):
            self.origin_sum.store(at, x)

    def _wide_value_coefficients(self, r0: Vector, scales: Vector, origins: Vector, first: Vector, sealed: Vector | None) -> None:
        """The same with the groups of one token along the lanes. Tokens whose values are not sealed keep the coefficient 0."""
        per, rows, metadata, page = self.per_token, range(self.together), self.form.value_metadata, self.given["page_value_metadata"]
        if sealed is not None:
            self._fill(self.value_coefficient, self.together * self.value_coefficients, 0.0)
        end = index(self.tokens) if sealed is None else sealed.maximum(0).minimum(self.tokens)

        def one_token(token: Vector) -> list[Vector]:
            def groups(n: Vector, lanes: int) -> None:
                at = token * per + n
                s = load_float(page, metadata, scales + at, lanes, self.target)
                o = load_float(page, metadata, origins + at, lanes, self.target)
                for r in rows:
                    p = self.score.load((r0 + r) * self.width + token)
                    product, place = o * p, (r0 + r) * per + n
                    if self.poison:  # NaN of a token that a query may not see must not reach it as 0 * NaN
                        product = where(token + first <= self.last.load(r0 + r), product, 0.0)
                    self.value_coefficient.store(at + r * self.value_coefficients, s * p)
                    self.origin_sum.store(place, self.origin_sum.load(place, lanes) + product)

            self._over(per, groups)
            return []

        loop(0, end, [], one_token)

    def _value_channels(
        self, r0: Vector, first: Vector, channel: Vector, group: Vector, lanes: int, row_words: int, following: Vector | None
    ) -> None:
        """Sums of `lanes` channels of one group, whose words begin at `first`."""
        width, vectors = self._split(lanes)
        per, unit = self.per_token, self.values.unit
        blocks = self.form.value.padded_tokens // unit
        shares = -(-self.form.value_head_dim // lanes) * blocks

        def beside(block: Vector) -> None:
            self.prefetch(following, channel // lanes * blocks + block + shares, 2 * shares)

        def coefficient(row: int, block: Vector, slot: int) -> Vector:
            return self.value_coefficient.load(block * (unit * per) + group + (row * self.value_coefficients + slot * per))

        for lane in range(0, lanes, width * vectors):
            places = [[(r0 + r) * self.value_channels + channel + (lane + v * width) for v in range(vectors)] for r in range(self.together)]
            start = [[self.sum.load(at, width) for at in row] for row in places]
            more = [beside] if lane == 0 else []
            sums = self.values(self.given["page_words"], first + lane, row_words, blocks, coefficient, start, *more)
            for row, results in zip(places, sums, strict=True):
                for at, x in zip(row, results, strict=True):
                    self.sum.store(at, x)

    # floating rows

    def _rows_of(self, name: str, channels: int) -> list[tuple[Pointer, Callable[[Vector], Vector]]]:
        """(pointer, token -> offset of its row) of the window and of the chunk of this call."""
        g, stored = self.given, self.n["stored"]
        capacity = g[f"{name}_capacity"].to(i64)
        window = (self.request * self.form.kv_heads + self.head) * (capacity * channels)
        chunk = self.request * g[f"{name}_batch"] + self.head * g[f"{name}_head"]
        slots = g[f"{name}_capacity"]
        return [
            (g[f"{name}_window"], lambda token: window + (token.to(i32) % slots).to(i64) * channels),
            (g[name], lambda token: chunk + (token - stored) * g[f"{name}_token"]),
        ]

    def ask(self, name: str, low: Vector, high: Vector) -> None:
        """Ask for rows [low, high) of a window."""
        loop(low, high, [], lambda token: self.ask_row(name, token) or [])

    def ask_row(self, name: str, token: Vector) -> None:
        """Ask for a row of a window: between two steps other work has pushed it out of the processor's caches, and a hardware prefetcher
        ends with a page of memory, which is a few rows."""
        channels = self.form.head_dim if name == "k" else self.form.value_head_dim
        pointer, place = self._rows_of(name, channels)[0]
        first, line = place(token), LINE // np_dtype(self.dtype).itemsize
        for at in range(0, channels, line):
            pointer.prefetch(first + at)

    def _spans(self, low: Vector, high: Vector) -> list[tuple[Vector, Vector]]:
        """Tokens [low, high) that lie in the window, and those that are of this call; either may be none."""
        stored = self.n["stored"]
        return [(low, high.minimum(stored)), (low.maximum(stored), high)]

    def floating_scores(self, first: Vector, low: Vector, high: Vector) -> None:
        """Scores of tokens [low, high), whose keys are floating, at their distance from `first`; of several tokens together, since the sum
        of one alone waits for itself."""
        several = max(1, min(4, self.target.registers // 4 // self.together))
        self.ask("k", low, (low + AHEAD).minimum(high))
        for (start, stop), (pointer, place) in zip(self._spans(low, high), self._rows_of("k", self.form.head_dim), strict=True):

            def tokens(token: Vector, count: int, pointer: Pointer = pointer, place: Callable = place) -> list[Vector]:
                for i in range(count):
                    self.ask_row("k", token + (AHEAD + i))
                    self.ask_row("v", token + i)
                offsets = [place(token + i) for i in range(count)]
                self._blocks(lambda r0: self._dots(r0, token - first, pointer, offsets))
                return []

            together = start + (stop - start).maximum(0) // several * several
            loop(start, together, [], lambda token, tokens=tokens: tokens(token, several), step=several)
            if several > 1:
                loop(together, stop, [], lambda token, tokens=tokens: tokens(token, 1))

    def _dots(self, r0: Vector, at: Vector, pointer: Pointer, offsets: list[Vector]) -> None:
        """Scores of `together` rows and the tokens whose keys begin at `offsets`, stored from place `at` on."""
        rows, dim = range(self.together), self.form.head_dim

        def body(c: Vector, lanes: int, sums: list[Vector]) -> list[Vector]:
            keys = [load_float(pointer, self.dtype, offset + c, lanes, self.target) for offset in offsets]
            queries = [self.q.load((r0 + r) * self.key_channels + c, lanes) for r in rows]
            return [multiply_add(q, k, sums[i], self.target) for i, (q, k) in enumerate((q, k) for q in queries for k in keys)]

        full, count = dim - dim % self.lanes, self.together * len(offsets)
        scores = [constant(0.0, f32)] * count
        if full:
            start = [constant(0.0, f32, self.lanes)] * count
            scores = [s.reduce("add") for s in loop(0, full, start, lambda c, *s: body(c, self.lanes, list(s)), step=self.lanes)]
        for channel, width in pieces(dim, self.lanes):
            rest = body(index(channel), width, [constant(0.0, f32, width)] * count)
            scores = [a + b.reduce("add") for a, b in zip(scores, rest, strict=True)]
        for i, score in enumerate(scores):
            self.score.store((r0 + i // len(offsets)) * self.width + at + i % len(offsets), score)

    def floating_values(self, first: Vector, low: Vector, high: Vector) -> None:
        """Weights times values of tokens [low, high), whose values are floating, added to the sums; a stretch of channels at a time."""
        dim, lanes = self.form.value_head_dim, self.lanes
        vectors = max(1, min(dim // lanes, self.target.registers // 2 // self.together))
        full = dim - dim % (lanes * vectors)
        spans = list(zip(self._spans(low, high), self._rows_of("v", dim), strict=True))

        def some_rows(r0: Vector) -> None:
            def stretch(c: Vector, width: int, count: int) -> list[Vector]:
                self._weigh(r0, first, spans, [c + i * width for i in range(count)], width)
                return []

            if full:
                loop(0, full, [], lambda c: stretch(c, lanes, vectors), step=lanes * vectors)
            if dim // lanes * lanes > full:
                loop(full, dim // lanes * lanes, [], lambda c: stretch(c, lanes, 1), step=lanes)
            for at, width in pieces(dim, lanes):
                stretch(index(at), width, 1)

        self._blocks(some_rows)

    def _weigh(self, r0: Vector, first: Vector, spans: list, channels: list[Vector], lanes: int) -> None:
        """What `floating_values` adds for `together` rows and the channels of several vectors."""
        rows = range(self.together)
        places = [(r0 + r) * self.value_channels + c for r in rows for c in channels]
        sums = [self.sum.load(at, lanes) for at in places]
        for (start, stop), (pointer, place) in spans:

            def body(token: Vector, *sums: Vector, pointer: Pointer = pointer, place: Callable = place) -> list[Vector]:
                offset, out = place(token), list(sums)
                values = [load_float(pointer, self.dtype, offset + c, lanes, self.target) for c in channels]
                for r in rows:
                    p = self.score.load((r0 + r) * self.width + token - first)
                    for i, v in enumerate(values):
                        at = r * len(channels) + i
                        if self.poison:  # NaN of a token that a query may not see must not reach it as 0 * NaN
                            out[at] = out[at] + where(token <= self.last.load(r0 + r), v * p, 0.0)
                        else:
                            out[at] = multiply_add(v, p, out[at], self.target)
                return out

            sums = loop(start, stop, sums, body)
        for at, x in zip(places, sums, strict=True):
            self.sum.store(at, x)

    # zones

    def page(self, number: Vector) -> tuple[Vector, Vector, Vector]:
        """(distance of this head's record in bytes, first token, end) of the page at table row `number`."""
        table, pages = self.given["table"], self.n["pages"]
        at = (self.request * self.given["table_rows"].to(i64) + number) * 2
        record = table.load(at) + self.head * self.form.bytes
        last = number + 1 >= pages
        following = table.load(at + where(last, constant(1, i64), constant(3, i64)))
        return record, table.load(at + 1), where(last, self.n["key_sealed"], following)

    def closed_pages(self, low: Vector, high: Vector) -> None:
        """Pages [low, high) of the table, keys and values sealed."""

        def body(number: Vector) -> list[Vector]:
            record, first, end = self.page(number)
            following = self.page((number + 1).minimum(high - 1))[0]
            self.sealed_scores(record, following)
            self.softmax(first, end, self.tokens)
            self.sealed_values(record, first, following=following)
            return []

        loop(low, high, [], body)

    def open_pages(self, low: Vector, high: Vector) -> None:
        """Pages [low, high) whose values are sealed up to `value_sealed` and floating beyond."""

        def body(number: Vector) -> list[Vector]:
            record, first, end = self.page(number)
            self.ask("v", first.maximum(self.n["value_sealed"]), end)
            self.sealed_scores(record)
            self.softmax(first, end, self.tokens)
            self.sealed_values(record, first, self.n["value_sealed"].minimum(end) - first)
            self.floating_values(first, first.maximum(self.n["value_sealed"]), end)
            return []

        loop(low, high, [], body)

    def floating(self, low: Vector, high: Vector) -> None:
        """Tokens [low, high), keys and values floating."""

        def body(first: Vector) -> list[Vector]:
            end = (first + TILE).minimum(high)
            self.floating_scores(first, first, end)
            self.softmax(first, end, TILE)
            self.floating_values(first, first, end)
            return []

        loop(low, high, [], body, step=TILE)


def attention_kernel(zone: str, form: PageFormat, q_heads: int, dtype: str, schedule: Schedule, target: Target) -> Kernel:
    """Partial attention over `zone` "history" or "tail", as `kivi.passes.attention.attention_kernel` leaves it: the history shared by
    `shares` programs, which leave theirs in slots 0, 1, ..., the tail in slot `slot`."""

    def body(**given) -> None:
        a = Attend(form, q_heads // form.kv_heads, dtype, schedule, target, given)
        closed = a.n["closed"]
        if zone == "history":
            slot, shares = program_id(1).to(i64), given["shares"].to(i64)
            run = (closed + (shares - 1)) // shares
            low = (slot * run).minimum(closed)
            a.closed_pages(low, (low + run).minimum(closed))
        else:
            slot = given["slot"].to(i64)
            a.open_pages(closed, a.n["pages"])
            a.floating(a.n["key_sealed"], a.n["stored"] + a.n["chunk"])
        a.store(slot, q_heads)

    floats = float_pointer(dtype, target)
    strides = ("batch", "head", "token", "channel")
    arguments: dict[str, Attribute] = {"q": floats, **{f"q_{axis}": i64 for axis in strides}}
    for name in ("k", "v"):
        arguments |= {f"{name}_window": floats, f"{name}_capacity": i32, name: floats, **{f"{name}_{axis}": i64 for axis in strides}}
    arguments |= {
        "page_words": PtrType(TYPES[form.layout.word]),
        "page_key_metadata": float_pointer(form.key_metadata, target),
        "page_value_metadata": float_pointer(form.value_metadata, target),
        "table": PtrType(i64),
        "table_rows": i32,
        "counts": PtrType(i64),
        "scale": f32,
        "slot": i32,
        "shares": i32,
        "rows": i32,
        "outputs": i64,
        "top": PtrType(f32),
        "total": PtrType(f32),
        "part": PtrType(f32),
    }
    shares: list[tuple[str, int]] = [("shares", 1)] if zone == "history" else []
    grid = [[("batch", 1), ("heads", 1)], shares, [("rows", schedule.queries)]]
    return Kernel(zone, kernel(zone, arguments, body), grid, list(arguments))
