"""Crop, reorder, select, repeat, fork, reset, save and load: codes, scales, residuals and lengths move together, nothing is requantized."""

from __future__ import annotations

from typing import Any

from kivi.conformance.case import (
    Attend,
    Case,
    Crop,
    Fork,
    Geometry,
    Move,
    Refused,
    Reload,
    Reorder,
    Repeat,
    Reset,
    Select,
    Stream,
    Swap,
    decode,
    spec_of,
)
from kivi.conformance.inputs import make

TWO = Geometry(batch=2, q_heads=2, kv_heads=1, dtype="float32")
HEADS = Geometry(batch=2, q_heads=4, kv_heads=2, dtype="float32")
ONE = Geometry(dtype="float32")


def stream(name: str, about: str, events: tuple[Any, ...], seed: int, geometry: Geometry = TWO, reports: tuple[int, ...] = (21,), kind: str = "rich", **changes: Any) -> Stream:
    spec = spec_of({k.replace("__", "."): v for k, v in changes.items()})
    return Stream(id=f"stream/edits.{name}", about=about, spec=spec, geometry=geometry, inputs=make(kind, seed), events=events, reports=reports)


def cases() -> list[Case]:
    start = Attend(39)  # 32 keys and 23 values sealed, 7 and 16 floating
    out: list[Case] = []
    for t, where in ((39, "nothing"), (35, "floating keys"), (32, "the key frontier"), (28, "sealed keys, floating values"), (24, "inside a page, at a group"),
                     (21, "inside a group, sealed values"), (16, "at a page"), (5, "inside the first page"), (0, "everything")):  # fmt: skip
        out.append(stream(f"crop{t}", f"crop {where}, then grow over both frontiers", (start, Crop(t), Attend(), Attend(18)), 1, ONE))
    out += [
        stream("crop-twice", "crops inside two groups: three segments", (start, Crop(21), Attend(20), Crop(27), Attend(2), Attend(16), Crop(10), Attend(17)), 2, ONE),
        stream("crop-paper", "crop in the paper's order", (start, Crop(21), Attend(), Attend(18)), 1, ONE, order="seal_then_attend"),
        stream("crop-ragged", "one crop a request", (Attend(39, counts=(39, 20)), Crop((30, 20)), Attend(3), Crop((0, 13)), Attend(19)), 3),
        stream("crop-wide", "crop between the frontiers of a wide value window", (start, Crop(18), Attend(9), Attend(9)), 4, ONE, value__residual=32),
        stream("crop-refused", "t < 0 and t > T", (Attend(9), Refused(Crop(-1), "InputError"), Refused(Crop(10), "InputError"), Refused(Crop((9, 10)), "InputError"), Attend()), 5),
        stream("reorder", "beams swap and merge", (Attend(39, counts=(39, 22)), Reorder((1, 0)), Attend(2), Reorder((1, 1)), Attend(), Attend(17)), 6, HEADS),
        stream("reorder-short", "reorder while nothing is sealed, then with an empty residual", (Attend(3), Reorder((1, 0)), Attend(13), Reorder((1, 0)), *decode(2)), 7),
        stream("select", "keep one row, then double it", (Attend(21, counts=(21, 18)), Select((1,)), Attend(2), Repeat(2), Attend(), Attend(15)), 8),
        stream("repeat", "copies lie side by side and part ways", (Attend(18, counts=(18, 7)), Repeat(2), Attend(4, counts=(4, 0, 1, 3)), Attend(14), Select((3, 0))), 9),
        stream("fork", "both branches grow over shared pages", (start, Fork(), Attend(2), Attend(18), Swap(), Attend(5), Attend(14), Crop(33), Attend(2), Swap(), Attend()), 10, ONE),
        stream("fork-open", "fork in the middle of an open page: values still to come", (Attend(17), Fork(), *decode(3), Swap(), Attend(6), Reset(), Attend(5), Swap(), Attend(12)), 11),
        stream("reset", "reset, then less and more than before", (Attend(39), Reset(), Attend(3), *decode(2), Attend(30), Reset(), Attend(17)), 12, TWO, (39, 21)),
        stream("reuse", "pages that others gave back hold nothing old", (Attend(39), Crop(3), Attend(14), Attend(16), Reorder((0, 0)), Attend(17)), 13, TWO, (21, 39), "contrast"),
        stream("reload", "save and load at every kind of boundary", (Attend(5), Reload(), Attend(11), Reload(), Attend(1), Reload(), Attend(18), Crop(21), Reload(), Attend(17)), 14),
        stream("reload-empty", "an empty cache can be saved", (Reload(), Attend(17), Reset(), Reload(), Attend(2)), 15),
        stream("reload-bf16", "metadata and rows of bf16, values of another width", (Attend(19, counts=(19, 7)), Reload(), Attend(16)), 16,
               Geometry(batch=2, q_heads=4, kv_heads=2, value_head_dim=80, dtype="bfloat16"), key__metadata="bfloat16", value__bits=3, numerics="portable"),
        stream("history", "a long mixed life", (Attend(20, counts=(20, 13)), Fork(), Attend(3), Swap(), Reorder((1, 0)), Attend(15), Crop((27, 30)), Reload(), Attend(4, counts=(4, 0)), Move(),
               Repeat(2), Attend(2), Select((0, 3)), Attend(17), Crop((40, 35)), Attend(3)), 17, order="seal_then_attend"),
    ]  # fmt: skip
    return out
