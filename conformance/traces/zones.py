"""Zones: one softmax, two boundaries. Weights that are uniform or sit on one token make a lost or doubled token visible."""

from __future__ import annotations

from kivi.conformance.case import Attend, Case, Geometry, decode
from kivi.conformance.traces.build import Streams


def cases() -> list[Case]:
    out = Streams("zones", "attention")
    walk = (Attend(14), *decode(3), Attend(3), Attend(19), *decode(2))
    two = Geometry(batch=2, q_heads=4, kv_heads=2, dtype="float32")
    for tag, order in (("", "attend_then_seal"), ("-paper", "seal_then_attend")):
        out.add(f"uniform{tag}", "all tokens count the same: one lost, doubled or masked shows", *walk, inputs="uniform", order=order)
        out.add(f"needle{tag}", "one token has nearly all the weight, in each zone in turn", *walk, inputs="needle", order=order)
        out.add(f"rich{tag}", "sealed keys with floating values: both frontiers apart", *walk, order=order, value__residual=24)
    out.add("uniform-wide", "a value window longer than the key window", *walk[3:], inputs="uniform", geometry=two, value__residual=32)
    out.add(
        "needle-ragged",
        "needles in a ragged batch",
        Attend(20, counts=(20, 11)),
        Attend(6, counts=(2, 6)),
        *decode(2),
        Attend(17, counts=(17, 0)),
        *decode(2),
        inputs="needle",
        geometry=two,
    )
    single, half = Geometry(q_heads=2, dtype="float32"), Geometry(q_heads=2, kv_heads=2)
    out.add("steps", "value sizes from 1/16 to 32 side by side", *walk, inputs="steps", geometry=single, value__bits=4)
    out.add("uniform-half", "uniform weights in fp16: sums of 50 terms", *walk, inputs="uniform", geometry=half)
    out.add("needle-bf16", "needles in bf16", *walk, inputs="needle", geometry=Geometry(q_heads=2, dtype="bfloat16"))
    return out.cases
