"""What the official implementation stored and computed (golden/README.md): bits outside degenerate groups, lengths, outputs.

Codes, scales and origins must be equal bit for bit, the sign of a zero origin aside. The official outputs are fp16 with the
kernels emulated in fp32; how far they may lie from the oracle follows from the roundings of that pipeline, `OFFICIAL`: logits
rounded to fp16 after the product and again after the division by sqrt(D), the softmax rounded to fp16, the quantized and the
floating part of the output each rounded to fp16 and again when added. A subject may differ from them by that and by its own bound.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kivi.conformance import quantizer
from kivi.conformance.bounds import Bound, Numerics, output_bound
from kivi.conformance.case import Attend, Case, Geometry, Run, Side, Special, Stream, decode, spec_of
from kivi.conformance.compare import Mismatch, Tally, same, within
from kivi.conformance.expect import expectation
from kivi.conformance.inputs import golden, golden_index, make
from kivi.conformance.subject import Subject

OFFICIAL = Numerics(accumulate="float32", score="float16", score_roundings=2, probability="float16", part="float16", parts=2, exp_ulp=2.0)

#: Trajectories whose first steps are in the quick size: one over a key frontier with grouped heads, one of the other class.
FIRST_STEPS = {"flash.gqa.b2.n70": 27, "plain.mha.b4.n64": 3}


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes of official int32 words, along the last axis."""
    count = 32 // bits
    return (words.view(np.uint32)[..., None] >> (np.arange(count, dtype=np.uint32) * np.uint32(bits)) & np.uint32(2**bits - 1)).reshape(
        *words.shape[:-1], -1
    )


def positive_zero(x: np.ndarray) -> np.ndarray:
    return np.where(x == 0, np.zeros((), x.dtype), x)


def quantized(entry: dict[str, Any], which: Side) -> Run:
    """One golden tensor. Degenerate groups follow the spec instead of the official code: they are left to the naive model."""

    def run(subject: Subject, tally: Tally) -> None:
        data, key, bits, group = golden("official_quant"), entry["key"], entry["bits"], entry["G"]
        x = data[key.rsplit(".", 1)[0] + ".input"]
        sizes = {f"{w}.{f}": n for w in ("key", "value") for f, n in (("group", group), ("residual", 128))}
        policy = {"numerics": "staged", "nonfinite": "propagate", "overflow": "saturate", "packing.layout": "official_int32"}
        spec = spec_of({**policy, **sizes, f"{which}.bits": bits})
        qt = subject.quantize(x.copy(), spec, which)
        whole = data[f"{key}.degenerate_group"] == 0
        if which == "key":  # the official packer takes keys transposed
            scale, origin = (np.ascontiguousarray(np.swapaxes(np.asarray(a), -1, -2)) for a in (qt.scale, qt.origin))
        else:
            scale, origin = np.asarray(qt.scale), np.asarray(qt.origin)
        same("scale", scale[whole], data[f"{key}.scale"][whole], tally)
        same("origin", origin[whole], positive_zero(data[f"{key}.mn"])[whole], tally)
        words, expected = np.asarray(qt.words), data[f"{key}.code"]
        if words.shape != expected.shape or words.dtype != expected.dtype:
            raise Mismatch(f"words are {words.dtype}{words.shape}, official ones {expected.dtype}{expected.shape}")
        codes = np.repeat(whole, group, -1)
        same("codes", unpacked(words, bits)[codes], unpacked(expected, bits)[codes], tally)
        if whole.all():
            same("words", words, expected, tally)
        naive = (quantizer.quantize_key if which == "key" else quantizer.quantize_value)(x, quantizer.Rule.of(spec, which), group)
        same("codes, degenerate groups included", qt.codes(), naive.codes, tally)

    return run


