"""Runs: the tokens of a request in parts that lie in one place, in the order of tokens, and what a graph is given to read them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kivi.arena import region_of
from kivi.backend import Reading
from kivi.dtypes import np_dtype
from kivi.pool import PageFormat, PagePool

TOKENS = 1024  # of a run, at most, or one page: what is decoded of them should stay in a processor's cache


def unit_bytes(form: PageFormat) -> int:
    """The largest size of which the place of every field, and the size of a record, are multiples; at least `kivi.pool.ALIGN`."""
    return math.gcd(form.bytes, *(f.offset for f in form.fields.values()))


def ints(*numbers: int) -> np.ndarray:
    """Numbers as graphs take them, int64 on every platform."""
    return np.array(numbers, np.int64)


@dataclass(frozen=True)
class Run:
    """Tokens `first` to `first + count - 1` of a request: the zone whose graph reads them, and its inputs."""

    zone: str
    first: int
    count: int
    inputs: dict[str, np.ndarray]


def runs(reading: Reading, b: int, k: np.ndarray, v: np.ndarray) -> list[Run]:
    """All tokens that the last query row of request b sees; k and v are the rows of the call."""
    stored, key_sealed, value_sealed, chunk = (int(a[b]) for a in (reading.stored, reading.key_sealed, reading.value_sealed, reading.chunk))
    windows = reading.windows.key[b], reading.windows.value[b]
    out = list(_sealed(reading, b, key_sealed, value_sealed, windows[1]))
    out += _floating(windows, key_sealed, key_sealed, stored)
    out += _floating((k[b], v[b]), stored, 0, chunk)
    return out


def visible(run: Run, row: int, page: int) -> Iterator[Run]:
    """The run as graphs take it when the first query row belongs to token `row`: a history is whole pages that every row sees, so pages
    of `page` tokens that reach beyond are runs of their own."""
    if run.zone != "history" or run.first + run.count <= row + 1:
        yield run
        return
    whole = max(0, row + 1 - run.first) // page
    index, slab = run.inputs["pages"], {name: a for name, a in run.inputs.items() if name != "pages"}
    if whole:
        yield Run("history", run.first, whole * page, {"pages": index[:whole], **slab})
    for i in range(whole, len(index)):
        yield Run("page", run.first + i * page, page, {"pages": index[i : i + 1], **_bounds(0, page), **slab})


def _sealed(reading: Reading, b: int, key_sealed: int, value_sealed: int, values: np.ndarray) -> Iterator[Run]:
    """Tokens whose keys are sealed, page by page; whole pages with sealed values together."""
    form = reading.pool.format
    table = reading.table[b, : int(reading.pages[b])].tolist()
    ends = [first for _, first in table[1:]] + [key_sealed]
    whole: list[int] = []  # pages collected so far: where each begins, their first token, their region
    at, region, unit, most = 0, np.empty(0), unit_bytes(form), max(1, TOKENS // form.tokens)
    for (page, first), end in zip(table, ends):  # a table without pages has an end too
        found, start = _place(reading.pool, page)
        joins = end <= value_sealed and end - first == form.tokens
        if whole and (not joins or found is not region or len(whole) == most):
            yield _history(form, region, whole, at)
            whole = []
        if joins:
            at, region = (at, region) if whole else (first, found)
            whole.append(start // unit)
            continue
        inputs = {"pages": ints(start // unit), **_slabs(form, found)}
        split = min(max(first, value_sealed), end)
        if first < split:
            yield Run("page", first, split - first, {**inputs, **_bounds(0, split - first)})
        if split < end:
            floating = {"value_rows": values, "value_at": np.arange(split, end, dtype=np.int64) % values.shape[1]}
            yield Run("open", split, end - split, {**inputs, **_bounds(split - first, end - first), **floating})
    if whole:
        yield _history(form, region, whole, at)


def _place(pool: PagePool, page: int) -> tuple[np.ndarray, int]:
    """The region that holds a page, and the byte at which it begins."""
    slab, index = pool.where(page)
    return region_of(pool.raw[slab]), index * pool.format.page_bytes


def _history(form: PageFormat, region: np.ndarray, pages: list[int], first: int) -> Run:
    return Run("history", first, len(pages) * form.tokens, {"pages": ints(*pages), **_slabs(form, region)})


def _floating(rows: tuple[np.ndarray, np.ndarray], first: int, start: int, end: int) -> Iterator[Run]:
    """Rows start to end - 1 of keys and values [H, slots, C], each at its number modulo the slots; the first is token `first`."""
    keys, values = rows
    for at in range(start, end, TOKENS):
        number = np.arange(at, min(at + TOKENS, end), dtype=np.int64)
        inputs = {
            "key_rows": keys,
            "key_at": number % keys.shape[1],
            "value_rows": values,
            "value_at": number % values.shape[1],
        }
        yield Run("floating", first + at - start, len(number), inputs)


def _bounds(first: int, last: int) -> dict[str, np.ndarray]:
    return {"first": ints(first), "last": ints(last)}


def _slabs(form: PageFormat, region: np.ndarray) -> dict[str, np.ndarray]:
    """A region as rows of units, once for each type of its fields, signed words as what they are, bits; and as wide integers."""
    unit = unit_bytes(form)
    names = {"uint64", *("uint32" if f.dtype == "int32" else f.dtype for f in form.fields.values())}
    units = region[: len(region) // unit * unit]
    return {f"slab_{name}": units.view(np_dtype(name)).reshape(-1, unit // np_dtype(name).itemsize) for name in sorted(names)}
