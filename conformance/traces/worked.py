"""The worked examples of the design, with their numbers written out, so that the naive model is checked as well."""

from __future__ import annotations

from typing import Any

import numpy as np

from kivi.conformance.case import (
    Attend,
    Case,
    Commit,
    Crop,
    Fork,
    Geometry,
    Refused,
    Reload,
    Reorder,
    Repeat,
    Reset,
    Rollback,
    Select,
    Special,
    Swap,
    decode,
    draft,
    spec_of,
)
from kivi.conformance.compare import Mismatch, Tally
from kivi.conformance.inputs import given
from kivi.conformance.subject import Subject
from kivi.conformance.traces.build import Streams, dotted

#: R = 4, G = 2, fp32 metadata, four codes a byte: the preset `teaching`.
TEACHING: dict[str, Any] = {
    "key__group": 2,
    "key__residual": 4,
    "key__metadata": "float32",
    "value__group": 2,
    "value__residual": 4,
    "value__metadata": "float32",
    "packing__layout": "bytes_lsb",
}
LONE = Geometry(batch=1, q_heads=2, kv_heads=2, head_dim=8, dtype="float32")
PAIR = Geometry(batch=2, q_heads=4, kv_heads=2, head_dim=8, dtype="float32")
PAPER = "seal_then_attend"


def expect(what: str, got: Any, expected: Any) -> None:
    if got != expected:
        raise Mismatch(f"{what} is {got}, expected {expected}")


def one_head(subject: Subject) -> Any:
    return subject.cache(spec_of(dotted(TEACHING)), batch=1, q_heads=1, kv_heads=1, head_dim=2, dtype="float32")


def kept(subject: Subject, tally: Tally) -> None:
    """`T: K kept, V kept` of the design, R = 4, one token a step."""
    cache, x = one_head(subject), np.ones((1, 1, 1, 2), np.float32)
    table = {1: (1, 1), 2: (2, 2), 3: (3, 3), 4: (0, 4), 5: (1, 4), 6: (2, 4), 7: (3, 4), 8: (0, 4), 9: (1, 4)}
    for tokens, floating in table.items():
        cache.attend(x, x * tokens, x)
        got = cache.lengths(0)
        found = (got.tokens, got.key_residual, got.value_residual)
        expect(f"(tokens, floating keys, floating values) at T = {tokens}", found, (tokens, *floating))
        expect(
            f"(sealed keys, sealed values) at T = {tokens}",
            (got.key_sealed, got.value_sealed),
            (tokens - floating[0], tokens - floating[1]),
        )


def cropped(subject: Subject, tally: Tally) -> None:
    """Crop below the frontiers: what is sealed stays sealed, the next key block starts at the new end (SPEC 4.4)."""
    cache, rng = one_head(subject), np.random.default_rng(7)
    for event, count, expected in (
        ("append", 10, (10, 8, 6)),
        ("crop", 7, (7, 7, 6)),
        ("append", 3, (10, 7, 6)),
        ("append", 1, (11, 11, 7)),
        ("crop", 0, (0, 0, 0)),
        ("append", 5, (5, 4, 1)),
    ):
        if event == "append":
            cache.attend(*(rng.standard_normal((1, 1, count, 2)).astype(np.float32) for _ in range(3)))
        else:
            cache.crop(count)
        got = cache.lengths(0)
        expect(f"(tokens, sealed keys, sealed values) after {event} {count}", (got.tokens, got.key_sealed, got.value_sealed), expected)


def softmax(out: Streams) -> None:
    """Eight logits 0 and one ln 9, values 1 to 9: 117/17. Softmaxes of the parts give 13.5 or other numbers."""
    k = [(0, 0)] * 8 + [(float(np.log(9)), 0)]
    rows = given([(1, 0)] * 9, k, [(t, t) for t in range(1, 10)])
    outputs = [((t + 1) / 2,) * 2 for t in range(1, 9)] + [(117 / 17,) * 2]
    geometry = Geometry(head_dim=2, dtype="float32", scale=1.0)
    out.add("softmax", "one softmax over all zones: 117/17", *decode(9), inputs=rows, geometry=geometry, outputs=outputs, **TEACHING)


