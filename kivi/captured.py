"""`CapturedStep`: one decode step recorded once and replayed, so that a step costs no launches of its own and waits for nothing.

All that changes from step to step lies in arrays: jobs, counts and the block table. A step writes these, replays, and counts its tokens.
What a step may not know without waiting, a number that is not finite or that no metadata can hold, goes to a row of flags; every few steps,
and whenever the cache is asked anything else, they are read, and the cache is put back to before the first bad step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kivi import checks
from kivi.backend import Append
from kivi.errors import KiviError, NonFiniteError, StateError, UnsupportedError
from kivi.kernels.backend import KernelBackend
from kivi.state import State

if TYPE_CHECKING:
    from kivi.cache import KVCache

#: Steps between two readings of the flags. A window keeps this many rows beyond the residual, so the rows of a state that this many steps
#: have followed are all still there.
UNREAD = 8
FLAGS = ("q", "key", "value", "key overflow", "value overflow")


class CapturedStep:
    """A step of one new token for every request, on arrays that stay where they are: `step()` attends to what q, k and v hold now.

    Made by `KVCache.capture`. `step()` returns the output array, the same one each time. `strict`: read the flags after every step.
    """

    def __init__(self, cache: KVCache, q: Any, k: Any, v: Any, strict: bool = False) -> None:
        be = cache.backend
        if not isinstance(be, KernelBackend) or not be.can_capture:
            raise UnsupportedError(f"backend {be.name!r} (mode {be.mode}) cannot capture a step; call attend, or use a backend that can")
        if checks.inputs(q, k, v, cache.geometry, cache.batch) != 1:
            raise UnsupportedError(f"a captured step takes one token a request, and q has {q.shape[2]}; call attend for longer chunks")
        self.cache, self.backend, self.strict = cache, be, strict
        self._batch = cache.batch
        self._given, self._like = (q, k, v), q
        self._native = [be.adopt(x, name) for x, name in zip(self._given, "qkv")]
        if any(be.address(a) != be.address(be.adopt(x, name)) for a, x, name in zip(self._native, self._given, "qkv")):
            raise UnsupportedError("q, k and v are copied to reach this backend, so a captured step would not see them change")
        self._states: list[State] = []  # before each step whose flags were not read
        self._flags = be.zeros((UNREAD, len(FLAGS)), "int32")
        self._out: Any = None
        self._replay: Callable[[], None] | None = None
        self._shape: tuple[Any, ...] = ()

    def __call__(self) -> Any:
        """Attend to the tokens in q, k and v, and commit them. Raises `CapacityError`, `PendingTokensError`, and what `check` raises;
        `StateError` if the cache has another number of requests than when the step was captured, or moved to another backend."""
        cache = self.cache
        moved = cache.backend is not self.backend and repr(cache.backend) != repr(self.backend)
        if cache.batch != self._batch or moved:
            raise StateError(
                f"the step was captured for {self._batch} requests on {self.backend}, and the cache now has {cache.batch} on "
                f"{cache.backend}; capture a step again, with q, k and v of that batch"
            )
        if cache._captured is not self:
            cache._take_over(self)
        if len(self._states) == UNREAD:
            self.check()
        state, one = cache._current, np.ones(cache.batch, np.int64)
        if state.pending.any():
            raise cache._pending_error("a captured step")
        checks.room(state.stored + one, cache.geometry.max_tokens)
        with cache._running("a captured step"):
            draft, step = cache._plan(state, state.tokens + one, one)
            try:
                self._write(state, draft, step)
                assert self._replay is not None
                self._replay()
                self.backend.write(self._flags[len(self._states)], self._row)
            except BaseException:
                cache._give_back(state, draft)
                raise
        self._states.append(state)
        cache._current = replace(draft, windows=step.target)
        if self.strict:
            self.check()
        return self.backend.give(self._out, self._like)

    def check(self) -> None:
        """Wait for the steps so far and read their flags. If one was bad, the cache is as it was before it, and the error names it."""
        cache, states = self.cache, self._states
        if not states:
            return
        with cache._running("captured steps"):
            flags = self.backend.to_host(self._flags)[: len(states)]
        self._states = []
        spec = cache.spec
        wrong = np.zeros(len(states), bool)
        if spec.nonfinite == "reject":
            wrong |= flags[:, :3].any(1)
        if spec.overflow == "reject":
            wrong |= flags[:, 3:].any(1)
        if not wrong.any():
            if spec.overflow == "saturate":
                cache._current = replace(cache._current, clamped=cache._current.clamped + int(flags[:, 3:].sum()))
            return
        bad = int(np.argmax(wrong))
        before, now = states[bad], cache._current
        error = self._error(before, flags[bad])
        cache._current = replace(before, table=now.table)  # rows past the valid ones mean nothing
        cache._give_back(before, now)
        raise error

    def _error(self, state: State, flags: np.ndarray) -> KiviError:
        tensor = next(i for i, flag in enumerate(flags) if flag)
        if tensor >= 3:
            which = FLAGS[tensor].split()[0]
            window = state.windows.key if which == "key" else state.windows.value
            where = f"the step after {int(state.tokens.max())} tokens"
            return self.backend.overflow(self.cache.pool, which, where, window, self._native[1 if which == "key" else 2])
        shape = tuple(int(n) for n in self._native[tensor].shape)
        b, head, _, channel = np.unravel_index(int(flags[tensor]) - 1, shape)
        return NonFiniteError(
            f"{FLAGS[tensor]} held a value that is not finite, or too low for an origin, at request {b}, head {head}, token "
            f"{int(state.stored[b])}, channel {channel}; the cache is as it was before that step. The spec says nonfinite = 'reject': "
            f"clean the input, or use nonfinite = 'propagate'"
        )

    # recording

    def _write(self, state: State, draft: State, step: Append) -> None:
        """The numbers of this step into their arrays; recorded anew if they do not fit, or if arrays of the cache are others."""
        cache, be = self.cache, self.backend
        after = replace(draft, windows=step.target)
        first = cache.spec.order == "attend_then_seal"
        reading = cache._reading(state, step.counts, step.counts) if first else cache._reading_after_seal(state, after, step.counts)
        counts, closed = be.counts(reading)
        width = int(draft.pages.max(initial=0))
        if self._replay is None or self._arrays(step) != self._shape or closed > self._most_closed or width > self._most_pages:
            self._record(step, closed, width)
        seals = {which: [s for s in step.seals if s.which == which] for which in ("key", "value")}
        for which, keep in (("key", step.keep_key), ("value", step.keep_value)):
            jobs = np.zeros((cache.batch, 6), np.int64)  # a job of no rows does nothing
            jobs[: len(seals[which])] = be.jobs(cache.pool, seals[which], step.stored)
            be.write(self._jobs[which], jobs)
            be.write(self._keep[which], np.stack([step.stored, step.counts, keep], 1))
        be.write(self._counts, counts)
        be.write(self._table, be.table(reading, self._most_pages)[:, : self._most_pages])

    def _arrays(self, step: Append) -> tuple[Any, ...]:
        """What the recorded launches point to besides arrays of their own."""
        raw = self.cache.pool.raw
        windows = (step.source.key, step.source.value, step.target.key, step.target.value)
        return (*map(self.backend.address, windows), self.backend.address(raw[0]) if raw else 0)

    def _record(self, step: Append, closed: int, width: int) -> None:
        cache, be, pool, spec = self.cache, self.backend, self.cache.pool, self.cache.spec
        batch, (q, k, v) = cache.batch, self._native
        self._shape = self._arrays(step)
        self._most_closed, self._most_pages = _room(closed), max(4, _room(width))
        self._jobs, self._keep = ({which: be.zeros((batch, n), "int64") for which in ("key", "value")} for n in (6, 3))
        self._counts, self._table = be.zeros((batch, 7), "int64"), be.zeros((batch, self._most_pages, 2), "int64")
        self._row = be.zeros((len(FLAGS),), "int32")
        sides = (("key", k, step.source.key, step.target.key), ("value", v, step.source.value, step.target.value))
        programs = be.shares_of(pool.format, q, self._most_closed)

        def attend() -> None:
            self._out = be.attention(
                pool, step.source if first else step.target, self._table, self._counts, programs, cache.geometry.scale, q, k, v
            )

        def append() -> None:
            for i, (which, chunk, source, _) in enumerate(sides):
                most = spec.key.residual if which == "key" else 1
                flag, flat = be.seal_metadata(pool, which, self._jobs[which], most, source, chunk)
                be.seal_words(pool, which, self._jobs[which], most, source, chunk, flat)
                be.write(self._row[3 + i], be.total(flag))
            for which, chunk, source, target in sides:
                be.keep_rows(self._keep[which], 1 if target is source else int(target.shape[2]), chunk, source, target)

        def launches() -> None:
            for i, (x, low) in enumerate(zip((q, k, v), (-np.inf, *cache._lowest))):
                be.write(self._row[i], be.first_bad_place(x, low))
            for part in (attend, append) if first else (append, attend):
                part()

        first = spec.order == "attend_then_seal"
        launches()  # compiles what is missing; with no jobs and no rows it changes nothing
        self._replay = be.capture(launches)


def _room(n: int) -> int:
    """A capacity for n that is not outgrown soon: the next power of two."""
    return 1 << n.bit_length() if n else 0
