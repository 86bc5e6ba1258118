"""What the naive model expects of a stream, event by event, computed once per case and process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from kivi.conformance import case as c
from kivi.conformance.floats import cast
from kivi.conformance.inputs import Arrays, frozen
from kivi.conformance.model import NaiveCache, Sealed
from kivi.conformance.oracle import Attended, attend


@dataclass(frozen=True)
class RequestState:
    """One request as a reader sees it; arrays [Hkv, n, D], None where there is nothing."""

    lengths: dict[str, int]
    pending: int
    key: Sealed | None
    value: Sealed | None
    key_residual: np.ndarray | None
    value_residual: np.ndarray | None


@dataclass(frozen=True)
class Step:
    """After one event: `outputs` [request][query head] of an attend, None for a request that took no part; `state` of every
    request where it is to be compared in full; `lengths` and `pending` always. `inputs`: q, k, v of the call. `clamped`: the
    count of saturated numbers, None once an event has moved or copied what was counted."""

    event: Any
    inputs: Arrays | None
    counts: tuple[int, ...] | None
    outputs: list[list[Attended] | None] | None
    lengths: list[dict[str, int]]
    pending: list[int]
    state: list[RequestState] | None
    waiting: list[RequestState] | None
    clamped: int | None


@lru_cache(maxsize=4096)
def expectation(stream: c.Stream) -> tuple[Step, ...]:
    """All steps of a case, kept for the next subject: cases are compared by identity."""
    steps = tuple(_steps(stream))
    if stream.outputs is not None:
        found = [s.outputs[0][0].out[-1] for s in steps if s.outputs and s.outputs[0]]
        assert np.allclose(found, stream.outputs, rtol=0, atol=1e-6), f"the oracle disagrees with the outputs written out in {stream.id}"
    return steps


def _steps(stream: c.Stream) -> Iterator[Step]:
    geometry = stream.geometry
    data = stream.inputs.make(stream.rows, geometry.q_heads, geometry.kv_heads, stream.length, geometry.head_dim, geometry.value_dim)
    q, k, v = (cast(a, geometry.dtype) for a in data)
    model, waiting = NaiveCache(stream.spec, geometry.batch), None
    at, counted = 0, True
    for i, event in enumerate(stream.events):
        inner = event.event if isinstance(event, c.Refused) else event
        inputs: Arrays | None = None
        counts = outputs = None
        sealed_before = [r.key_sealed for r in model.requests]
        if isinstance(inner, c.Attend):
            batch = len(model.requests)
            rows = np.s_[:batch, :, at : at + inner.n]
            inputs = poked(q[rows], "q", inner), poked(k[rows], "k", inner), poked(v[rows], "v", inner)
            at += inner.n
            counts = inner.counts or (inner.n,) * batch
        if isinstance(event, c.Refused):
            pass
        elif isinstance(event, c.Attend):
            assert inputs is not None
            assert counts is not None
            seen = model.attend(*inputs, counts, event.commit)
            outputs = [attend(h, geometry.softmax_scale) if h is not None else None for h in seen]
        elif isinstance(event, c.Fork):
            waiting, model = model, model.fork()
        elif isinstance(event, c.Swap):
            assert waiting is not None
            waiting, model = model, waiting
        else:
            apply(model, event)
        whole = not isinstance(event, c.Attend) or i == len(stream.events) - 1 or sealed_before != [r.key_sealed for r in model.requests]
        last = i == len(stream.events) - 1
        counted &= isinstance(event, c.Attend | c.Commit | c.Rollback | c.Refused)
        yield Step(
            event,
            inputs,
            counts,
            outputs,
            [model.lengths(b) for b in range(len(model.requests))],
            [model.pending(b) for b in range(len(model.requests))],
            snapshot(model) if whole else None,
            snapshot(waiting) if last and waiting else None,
            model.clamped if counted else None,
        )


def poked(x: np.ndarray, name: str, event: c.Attend) -> np.ndarray:
    """The call's rows with padding filled and pokes written."""
    x = x.copy()
    for b, count in enumerate(event.counts or ()):
        x[b, :, count:] = np.asarray(event.padding).astype(x.dtype)
    for poke in event.pokes:
        if poke.tensor == name:
            x[poke.request, poke.head, poke.token, poke.channel] = poke.value
    return frozen(x)


def apply(cache: Any, event: Any) -> None:
    """An event that is neither attend, fork nor save, on the model or on the subject: both have the same methods."""
    if isinstance(event, c.Commit):
        cache.commit(list(event.n) if isinstance(event.n, tuple) else event.n)
    elif isinstance(event, c.Rollback):
        cache.rollback()
    elif isinstance(event, c.Crop):
        cache.crop(list(event.t) if isinstance(event.t, tuple) else event.t)
    elif isinstance(event, c.Reorder):
        cache.reorder(list(event.index))
    elif isinstance(event, c.Select):
        cache.select(list(event.index))
    elif isinstance(event, c.Repeat):
        cache.repeat(event.n)
    elif isinstance(event, c.Reset):
        cache.reset()
    elif not isinstance(event, c.Reload | c.Move):
        raise TypeError(f"{event!r} is not an event")


def snapshot(model: NaiveCache) -> list[RequestState]:
    return [
        RequestState(
            model.lengths(b),
            model.pending(b),
            model.sealed(b, "key"),
            model.sealed(b, "value"),
            model.residual(b, "key"),
            model.residual(b, "value"),
        )
        for b in range(len(model.requests))
    ]
