"""Requests of different lengths: counts, padding, requests that start late or pause, decisions taken request by request."""

from __future__ import annotations

from typing import Any

from kivi.conformance.case import Attend, Case, Geometry, Stream, decode, spec_of
from kivi.conformance.inputs import make

NAN = float("nan")


def stream(name: str, about: str, events: tuple[Any, ...], seed: int, geometry: Geometry, reports: tuple[int, ...] = (), kind: str = "rich", **changes: Any) -> Stream:
    spec = spec_of({k.replace("__", "."): v for k, v in changes.items()})
    return Stream(id=f"stream/ragged.{name}", about=about, spec=spec, geometry=geometry, inputs=make(kind, seed), events=events, reports=reports)


def cases() -> list[Case]:
    two = Geometry(batch=2, q_heads=4, kv_heads=1, dtype="float32")
    out: list[Case] = []
    for tag, changes in (("", {}), ("-paper", {"order": "seal_then_attend"})):
        out += [
            stream(f"late{tag}", "a request starts while another is long: its first call is its prefill", (
                Attend(20, counts=(20, 0)), Attend(18, counts=(2, 18)), *decode(2)), 1, two, (24, 30), **changes),
            stream(f"first{tag}", "a ragged first prompt", (Attend(8, counts=(8, 3)), Attend(17, counts=(4, 17)), *decode(2)), 2, two, (30,), **changes),
        ]
    out += [
        stream("padding", "1e4 in the padding: neither attended to nor in a range", (Attend(20, counts=(17, 5), padding=1e4), Attend(14, counts=(1, 14), padding=1e4), *decode(1)), 3, two, (26,)),
        stream("padding-nan", "NaN in the padding is not looked at", (Attend(20, counts=(17, 5), padding=NAN), Attend(14, counts=(1, 14), padding=NAN), *decode(1)), 4, two, (26,)),
        stream("padding-propagate", "NaN in the padding reaches nothing", (Attend(20, counts=(17, 5), padding=NAN), *decode(1)), 5, two, (26,), nonfinite="propagate"),
        stream("pause", "a request that takes no part is not touched", (Attend(15), *(Attend(1, counts=(1, 0)),) * 2, Attend(5, counts=(0, 5)), Attend(1, counts=(0, 1)), *decode(2)), 6, two),
        stream("none", "a call in which nobody takes part", (Attend(2, counts=(0, 0)), Attend(16), Attend(1, counts=(0, 0)), *decode(1)), 7, two),
        stream("contrast", "a neighbour a thousand times as large", (Attend(19, counts=(19, 5)), Attend(14), *decode(2)), 8, two, (23,), "contrast"),
        stream("uniform", "uniform weights at unequal lengths", (Attend(20, counts=(3, 20)), Attend(16, counts=(16, 1)), *decode(1)), 9,
               Geometry(batch=2, q_heads=2, kv_heads=2, dtype="float32"), (26, 30), "uniform"),
        stream("half", "fp16, heads 8 over 2", (Attend(17, counts=(2, 17), padding=1e4), Attend(15, counts=(15, 0)), *decode(2)), 10, Geometry(batch=2, q_heads=8, kv_heads=2), (26,)),
    ]  # fmt: skip
    return out
