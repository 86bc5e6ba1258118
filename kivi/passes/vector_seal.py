"""Sealing in one kernel, for processors where a program costs nothing: scales, origins and words together.

It takes pages whose seals lie in words of their own (`PageFormat.seals_apart`). Where the slots of a value's word are tokens, as in
`lanes32`, the codes of one row lie in words of their own, a word a channel. So a program that owns a page of a head can seal row by row: it
reduces the groups of a row, and puts the row's codes into their place in those words. A decode step, which seals one row, then reads one
row and touches one row of words. Where the slots of a key's word are neighbouring channels, a group of tokens has words of its own, so a
program seals one group. (`kivi.passes.append` takes two kernels, in which a program owns whole words of any layout, and reads the rows of
all slots.)
"""

from __future__ import annotations

from kivi.ir.build import Tile, full, indices, kernel, loop, pointer, program_id, where
from kivi.ir.xdsl import i32, i64
from kivi.passes import numbers, pages
from kivi.passes.address import place_of, word_stride
from kivi.passes.append import Job
from kivi.passes.numbers import Numbers
from kivi.passes.pages import Pages
from kivi.passes.quantize import group_extremes
from kivi.passes.tensors import Kernel
from kivi.pool import PageFormat


class Rows(pages.Rows):
    """Rows of which no address lies outside its array, even where it is masked: some processors take hundreds of cycles to see that a page
    of memory which is not there is not read either."""

    def load(self, token: Tile, channel: Tile, mask: Tile) -> Tile:
        old = token < self.stored
        slot = (token % self.capacity).to(i64) * self.channels + channel.to(i64)
        x = numbers.load_float(self.window, self.dtype, self.window_base + slot, mask & old)
        place = (token - self.stored).maximum(0).to(i64) * self.chunk_token + channel.to(i64) * self.chunk_channel
        return x + numbers.load_float(self.chunk, self.dtype, self.chunk_base + place, mask & (token >= self.stored))


def _job(which: str, form: PageFormat, dtype: str, given: dict) -> Job:
    job = Job(which, form, dtype, given)
    job.rows = Rows(**vars(job.rows))
    return job


