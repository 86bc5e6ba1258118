"""`PreparedStep`: the decode step of `KVCache.attend`, prepared, so that it costs the host little more than a call.

A step of one token for every request that seals no keys does the same launches as the one before it, and every number that they are given
grows by a constant until some request comes to the end of a page. So the launches are recorded once, and a step adds one array to another,
replays, and counts its tokens. Results are those of the general path bit for bit. Whatever is unusual is left to that path, and so is
every error of a step: one that meets something to refuse has changed nothing that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kivi import checks
from kivi.backend import Append, Reading, Seal
from kivi.state import State

if TYPE_CHECKING:
    from kivi.cache import KVCache


class PreparedStep:
    """What is prepared for one cache. It does not refer to the cache, which holds it."""

    def __init__(self) -> None:
        self._looks: Any = None  # of the q, k and v that were checked last
        self._state: State | None = None  # that the last step led to
        self._left = 0  # steps from there that are alike
        self._recorded: tuple[Any, ...] = ()  # what the recorded launches depend on

    def attend(self, cache: KVCache, q: Any, k: Any, v: Any) -> Any:
        """The output of `KVCache.attend`, its token committed; None, and nothing has changed, if the general path has to do this step.

        Raises what `kivi.checks.inputs` and `Backend.adopt` raise.
        """
        state, be = cache._state, cache.backend
        looks: list[Any] = [cache.batch]  # another one after `select` or `repeat`
        looks += [(type(x), getattr(x, "dtype", None), getattr(x, "shape", None), getattr(x, "device", None)) for x in (q, k, v)]
        if looks != self._looks:
            if checks.inputs(q, k, v, cache.geometry, cache.batch) != 1:
                return None
            self._looks = looks
        native = (be.adopt(q, "q"), be.adopt(k, "k"), be.adopt(v, "v"))
        if (state is not self._state or not self._left) and not self._begin(cache, state):
            return None
        self._state = None  # until this step has succeeded
        for row, x in zip(self._rows, native):
            row[:] = x
        self._replay()
        for flag in self._refused:
            if flag.tobytes().strip(b"\0"):
                return None
        out = be.give(self._out.copy(), q)
        self._numbers += self._growth
        clamped = state.clamped
        for flag in self._clamped:
            clamped += int(flag.sum())
        tokens, value_sealed = state.tokens + 1, state.value_sealed + self._seals
        after = State(tokens, state.pending, state.key_sealed, value_sealed, state.pages, state.table, state.windows, clamped)
        self._left -= 1  # first: an interrupt between the two may cost a preparation, not a step too many
        cache._current = self._state = after
        return out

    def _begin(self, cache: KVCache, state: State) -> bool:
        """Plan the steps from `state` on that are alike. False if the next one is for the general path."""
        be: Any = cache.backend
        self._state, spec, tokens = None, cache.spec, state.tokens
        limits = [spec.key.residual - 1 - (tokens - state.key_sealed)]
        if cache.geometry.max_tokens is not None:
            limits.append(cache.geometry.max_tokens - tokens)
        if min(int(limit.min()) for limit in limits) < 1 or state.pending.any() or not tokens.all():
            return False
        one = np.ones_like(tokens)
        draft, step = cache._plan(state, tokens + 1, one)  # lends no page, since no keys are due
        old, new = step.source, step.target
        if new.key is not old.key or new.value is not old.value or any(s.count != 1 for s in step.seals):
            return False
        first = spec.order == "attend_then_seal"
        reading = cache._reading(state, one, one) if first else cache._reading_after_seal(state, draft, one)
        counts, closed = be.counts(reading)
        self._record(cache, step, reading, closed)
        self._table[:] = be.table(reading, self._table.shape[1])
        self._counts[:] = counts
        for which, first_kept in (("key", step.keep_key), ("value", step.keep_value)):
            self._keep[which][:] = np.stack([step.stored, one, first_kept], 1)
        self._jobs[:] = 0  # a job of no rows does nothing
        self._jobs[: len(step.seals)] = be.jobs(cache.pool, step.seals, step.stored)
        self._seals = draft.value_sealed - state.value_sealed
        self._grow(len(step.seals))
        rows = [_rows_of_page(state, s) - (not first) for s in step.seals]  # the next page is seen one step sooner
        floating = (spec.value.residual - (tokens - state.value_sealed))[self._seals == 0]
        self._left = max(1, min(int(n) for limit in (*limits, floating, rows) for n in limit))
        self._state = state
        return True

    def _grow(self, seals: int) -> None:
        """What the next step adds to every number: one stored token a request, and one sealed value where one is sealed."""
        self._growth[:] = 0
        counts, keep_key, keep_value, jobs = self._views(self._growth)
        counts[:, 0] = keep_key[:, 0] = keep_value[:, 0] = jobs[:seals, 5] = 1  # stored
        counts[:, 2] = keep_value[:, 2] = self._seals
        jobs[:seals, 1] = jobs[:seals, 4] = 1  # first token, row of the page

    @staticmethod
    def _views(numbers: np.ndarray) -> list[np.ndarray]:
        """Counts [B, 7], rows to keep of keys and of values [B, 3] each, jobs [B, 6], as `KernelBackend` has them."""
        batch = len(numbers) // 19
        return [part.reshape(batch, -1) for part in np.split(numbers, np.cumsum([7, 3, 3]) * batch)]

    def _record(self, cache: KVCache, step: Append, reading: Reading, closed: int) -> None:
        """Record the launches, if those that are recorded are for others. The rows of a step are copied to where they find them."""
        be: Any = cache.backend
        pool, windows, batch, g = cache.pool, step.source, cache.batch, cache.geometry
        shapes = [
            (batch, heads, 1, dim) for heads, dim in ((g.q_heads, g.head_dim), (g.kv_heads, g.head_dim), (g.kv_heads, g.value_head_dim))
        ]
        q, k, v = rows = [be.empty(shape, g.dtype) for shape in shapes]
        programs = be.shares_of(pool.format, q, closed)
        key = (programs, reading.table.shape, be.address(pool.raw[0]) if pool.raw else 0, id(windows.key), id(windows.value))
        if key == self._recorded:
            return
        self._rows, self._windows = rows, windows  # the windows stay alive, so that no others have their numbers
        self._numbers, self._growth = (np.zeros(19 * batch, np.int64) for _ in range(2))
        self._counts, keep_key, keep_value, self._jobs = self._views(self._numbers)
        self._keep = {"key": keep_key, "value": keep_value}
        self._table: np.ndarray = np.zeros(reading.table.shape, np.int64)
        self._out = be.empty((batch, g.q_heads, 1, g.value_head_dim), g.dtype)
        flags: dict[str, list[Any]] = {"outside": [], "exceeded": []}
        parts: list[Any] = []
        flat: list[Any] = [None]

        def look(at: Any) -> None:
            if cache.spec.nonfinite == "reject":
                flags["outside"] = [at.outside(x, low) for x, low in ((q, -np.inf), (k, cache._lowest[0]), (v, cache._lowest[1]))]

        def attend(at: Any) -> None:
            parts[:] = at.parts(pool, windows, self._table, self._counts, programs, cache.geometry.scale, q, k, v)

        def merge(at: Any) -> None:
            at.merge(tuple(parts), self._counts, self._out)

        def seal(at: Any) -> None:
            exceeded, flat[0] = at.seal_metadata(pool, "value", self._jobs, 1, windows.value, v)
            flags["exceeded"] = [exceeded]

        def words(at: Any) -> None:
            at.seal_words(pool, "value", self._jobs, 1, windows.value, v, flat[0])

        def keep(at: Any) -> None:
            for which, chunk, window in (("key", k, windows.key), ("value", v, windows.value)):
                at.keep_rows(self._keep[which], 1, chunk, window, window)

        first = cache.spec.order == "attend_then_seal"
        phases = [[attend, look], [merge, seal, keep], [words]] if first else [[look, seal, keep], [words], [attend], [merge]]
        self._replay = be.record([_together(phase) for phase in phases])
        saturates = cache.spec.overflow == "saturate"
        self._refused = flags["outside"] + ([] if saturates else flags["exceeded"])
        self._clamped = flags["exceeded"] if saturates else []
        self._recorded = key


def _together(parts: Sequence[Callable[[Any], None]]) -> Callable[[Any], None]:
    """One function that calls several."""

    def phase(at: Any) -> None:
        for part in parts:
            part(at)

    return phase


def _rows_of_page(state: State, seal: Seal) -> int:
    """Rows from the one of a seal to the end of its page."""
    b = seal.request
    index = int(np.searchsorted(state.table[b, : state.pages[b], 1], seal.first, side="right"))
    return int(state.table[b, index, 1] if index < state.pages[b] else state.key_sealed[b]) - seal.first
