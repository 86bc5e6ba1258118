"""Speculative tokens: floating while they wait, sealed only by commit, gone without a trace after rollback."""

from __future__ import annotations

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
    decode,
    draft,
)
from kivi.conformance.traces.build import Streams


def cases() -> list[Case]:
    out = Streams("pending", geometry=Geometry(batch=2, q_heads=2, kv_heads=1, dtype="float32"))
    for tag, order in (("", "attend_then_seal"), ("-paper", "seal_then_attend")):
        out.add(
            f"part{tag}",
            "a draft over the key frontier, kept in part",
            Attend(14),
            draft(5),
            Commit(3),
            Attend(),
            draft(4),
            Commit((0, 4)),
            *decode(2),
            reports=(19,),
            order=order,
        )
        out.add(f"undo{tag}", "a draft longer than the window's slack, dropped", Attend(14), draft(30), Rollback(), *decode(4), order=order)
        out.add(
            f"twice{tag}", "drafts add up and see each other", Attend(13), draft(1), draft(4), draft(2), Commit(), *decode(2), order=order
        )
        out.add(f"empty{tag}", "a draft before any token is a prefill", draft(18), Commit(17), *decode(2), order=order)
    out.add("nothing", "commit(0) and commit beyond what waits", Attend(5), draft(2), Commit(0), draft(2), Commit(99), Attend())
    out.add(
        "ragged",
        "drafts of different length",
        Attend(15, counts=(15, 4)),
        Attend(4, counts=(1, 4), commit=False, padding=1e4),
        Commit((1, 2)),
        *decode(2),
    )
    edits = (Attend(), Crop(3), Fork(), Reload(), Reorder((1, 0)), Select((0,)), Repeat(2))
    refusals = tuple(Refused(edit, "PendingTokensError") for edit in edits)
    out.add("refused", "what must wait for commit or rollback", Attend(17), draft(2), *refusals, Commit(1), Attend())
    out.add("reset", "reset drops a draft too", Attend(5), draft(14), Reset(), *decode(2), Attend(17), reports=(39,))
    out.add(
        "drop-after-seal",
        "rollback next to a fresh seal leaves windows as they were",
        Attend(16),
        draft(3),
        Rollback(),
        Attend(3),
        draft(20),
        Rollback(),
        *decode(3),
        geometry=Geometry(q_heads=2, dtype="float16"),
    )
    return out.cases