def trajectory(entry: dict[str, Any], steps: int) -> tuple[Run, int]:
    """One trajectory: lengths after each call, outputs, and, at the full length, the final state."""
    key, heads, dim = entry["key"], entry["nh"], entry["D"]
    fields = (("bits", entry["bits"]), ("group", entry["G"]), ("residual", entry["R"]))
    sides = {f"{w}.{f}": v for w in ("key", "value") for f, v in fields}
    spec = spec_of({"numerics": "staged", "packing.layout": "official_int32", **sides})
    stream = Stream(
        id=key,
        about="",
        spec=spec,
        geometry=Geometry(1, heads, entry["nh_kv"], dim),
        inputs=make("official", key=key),
        events=(Attend(entry["prefill"]), *decode(steps)),
    )

    def run(subject: Subject, tally: Tally) -> None:
        g = stream.geometry
        cache = subject.cache(spec, batch=1, q_heads=g.q_heads, kv_heads=g.kv_heads, head_dim=dim, dtype="float16")
        own = Numerics.declared(subject.backend.manifest)
        out = golden("official_stream")[f"{key}.out"].reshape(-1, heads, dim).transpose(1, 0, 2)
        at = 0
        for step, row in zip(expectation(stream), entry["states"], strict=False):
            assert step.inputs is not None
            assert step.outputs is not None
            got, n = np.asarray(cache.attend(*(x.copy() for x in step.inputs))), step.inputs[0].shape[2]
            found = cache.lengths(0)
            state = [found.tokens, found.key_sealed, found.key_residual, found.value_sealed, found.value_residual]
            if state != row:
                raise Mismatch(f"lengths are {state}, the official classes have {row}")
            for h, exact in enumerate(step.outputs[0] or []):
                name, bound = f"output at T = {row[0]}, head {h}", output_bound(exact, own, "float16")
                within(name, got[0, h], exact.out, bound, "float16", tally, "row channel")
                theirs = output_bound(exact, OFFICIAL, "float16")
                both = Bound(bound.total + theirs.total, bound.rounding + theirs.rounding)
                official = out[h, at : at + n].astype(np.float64)
                within(f"{name}, against the official one", got[0, h], official, both, "float16", Tally(), "row channel")
            at += n
        if steps == entry["decode_steps"]:
            compare_final(cache, key, tally)

    return run, stream.instances


def compare_final(cache: Any, key: str, tally: Tally) -> None:
    data = golden("official_stream")
    sealed, residual = cache.sealed(0), cache.residual(0)
    for which, k in (("key", "k"), ("value", "v")):
        ((start, qt),) = sealed[which]
        turn = (lambda a: np.swapaxes(a, -1, -2)) if which == "key" else (lambda a: a)
        same(f"final {which} words", qt.words, data[f"{key}.final.{k}_code"], tally)
        same(f"final {which} scale", turn(np.asarray(qt.scale)), data[f"{key}.final.{k}_scale"], tally)
        same(f"final {which} origin", turn(np.asarray(qt.origin)), positive_zero(data[f"{key}.final.{k}_mn"]), tally)
        same(f"final floating {which} rows", residual[which], data[f"{key}.final.{k}_residual"][0], tally)


def cases() -> list[Case]:
    out: list[Case] = []
    for entry in golden_index("official_quant")["cases"]:
        which: Side = "key" if entry["tensor"] == "k" else "value"
        about, run = "bit for bit what the official packer stores", quantized(entry, which)
        out.append(Special(id=f"quantize/official.{entry['key']}", profile="quantize", about=about, run=run, cost=2))
    about = "lengths and outputs of the official classes"
    for entry in golden_index("official_stream")["cases"]:
        name = f"stream/official.{entry['key']}"
        if entry["key"] in FIRST_STEPS:
            steps = FIRST_STEPS[entry["key"]]
            run, cost = trajectory(entry, steps)
            out.append(Special(id=f"{name}.first{steps}", profile="stream", about=about, run=run, cost=cost))
        run, cost = trajectory(entry, entry["decode_steps"])
        out.append(Special(id=name, profile="stream", about=about, run=run, cost=cost, size="full"))
    return out
