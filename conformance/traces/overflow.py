"""Scales and origins beyond the metadata dtype: an error that says what would do, or clamped numbers; never an infinity."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from kivi.conformance.case import Attend, Case, Commit, Crop, Geometry, Poke, Refused, Rollback, decode, draft
from kivi.conformance.traces.build import Streams, Tensors


def outlier() -> np.ndarray:
    """Report 4: one value token of 128 bf16 numbers in [-1, 4] with one at -70000, between ordinary tokens."""
    x = np.random.default_rng(4).uniform(-1, 4, (1, 2, 3, 128))
    x[0, 1, 1, 77] = -70000.0
    return x


def token(*numbers: float) -> Any:
    """A value tensor of one token."""
    return lambda: np.array(numbers)[None, None, None]


def tensors(out: Tensors) -> None:
    over: dict[str, Any] = {"error": "MetadataOverflowError"}
    named: dict[str, Any] = {**over, "says": ("metadata", "bfloat16")}
    fourth: dict[str, Any] = {"reports": (4,), "value__group": 32}
    value = partial(out.add, which="value")
    value("origin.reject", "bf16 outlier, fp16 metadata: an error", make=outlier, dtype="bfloat16", **named, **fourth)
    value("origin.saturate", "clamped: neighbours are not infected", make=outlier, dtype="bfloat16", overflow="saturate", **fourth)
    value("origin.saturate8", "at eight bits", make=outlier, dtype="bfloat16", overflow="saturate", value__bits=8, **fourth)
    value("origin.bf16", "bf16 metadata holds it", make=outlier, dtype="bfloat16", value__metadata="bfloat16", **fourth)
    value("origin.fp32", "fp32 metadata holds it", make=outlier, dtype="bfloat16", value__metadata="float32", **fourth)
    ones = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    value("edge", "-65519 still rounds to a finite fp16 origin", make=token(-65519.0, *ones), dtype="float32", value__bits=8)
    value("edge.over", "-65520 does not", make=token(-65520.0, *ones), dtype="float32", value__bits=8, **over)
    value("high", "70000 is fine as a maximum: only scale and origin are stored", make=token(70000.0, *ones), dtype="float32")
    whole = token(*(-65504.0, 65504.0, 0.0, 100.0) * 2)
    value("scale.reject", "one bit: the whole fp16 range is the scale", make=whole, dtype="float16", value__bits=1, **over)
    value("scale.saturate", "the scale is clamped on its own", make=whole, dtype="float16", value__bits=1, overflow="saturate")
    staged = token(*(-60000.0, 60000.0, 0.0, 5.0) * 2)
    value("staged.reject", "staged: the difference itself overflows", make=staged, dtype="float16", numerics="staged", **over)
    value("staged.saturate", "staged, clamped", make=staged, dtype="float16", numerics="staged", overflow="saturate")
    full = token(-3e38, 3e38, 0.0, 1.0, -1.0, 1e38, -1e38, 2e38)
    clamped: dict[str, Any] = {"make": full, "overflow": "saturate"}
    value("full.reject", "the difference overflows fp32", make=full, dtype="float32", value__metadata="float32", **over)
    value("full.saturate", "quotients of 1e34 are clamped, not cast", dtype="float32", **clamped)
    value("full.saturate32", "fp32 metadata", dtype="float32", value__metadata="float32", value__bits=4, **clamped)
    value("full.saturate-bf16", "bf16 metadata", dtype="bfloat16", value__metadata="bfloat16", value__bits=8, **clamped)
    rows = np.array([[-131038.0, *ones], [-65519.0, *ones], [131038.0, *ones]])
    out.add("key.reject", "keys are checked too", "key", lambda: rows[:1].T[None, None], "float32", **named)
    out.add("key.saturate", "keys are clamped too", "key", lambda: rows.T[None, None], "float32", overflow="saturate")


def streams(out: Streams) -> None:
    error, low = "MetadataOverflowError", (Poke("v", 0, 0, 0, 9, -70000.0),)
    out.add(
        "reject",
        "an append that could not be sealed later changes nothing",
        Attend(15),
        Refused(Attend(3, pokes=low), error),
        Refused(Attend(2, commit=False, pokes=low), error),
        Attend(3),
        *decode(2),
    )
    out.add("saturate", "a clamped row infects nothing else", Attend(15), Attend(3, pokes=low), Attend(20), *decode(2), overflow="saturate")
    span = Attend(14, pokes=(Poke("k", 1, 0, 3, 5, -60000.0), Poke("k", 1, 0, 4, 5, 60000.0)))
    about = "a key block whose scale overflows: the step that seals it is refused as a whole"
    late = (span, Refused(Attend(2), error), Attend(1), Refused(Attend(1), error))
    out.add("scale", about, *late, geometry=Geometry(batch=2), reports=(), key__bits=1)
    drafted = Attend(7, counts=(7, 3), commit=False, pokes=(Poke("k", 0, 0, 1, 5, -60000.0), Poke("k", 0, 0, 2, 5, 60000.0)))
    refusals = (Refused(Commit(), error), Refused(Commit((6, 2)), error), Refused(Attend(), "PendingTokensError"))
    kept = (Rollback(), drafted, Refused(Commit(), error), Commit(4), Crop(10), Attend(8))
    about = "a commit whose seal overflows is refused, and its tokens go on waiting"
    out.add("commit", about, Attend(10), drafted, *refusals, draft(1), *kept, geometry=Geometry(batch=2), reports=(), key__bits=1)


def counts(out: Streams) -> None:
    """Each saturated scale and origin is counted once (SPEC 3.7.4)."""
    far = Geometry(batch=2, head_dim=16, dtype="float32")

    def outliers(side: str, low: float, high: float) -> tuple[Poke, ...]:
        return Poke(side, 0, 0, 0, 1, low), Poke(side, 0, 0, 2, 1, high), Poke(side, 1, 0, 1, 9, low), Poke(side, 1, 0, 1, 12, high)

    keys, values = outliers("k", -70000.0, 80000.0), outliers("v", -66000.0, 1.0)
    about = "saturated scales and origins are counted once, when they are sealed"
    out.add(
        "clamped",
        about,
        Attend(15, pokes=keys),
        Attend(3, counts=(3, 2), pokes=values),
        Attend(3, commit=False, pokes=keys + values),
        Rollback(),
        Attend(4, commit=False, pokes=outliers("v", 70000.0, -70000.0)),
        Commit((4, 2)),
        Attend(20),
        *decode(2),
        geometry=far,
        reports=(),
        overflow="saturate",
        key__bits=1,
        value__bits=1,
    )


def cases() -> list[Case]:
    whole, steps = Tensors("overflow"), Streams("overflow", geometry=Geometry(dtype="bfloat16"), reports=(4,))
    tensors(whole)
    streams(steps)
    counts(steps)
    return [*whole.cases, *steps.cases]
