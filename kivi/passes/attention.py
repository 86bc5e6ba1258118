"""Kernels of `attend`: one softmax over the whole mixed history, in partial results that are merged.

Two kernels, so that the long one keeps its registers for one kind of work: `history` walks the pages whose keys and values are all sealed,
`tail` walks the pages that still wait for values, and the floating rows. A program owns one (request, KV head) and one block of query rows
of the heads that share it; it leaves a running maximum, a sum of weights and weighted values in a slot of its own. Codes are unpacked once
for all query heads. What is built here is the plain form: elements are dequantized and multiplied; schedules name the rewrites that follow
(`kivi.passes.rewrites`).

Scores are kept in units of log 2. The running maximum starts at minus infinity and is replaced by 0 while nothing was seen, so an empty
split yields weight 0 and no NaN.
"""

from __future__ import annotations

from kivi.ir.build import Pointer, Tile, constant, exp2, full, indices, kernel, loop, pointer, program_id, where
from kivi.ir.xdsl import f32, i32, i64
from kivi.passes import numbers
from kivi.passes.lanes import Lanes
from kivi.passes.numbers import float_pointer
from kivi.passes.pages import Pages, Rows
from kivi.passes.quantize import power
from kivi.passes.rewrites import rewrite
from kivi.passes.tensors import Kernel
from kivi.pool import PageFormat
from kivi.schedule import Schedule

LOG2_E = 1.4426950408889634
#: Counts of a request, int64 [B, 7]
COUNTS = ("stored", "key_sealed", "value_sealed", "pages", "closed", "chunk", "count")


