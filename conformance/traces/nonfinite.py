"""NaN and Inf: refused by name with nothing changed, or confined to their group."""

from __future__ import annotations

from typing import Any

import numpy as np

from kivi.conformance.case import Attend, Case, Geometry, Poke, Quantize, Refused, Stream, decode, draft, spec_of
from kivi.conformance.inputs import make

NAN, INF = float("nan"), float("inf")


def spoiled(*places: tuple[int, int, int, int, float]):
    """Ordinary numbers [2, 2, 16, 32] with some elements replaced."""

    def build() -> np.ndarray:
        x = np.random.default_rng(8).normal(1.0, 2.0, (2, 2, 16, 32))
        for b, h, t, c, value in places:
            x[b, h, t, c] = value
        return x

    return build


def cases() -> list[Case]:
    error = "NonFiniteError"
    out: list[Case] = []
    for dtype in ("float16", "bfloat16", "float32"):
        for i, (name, value) in enumerate((("nan", NAN), ("inf", INF), ("minus-inf", -INF))):
            for which in ("key", "value"):
                out.append(
                    Quantize(id=f"quantize/nonfinite.reject.{name}.{dtype}.{which}", about="the error names request, head, token and channel", spec=spec_of({}), which=which,  # type: ignore[arg-type]
                             make=spoiled((1, 0, 13, 21, value)), dtype=dtype, size="quick" if (i + len(dtype)) % 2 == (which == "key") else "full", error=error, says=("request 1", "head 0", "token 13", "channel 21"), reports=(8,))
                )  # fmt: skip
    groups = {
        "one": [(1, 0, 13, 21, NAN)],
        "mixed": [(0, 0, 0, 0, NAN), (0, 0, 1, 0, INF), (0, 1, 5, 8, -INF), (1, 1, 15, 31, INF)],
        "first": [(0, 0, 0, 0, INF), (0, 0, 8, 3, NAN)],
        "all": [(0, 0, t, c, NAN) for t in range(8) for c in range(8)],
    }
    for name, places in groups.items():
        for which in ("key", "value"):
            for numerics in ("portable", "staged"):
                out.append(
                    Quantize(id=f"quantize/nonfinite.propagate.{name}.{numerics}.{which}", about="that group has origin NaN, scale 1, codes 0; its neighbours are untouched",
                             spec=spec_of({"nonfinite": "propagate", "numerics": numerics}), which=which, make=spoiled(*places), reports=(8,),  # type: ignore[arg-type]
                             dtype="float32" if name == "mixed" else "bfloat16" if name == "first" else "float16",
                             size="quick" if (which == "key") == (numerics == "portable") or name == "mixed" else "full")
                )  # fmt: skip
    two = Geometry(batch=2, q_heads=4, kv_heads=2, dtype="float32")

    def bad(tensor: str, value: float = NAN, commit: bool = True, n: int = 4) -> Refused:
        words = {"q": "q", "k": "key", "v": "value"}[tensor]
        event = Attend(n, commit=commit, pokes=(Poke(tensor, 1, 1, 2, 5, value),))
        return Refused(event, error, (words, "request 1", "head 1", "channel 5"))

    def stream(name: str, about: str, events: tuple[Any, ...], seed: int, **changes: Any) -> Case:
        return Stream(id=f"stream/nonfinite.{name}", about=about, spec=spec_of(changes), geometry=two, inputs=make("rich", seed), events=events, reports=(8,))

    hidden = Attend(5, pokes=(Poke("k", 0, 0, 3, 5, NAN), Poke("v", 1, 1, 4, 6, NAN)))
    out += [
        stream("reject", "q, k and v are looked at when they arrive, and nothing changes", (
            bad("k"), Attend(15), bad("q"), bad("k", INF), bad("v", -INF), bad("v", NAN, commit=False), draft(2), bad("k", NAN, commit=False), draft(1),
        ), 1),
        stream("reject-seal", "a step that would seal two blocks", (Attend(15), bad("v", NAN, n=20), Attend(20), *decode(1)), 2),
        stream("propagate", "a NaN reaches only those who see it", (Attend(3), hidden, *decode(2)), 3, nonfinite="propagate"),
        stream("propagate-sealed", "sealed, a NaN stays in its group", (Attend(3), hidden, Attend(12), Attend(14), *decode(1)), 4, nonfinite="propagate"),
    ]  # fmt: skip
    return out
