"""`max_tokens` and `max_pages`: kept by copies, pending tokens counted, and no page lost by what drops or fails."""

from __future__ import annotations

from kivi.conformance.case import (
    Attend,
    Case,
    Commit,
    Crop,
    Fork,
    Geometry,
    Move,
    Poke,
    Refused,
    Reload,
    Reorder,
    Repeat,
    Reset,
    Rollback,
    Select,
    Swap,
    draft,
)
from kivi.conformance.traces.build import Streams
from kivi.conformance.traces.long import SMALL


def full(n: int = 1, commit: bool = True) -> Refused:
    return Refused(Attend(n, commit=commit), "CapacityError")


def tokens(out: Streams) -> None:
    twenty, two = Geometry(head_dim=16, dtype="float32", max_tokens=20), Geometry(batch=2, head_dim=16, dtype="float32", max_tokens=20)
    waiting = (Attend(15), draft(3), full(3, commit=False), draft(2), full(commit=False), Rollback(), Attend(5), full(), full(commit=False))
    out.add("pending", "tokens that wait take room, too", *waiting, geometry=twenty)
    long, short = Attend(6, counts=(6, 2), commit=False), Attend(2, counts=(0, 2), commit=False)
    ragged = (Attend(14, counts=(14, 2)), long, full(commit=False), short, Commit(), full(), Crop((19, 6)), Attend(), full())
    out.add("ragged", "the longest request decides", *ragged, geometry=two)
    copies = (Attend(20), Fork(), full(), Swap(), full(), Reload(), full(), Move(), full(), Crop(19), Fork(), Attend(), full())
    out.add("tokens", "forks and loaded caches keep max_tokens", *copies, geometry=twenty)
    batch = (Attend(20), Repeat(2), full(), Reorder((1, 0)), full(), Select((1,)), full(), Reset(), Attend(20), full())
    out.add("tokens-batch", "so do batches that were edited", *batch, geometry=twenty)


def pages(out: Streams) -> None:
    three = Geometry(head_dim=16, dtype="float32", max_pages=3)
    freed = (Attend(12), full(4), Crop(5), Attend(4), full(4), Crop(0), Attend(12), full(4), Reset(), Attend(11), Attend(1), full(4))
    out.add("freed", "pages that crop and reset drop are used again", *freed, geometry=three, **SMALL)
    out.add("freed-paper", "the same, sealing first", *freed, geometry=three, order="seal_then_attend", **SMALL)
    kept = (Attend(32), Reload(), Attend(16), full(16), Move(), full(16), Crop(32), Reload(), Attend(16), full(16))
    out.add("pages", "loaded caches keep max_pages", *kept, geometry=three)
    # An open page is copied before the old one is dropped: two pages hold the cache, a third one the copy.
    turned = (Attend(39), *(Reorder((0,)),) * 3, *(Fork(),) * 3, Attend(8), Swap(), Reset(), Swap(), Attend(17), full(16))
    out.add(
        "edits", "batch edits and forks that are gone keep no page", *turned, geometry=Geometry(head_dim=16, dtype="float32", max_pages=4)
    )
    shared = (Attend(55), Fork(), Reset(), Swap(), Attend(9), full(16), Swap(), full(16), Swap(), Crop(0), Attend(32), Swap(), Attend(32))
    out.add("shared", "pages are free when the last of two forks drops them", *shared, geometry=Geometry(head_dim=16, max_pages=4))


def failures(out: Streams) -> None:
    """A scale of 120000 overflows fp16 when its key block is sealed; by then pages have been taken for both requests."""
    four, error = Geometry(batch=2, head_dim=16, max_pages=4), "MetadataOverflowError"
    wide = (Poke("k", 1, 0, 3, 5, -60000.0), Poke("k", 1, 0, 4, 5, 60000.0))
    fails = (Refused(Attend(2), error),) * 3
    for tag, order in (("", "attend_then_seal"), ("-paper", "seal_then_attend")):
        steps = (Attend(14, pokes=wide), *fails, Crop((14, 0)), Attend(18), full(16), Reset(), Attend(32))
        out.add(f"failed{tag}", "steps that fail while they seal give their pages back", *steps, geometry=four, key__bits=1, order=order)
    commits = (Attend(16, commit=False, pokes=wide), *(Refused(Commit(), error),) * 3, Rollback(), Attend(32), full(16))
    out.add("failed-commit", "and so do commits", *commits, geometry=four, key__bits=1)


def cases() -> list[Case]:
    out = Streams("limits")
    for part in (tokens, pages, failures):
        part(out)
    return out.cases
