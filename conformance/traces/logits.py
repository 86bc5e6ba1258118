"""The softmax under strain: logits that overflow exp, given scales, one-sided data, weights on one token, chunks and causality."""

from __future__ import annotations

from typing import Any

from kivi.conformance.case import Attend, Case, Geometry, Inputs, Stream, decode, spec_of
from kivi.conformance.inputs import make

DTYPES = ("float32", "float16", "bfloat16")


def stream(name: str, about: str, inputs: Inputs, events: tuple[Any, ...], geometry: Geometry, reports: tuple[int, ...] = (), **changes: Any) -> Stream:
    spec = spec_of({k.replace("__", "."): v for k, v in changes.items()})
    return Stream(id=f"attention/logits.{name}", profile="attention", about=about, spec=spec, geometry=geometry, inputs=inputs, events=events, reports=reports)


def cases() -> list[Case]:
    out: list[Case] = []
    short = (Attend(18), Attend(), Attend(17), Attend())
    for dtype in DTYPES:
        out += [
            stream(f"large.{dtype}", "logits near 900 and near -900: the maximum must be subtracted", make("large", 1), short, Geometry(batch=2, q_heads=2, dtype=dtype)),
            stream(f"shifted.{dtype}", "data in [5, 6]", make("shifted", 2), short, Geometry(q_heads=2, head_dim=96, dtype=dtype), (27,)),
        ]
    f32 = Geometry(dtype="float32")
    out += [
        stream("scale.one", "a given scale of 1", make("rich", 3), short, Geometry(dtype="float32", scale=1.0)),
        stream("scale.small", "a given scale of 0.01", make("rich", 4), short, Geometry(dtype="float32", scale=0.01)),
        stream("scale.quarter", "a given scale that is not 1/sqrt(D)", make("needle", 5), short, Geometry(q_heads=2, dtype="float16", scale=0.2)),
        stream("scale.negative", "a negative scale turns the order of the logits", make("rich", 6), short, Geometry(dtype="float32", scale=-0.1)),
        stream("causal", "rows of a chunk see one token more each", make("uniform", 7), (Attend(5), Attend(5), Attend(13), Attend(5)), f32),
        stream("causal-needle", "rows of a chunk want tokens of the same chunk", make("needle", 8, stride=1), (Attend(9), Attend(9), Attend(9)), f32),
        stream("causal-paper", "chunks in the paper's order", make("needle", 9, stride=1), (Attend(9), Attend(9), Attend(9)), f32, order="seal_then_attend"),
        stream("chunk", "chunks of R + 1", make("rich", 10), (Attend(17), Attend(17), Attend(17)), Geometry(q_heads=4, kv_heads=2, dtype="float32")),
        stream("chunk-uniform", "chunks of R + 1 with uniform weights", make("uniform", 11), (Attend(17), Attend(17), Attend(17)), Geometry(q_heads=4, kv_heads=2, dtype="bfloat16")),
        stream("sharp-tail", "weights that leave the softmax nearly one-hot", make("needle", 12, logit=60.0), short, f32),
        stream("flat-tail", "many small weights: logits of 14 against 50 zeros", make("needle", 13, logit=4.0), (Attend(30), *decode(4), Attend(16)), f32),
    ]  # fmt: skip
    return out
