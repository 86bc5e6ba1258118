"""The worked examples of the design, with their numbers written out, so that the naive model is checked as well."""

from __future__ import annotations

from typing import Any

import numpy as np

from kivi.conformance.case import Case, Crop, Geometry, Refused, Reload, Special, Stream, decode, draft, spec_of
from kivi.conformance.case import Attend, Commit, Fork, Reorder, Repeat, Reset, Rollback, Select, Swap
from kivi.conformance.compare import Mismatch, Tally
from kivi.conformance.inputs import given, make
from kivi.conformance.subject import Subject

#: R = 4, G = 2, fp32 metadata, four codes a byte: the preset `teaching`.
TEACHING = {
    "key.group": 2,
    "key.residual": 4,
    "key.metadata": "float32",
    "value.group": 2,
    "value.residual": 4,
    "value.metadata": "float32",
    "packing.layout": "bytes_lsb",
}
SMALL = Geometry(batch=2, q_heads=4, kv_heads=2, head_dim=8, dtype="float32")
LONE = Geometry(batch=1, q_heads=2, kv_heads=2, head_dim=8, dtype="float32")


def expect(what: str, got: Any, expected: Any) -> None:
    if got != expected:
        raise Mismatch(f"{what} is {got}, expected {expected}")


def one_head(subject: Subject) -> Any:
    return subject.cache(spec_of(TEACHING), batch=1, q_heads=1, kv_heads=1, head_dim=2, dtype="float32")


def row(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32).reshape(1, 1, 1, -1)


def kept(subject: Subject, tally: Tally) -> None:
    """`T: K kept, V kept` of the design, R = 4, one token a step."""
    cache = one_head(subject)
    table = {1: (1, 1), 2: (2, 2), 3: (3, 3), 4: (0, 4), 5: (1, 4), 6: (2, 4), 7: (3, 4), 8: (0, 4), 9: (1, 4)}
    for tokens, floating in table.items():
        cache.attend(row(1, 0), row(tokens, 1), row(1, tokens))
        got = cache.lengths(0)
        expect(f"(tokens, floating keys, floating values) at T = {tokens}", (got.tokens, got.key_residual, got.value_residual), (tokens, *floating))
        expect(f"(sealed keys, sealed values) at T = {tokens}", (got.key_sealed, got.value_sealed), (tokens - floating[0], tokens - floating[1]))


def literal(name: str, about: str, profile: str, scale: float, q: Any, k: Any, v: Any, outputs: Any, **changes: Any) -> Stream:
    """One request and head, one token a call, rows written out. `outputs`: what each call must give, to six digits after the point."""
    spec = spec_of({**TEACHING, **{key.replace("__", "."): value for key, value in changes.items()}})
    geometry = Geometry(head_dim=len(q[0]), value_head_dim=len(v[0]), dtype="float32", scale=scale)
    return Stream(id=f"{profile}/worked.{name}", profile=profile, about=about, spec=spec, geometry=geometry, inputs=given(q, k, v), events=decode(len(q)), outputs=outputs)  # type: ignore[arg-type]


def softmax() -> Stream:
    """Eight logits 0 and one ln 9, values 1 to 9: 117/17. Softmaxes of the parts give 13.5 or other numbers."""
    k = [(0.0, 0.0)] * 8 + [(float(np.log(9)), 0.0)]
    v = [(float(t), float(t)) for t in range(1, 10)]
    outputs = [((t + 1) / 2,) * 2 for t in range(1, 9)] + [(117 / 17,) * 2]
    return literal("softmax", "one softmax over all zones: 117/17", "attention", 1.0, [(1.0, 0.0)] * 9, k, v, outputs)


