"""Speculative tokens: floating while they wait, sealed only by commit, gone without a trace after rollback."""

from __future__ import annotations

from typing import Any

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
    Stream,
    decode,
    draft,
    spec_of,
)
from kivi.conformance.inputs import make

TWO = Geometry(batch=2, q_heads=2, kv_heads=1, dtype="float32")


def stream(name: str, about: str, events: tuple[Any, ...], seed: int, geometry: Geometry = TWO, reports: tuple[int, ...] = (), **changes: Any) -> Stream:
    spec = spec_of({k.replace("__", "."): v for k, v in changes.items()})
    return Stream(id=f"stream/pending.{name}", about=about, spec=spec, geometry=geometry, inputs=make("rich", seed), events=events, reports=reports)


def cases() -> list[Case]:
    waiting = "PendingTokensError"
    out: list[Case] = []
    for tag, changes in (("", {}), ("-paper", {"order": "seal_then_attend"})):
        out += [
            stream(f"part{tag}", "a draft over the key frontier, kept in part", (Attend(14), draft(5), Commit(3), Attend(), draft(4), Commit((0, 4)), *decode(2)), 1, TWO, (19,), **changes),
            stream(f"undo{tag}", "a draft longer than the window's slack, dropped", (Attend(14), draft(30), Rollback(), *decode(4)), 2, **changes),
            stream(f"twice{tag}", "drafts add up and see each other", (Attend(13), draft(1), draft(4), draft(2), Commit(), *decode(2)), 3, **changes),
            stream(f"empty{tag}", "a draft before any token is a prefill", (draft(18), Commit(17), *decode(2)), 4, **changes),
        ]
    out += [
        stream("nothing", "commit(0) and commit beyond what waits", (Attend(5), draft(2), Commit(0), draft(2), Commit(99), Attend()), 5),
        stream("ragged", "drafts of different length", (Attend(15, counts=(15, 4)), Attend(4, counts=(1, 4), commit=False, padding=1e4), Commit((1, 2)), *decode(2)), 6),
        stream("refused", "what must wait for commit or rollback", (
            Attend(17), draft(2), Refused(Attend(), waiting), Refused(Crop(3), waiting), Refused(Fork(), waiting), Refused(Reload(), waiting),
            Refused(Reorder((1, 0)), waiting), Refused(Select((0,)), waiting), Refused(Repeat(2), waiting), Commit(1), Attend()), 7),
        stream("reset", "reset drops a draft too", (Attend(5), draft(14), Reset(), *decode(2), Attend(17)), 8, TWO, (39,)),
        stream("drop-after-seal", "rollback next to a fresh seal leaves windows as they were", (Attend(16), draft(3), Rollback(), Attend(3), draft(20), Rollback(), *decode(3)), 9,
               Geometry(q_heads=2, dtype="float16")),
    ]  # fmt: skip
    return out
