"""Zones: one softmax, two boundaries. Weights that are uniform or sit on one token make a lost or doubled token visible."""

from __future__ import annotations

from typing import Any

from kivi.conformance.case import Attend, Case, Geometry, Inputs, Stream, decode, spec_of
from kivi.conformance.inputs import make

PAPER = "seal_then_attend"


def stream(name: str, about: str, inputs: Inputs, events: tuple[Any, ...], geometry: Geometry | None = None, reports: tuple[int, ...] = (), **changes: Any) -> Stream:
    return Stream(
        id=f"attention/zones.{name}",
        profile="attention",
        about=about,
        spec=spec_of({k.replace("__", "."): v for k, v in changes.items()}),
        geometry=geometry or Geometry(dtype="float32"),
        inputs=inputs,
        events=events,
        reports=reports,
    )


def cases() -> list[Case]:
    walk = (Attend(14), *decode(3), Attend(3), Attend(19), *decode(2))
    out: list[Case] = []
    for order in ("attend_then_seal", PAPER):
        tag = "" if order != PAPER else "-paper"
        out += [
            stream(f"uniform{tag}", "all visible tokens count the same: one lost, doubled or masked wrongly shows", make("uniform", 1), walk, order=order),
            stream(f"needle{tag}", "one token has nearly all the weight, in each zone in turn", make("needle", 2), walk, order=order),
            stream(f"rich{tag}", "both frontiers apart: sealed keys with floating values", make("rich", 3), walk, order=order, value__residual=24),
        ]
    two = Geometry(batch=2, q_heads=4, kv_heads=2, dtype="float32")
    out += [
        stream("uniform-wide", "a value window longer than the key window", make("uniform", 4), walk[3:], two, value__residual=32),
        stream("needle-ragged", "needles in a ragged batch", make("needle", 5), (Attend(20, counts=(20, 11)), Attend(6, counts=(2, 6)), *decode(2), Attend(17, counts=(17, 0)), *decode(2)), two),
        stream("steps", "value sizes from 1/16 to 32 side by side", make("steps", 6), walk, Geometry(q_heads=2, dtype="float32"), value__bits=4),
        stream("uniform-half", "uniform weights in fp16: sums of 50 terms", make("uniform", 7), walk, Geometry(q_heads=2, kv_heads=2)),
        stream("needle-bf16", "needles in bf16", make("needle", 8), walk, Geometry(q_heads=2, dtype="bfloat16")),
    ]  # fmt: skip
    return out
