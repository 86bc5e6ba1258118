"""Requests of different lengths: counts, padding, requests that start late or pause, decisions taken request by request."""

from __future__ import annotations

from typing import Any

from kivi.conformance.case import Attend, Case, Geometry, decode
from kivi.conformance.traces.build import Streams

NAN = float("nan")


def cases() -> list[Case]:
    out = Streams("ragged", geometry=Geometry(batch=2, q_heads=4, kv_heads=1, dtype="float32"))
    for tag, order in (("", "attend_then_seal"), ("-paper", "seal_then_attend")):
        late = (Attend(20, counts=(20, 0)), Attend(18, counts=(2, 18)), *decode(2))
        out.add(f"late{tag}", "a request starts beside a long one: its first call is its prefill", *late, reports=(24, 30), order=order)
        first = (Attend(8, counts=(8, 3)), Attend(17, counts=(4, 17)), *decode(2))
        out.add(f"first{tag}", "a ragged first prompt", *first, reports=(30,), order=order)

    def padded(value: float) -> tuple[Any, ...]:
        return Attend(20, counts=(17, 5), padding=value), Attend(14, counts=(1, 14), padding=value), *decode(1)

    out.add("padding", "1e4 in the padding: neither attended to nor in a range", *padded(1e4), reports=(26,))
    out.add("padding-nan", "NaN in the padding is not looked at", *padded(NAN), reports=(26,))
    out.add("padding-propagate", "NaN in the padding reaches nothing", *padded(NAN), reports=(26,), nonfinite="propagate")
    lone = (Attend(1, counts=(1, 0)),) * 2
    out.add(
        "pause",
        "a request that takes no part is not touched",
        Attend(15),
        *lone,
        Attend(5, counts=(0, 5)),
        Attend(1, counts=(0, 1)),
        *decode(2),
    )
    nobody = Attend(2, counts=(0, 0))
    out.add("none", "a call in which nobody takes part", nobody, Attend(16), nobody, *decode(1))
    loud = (Attend(19, counts=(19, 5)), Attend(14), *decode(2))
    out.add("contrast", "a neighbour a thousand times as large", *loud, reports=(23,), inputs="contrast")
    heads = Geometry(batch=2, q_heads=2, kv_heads=2, dtype="float32")
    unequal = (Attend(20, counts=(3, 20)), Attend(16, counts=(16, 1)), *decode(1))
    out.add("uniform", "uniform weights at unequal lengths", *unequal, geometry=heads, reports=(26, 30), inputs="uniform")
    eight = Geometry(batch=2, q_heads=8, kv_heads=2)
    calls = (Attend(17, counts=(2, 17), padding=1e4), Attend(15, counts=(15, 0)), *decode(2))
    out.add("half", "fp16, eight heads over two", *calls, geometry=eight, reports=(26,))
    return out.cases
