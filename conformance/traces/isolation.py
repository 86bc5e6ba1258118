"""Two runs that must agree to the last bit: what one request gives may not depend on another, on padding, or on being repeated."""

from __future__ import annotations

from typing import Any

import numpy as np

from kivi.conformance.case import Case, Special, spec_of
from kivi.conformance.compare import Tally, same
from kivi.conformance.subject import Subject

COUNTS = ((19, 5), (1, 14), (3, 2))


def arrays(seed: int, dtype: str) -> list[list[np.ndarray]]:
    """q, k, v of each call for two requests, two KV heads, four query heads, D = 64."""
    rng = np.random.default_rng(seed)
    return [[(rng.standard_normal((2, heads, max(counts), 64)) + 0.5).astype(dtype) for heads in (4, 2, 2)] for counts in COUNTS]


def life(subject: Subject, calls: list[list[np.ndarray]], dtype: str, **changes: Any) -> tuple[list[np.ndarray], Any]:
    """Outputs of all calls, and the cache afterwards."""
    cache = subject.cache(spec_of(changes), batch=2, q_heads=4, kv_heads=2, head_dim=64, dtype=dtype)
    return [
        np.array(cache.attend(*(x.copy() for x in call), counts=list(counts))) for call, counts in zip(calls, COUNTS, strict=True)
    ], cache


def compare(first: tuple[list[np.ndarray], Any], second: tuple[list[np.ndarray], Any], requests: tuple[int, ...], tally: Tally) -> None:
    for i, (a, b) in enumerate(zip(first[0], second[0], strict=True)):
        for r in requests:
            same(f"the output of request {r} in call {i}", b[r, :, : COUNTS[i][r]], a[r, :, : COUNTS[i][r]], tally)
    for r in requests:
        for which in ("key", "value"):
            for (_, a), (_, b) in zip(first[1].sealed(r)[which], second[1].sealed(r)[which], strict=True):
                same(f"{which} words of request {r}", b.words, np.asarray(a.words), tally)
                same(f"{which} origins of request {r}", b.origin, np.asarray(a.origin), tally)


def neighbour(subject: Subject, tally: Tally) -> None:
    """Report 23: request 1's keys times 1000, its values times 30, change no bit of request 0."""
    calls = arrays(23, "float32")
    louder = [[x.copy() for x in call] for call in calls]
    for _, k, v in louder:
        k[1] *= 1000
        v[1] *= 30
    compare(life(subject, calls, "float32"), life(subject, louder, "float32"), (0,), tally)


def padding(subject: Subject, tally: Tally) -> None:
    """Report 26: what padding rows hold changes no bit of any request."""
    calls = arrays(26, "float16")
    filled = [[x.copy() for x in call] for call in calls]
    for call, counts in zip(filled, COUNTS, strict=True):
        for x in call:
            for r, count in enumerate(counts):
                x[r, :, count:] = 1e4 if r else np.nan
    compare(life(subject, calls, "float16"), life(subject, filled, "float16"), (0, 1), tally)


def repeated(subject: Subject, tally: Tally) -> None:
    """Report 47: two runs of the same calls give the same bits."""
    calls = arrays(47, "float32")
    compare(
        life(subject, calls, "float32", order="seal_then_attend"), life(subject, calls, "float32", order="seal_then_attend"), (0, 1), tally
    )


def swapped(subject: Subject, tally: Tally) -> None:
    """Requests that change places change nothing else: outputs within the batch are those of the other row."""
    calls = arrays(24, "float32")
    cache = [subject.cache(spec_of({}), batch=2, q_heads=4, kv_heads=2, head_dim=64, dtype="float32") for _ in range(2)]
    for call, counts in zip(calls, COUNTS, strict=True):
        plain = np.asarray(cache[0].attend(*(x.copy() for x in call), counts=list(counts)))
        turned = np.asarray(cache[1].attend(*(x[::-1].copy() for x in call), counts=list(counts[::-1])))
        same("the output with requests exchanged", turned[::-1], plain, tally)


def cases() -> list[Case]:
    return [
        Special(
            id=f"stream/isolation.{run.__name__}",
            profile="stream",
            about=(run.__doc__ or "").split(": ")[-1],
            run=run,
            cost=24,
            reports=reports,
        )
        for run, reports in ((neighbour, (23,)), (padding, (26,)), (repeated, (47,)), (swapped, (24,)))
    ]
