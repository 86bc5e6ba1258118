"""Crop, reorder, select, repeat, fork, reset, save and load: codes, scales and floating rows move together, nothing is requantized."""

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
    Swap,
    decode,
)
from kivi.conformance.inputs import make
from kivi.conformance.traces.build import Streams

#: 32 keys and 23 values sealed, 7 and 16 floating.
START = Attend(39)

CROPS = {
    39: "nothing",
    35: "floating keys",
    32: "the key frontier",
    28: "sealed keys with floating values",
    24: "inside a page, at a group",
    21: "inside a group, sealed values",
    16: "at a page",
    5: "inside the first page",
    0: "everything",
}


def crops(out: Streams) -> None:
    one: dict[str, Any] = {"geometry": Geometry(dtype="float32")}
    for t, where in CROPS.items():
        out.add(
            f"crop{t}", f"crop {where}, then grow over both frontiers", START, Crop(t), Attend(), Attend(18), inputs=make("rich", 21), **one
        )
    segments = (START, Crop(21), Attend(20), Crop(27), Attend(2), Attend(16), Crop(10), Attend(17))
    out.add("crop-twice", "crops inside two groups: three segments", *segments, **one)
    out.add("crop-paper", "crop in the paper's order", START, Crop(21), Attend(), Attend(18), order="seal_then_attend", **one)
    ragged = (Attend(39, counts=(39, 20)), Crop((30, 20)), Attend(3), Crop((0, 13)), Attend(19))
    out.add("crop-ragged", "one crop a request", *ragged)
    out.add(
        "crop-wide", "crop between the frontiers of a wide value window", START, Crop(18), Attend(9), Attend(9), value__residual=32, **one
    )
    impossible = tuple(Refused(Crop(t), "InputError") for t in (-1, 10, (9, 10)))
    out.add("crop-refused", "t < 0 and t > T", Attend(9), *impossible, Attend())


def batches(out: Streams) -> None:
    heads = Geometry(batch=2, q_heads=4, kv_heads=2, dtype="float32")
    beams = (Attend(39, counts=(39, 22)), Reorder((1, 0)), Attend(2), Reorder((1, 1)), Attend(), Attend(17))
    out.add("reorder", "beams swap and merge", *beams, geometry=heads)
    short = (Attend(3), Reorder((1, 0)), Attend(13), Reorder((1, 0)), *decode(2))
    out.add("reorder-short", "reorder while nothing is sealed, then with an empty residual", *short)
    kept = (Attend(21, counts=(21, 18)), Select((1,)), Attend(2), Repeat(2), Attend(), Attend(15))
    out.add("select", "keep one row, then double it", *kept)
    copies = (Attend(18, counts=(18, 7)), Repeat(2), Attend(4, counts=(4, 0, 1, 3)), Attend(14), Select((3, 0)))
    out.add("repeat", "copies lie side by side and part ways", *copies)
    branches = (START, Fork(), Attend(2), Attend(18), Swap(), Attend(5), Attend(14), Crop(33), Attend(2), Swap(), Attend())
    out.add("fork", "both branches grow over shared pages", *branches, geometry=Geometry(dtype="float32"))
    opened = (Attend(17), Fork(), *decode(3), Swap(), Attend(6), Reset(), Attend(5), Swap(), Attend(12))
    out.add("fork-open", "fork in the middle of an open page: values still to come", *opened)


def lives(out: Streams) -> None:
    again = (START, Reset(), Attend(3), *decode(2), Attend(30), Reset(), Attend(17))
    out.add("reset", "reset, then less and more than before", *again, reports=(39, 21))
    reused = (START, Crop(3), Attend(14), Attend(16), Reorder((0, 0)), Attend(17))
    out.add("reuse", "pages that others gave back hold nothing old", *reused, reports=(21, 39), inputs="contrast")
    saved = (Attend(5), Reload(), Attend(11), Reload(), Attend(1), Reload(), Attend(18), Crop(21), Reload(), Attend(17))
    out.add("reload", "save and load at every kind of boundary", *saved)
    out.add("reload-empty", "an empty cache can be saved", Reload(), Attend(17), Reset(), Reload(), Attend(2))
    wide = Geometry(batch=2, q_heads=4, kv_heads=2, value_head_dim=80, dtype="bfloat16")
    about = "metadata and rows of bf16, values of another width"
    out.add("reload-bf16", about, Attend(19, counts=(19, 7)), Reload(), Attend(16), geometry=wide, key__metadata="bfloat16", value__bits=3)
    out.add(
        "history",
        "a long mixed life",
        Attend(20, counts=(20, 13)),
        Fork(),
        Attend(3),
        Swap(),
        Reorder((1, 0)),
        Attend(15),
        Crop((27, 30)),
        Reload(),
        Attend(4, counts=(4, 0)),
        Move(),
        Repeat(2),
        Attend(2),
        Select((0, 3)),
        Attend(17),
        Crop((40, 35)),
        Attend(3),
        order="seal_then_attend",
    )


def cases() -> list[Case]:
    out = Streams("edits", geometry=Geometry(batch=2, q_heads=2, kv_heads=1, dtype="float32"), reports=(21,))
    for part in (crops, batches, lives):
        part(out)
    return out.cases
