"""Sealing of values in one kernel, for processors where a program costs nothing: scales, origins and words of one row after another.

Where the slots of a value's word are tokens, as in `lanes32`, the codes of one row lie in words of their own, a word a channel. So a
program that owns a page of a head can seal row by row: it reduces the groups of a row, and puts the row's codes into their place in
those words. A decode step, which seals one row, then reads one row and touches one row of words. (`kivi.passes.append` takes two
kernels, in which a program owns whole words of any layout, and reads the rows of all slots.)
"""

from __future__ import annotations

from kivi.ir.build import Tile, full, indices, kernel, loop, pointer, program_id, where
from kivi.ir.xdsl import i32, i64
from kivi.passes import numbers
from kivi.passes.address import place_of, word_stride
from kivi.passes.append import Job
from kivi.passes.numbers import Numbers
from kivi.passes.pages import Pages, Rows
from kivi.passes.quantize import group_extremes
from kivi.passes.tensors import Kernel
from kivi.pool import PageFormat


def serves(form: PageFormat) -> bool:
    """Whether the codes of one value row lie in words of their own."""
    return all(digit.axis == "t" for digit in form.value.slots)


def value_seal_kernel(form: PageFormat, dtype: str) -> Kernel:
    """Scales, origins and words of all jobs (`kivi.passes.append`). flag [jobs * heads] counts numbers that exceed the metadata dtype."""
    n = Numbers.of(form.spec, "value", dtype, form.value_metadata)
    dim, arrangement = form.value_head_dim, form.value
    groups = -(-dim // n.group)
    shape = (groups, n.group)

    def body(**given) -> None:
        job = Job("value", form, dtype, given)
        number = indices(groups, 0, 2)
        channel = (number * n.group + indices(n.group, 1, 2)).spread(shape)
        inside = channel < dim

        def row(token: Tile, flags: Tile) -> list[Tile]:
            x = job.source(token.spread(shape), channel, inside)
            low, high, bad = group_extremes(x, inside, 1)
            scale, origin, over = numbers.scale_and_origin(low, high, bad, n)
            at = (token * groups).spread(number.shape) + number
            for name, value in (("scale", scale), ("origin", origin)):
                job.pages.store_metadata("value", job.pages.base(job.record, f"value.{name}") + at.to(i64), value, number < groups)
            code = numbers.codes(x, scale.spread(shape), origin.spread(shape), n)
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
