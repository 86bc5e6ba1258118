"""Which loads are found to read runs of neighbours: only those whose runs are certain."""

from __future__ import annotations

import pytest

from kivi.ir import tile
from kivi.ir.build import Aligned, constant, indices, kernel, pointer, where
from kivi.ir.xdsl import i8, i16, i32, i64
from kivi.passes.runs import runs
from tests.ir.foreign import FOREIGN


def found(offset, element=i16, align=16, mask=None, other=None) -> int:
    """Loads that are found in a kernel that reads x [8, 16] at `offset(row, column, n, first)`."""

    def body(x, o, n, first):
        row, column = indices(8, 0, 2), indices(16, 1, 2)
        at = offset(row, column, n, first).spread((8, 16))
        values = x.load(at, None if mask is None else mask(row, column, n).spread((8, 16)), other)
        o.store(row.to(i64).spread((8, 16)) * 16 + column.to(i64).spread((8, 16)), values)

    kind = pointer(element)
    arguments = {"x": Aligned(kind, align) if align else kind, "o": pointer(element), "n": i32, "first": i64}
    module = kernel("k", arguments, body)
    module.verify()
    return len(runs(next(iter(module.ops))))


FOUND = {
    "rows one after another": {"offset": lambda r, c, n, f: r * 16 + c},
    "rows further apart": {"offset": lambda r, c, n, f: r * 24 + c},
    "rows in any order that a constant gives": {"offset": lambda r, c, n, f: (r * 0 + 7 - r) * 8 + c},
    "from where a program starts": {"offset": lambda r, c, n, f: (n * 4 * 8 + r * 16) + c},
    "from a promise": {"offset": lambda r, c, n, f: f.multiple_of(8) + (r * 16 + c).to(i64)},
    "from half of a promise": {"offset": lambda r, c, n, f: f.multiple_of(16) // 2 + (r * 16 + c).to(i64)},
    "bytes": {"offset": lambda r, c, n, f: r * 16 + c, "element": i8},
    "rows that are masked as a whole": {"offset": lambda r, c, n, f: r * 16 + c, "mask": lambda r, c, n: r < n},
    "one mask for all": {"offset": lambda r, c, n, f: r * 16 + c, "mask": lambda r, c, n: n < 5},
    "better aligned": {"offset": lambda r, c, n, f: r * 16 + c, "align": 256},
}
NOT_FOUND = {
    "a pointer without a promise": {"offset": lambda r, c, n, f: r * 16 + c, "align": 0},
    "a pointer that may lie between": {"offset": lambda r, c, n, f: r * 16 + c, "align": 8},
    "one element late": {"offset": lambda r, c, n, f: r * 16 + c + 1},
    "rows that start between": {"offset": lambda r, c, n, f: r * 12 + c},
    "every other element": {"offset": lambda r, c, n, f: r * 16 + c * 2},
    "backwards": {"offset": lambda r, c, n, f: r * 16 - c},
    "any start": {"offset": lambda r, c, n, f: n + (r * 16 + c)},
    "too small a promise": {"offset": lambda r, c, n, f: f.multiple_of(4) + (r * 16 + c).to(i64)},
    "a third of a promise": {"offset": lambda r, c, n, f: f.multiple_of(24) // 3 + (r * 16 + c).to(i64)},
    "rows at any distance": {"offset": lambda r, c, n, f: r * n + c},
    "a row chosen by a table": {"offset": lambda r, c, n, f: where(r < n, r * 3, r) * 16 + where(c < 4, c, c)},
    "columns that are masked": {"offset": lambda r, c, n, f: r * 16 + c, "mask": lambda r, c, n: c < n},
    "another filling than zeros": {"offset": lambda r, c, n, f: r * 16 + c, "mask": lambda r, c, n: r < n, "other": 1},
    "wide elements in rows of odd length": {"offset": lambda r, c, n, f: r * 17 + c, "element": i64},
    "strides that cancel only modulo 2^32": {
        "offset": lambda r, c, n, f: (c + ((c * constant(1 << 31, i32)).to(i64) + c.to(i64) * constant(1 << 31, i64)).to(i32)) + r * 16
    },
    "a mask that is equal modulo 2^32": {
        "offset": lambda r, c, n, f: r * 16 + c,
        "mask": lambda r, c, n: ((c * constant(1 << 31, i32)).to(i64) + c.to(i64) * constant(1 << 31, i64)).equals(constant(0, i64)),
    },
}


@pytest.mark.parametrize("what", FOUND)
def test_found(what):
    assert found(**FOUND[what]) == 1


@pytest.mark.parametrize("what", NOT_FOUND)
def test_not_found(what):
    assert found(**NOT_FOUND[what]) == 0


def test_foreign_kernels():
    by_name = {f.name: len(runs(next(iter(f.module().ops)))) for f in FOREIGN}
    assert by_name == {"row_softmax": 0, "prefix_minimum": 0, "strided_copy": 0, "row_totals": 1, "named": 0}


def test_the_promise_is_an_attribute():
    module = kernel("k", {"x": Aligned(pointer(i16), 16), "n": i32}, lambda x, n: None)
    assert "%x: !tile.ptr<i16> {tile.align = 16 : i64}" in str(module)
    [function] = module.ops
    assert list(tile.alignment(function).values()) == [16]
