"""Kernels of `append`: seal rows into pages, and keep the others in the windows.

A job is a row of int64 [jobs, 6]: request, first token, count, distance of the page in bytes, row in the page, stored tokens of the
request. One program owns one (job, head) and one block of groups or words.
"""

from __future__ import annotations

from kivi.ir.build import Tile, indices, kernel, pointer, program_id, where
from kivi.ir.xdsl import i8, i32, i64
from kivi.passes import numbers
from kivi.passes.address import code_of, units
from kivi.passes.numbers import Numbers, float_pointer
from kivi.passes.pages import Pages, Rows
from kivi.passes.quantize import Extent, key_metadata, pack_units, power, store_words, value_metadata, word_offsets
from kivi.passes.tensors import ELEMENTS, Kernel
from kivi.pool import PageFormat

JOB = ("request", "first", "count", "page", "row", "stored")


class Job:
    """The job of a program, its rows and its page."""

    def __init__(self, which: str, form: PageFormat, dtype: str, given: dict) -> None:
        heads = form.kv_heads
        number, head = program_id(0) // heads, program_id(0) % heads
        fields = {name: given["jobs"].load((number * len(JOB) + i).to(i64)) for i, name in enumerate(JOB)}
        self.pages = Pages(form, given["page_words"], given["page_key_metadata"], given["page_value_metadata"])
        self.record = self.pages.record(fields["page"].multiple_of(16), head)
        request, first, count, row, stored = (fields[name].to(i32) for name in ("request", "first", "count", "row", "stored"))
        self.channels = form.head_dim if which == "key" else form.value_head_dim
        self.rows = Rows.of("x", dtype, self.channels, given, request, head, heads, stored)
        self.extent = Extent(row, count, self.channels)
        self._shift = first - row

    def source(self, token: Tile, channel: Tile, mask: Tile) -> Tile:
        """Element of a page's row."""
        return self.rows.load(token + self._shift, channel, mask)


