"""NaN and Inf: refused by name with nothing changed, or confined to their group."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from kivi.conformance.case import Attend, Case, Geometry, Poke, Refused, Side, decode, draft
from kivi.conformance.traces.build import Streams, Tensors

NAN, INF = float("nan"), float("inf")
SIDES: tuple[Side, Side] = ("key", "value")

#: What is spoiled, [request, head, token, channel, value], and the dtype of the tensor.
SPOILED: dict[str, tuple[str, list[tuple[int, int, int, int, float]]]] = {
    "one": ("float16", [(1, 0, 13, 21, NAN)]),
    "mixed": ("float32", [(0, 0, 0, 0, NAN), (0, 0, 1, 0, INF), (0, 1, 5, 8, -INF), (1, 1, 15, 31, INF)]),
    "first": ("bfloat16", [(0, 0, 0, 0, INF), (0, 0, 8, 3, NAN)]),
    "all": ("float16", [(0, 0, t, c, NAN) for t in range(8) for c in range(8)]),
}


def spoiled(places: list[tuple[int, int, int, int, float]]) -> np.ndarray:
    """Ordinary numbers [2, 2, 16, 32] with some elements replaced."""
    x = np.random.default_rng(8).normal(1.0, 2.0, (2, 2, 16, 32))
    for b, h, t, c, value in places:
        x[b, h, t, c] = value
    return x


def tensors(out: Tensors) -> None:
    says = ("request 1", "head 0", "token 13", "channel 21")
    for dtype in ("float16", "bfloat16", "float32"):
        for i, (name, value) in enumerate((("nan", NAN), ("inf", INF), ("minus-inf", -INF))):
            for which in SIDES:
                quick = (i + len(dtype)) % 2 == (which == "key")
                out.add(
                    f"reject.{name}.{dtype}.{which}",
                    "the error names request, head, token and channel",
                    which,
                    partial(spoiled, [(1, 0, 13, 21, value)]),
                    dtype,
                    error="NonFiniteError",
                    says=says,
                    size="quick" if quick else "full",
                )
    for name, (dtype, places) in SPOILED.items():
        for which in SIDES:
            for numerics in ("portable", "staged"):
                quick = name == "mixed" or (which == "key") == (numerics == "portable")
                out.add(
                    f"propagate.{name}.{numerics}.{which}",
                    "that group has origin NaN, scale 1, codes 0; its neighbours are untouched",
                    which,
                    partial(spoiled, places),
                    dtype,
                    size="quick" if quick else "full",
                    nonfinite="propagate",
                    numerics=numerics,
                )


def bad(tensor: str, value: float = NAN, commit: bool = True, n: int = 4) -> Refused:
    """A call with one bad number in request 1, head 1, channel 5."""
    name = {"q": "q", "k": "key", "v": "value"}[tensor]
    event = Attend(n, commit=commit, pokes=(Poke(tensor, 1, 1, 2, 5, value),))
    return Refused(event, "NonFiniteError", (name, "request 1", "head 1", "channel 5"))


def streams(out: Streams) -> None:
    committed = (bad("k"), Attend(15), bad("q"), bad("k", INF), bad("v", -INF), bad("v", commit=False))
    out.add("reject", "q, k and v are looked at when they arrive", *committed, draft(2), bad("k", commit=False), draft(1))
    out.add("reject-seal", "a step that would seal two blocks", Attend(15), bad("v", n=20), Attend(20), *decode(1))
    hidden: Any = Attend(5, pokes=(Poke("k", 0, 0, 3, 5, NAN), Poke("v", 1, 1, 4, 6, NAN)))
    out.add("propagate", "a NaN reaches only those who see it", Attend(3), hidden, *decode(2), nonfinite="propagate")
    sealed = (Attend(3), hidden, Attend(12), Attend(14), *decode(1))
    out.add("propagate-sealed", "sealed, a NaN stays in its group", *sealed, nonfinite="propagate")


def cases() -> list[Case]:
    whole = Tensors("nonfinite", reports=(8,))
    steps = Streams("nonfinite", geometry=Geometry(batch=2, q_heads=4, kv_heads=2, dtype="float32"), reports=(8,))
    tensors(whole)
    streams(steps)
    return [*whole.cases, *steps.cases]
