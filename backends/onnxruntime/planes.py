"""Planes: layouts whose slots are the topmost digit of the channel, so that a mask leaves the codes of consecutive channels in place."""

from __future__ import annotations

from kivi.layout import Arrangement
from kivi.pool import PageFormat

LANE = 8  # bytes that one mask covers when words are masked as wide integers


def in_planes(form: PageFormat, which: str) -> bool:
    """Whether words are planes, [tokens, channels of a plane], and the codes of a plane of values share a scale for each token."""
    shape = form.key if which == "key" else form.value
    if shape.bits == 3 or len(shape.slots) != 1 or shape.slots[0].axis != "c":
        return False
    if [(d.axis, d.star) for d in shape.places] != [("c", True), ("t", True)]:
        return False
    return which == "key" or all(len(groups) == 1 for groups in groups_of_planes(form))


def channels_of_plane(shape: Arrangement) -> int:
    return shape.places[0].extent


def groups_of_planes(form: PageFormat) -> list[list[int]]:
    """The groups of channels that each plane of values meets; a plane past the last channel counts as of the last group."""
    shape, group = form.value, form.spec.value.group
    plane, last = channels_of_plane(shape), shape.channels - 1
    return [sorted({min(c, last) // group for c in range(i * plane, (i + 1) * plane)}) for i in range(shape.unit)]


def masked_apart(form: PageFormat) -> tuple[str, ...]:
    """The sides of a cache whose words a graph of its own can mask, `LANE` bytes at a time."""
    sides = (which for which in ("key", "value") if form.fields[f"{which}.words"].bytes % LANE == 0)
    return tuple(which for which in sides if in_planes(form, which))


def masks(shape: Arrangement) -> list[int]:
    """The bits of each plane in a word."""
    return [((1 << shape.bits) - 1) << shape.bits * i for i in range(shape.unit)]