def orders(out: Streams) -> None:
    """Five calls of SPEC 6.4: the fourth fills the key residual, the fifth seals the first value."""
    k = [(0, 0, 0, 0), (1, 2, 0, 0), (2, 4, 0, 0), (6, 6, 0, 0), (3, 1, 0, 0)]
    v = [(0, 1, 2, 6), (6, 2, 1, 0), (1, 0, 6, 2), (2, 6, 0, 1), (3, 3, 3, 9)]
    both = [(0, 1, 2, 6), (3.734756, 1.622459, 1.377541, 2.265244), (2.349656, 0.800715, 3.718726, 2.130903)]
    late = [(2.07373, 4.903662, 0.784142, 1.238466), (2.128507, 4.676657, 1.118463, 2.453681)]
    early = [(1.971041, 4.979605, 0.778497, 1.270857), (2.128507, 4.642511, 1.118463, 2.453681)]
    geometry = Geometry(head_dim=4, dtype="float32", scale=0.5)
    shared: dict[str, Any] = {**TEACHING, "key__group": 4, "value__group": 4}
    rows = given([(1, 0, 0, 0)] * 5, k, v)
    out.add("order", "attend, then seal", *decode(5), inputs=rows, geometry=geometry, outputs=both + late, **shared)
    out.add("order-paper", "seal, then attend", *decode(5), inputs=rows, geometry=geometry, outputs=both + early, order=PAPER, **shared)


def cases() -> list[Case]:
    attention, out = Streams("worked", "attention"), Streams("worked", geometry=PAIR)
    softmax(attention)
    orders(out)
    out.add("steps", "ten single steps, both frontiers passed twice", *decode(10), geometry=LONE, **TEACHING)
    out.add("steps-paper", "the same in the paper's order", *decode(10), geometry=LONE, order=PAPER, **TEACHING)
    out.add(
        "ragged",
        "requests of different length, one of them idle, padding of 1e4",
        Attend(6, counts=(6, 3), padding=1e4),
        Attend(3, counts=(0, 3), padding=1e4),
        Attend(2, counts=(2, 1), padding=1e4),
        *decode(3),
        reports=(26, 30),
        **TEACHING,
    )
    late = (Attend(6, counts=(6, 0)), Attend(5, counts=(1, 5)), Attend())
    out.add("late-paper", "a request starts beside another, in the paper's order", *late, reports=(24,), order=PAPER, **TEACHING)
    out.add(
        "edits",
        "every edit of the batch, small",
        Attend(7, counts=(7, 5)),
        Reorder((1, 0)),
        Attend(),
        Fork(),
        Attend(2),
        Swap(),
        Attend(3),
        Reload(),
        Attend(),
        Crop((6, 3)),
        Refused(Crop((7, 3)), "InputError"),
        Attend(3),
        Repeat(2),
        Attend(),
        Select((3, 0)),
        Attend(2),
        Reset(),
        *decode(5),
        reports=(21, 39),
        **TEACHING,
    )
    out.add(
        "pending",
        "drafts kept in part, dropped, and refused edits",
        Attend(3),
        draft(3),
        Refused(Attend(), "PendingTokensError"),
        Refused(Crop(1), "PendingTokensError"),
        Commit((1, 2)),
        draft(2),
        draft(2),
        Rollback(),
        Attend(),
        draft(6),
        Commit(5),
        *decode(2),
        geometry=Geometry(batch=2, q_heads=2, head_dim=8, dtype="float32"),
        reports=(19,),
        **TEACHING,
    )
    about = "what stays floating after each append"
    specials: list[Case] = [
        Special(id="stream/worked.kept", profile="stream", about=about, run=kept, cost=9),
        Special(id="stream/worked.crop", profile="stream", about="crop below the frontiers", run=cropped, cost=4, reports=(21,)),
    ]
    return [*specials, *attention.cases, *out.cases]
