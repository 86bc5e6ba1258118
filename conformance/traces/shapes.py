"""Shapes: head dimensions that are no power of two, values of another width, grouped and single KV heads, short last groups."""

from __future__ import annotations

from typing import Any

from kivi.conformance.case import Attend, Case, Geometry
from kivi.conformance.traces.build import Streams


def cases() -> list[Case]:
    out, events = Streams("shapes", "attention"), (Attend(18), Attend(), Attend(14))
    for dim in (96, 80, 112, 256, 128):
        about, geometry = "a head dimension with dead lanes beside it, data in [5, 6]", Geometry(q_heads=2, head_dim=dim, dtype="float32")
        out.add(f"d{dim}", about, *events, inputs="shifted", geometry=geometry, reports=(27, 28), value__group=32)
    for q_heads, kv_heads in ((8, 1), (4, 1), (8, 2), (4, 2), (2, 2), (16, 2), (3, 1)):
        about, geometry = (
            "query head h reads KV head h // (Hq / Hkv)",
            Geometry(batch=2, q_heads=q_heads, kv_heads=kv_heads, dtype="float32"),
        )
        out.add(f"heads{q_heads}-{kv_heads}", about, *events, geometry=geometry, reports=(30,))

    def shape(name: str, about: str, key_dim: int, value_dim: int, q_heads: int = 2, dtype: str = "float32", **more: Any) -> None:
        out.add(name, about, *events, geometry=Geometry(1, q_heads, 1, key_dim, value_dim, dtype), **more)

    shape("wide-values", "Dv = 96, D = 64", 64, 96)
    shape("narrow-values", "Dv = 40, D = 128: the softmax scale is that of D", 128, 40, dtype="float16", value__group=16)
    about = "G = 32 over Dv = 80: the last group has 16 channels"
    shape("short-group", about, 80, 80, inputs="shifted", reports=(27,), value__group=32, value__bits=3)
    shape("one-channel-group", "Dv = 33: a last group of one channel", 64, 33, q_heads=1, value__group=32)
    shape("odd-dim", "D = Dv = 72", 72, 72, dtype="bfloat16", value__group=16)
    shape("one-kv-head", "four query heads over one KV head with needles", 64, 64, q_heads=4, inputs="needle", reports=(30,))
    return out.cases