def order(name: str, about: str, fourth: list[float], fifth: list[float], **changes: Any) -> Stream:
    """Five calls of SPEC 6.4: the fourth fills the key residual, the fifth seals the first value."""
    k = [(0, 0, 0, 0), (1, 2, 0, 0), (2, 4, 0, 0), (6, 6, 0, 0), (3, 1, 0, 0)]
    v = [(0, 1, 2, 6), (6, 2, 1, 0), (1, 0, 6, 2), (2, 6, 0, 1), (3, 3, 3, 9)]
    outputs = [[0, 1, 2, 6], [3.734756, 1.622459, 1.377541, 2.265244], [2.349656, 0.800715, 3.718726, 2.130903], fourth, fifth]
    return literal(name, about, "stream", 0.5, [(1, 0, 0, 0)] * 5, k, v, outputs, key__group=4, value__group=4, **changes)


def cropped(subject: Subject, tally: Tally) -> None:
    """Crop below the frontiers: what is sealed stays sealed, the next key block starts at the new end (SPEC 4.4)."""
    cache = one_head(subject)
    rng = np.random.default_rng(7)

    def append(n: int) -> None:
        cache.attend(*(rng.standard_normal((1, 1, n, 2)).astype(np.float32) for _ in range(3)))

    for event, count, expected in (
        ("append", 10, (10, 8, 6)),
        ("crop", 7, (7, 7, 6)),
        ("append", 3, (10, 7, 6)),
        ("append", 1, (11, 11, 7)),
        ("crop", 0, (0, 0, 0)),
        ("append", 5, (5, 4, 1)),
    ):
        append(count) if event == "append" else cache.crop(count)
        got = cache.lengths(0)
        expect(f"(tokens, sealed keys, sealed values) after {event} {count}", (got.tokens, got.key_sealed, got.value_sealed), expected)


def special(name: str, about: str, run: Any, cost: int, reports: tuple[int, ...] = ()) -> Special:
    return Special(id=f"stream/worked.{name}", profile="stream", about=about, run=run, cost=cost, reports=reports)


def stream(name: str, about: str, events: tuple[Any, ...], seed: int, reports: tuple[int, ...] = (), geometry: Geometry = SMALL, **changes: Any) -> Stream:
    spec = spec_of({**TEACHING, **{k.replace("__", "."): v for k, v in changes.items()}})
    return Stream(id=f"stream/worked.{name}", about=about, spec=spec, geometry=geometry, inputs=make("rich", seed), events=events, reports=reports)


def cases() -> list[Case]:
    paper = "seal_then_attend"
    return [
        special("kept", "what stays floating after each append", kept, 9),
        softmax(),
        order("order", "attend, then seal", [2.07373, 4.903662, 0.784142, 1.238466], [2.128507, 4.676657, 1.118463, 2.453681]),
        order("order-paper", "seal, then attend", [1.971041, 4.979605, 0.778497, 1.270857], [2.128507, 4.642511, 1.118463, 2.453681], order=paper),
        special("crop", "crop below the frontiers, then go on", cropped, 4, (21,)),
        stream("steps", "ten single steps, both frontiers passed twice", decode(10), 1, (), LONE),
        stream("steps-paper", "the same in the paper's order", decode(10), 1, (), LONE, order=paper),
        stream("ragged", "requests of different length, one of them idle, padding of 1e4", (
            Attend(6, counts=(6, 3), padding=1e4), Attend(3, counts=(0, 3), padding=1e4), Attend(2, counts=(2, 1), padding=1e4), *decode(3)), 2, (26, 30)),
        stream("edits", "every edit of the batch, small", (
            Attend(7, counts=(7, 5)), Reorder((1, 0)), Attend(), Fork(), Attend(2), Swap(), Attend(3), Reload(), Attend(), Crop((6, 3)), Attend(3),
            Select((1,)), Repeat(2), Attend(2), Reset(), *decode(5)), 3, (21, 39)),
        stream("pending", "drafts kept in part, dropped, and refused edits", (
            Attend(3), draft(3), Refused(Attend(), "PendingTokensError"), Refused(Crop(1), "PendingTokensError"), Commit((1, 2)), draft(2), draft(2), Rollback(),
            Attend(), draft(6), Commit(5), *decode(2)), 4, (19,), Geometry(batch=2, q_heads=2, head_dim=8, dtype="float32")),
    ]  # fmt: skip