def value_seal_kernel(form: PageFormat, dtype: str) -> Kernel:
    """Scales, origins and words of all jobs (`kivi.passes.append`). flag [jobs * heads] counts numbers that exceed the metadata dtype."""
    n = Numbers.of(form.spec, "value", dtype, form.value_metadata)
    dim, arrangement = form.value_head_dim, form.value
    groups = -(-dim // n.group)
    shape = (groups, n.group)

    def body(**given) -> None:
        job = _job("value", form, dtype, given)
        number = indices(groups, 0, 2)
        channel = (number * n.group + indices(n.group, 1, 2)).spread(shape)
        inside = channel < dim

        def row(token: Tile, flags: Tile) -> list[Tile]:
            x = job.source(token.spread(shape), channel, inside)
            low, high, bad = group_extremes(x, inside, 1)
            scale, origin, over, flat = numbers.scale_and_origin(low, high, bad, n)
            at = (token * groups).spread(number.shape) + number
            for name, value in (("scale", scale), ("origin", origin)):
                job.pages.store_metadata("value", job.pages.base(job.record, f"value.{name}") + at.to(i64), value, number < groups)
            code = numbers.codes(x, scale.spread(shape), origin.spread(shape), flat.spread(shape), n)
            _put(job, token, channel, code, inside)
            return [flags + over.reduce("add", 0)]

        [flags] = loop(job.extent.first, job.extent.first + job.extent.count, [full((1, 1), 0, i32)], row)
        given["flag"].store(program_id(0).spread((1, 1)), flags)

    def _put(job: Job, token: Tile, channel: Tile, code: Tile, inside: Tile) -> None:
        """Codes of one row into their words, whose other bits stay."""
        place = place_of(arrangement, token.spread(shape), channel)
        word = job.pages.base(job.record, "value.words") + (place.major * arrangement.shape[1] + place.minor).to(i64)
        if n.bits != 3:
            _insert(job, word, code, place.slot * n.bits, n.bits, inside)
            return
        half, stride = arrangement.unit // 2, word_stride(arrangement)
        low = word + where(place.slot >= half, stride, place.slot * 0).to(i64)
        _insert(job, low, code & 3, (place.slot % half) * 2, 2, inside)
        _insert(job, word + 2 * stride, code >> 2, place.slot, 1, inside)

    def _insert(job: Job, word: Tile, code: Tile, shift: Tile, bits: int, inside: Tile) -> None:
        hole = ((code * 0 + ((1 << bits) - 1)) << shift) ^ -1
        old = job.pages.words.load(word, inside).to(i32)
        job.pages.words.store(word, ((old & hole) | (code << shift)).to(job.pages.words.element), inside)

    arguments = {"jobs": pointer(i64), **Pages.arguments(form), **Rows.arguments("x", dtype), "flag": pointer(i32)}
    return Kernel("value_seal", kernel("value_seal", arguments, body), [[("jobs", 1), ("heads", 1)], [], []], list(arguments))


def key_seal_kernel(form: PageFormat, dtype: str) -> Kernel:
    """Scales, origins and words of all jobs, each a whole number of groups from row 0 of its page. flag [jobs * heads, groups of a page]
    counts numbers that exceed the metadata dtype."""
    n = Numbers.of(form.spec, "key", dtype, form.key_metadata)
    dim, arrangement, group = form.head_dim, form.key, n.group
    shape, wide = (group, arrangement.padded_channels), (group, arrangement.padded_channels // arrangement.unit)

    def body(**given) -> None:
        job = _job("key", form, dtype, given)
        number = program_id(1)
        first = number * group
        real = first < job.extent.count
        channel = indices(shape[1], 1, 2)
        inside = ((channel < dim) & real.spread(channel.shape)).spread(shape)
        token = (first.spread((group, 1)) + indices(group, 0, 2)).spread(shape)
        x = job.source(token, channel.spread(shape), inside)
        low, high, bad = group_extremes(x, inside, 0)
        scale, origin, over, flat = numbers.scale_and_origin(low, high, bad, n)
        stored = (channel < dim) & real.spread(channel.shape)
        at = (number * dim).spread(channel.shape) + channel
        for name, value in (("scale", scale), ("origin", origin)):
            job.pages.store_metadata("key", job.pages.base(job.record, f"key.{name}") + at.to(i64), value, stored)
        code = where(inside, numbers.codes(x, scale.spread(shape), origin.spread(shape), flat.spread(shape), n), 0)
        _put(job, first, code, real)
        place = program_id(0) * (form.tokens // group) + number
        given["flag"].store(place.spread((1, 1)), where(stored, over, 0).reduce("add", 1))

    def _put(job: Job, first: Tile, code: Tile, real: Tile) -> None:
        """Codes of the group's rows into their words."""
        token = (first.spread((group, 1)) + indices(group, 0, 2)).spread(wide)
        place = place_of(arrangement, token, (indices(wide[1], 1, 2) * arrangement.unit).spread(wide))
        word = job.pages.base(job.record, "key.words") + (place.major * arrangement.shape[1] + place.minor).to(i64)
        units = code.reshape(*wide, arrangement.unit)
        slot = indices(arrangement.unit, 2, 3).spread(units.shape)
        for part, fields in enumerate(_fields(units, slot, n.bits)):
            value = fields.reduce("add", 2).reshape(*wide)  # of disjoint bits
            job.pages.words.store(word + part * word_stride(arrangement), value.to(job.pages.words.element), real.spread(wide))

    def _fields(code: Tile, slot: Tile, bits: int) -> list[Tile]:
        """Codes where they lie in each word of their unit."""
        if bits != 3:
            return [code << (slot * bits)]
        half = arrangement.unit // 2
        low = (code & 3) << ((slot % half) * 2)
        return [where(slot < half, low, 0), where(slot >= half, low, 0), (code >> 2) << slot]

    arguments = {"jobs": pointer(i64), **Pages.arguments(form), **Rows.arguments("x", dtype), "flag": pointer(i32)}
    grid = [[("jobs", 1), ("heads", 1)], [("most", group)], []]
    return Kernel("key_seal", kernel("key_seal", arguments, body), grid, list(arguments))
