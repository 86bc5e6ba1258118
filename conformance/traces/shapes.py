"""Shapes: head dimensions that are no power of two, values of another width, grouped and single KV heads, short last groups."""

from __future__ import annotations

from typing import Any

from kivi.conformance.case import Attend, Case, Geometry, Stream, decode, spec_of
from kivi.conformance.inputs import make

EVENTS = (Attend(18), *decode(1), Attend(14))


def stream(name: str, about: str, geometry: Geometry, seed: int, kind: str = "rich", reports: tuple[int, ...] = (), size: str = "quick", **changes: Any) -> Stream:
    spec = spec_of({k.replace("__", "."): v for k, v in changes.items()})
    return Stream(id=f"attention/shapes.{name}", profile="attention", about=about, spec=spec, geometry=geometry, inputs=make(kind, seed), events=EVENTS, reports=reports, size=size)  # type: ignore[arg-type]


def cases() -> list[Case]:
    out: list[Case] = []
    for i, dim in enumerate((96, 80, 112, 256, 128)):
        out.append(stream(f"d{dim}", "a head dimension with dead lanes beside it, data in [5, 6]", Geometry(q_heads=2, head_dim=dim, dtype="float32"), i, "shifted", (27, 28), value__group=32))
    for i, (q_heads, kv_heads) in enumerate(((8, 1), (4, 1), (8, 2), (4, 2), (2, 2), (16, 2), (3, 1))):
        out.append(stream(f"heads{q_heads}-{kv_heads}", "query head h reads KV head h // (Hq / Hkv)", Geometry(batch=2, q_heads=q_heads, kv_heads=kv_heads, dtype="float32"), 10 + i, "rich", (30,)))
    out += [
        stream("wide-values", "Dv = 96, D = 64", Geometry(q_heads=2, head_dim=64, value_head_dim=96, dtype="float32"), 20),
        stream("narrow-values", "Dv = 40, D = 128: the softmax scale is that of D", Geometry(q_heads=2, head_dim=128, value_head_dim=40, dtype="float16"), 21, value__group=16),
        stream("short-group", "G = 32 over Dv = 80: the last group has 16 channels", Geometry(q_heads=2, head_dim=80, dtype="float32"), 22, "shifted", (27,), value__group=32, value__bits=3),
        stream("one-channel-group", "Dv = 33: a last group of one channel", Geometry(head_dim=64, value_head_dim=33, dtype="float32"), 23, value__group=32),
        stream("odd-dim", "D = Dv = 72", Geometry(q_heads=2, kv_heads=1, head_dim=72, dtype="bfloat16"), 24, value__group=16),
        stream("identical-heads", "all query heads equal: MQA and MHA read the same codes", Geometry(q_heads=4, kv_heads=1, head_dim=64, dtype="float32"), 25, "needle", (30,)),
    ]  # fmt: skip
    return out