def seal_metadata_kernel(which: str, form: PageFormat, dtype: str) -> Kernel:
    """Scales and origins of all jobs, and in `flat` [jobs * heads, groups of a page] which groups are flat. flag [programs] counts numbers
    that exceed the metadata dtype."""
    n = _numbers(which, form, dtype)
    channels = form.head_dim if which == "key" else form.value_head_dim
    width = power(n.group)
    per_row = -(-channels // n.group)
    lanes = min(power(channels), 64) if which == "key" else power(per_row)
    most = form.tokens // n.group if which == "key" else form.tokens
    rows = min(power(most), max(1, ELEMENTS // (width * lanes)), 8 if which == "key" else 32)

    def body(**given) -> None:
        job = Job(which, form, dtype, given)
        outer = program_id(1) * rows + indices(rows, 0, 2)
        if which == "key":
            lane = program_id(2) * lanes + indices(lanes, 1, 2)
            s, o, over, plain, mask = key_metadata(job.source, job.extent, n, outer, lane)
            at = (outer * channels + lane).to(i64)
        else:
            outer = job.extent.first + outer
            lane = indices(lanes, 1, 2)
            s, o, over, plain, mask = value_metadata(job.source, job.extent, n, outer, lane)
            at = (outer * per_row + lane).to(i64)
        for name, x in (("scale", s), ("origin", o)):
            job.pages.store_metadata(which, job.pages.base(job.record, f"{which}.{name}") + at, x, mask)
        given["flat"].store(_flat_base(which, form, n) + at, where(plain, 1, over * 0).to(i8), mask)
        hit = where(mask, over, 0).reduce("add", 0).reduce("add", 1)
        number = (program_id(0) * given["blocks"] + program_id(1)) * (-(-channels // lanes) if which == "key" else 1) + program_id(2)
        given["flag"].store(number.spread((1, 1)), hit)

    arguments = {"jobs": pointer(i64), **Pages.arguments(form), **Rows.arguments("x", dtype)}
    arguments |= {"flat": pointer(i8), "flag": pointer(i32), "blocks": i32}
    name = f"{which}_seal_metadata"
    grid = [
        [("jobs", 1), ("heads", 1)],
        [("count", rows * (n.group if which == "key" else 1))],
        [("channels", lanes)] if which == "key" else [],
    ]
    return Kernel(name, kernel(name, arguments, body), grid, list(arguments))


def seal_words_kernel(which: str, form: PageFormat, dtype: str) -> Kernel:
    """Words of all jobs, given scales and origins in their pages, and which groups are flat. Words that other rows share keep those rows'
    bits."""
    n = _numbers(which, form, dtype)
    arrangement = form.key if which == "key" else form.value
    block = max(1, min(power(units(arrangement)), ELEMENTS // 4 // arrangement.unit))
    per_row = -(-arrangement.channels // n.group)
    row = arrangement.shape[1]

    def body(**given) -> None:
        job = Job(which, form, dtype, given)

        def code(token: Tile, channel: Tile, mask: Tile) -> Tile:
            at = ((token // n.group) * arrangement.channels + channel if which == "key" else token * per_row + channel // n.group).to(i64)
            s, o = (
                job.pages.load_metadata(which, job.pages.base(job.record, f"{which}.{name}") + at, mask, other)
                for name, other in (("scale", 1.0), ("origin", 0.0))
            )
            flat = given["flat"].load(_flat_base(which, form, n) + at, mask).to(i32) > 0
            return numbers.codes(job.source(token, channel, mask), s, o, flat, n)

        unit = program_id(1) * block + indices(block, 0, 2)
        words, keep, major, minor = pack_units(arrangement, unit, code, job.extent)
        lead, step = code_of(arrangement, unit, unit * 0)[0], arrangement.token_step
        mask = (unit < units(arrangement)) & (lead + step > job.extent.first) & (lead < job.extent.first + job.extent.count)
        base = job.pages.base(job.record, f"{which}.words")
        offsets = [base + o.to(i64) for o in word_offsets(arrangement, major, minor, row)]
        store_words(job.pages.words, offsets, words, keep, mask, partial=True)

    arguments = {"jobs": pointer(i64), **Pages.arguments(form), **Rows.arguments("x", dtype), "flat": pointer(i8)}
    name = f"{which}_seal_words"
    return Kernel(name, kernel(name, arguments, body), [[("jobs", 1), ("heads", 1)], [("units", block)]], list(arguments))


def keep_rows_kernel(dtype: str, heads: int, channels: int) -> Kernel:
    """Rows from token `keep` on into the target window: those of this call and, if it is a fresh window, older ones.

    counts int64 [B, 3]: stored, new, keep. `fresh`: 1 if target and source window differ.
    """
    lanes = min(power(channels), 128)
    rows = 16

    def body(**given) -> None:
        request, head = program_id(0) // heads, program_id(0) % heads
        stored, new, keep = (given["counts"].load((request * 3 + i).to(i64)).to(i32) for i in range(3))
        source = Rows.of("x", dtype, channels, given, request, head, heads, stored)
        start = keep.maximum(stored - (stored * given["fresh"]))  # older rows move only into a fresh window
        token = (start + program_id(1) * rows + indices(rows, 0, 2)).spread((rows, lanes))
        channel = (program_id(2) * lanes + indices(lanes, 1, 2)).spread((rows, lanes))
        mask = (token < stored + new) & (channel < channels)
        capacity = given["target_capacity"]
        base = (request * heads + head).to(i64) * (capacity * channels).to(i64)
        at = base + ((token % capacity) * channels + channel).to(i64)
        numbers.store_float(given["target"], dtype, at, source.load(token, channel, mask), mask)

    arguments = {
        "counts": pointer(i64),
        **Rows.arguments("x", dtype),
        "target": float_pointer(dtype),
        "target_capacity": i32,
        "fresh": i32,
    }
    name = "keep_rows"
    grid = [[("batch", 1), ("heads", 1)], [("count", rows)], [("channels", lanes)]]
    return Kernel(name, kernel(name, arguments, body), grid, list(arguments))


def _flat_base(which: str, form: PageFormat, n: Numbers) -> Tile:
    """Where the groups of this program's job and head begin in `flat`."""
    groups = (form.tokens // n.group) * form.head_dim if which == "key" else form.tokens * -(-form.value_head_dim // n.group)
    return program_id(0).to(i64) * groups


def _numbers(which: str, form: PageFormat, dtype: str) -> Numbers:
    return Numbers.of(form.spec, which, dtype, form.key_metadata if which == "key" else form.value_metadata)
