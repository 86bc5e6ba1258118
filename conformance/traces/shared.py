"""Pages that several requests or caches share: what one of them drops, cuts or empties, the others still read."""

from __future__ import annotations

from kivi.conformance.case import Attend, Case, Crop, Fork, Geometry, Move, Reload, Reorder, Repeat, Reset, Select, Swap
from kivi.conformance.traces.build import Streams

#: Three pages of 16 tokens with values up to token 39: two are closed, so that copies share them, and one is open.
START = Attend(55)


def cases() -> list[Case]:
    out = Streams("shared", geometry=Geometry(head_dim=16, dtype="float32"), reports=(21,))
    emptied = (START, Fork(), Reset(), Swap(), Attend(), Swap(), Attend(33), Swap(), Attend())
    out.add("reset", "a fork is emptied and filled again: its parent's pages stay", *emptied, reports=(21, 39))
    parent = (START, Fork(), Swap(), Reset(), Attend(49), Swap(), Attend(), Reset(), Swap(), Attend())
    out.add("reset-parent", "the parent of a fork is emptied: the fork's pages stay", *parent, reports=(21, 39))
    cut = (START, Fork(), Crop(21), Swap(), Attend(), Swap(), Attend(12), Swap(), Attend(6))
    out.add("crop-rows", "a fork is cut inside a page that its parent reads to the end", *cut)
    dropped = (START, Fork(), Crop(5), Swap(), Attend(), Swap(), Attend(28), Crop(0), Attend(17), Swap(), Attend(6))
    out.add("crop-pages", "a fork drops pages that its parent reads", *dropped)
    later = (START, Fork(), Swap(), Crop(18), Attend(30), Swap(), Attend(), Crop(3), Swap(), Attend())
    out.add("crop-parent", "the parent is cut: the fork reads on", *later)
    rows = (START, Repeat(3), Crop((5, 55, 21)), Attend(), Crop((0, 56, 20)), Attend(17), Select((1,)), Attend())
    out.add("crop-request", "requests of one batch are cut to different lengths of the pages they share", *rows)
    fewer = (START, Repeat(2), Reorder((1, 1)), Attend(9), Select((0,)), Attend(8), Repeat(2), Attend(16))
    out.add("select", "requests that shared pages are dropped", *fewer)
    gone = (START, Fork(), Fork(), Attend(), Fork(), Attend(18), Swap(), Attend(18))
    out.add("dropped", "a fork outlives the caches it came from", *gone)
    scaled = Geometry(q_heads=2, head_dim=16, dtype="float32", scale=0.6)
    settings = (Attend(20), Attend(), Fork(), Attend(2), Swap(), Attend(1), Reload(), Attend(14), Move(), Attend(), Repeat(2), Attend())
    out.add("scale", "copies keep the softmax scale, which is not 1/sqrt(D)", *settings, geometry=scaled)
    return out.cases
