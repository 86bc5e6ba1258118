"""The case matrix of the design as a covering array: every pair of settings in the quick size, every triple in the full one."""

from __future__ import annotations

from typing import Any

from kivi.conformance.case import Attend, Case, Geometry, Size, decode
from kivi.conformance.pairs import covering
from kivi.conformance.traces.build import Streams

R = 16
AXES: dict[str, tuple[Any, ...]] = {
    "dtype": ("float16", "bfloat16", "float32"),
    "bits": ((2, 2), (1, 4), (3, 8), (4, 1), (8, 3)),  # key, value
    "dim": (64, 80, 96, 112, 128, 256),
    "heads": ((1, 1), (4, 1), (8, 1), (8, 2)),
    "q_len": (1, 3, R + 1),
    "ragged": (False, True),
    "order": ("attend_then_seal", "seal_then_attend"),
    "numerics": ("portable", "staged"),
    "layout": ("auto", "lanes32", "hp16.mma"),
    "inputs": ("rich", "needle", "shifted", "uniform", "steps"),
}


def events(q_len: int, ragged: bool) -> tuple[Attend, ...]:
    """A prefill that leaves both windows half full, the chunk, and what follows it."""
    start = Attend(13, counts=(13, 6)) if ragged else Attend(13)
    if q_len == 1:
        return (start, *decode(3), Attend(16))
    if ragged:
        return (start, Attend(q_len, counts=(q_len, q_len - 2)), Attend(q_len, counts=(0, q_len)), Attend(q_len), *decode(1))
    return (start, Attend(q_len), Attend(q_len), *decode(1))


def cases() -> list[Case]:
    out, seen = Streams("matrix"), set()
    sizes: tuple[tuple[int, Size], ...] = ((2, "quick"), (3, "full"))
    for strength, size in sizes:
        for row in covering(AXES, strength):
            name = ".".join("x".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in row.values())
            if name in seen:
                continue
            seen.add(name)
            q_heads, kv_heads = row["heads"]
            key_bits, value_bits = row["bits"]
            out.add(
                name,
                "a row of the case matrix",
                *events(row["q_len"], row["ragged"]),
                inputs=row["inputs"],
                geometry=Geometry(2 if row["ragged"] else 1, q_heads, kv_heads, row["dim"], dtype=row["dtype"]),
                size=size,
                order=row["order"],
                numerics=row["numerics"],
                packing__layout=row["layout"],
                key__bits=key_bits,
                value__bits=value_bits,
                value__group=16,
            )
    return out.cases
