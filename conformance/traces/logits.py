"""The softmax under strain: logits that overflow exp, given scales, one-sided data, weights on one token, chunks and causality."""

from __future__ import annotations

from kivi.conformance.case import Attend, Case, Geometry, decode
from kivi.conformance.inputs import make
from kivi.conformance.traces.build import Streams


def cases() -> list[Case]:
    out = Streams("logits", "attention")
    short = (Attend(18), Attend(), Attend(17), Attend())
    for dtype in ("float32", "float16", "bfloat16"):
        about = "logits near 900 and near -900: the maximum must be subtracted"
        out.add(f"large.{dtype}", about, *short, inputs="large", geometry=Geometry(batch=2, q_heads=2, dtype=dtype))
        wide = Geometry(q_heads=2, head_dim=96, dtype=dtype)
        out.add(f"shifted.{dtype}", "data in [5, 6]", *short, inputs="shifted", geometry=wide, reports=(27,))
    out.add("scale.one", "a given scale of 1", *short, geometry=Geometry(dtype="float32", scale=1.0))
    out.add("scale.small", "a given scale of 0.01", *short, geometry=Geometry(dtype="float32", scale=0.01))
    out.add("scale.fifth", "a given scale, fp16", *short, inputs="needle", geometry=Geometry(q_heads=2, scale=0.2))
    out.add("scale.negative", "a negative scale turns the order of the logits", *short, geometry=Geometry(dtype="float32", scale=-0.1))
    out.add("causal", "rows of a chunk see one token more each", Attend(5), Attend(5), Attend(13), Attend(5), inputs="uniform")
    near, nines = make("needle", 8, stride=1), (Attend(9), Attend(9), Attend(9))
    out.add("causal-needle", "rows of a chunk want tokens of the same chunk", *nines, inputs=near)
    out.add("causal-paper", "chunks in the paper's order", *nines, inputs=near, order="seal_then_attend")
    chunks, heads = (Attend(17), Attend(17), Attend(17)), {"q_heads": 4, "kv_heads": 2}
    out.add("chunk", "chunks of R + 1", *chunks, geometry=Geometry(**heads, dtype="float32"))
    out.add("chunk-uniform", "the same with uniform weights", *chunks, inputs="uniform", geometry=Geometry(**heads, dtype="bfloat16"))
    out.add("sharp-tail", "weights that leave the softmax nearly one-hot", *short, inputs=make("needle", 12, logit=60.0))
    out.add("flat-tail", "many small weights beside a larger one", Attend(30), *decode(4), Attend(16), inputs=make("needle", 13, logit=4.0))
    return out.cases