class Attend:
    """The body of one attention kernel, built from kernel arguments."""

    def __init__(self, form: PageFormat, group_heads: int, dtype: str, schedule: Schedule, given: dict) -> None:
        self.form, self.dtype, self.given = form, dtype, given
        self.keys, self.values = Lanes(form.key, schedule.slots), Lanes(form.value, schedule.slots)
        self.poison = form.spec.nonfinite == "propagate"
        self.heads = group_heads
        self.queries = schedule.queries
        self.rows = power(group_heads * schedule.queries)
        divisor = form.spec.key.group & -form.spec.key.group  # the largest power of two that divides a group
        self.tile = min(divisor, schedule.tokens)
        self.request, self.head = program_id(0) // form.kv_heads, program_id(0) % form.kv_heads
        at = self.request * len(COUNTS)
        self.n = {name: given["counts"].load((at + i).to(i64)).to(i32) for i, name in enumerate(COUNTS)}
        self.pages = Pages(form, given["page_words"], given["page_key_metadata"], given["page_value_metadata"])
        place = (form.kv_heads, self.n["stored"])
        self.key_rows = Rows.of("k", dtype, form.head_dim, given, self.request, self.head, *place)
        self.value_rows = Rows.of("v", dtype, form.value_head_dim, given, self.request, self.head, *place)
        row = indices(self.rows, 0, 2)
        self.query = program_id(2) * schedule.queries + row // group_heads
        self.q_head = self.head * group_heads + row % group_heads
        self.real = (row < group_heads * schedule.queries) & (self.query < self.n["count"])
        self.position = self.n["stored"] + self.n["chunk"] - self.n["count"] + self.query
        self.q = [self._load_query(lane) for lane in range(self.keys.count)]

    def _load_query(self, lane: int) -> Tile:
        """Query rows [rows, width] of a key lane, multiplied by the softmax scale and log2(e)."""
        channel = self.keys.channel_tile(lane, 2)
        shape = (self.rows, self.keys.width)
        mask = (self.real & (channel < self.form.head_dim)).spread(shape)
        g = self.given
        at = self.request.to(i64) * g["q_batch"] + self.q_head.to(i64) * g["q_head"] + self.query.to(i64) * g["q_token"]
        at = at.spread(shape) + (channel.to(i64) * g["q_channel"]).spread(shape)
        return numbers.load_float(g["q"], self.dtype, at, mask) * g["scale"]

    # running state: maximum, sum of weights [rows, 1], and one accumulator [rows, width] for each value lane

    def start(self) -> list[Tile]:
        accumulators = [full((self.rows, self.values.width), 0.0, f32) for _ in range(self.values.count)]
        return [full((self.rows, 1), float("-inf"), f32), full((self.rows, 1), 0.0, f32), *accumulators]

    def step(self, state: list[Tile], scores: Tile, token: Tile, mask: Tile, weigh) -> list[Tile]:
        """One tile of history: scores [rows, tile], absolute token [1, tile]. `weigh(p, lane)` gives sum over tokens of p * value."""
        top, total, *accumulators = state
        seen = mask.spread(scores.shape) & (token.spread(scores.shape) <= self.position.spread(scores.shape))
        scores = where(seen, scores, float("-inf"))
        new = top.maximum(scores.reduce("max", 1))
        safe = where(new.equals(float("-inf")), 0.0, new)
        p = where(seen, exp2(scores - safe), 0.0)
        shrink = exp2(top - safe)
        total = total * shrink + p.reduce("add", 1)
        return [new, total, *(a * shrink + weigh(p, seen, lane) for lane, a in enumerate(accumulators))]

    # scores and weighted values of the two kinds of rows

    def sealed_scores(self, record: Tile, row: Tile, first: Tile, mask: Tile) -> Tile:
        """Scores [rows, tile] of sealed keys, rows `row` [tile, 1] of a page; one group of tokens."""
        group = self.form.spec.key.group
        words = self.keys.load(self.pages, self.pages.base(record, "key.words"), row, mask)
        bases = [self.pages.base(record, f"key.{name}") + (first // group * self.form.head_dim).to(i64) for name in ("scale", "origin")]
        total = None
        for lane, q in enumerate(self.q):
            channel = self.keys.channel_tile(lane, 2)
            inside = channel < self.form.head_dim
            scale, origin = (self.pages.load_metadata("key", base + channel.to(i64), inside, 0.0) for base in bases)
            part = self.scored(q, numbers.dequantized(self.keys.code(words, lane), scale, origin))
            total = part if total is None else total + part
        return total  # type: ignore[return-value]

    def scored(self, q: Tile, k: Tile) -> Tile:
        """q [rows, width] . k [tile, width]: [rows, tile]."""
        return (q.expand(1) * k.expand(0)).reduce("add", 2).reshape(self.rows, self.tile)

    def floating_scores(self, token: Tile, mask: Tile) -> Tile:
        """Scores [rows, tile] of floating keys, tokens [tile, 1]."""
        total = None
        for lane, q in enumerate(self.q):
            channel = self.keys.channel_tile(lane, 2)
            shape = (self.tile, self.keys.width)
            inside = (mask & (channel < self.form.head_dim)).spread(shape)
            k = self.key_rows.load(token.spread(shape), channel.spread(shape), inside)
            part = self.scored(q, k)
            total = part if total is None else total + part
        return total  # type: ignore[return-value]

    def sealed_values(self, record: Tile, row: Tile, mask: Tile):
        """A function (p, seen, lane) -> [rows, width] of sealed values, rows `row` [tile, 1] of a page."""
        group, dim = self.form.spec.value.group, self.form.value_head_dim
        per_row = -(-dim // group)
        words = self.values.load(self.pages, self.pages.base(record, "value.words"), row, mask)
        bases = [self.pages.base(record, f"value.{name}") for name in ("scale", "origin")]
        loaded: dict[int, tuple[Tile, Tile]] = {}

        def of_group(number: int) -> tuple[Tile, Tile]:
            """(scale, origin) [tile, 1] of one group of channels."""
            if number not in loaded:
                at = (row * per_row + number).to(i64)
                scale, origin = (self.pages.load_metadata("value", base + at, mask, 0.0) for base in bases)
                loaded[number] = scale, origin
            return loaded[number]

        def weigh(p: Tile, seen: Tile, lane: int) -> Tile:
            groups = self.values.groups(lane, group)
            if len(groups) == 1:
                scale, origin = of_group(int(groups[0]))
            else:
                channel = self.values.channel_tile(lane, 2)
                shape = (self.tile, self.values.width)
                at = (row * per_row).spread(shape).to(i64) + (channel // group).spread(shape).to(i64)
                inside = (mask & (channel < dim)).spread(shape)
                scale, origin = (self.pages.load_metadata("value", base + at, inside, 0.0) for base in bases)
            return self.weighted(p, numbers.dequantized(self.values.code(words, lane), scale, origin), seen)

        return weigh

    def floating_values(self, token: Tile, mask: Tile):
        """The same of floating values, tokens [tile, 1]."""

        def weigh(p: Tile, seen: Tile, lane: int) -> Tile:
            channel = self.values.channel_tile(lane, 2)
            shape = (self.tile, self.values.width)
            inside = (mask & (channel < self.form.value_head_dim)).spread(shape)
            v = self.value_rows.load(token.spread(shape), channel.spread(shape), inside)
            return self.weighted(p, v, seen)

        return weigh

    def weighted(self, p: Tile, v: Tile, seen: Tile) -> Tile:
        """Sum over tokens of p [rows, tile] * v [tile, width]; a NaN that a query may not see must not reach it as 0 * NaN."""
        product = p.expand(2) * v.expand(0)
        if self.poison:
            product = where(seen.expand(2).spread(product.shape), product, 0.0)
        return product.reduce("add", 1).reshape(self.rows, self.values.width)

    # zones

    def page(self, number: Tile, i: Tile) -> tuple[Tile, Tile, Tile, Tile, Tile]:
        """(record, first row of the tile, rows [tile, 1], tokens [tile, 1], mask) of tile i of the page at table row `number`."""
        table, per_request = self.given["table"], self.given["table_rows"]
        at = (self.request * per_request + number).to(i64) * 2
        record = self.pages.record(table.load(at).multiple_of(16), self.head)
        first = table.load(at + 1).to(i32)
        is_last = number + 1 >= self.n["pages"]
        following = table.load(at + where(is_last, constant(0, i64), constant(2, i64)) + 1).to(i32)
        end = where(is_last, self.n["key_sealed"], following)
        start = i * self.tile
        row = start + indices(self.tile, 0, 2)
        token = first + row
        return record, start, row, token, token < end

    def closed_pages(self, state: list[Tile], low: Tile, high: Tile) -> list[Tile]:
        """Pages [low, high) of the table, keys and values sealed."""
        tiles = self.form.tokens // self.tile

        def body(i: Tile, *state: Tile) -> list[Tile]:
            record, start, row, token, mask = self.page(i // tiles, i % tiles)
            scores = self.sealed_scores(record, row, start, mask)
            return self.step(
                list(state), scores, token.reshape(1, self.tile), mask.reshape(1, self.tile), self.sealed_values(record, row, mask)
            )

        return loop(low * tiles, high * tiles, state, body)

    def open_pages(self, state: list[Tile], low: Tile, high: Tile) -> list[Tile]:
        """Pages [low, high) whose values are sealed up to `value_sealed` and floating beyond."""
        tiles = self.form.tokens // self.tile

        def body(i: Tile, *state: Tile) -> list[Tile]:
            record, start, row, token, mask = self.page(i // tiles, i % tiles)
            scores = self.sealed_scores(record, row, start, mask)
            is_sealed = token < self.n["value_sealed"]
            sealed = self.sealed_values(record, row, mask & is_sealed)
            floating = self.floating_values(token, mask & (token >= self.n["value_sealed"]))
            sealed_here = is_sealed.reshape(1, self.tile)

            def weigh(p: Tile, seen: Tile, lane: int) -> Tile:
                here = sealed_here.spread(p.shape)
                return sealed(where(here, p, 0.0), seen & here, lane) + floating(where(here, 0.0, p), seen, lane)

            return self.step(list(state), scores, token.reshape(1, self.tile), mask.reshape(1, self.tile), weigh)

        return loop(low * tiles, high * tiles, state, body)

    def floating(self, state: list[Tile], low: Tile, high: Tile) -> list[Tile]:
        """Tokens [low, high), keys and values floating."""

        def body(start: Tile, *state: Tile) -> list[Tile]:
            token = start + indices(self.tile, 0, 2)
            mask = token < high
            scores = self.floating_scores(token, mask)
            return self.step(
                list(state), scores, token.reshape(1, self.tile), mask.reshape(1, self.tile), self.floating_values(token, mask)
            )

        return loop(low, high, state, body, step=self.tile)


def attention_kernel(zone: str, form: PageFormat, q_heads: int, dtype: str, schedule: Schedule) -> Kernel:
    """Partial attention over `zone` "history" or "tail", left in slot `slot` of `splits`: maxima and sums f32 [splits, B * Hq * n],
    outputs f32 [splits, B * Hq * n, Dv]."""
    group_heads = q_heads // form.kv_heads
    dim = form.value_head_dim

    def body(**given) -> None:
        a = Attend(form, group_heads, dtype, schedule, given)
        if zone == "history":
            state = a.closed_pages(a.start(), constant(0, i32), a.n["closed"])
        else:
            state = a.open_pages(a.start(), a.n["closed"], a.n["pages"])
            state = a.floating(state, a.n["key_sealed"], a.n["stored"] + a.n["chunk"])
        top, total, *accumulators = state
        rows = given["rows"]
        row = (a.request * q_heads + a.q_head) * rows + a.query
        inside = (indices(a.rows, 0, 2) < group_heads * schedule.queries) & (a.query < rows)
        at = given["slot"].to(i64) * given["outputs"] + row.to(i64)
        given["top"].store(at, top, inside)
        given["total"].store(at, total, inside)
        for lane, accumulator in enumerate(accumulators):
            channel = a.values.channel_tile(lane, 2)
            shape = (a.rows, a.values.width)
            mask = (inside & (channel < dim)).spread(shape)
            given["part"].store((at * dim).spread(shape) + channel.to(i64).spread(shape), accumulator, mask)

    arguments = {
        "q": float_pointer(dtype),
        **{f"q_{axis}": i64 for axis in ("batch", "head", "token", "channel")},
        **Rows.arguments("k", dtype),
        **Rows.arguments("v", dtype),
        **Pages.arguments(form),
        "table": pointer(i64),
        "table_rows": i32,
        "counts": pointer(i64),
        "scale": f32,
        "slot": i32,
        "shares": i32,
        "rows": i32,
        "outputs": i64,
        "top": pointer(f32),
        "total": pointer(f32),
        "part": pointer(f32),
    }
    grid: list[list[tuple[str, int]]] = [[("batch", 1), ("heads", 1)], [], [("rows", schedule.queries)]]
    return rewrite(Kernel(zone, kernel(zone, arguments, body), grid, list(arguments)), schedule.rewrites)


def merge_kernel(q_heads: int, dim: int, dtype: str) -> Kernel:
    """The splits' partial results as the output [B * Hq * n, Dv] in `dtype`; rows past a request's count are 0."""
    width = power(dim)
    rows = max(1, min(16, 4096 // width))

    def body(
        top: Pointer, total: Pointer, part: Pointer, counts: Pointer, out: Pointer, splits: Tile, rows_of_head: Tile, outputs: Tile
    ) -> None:
        row = program_id(0) * rows + indices(rows, 0, 2)
        channel = indices(width, 1, 2)
        mask = row.to(i64) < outputs
        shape = (rows, width)
        inside = (mask & (channel < dim)).spread(shape)

        def at(split: Tile) -> Tile:
            return split.to(i64) * outputs + row.to(i64)

        [most] = loop(0, splits, [full((rows, 1), float("-inf"), f32)], lambda i, m: [m.maximum(_masked(top, at(i), mask, float("-inf")))])
        safe = where(most.equals(float("-inf")), 0.0, most)

        def add(i: Tile, weight: Tile, value: Tile) -> list[Tile]:
            share = exp2(_masked(top, at(i), mask, float("-inf")) - safe)
            place = (at(i) * dim).spread(shape) + channel.to(i64).spread(shape)
            return [weight + share * _masked(total, at(i), mask, 0.0), value + share * part.load(place, inside)]

        weight, value = loop(0, splits, [full((rows, 1), 0.0, f32), full(shape, 0.0, f32)], add)
        request, query = row // (rows_of_head * q_heads), row % rows_of_head
        place = (request * len(COUNTS) + COUNTS.index("count")).to(i64)
        real = mask & (query.to(i64) < counts.load(place, mask))
        result = where(real.spread(shape), value / weight, 0.0)
        numbers.store_float(out, dtype, (row.to(i64) * dim).spread(shape) + channel.to(i64).spread(shape), result, inside)

    arguments = {
        "top": pointer(f32),
        "total": pointer(f32),
        "part": pointer(f32),
        "counts": pointer(i64),
        "out": float_pointer(dtype),
        "splits": i32,
        "rows_of_head": i32,
        "outputs": i64,
    }
    return Kernel("merge", kernel("merge", arguments, body), [[("outputs", rows)]], list(arguments))


def _masked(source: Pointer, offset: Tile, mask: Tile, other: float) -> Tile:
    return where(mask, source.load(offset, mask), other)
