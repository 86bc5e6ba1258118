"""`KVCache`: the paged state of one layer, and the schedule that seals it.

The cache does integer bookkeeping on the host and leaves every array operation to its backend. A request is three counts
(tokens, key_sealed, value_sealed) and a row of the block table; `Draft` holds the counts that a step would lead to, and they
replace the current ones in a single assignment after all array work has succeeded. A step that fails leaves the state as it was.
Normative text: spec/SPEC.md sections 4 (frontiers), 6 (order) and 9 (storage).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from kivi import accounts, checks, memory, storefile
from kivi.arrays import sample
from kivi.backend import Append, Backend, Ran, Reading, Seal, Served, Windows
from kivi.captured import UNREAD, CapturedStep
from kivi.dtypes import lowest_origin, metadata_dtype
from kivi.errors import CapacityError, InputError, KiviError, PendingTokensError, StateError
from kivi.failures import Running
from kivi.geometry import geometry, page_format, positive
from kivi.layout import Which
from kivi.pool import PagePool
from kivi.prepared import PreparedStep
from kivi.quantized import QuantizedTensor
from kivi.ranks import Bucket, buckets
from kivi.segments import segments
from kivi.selection import resolve
from kivi.spec import CacheSpec, load_spec
from kivi.state import Lengths, State

SLACK = UNREAD  # window rows beyond the residual, so that short chunks need no fresh window


class KVCache:
    """A quantized KV cache of one layer for a batch of requests, which may differ in length.

    spec            a `CacheSpec`, a preset's name or the path of a TOML file
    batch           requests; q_heads, kv_heads: heads of queries and of keys and values (q_heads a multiple of kv_heads)
    head_dim        channels of q and k; value_head_dim: channels of v, by default the same
    dtype           "float16", "bfloat16" or "float32": of all inputs, floating rows and outputs
    backend         "auto", a name, or a `Backend`; mode and device narrow the choice (see `kivi.select`)
    scale           softmax scale, default 1/sqrt(head_dim)
    max_tokens      limit on the tokens of a request; max_pages: limit on the pages of the pool

    A cache is used by one thread at a time. Several threads may each use one of their own, also forks of one cache, which share pages.

    Raises `SpecError`, `ShapeError`, `DtypeError`, and from selection `UnknownBackendError`, `BackendUnavailableError`,
    `UnsupportedError`.
    """

    _served: dict[Bucket, Served] = {}  # replaced, never changed
    _noted = 0  # tokens up to which `_served` says what served them

    def __init__(
        self,
        spec: CacheSpec | str | Path,
        *,
        batch: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        value_head_dim: int | None = None,
        dtype: str = "float16",
        backend: str | Backend = "auto",
        mode: str | None = None,
        device: str = "auto",
        scale: float | None = None,
        max_tokens: int | None = None,
        max_pages: int | None = None,
    ) -> None:
        self._captured: CapturedStep | None = None
        self._prepared = PreparedStep()
        self.spec = load_spec(spec)
        self.geometry = geometry(q_heads, kv_heads, head_dim, value_head_dim, dtype, scale, max_tokens, max_pages)
        self.backend = resolve(backend, self.spec, self.geometry, mode, device, positive(batch, "batch"))
        self.pool = PagePool(self.backend, page_format(self.spec, self.geometry, self.backend), max_pages)
        try:
            self._state = self._empty(positive(batch, "batch"))
        except (MemoryError, ValueError) as error:
            if isinstance(error, KiviError):
                raise
            raise CapacityError(f"no memory for the windows of batch = {batch} requests: {error}; use a smaller batch") from error
        self._like: Any = np.empty(0)
        lows = [lowest_origin(self._metadata(which)) for which in ("key", "value")]
        self._lowest = lows if self.spec.overflow == "reject" else [-np.inf, -np.inf]

    def __repr__(self) -> str:
        g, tokens = self.geometry, memory.integers(self._state.tokens[:8])
        shape = f"batch={self.batch} heads={g.q_heads}/{g.kv_heads} head_dim={g.head_dim} {g.dtype}"
        return f"<kivi.KVCache {self.spec.name} {shape} tokens={tokens} on {self.backend.name}>"

    def __copy__(self) -> KVCache:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        """An independent cache with a pool of its own. Raises `PendingTokensError`."""
        self._settled("deepcopy")
        with self._running("deepcopy"):
            twin = storefile.restore(storefile.snapshot(self), self.spec, self.geometry, self.backend)
        twin._state, twin._like = replace(twin._state, clamped=self._state.clamped), self._like
        twin._served, twin._noted = self._served, self._noted
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError("a cache is not pickled, since reading a pickle executes it; use save and KVCache.load")

    def __del__(self) -> None:
        if hasattr(self, "_current"):  # else construction failed
            self._drop(self._current)

    @property
    def _state(self) -> State:
        """The current state, once it is known that the captured steps so far were good. Raises what `CapturedStep.check` raises."""
        if self._captured is not None:
            self._captured.check()
        return self._current

    @_state.setter
    def _state(self, state: State) -> None:
        self._current = state

    # -- what it is -----------------------------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        return len(self._current.tokens)

    @property
    def ran(self) -> Ran:
        """What serves this cache: backend, mode, device, kernel, layout, versions; and what served it, by shape (`kivi.ranks.Bucket`)."""
        be = self.backend
        self._note_served()
        return Ran(be.name, be.mode, be.device, be.kernel, self.pool.format.layout.name, dict(be.versions), dict(self._served))

    def lengths(self, request: int) -> Lengths:
        """Committed token counts of one request."""
        b = checks.request(request, self.batch)
        tokens, key, value = (int(a[b]) for a in (self._state.tokens, self._state.key_sealed, self._state.value_sealed))
        return Lengths(tokens, key, tokens - key, value, tokens - value)

    def pending(self, request: int) -> int:
        """Tokens of `attend(commit=False)` that wait for `commit` or `rollback`."""
        return int(self._state.pending[checks.request(request, self.batch)])

    def sealed(self, request: int) -> dict[str, list[tuple[int, QuantizedTensor]]]:
        """The sealed history: {"key": [(first token, tensor), ...], "value": [...]}, tensors of batch 1.

        One segment, or none while nothing is sealed; more after a crop inside a key group (SPEC 9.5).
        """
        b = checks.request(request, self.batch)
        sides: tuple[Which, Which] = ("key", "value")
        rows, dtype = self._state.rows(b), self.geometry.dtype
        return {which: segments(self.pool, rows, self._sealed(which, b), which, dtype, self._like) for which in sides}

    def residual(self, request: int) -> dict[str, Any]:
        """The committed floating rows: {"key": [Hkv, n, D], "value": [Hkv, n, Dv]}."""
        b = checks.request(request, self.batch)
        state, out = self._state, {}
        for which, window in (("key", state.windows.key), ("value", state.windows.value)):
            slots = np.arange(self._sealed(which, b), state.tokens[b]) % window.shape[2]
            out[which] = self.backend.give(window[b][:, slots], self._like)
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of every page this cache refers to, of its windows and of its tables. A page shared with a fork counts here too."""
        return accounts.nbytes(self._state, self.pool)

    def memory(self) -> dict[str, Any]:
        """Measured bytes by kind, the formula, and the padding between them by kind (SPEC 9.6).

        `measured` = `formula` + sum of `padding`; it is `nbytes`. `pool` counts each page of the pool once, free ones too.
        `clamped` counts scales and origins that were saturated.
        """
        return accounts.account(self._state, self.spec, self.geometry, self.pool)

    # -- attention and growth -------------------------------------------------------------------------------------------

    def attend(self, q: Any, k: Any, v: Any, counts: Sequence[int] | None = None, commit: bool = True) -> Any:
        """Append the new tokens and attend to everything before and to themselves, causally: SPEC 5 and 6.

        q [B, Hq, n, D], k [B, Hkv, n, D], v [B, Hkv, n, Dv], n >= 1, in the cache's dtype -> [B, Hq, n, Dv], an array of the
        library of q. counts: real tokens of each request, 0 allowed; rows past them are padding, are not read, and come back as
        zeros. commit=False leaves the tokens pending: floating, never sealed, until `commit` or `rollback`.

        Raises `ShapeError`, `DtypeError`, `DeviceError`, `NonFiniteError`, `MetadataOverflowError`, `CapacityError`,
        `PendingTokensError` (commit=True while tokens are pending), `BackendError`. The state is then as it was.
        """
        if counts is None and commit is True and self.backend.can_record:
            with self._running("attend"):
                out = self._prepared.attend(self, q, k, v)
            if out is not None:
                if type(q) is not type(self._like):
                    self._like = sample(q, self._like)
                return out
        g, state = self.geometry, self._state
        n = checks.inputs(q, k, v, g, self.batch)
        checks.flag(commit, "commit")
        real = checks.counts(counts, self.batch, n)
        if commit and state.pending.any():
            raise self._pending_error("attend(commit=True)")
        checks.room(state.stored + real, g.max_tokens)
        with self._running("attend"):
            native = [self.backend.adopt(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v"))]
            if self.spec.nonfinite == "reject":
                for x, name, low in zip(native, ("q", "key", "value"), (-np.inf, *self._lowest)):
                    self.backend.check_finite(x, name, real, low, state.stored)
            if not commit:
                out = self.backend.attend(self._reading(state, real, real), *native)
                draft = self._grow(state, state.tokens, real, *native[1:])
                draft = replace(draft, pending=state.pending + real)
            elif self.spec.order == "attend_then_seal":
                out = self.backend.attend(self._reading(state, real, real), *native)
                draft = self._grow(state, state.tokens + real, real, *native[1:])
            else:
                draft = self._grow(state, state.tokens + real, real, *native[1:])
                try:
                    out = self.backend.attend(self._reading_after_seal(state, draft, real), *native)
                except BaseException:
                    self._give_back(state, draft)
                    raise
            result = self.backend.give(out, q)
        self._state, self._like = draft, sample(q, self._like)
        return result

    def capture(self, q: Any, k: Any, v: Any, strict: bool = False) -> CapturedStep:
        """A decode step to be replayed, a CUDA graph where there is one: `step()` attends to the one token a request that q, k and v
        hold then, commits it, and returns the output, all in arrays that stay where they are.

        A step waits for nothing. If its input is not finite, or overflows the metadata, the error is raised after at most 8 more steps,
        or when the cache is asked anything else, and the cache is as it was before that step; with `strict`, at once. Raises
        `UnsupportedError` for a backend that cannot capture, `ShapeError`, `DtypeError`, `DeviceError`.
        """
        return CapturedStep(self, q, k, v, strict)

    def _take_over(self, step: CapturedStep) -> None:
        """From now on `step` has the steps whose flags were not read."""
        if self._captured is not None:
            self._captured.check()
        self._captured = step

    def commit(self, n: int | Sequence[int] | None = None) -> None:
        """Keep the first n pending tokens (an int: min(n, pending) of each request; one per request; None: all), drop the rest,
        and seal what is due. Raises `InputError`, `MetadataOverflowError`; the tokens then stay pending."""
        state = self._state
        keep = checks.commit_counts(n, state.pending)
        with self._running("commit"):
            draft = self._grow(state, state.tokens + keep, np.zeros_like(keep), None, None)
        self._state = replace(draft, pending=np.zeros_like(keep))

    def rollback(self) -> None:
        """Drop all pending tokens. Sealed state is not touched."""
        self._state = replace(self._state, pending=np.zeros_like(self._state.pending))

    def _reading(self, state: State, chunk: np.ndarray, counts: np.ndarray) -> Reading:
        return Reading(
            state.stored,
            state.key_sealed,
            state.value_sealed,
            state.pages,
            state.table,
            state.windows,
            self.pool,
            chunk,
            counts,
            self.geometry.scale,
        )

    def _reading_after_seal(self, before: State, after: State, counts: np.ndarray) -> Reading:
        """`seal_then_attend`: what is persisted after the step; but a request that was empty attends to its chunk (SPEC 6.3)."""
        empty = before.tokens == 0
        names = ("tokens", "pending", "key_sealed", "value_sealed", "pages")
        seen: dict[str, Any] = {name: np.where(empty, 0, getattr(after, name)) for name in names}
        return self._reading(replace(after, **seen), np.where(empty, counts, 0), counts)

    def _plan(self, state: State, tokens: np.ndarray, counts: np.ndarray) -> tuple[State, Append]:
        """The state once `counts` rows were stored and what is due at `tokens` committed tokens was sealed, its windows aside, and the
        step that leads there. Its new pages are lent: `_give_back` returns them if it fails."""
        residual, value_residual = self.spec.key.residual, self.spec.value.residual
        blocks = (tokens - state.key_sealed) // residual
        key_sealed = state.key_sealed + blocks * residual
        value_sealed = np.maximum(state.value_sealed, tokens - value_residual)
        table, pages = self._extend_table(state, blocks)
        draft = replace(state, tokens=tokens, key_sealed=key_sealed, value_sealed=value_sealed, pages=pages, table=table)
        try:
            seals = [*self._key_seals(state, draft), *self._value_seals(state, draft)]
            target = Windows(
                self._window(state.windows.key, state.key_sealed, key_sealed, state.stored, counts, residual),
                self._window(state.windows.value, state.value_sealed, value_sealed, state.stored, counts, value_residual),
            )
        except BaseException:
            self._give_back(state, draft)
            raise
        return draft, Append(state.stored, counts, tuple(seals), key_sealed, value_sealed, state.windows, target)

    def _grow(self, state: State, tokens: np.ndarray, counts: np.ndarray, k: Any, v: Any) -> State:
        """Store `counts` new rows, then seal what is due once `tokens` tokens are committed. Returns the draft of the new state;
        on failure no page stays lent."""
        draft, step = self._plan(state, tokens, counts)
        try:
            clamped = self.backend.append(self.pool, step, k, v)
        except BaseException:
            self._give_back(state, draft)
            raise
        return replace(draft, windows=step.target, clamped=state.clamped + clamped)

    def _extend_table(self, state: State, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lend one page a key block. Rows past the valid ones are written in place: they mean nothing until counted."""
        pages, table = state.pages, state.table
        if not blocks.any():
            return table, pages
        most = int((pages + blocks).max())
        if most > table.shape[1]:
            wider = np.zeros((len(pages), max(most, 2 * table.shape[1]), 2), np.int64)
            wider[:, : table.shape[1]] = table
            table = wider
        lent = iter(self.pool.lend(int(blocks.sum())))
        for b in np.flatnonzero(blocks):
            for i in range(int(blocks[b])):
                table[b, pages[b] + i] = next(lent), state.key_sealed[b] + i * self.spec.key.residual
        return table, pages + blocks

    def _give_back(self, state: State, draft: State) -> None:
        for b in np.flatnonzero(draft.pages - state.pages):
            for page in draft.table[b, state.pages[b] : draft.pages[b], 0].tolist():
                self.pool.release(page)

    def _key_seals(self, old: State, new: State) -> Iterator[Seal]:
        for b in np.flatnonzero(new.pages - old.pages):
            for page, first in new.table[b, old.pages[b] : new.pages[b]].tolist():
                yield Seal("key", int(b), first, self.spec.key.residual, page, 0)

    def _value_seals(self, old: State, new: State) -> Iterator[Seal]:
        for b in np.flatnonzero(new.value_sealed - old.value_sealed):
            at, end = int(old.value_sealed[b]), int(new.value_sealed[b])
            index = int(np.searchsorted(new.table[b, : new.pages[b], 1], at, side="right")) - 1
            while at < end:
                page, first = new.table[b, index].tolist()
                last = int(new.table[b, index + 1, 1]) if index + 1 < new.pages[b] else int(new.key_sealed[b])
                stop = min(end, last)
                yield Seal("value", int(b), at, stop - at, page, at - first)
                at, index = stop, index + 1

    def _window(
        self, window: Any, old_from: np.ndarray, new_from: np.ndarray, stored: np.ndarray, counts: np.ndarray, residual: int
    ) -> Any:
        """The window to write to: the current one if no row of the current state would be overwritten, else a fresh one; a fresh
        one, too, when the current one grew for a long run of pending tokens that is over."""
        capacity, end, usual = int(window.shape[2]), stored + counts, residual + SLACK
        held = np.where((stored > old_from) & (counts > 0), end - old_from, end - new_from)
        if (held <= capacity).all() and (end - new_from <= capacity).all():
            idle = capacity > 2 * usual and int((end - new_from).max(initial=0)) <= usual
            if not idle:
                return window
        needed = max(usual, int((end - new_from).max()))
        return self.backend.zeros((*window.shape[:2], needed, window.shape[3]), self.geometry.dtype)

    # -- edits of the table ---------------------------------------------------------------------------------------------

    def crop(self, t: int | Sequence[int]) -> None:
        """Keep the first t tokens (an int, or one per request). Sealed tokens stay sealed; a page cut in the middle keeps a shorter
        length, and the next key block starts at the new end (SPEC 4.5). Raises `InputError` for t < 0 or t > tokens."""
        state = self._settled("crop")
        tokens = checks.crop_lengths(t, state.tokens)
        key_sealed = np.minimum(state.key_sealed, tokens)
        pages = np.array([sum(first < key_sealed[b] for _, first, _ in state.rows(b)) for b in range(self.batch)], np.int64)
        dropped = [page for b in range(self.batch) for page in state.table[b, pages[b] : state.pages[b], 0].tolist()]
        self._state = replace(state, tokens=tokens, key_sealed=key_sealed, value_sealed=np.minimum(state.value_sealed, tokens), pages=pages)
        for page in dropped:
            self.pool.release(page)
        self._note_served()

    def reorder(self, idx: Sequence[int]) -> None:
        """Request b becomes what request idx[b] was, as beam search needs; len(idx) is the batch.

        Open pages are copied before the old ones are given back, so a pool with `max_pages` needs room for one more a request.
        """
        index = checks.indices(idx, self.batch)
        if len(index) != self.batch:
            raise InputError(f"reorder takes one index for each of {self.batch} requests, got {len(index)}; use select to change the batch")
        self._take(index, "reorder")

    def select(self, idx: Sequence[int]) -> None:
        """Keep the requests idx, in this order; the batch becomes len(idx)."""
        self._take(checks.indices(idx, self.batch), "select")

    def repeat(self, n: int) -> None:
        """Each request n times, copies side by side; the batch becomes n times as large."""
        times = positive(n, "n")
        self._take([b for b in range(self.batch) for _ in range(times)], "repeat")

    def fork(self) -> KVCache:
        """A second cache with the same contents on the same pool: closed pages are shared, open ones and windows copied."""
        state = self._settled("fork")
        with self._running("fork"):
            copied = self._copied(state, list(range(self.batch)))
        twin = object.__new__(KVCache)
        twin.__dict__.update(self.__dict__, _current=copied, _captured=None, _prepared=PreparedStep())
        return twin

    def reset(self) -> None:
        """Empty all requests, pending tokens too; pages return to the pool."""
        with self._running("reset"):
            empty = self._empty(self.batch)
        self._note_served()
        self._drop(self._state)
        self._state, self._noted = empty, 0

    def _take(self, index: list[int], what: str) -> None:
        state = self._settled(what)
        with self._running(what):
            new = self._copied(state, index)
        self._drop(state)
        self._state = new
        self._note_served()

    def _copied(self, state: State, index: list[int]) -> State:
        """A state whose request j is request index[j] of `state`, with references of its own. Nothing changes if it fails."""
        open_pages = [state.open_pages(b) for b in index]
        copies = self.pool.lend(sum(len(pages) for pages in open_pages))
        try:
            windows = Windows(self.backend.gather(state.windows.key, index), self.backend.gather(state.windows.value, index))
            table = state.table[index]
            fresh = iter(copies)
            for row, b, pages in zip(table, index, open_pages):
                for i in range(int(state.pages[b])):
                    if int(row[i, 0]) in pages:
                        source, row[i, 0] = int(row[i, 0]), next(fresh)
                        self.backend.copy_page(self.pool, source, int(row[i, 0]))
        except BaseException:
            for page in copies:
                self.pool.release(page)
            raise
        mine = set(copies)
        for row, b in zip(table, index):
            for page in row[: state.pages[b], 0].tolist():
                if page not in mine:
                    self.pool.retain(page)
        counts = {name: getattr(state, name)[index] for name in ("tokens", "pending", "key_sealed", "value_sealed", "pages")}
        return replace(state, **counts, table=table, windows=windows)

    # -- moving ---------------------------------------------------------------------------------------------------------

    def to(self, backend: str | Backend, mode: str | None = None, device: str = "auto") -> KVCache:
        """Move to another backend, in place; sealed state is carried bit for bit. Returns self. Raises what construction raises."""
        self._settled("to")
        target = resolve(backend, self.spec, self.geometry, mode, device)
        with self._running("to"):
            held = storefile.snapshot(self)
        with Running(target, "the move"):
            moved = storefile.restore(held, self.spec, self.geometry, target)
        moved._state = replace(moved._state, clamped=self._state.clamped)
        self._captured, self._prepared = None, PreparedStep()
        for name in ("backend", "pool", "_current"):  # the two caches change places, and the other one goes with the old state
            mine, other = getattr(self, name), getattr(moved, name)
            setattr(self, name, other)
            setattr(moved, name, mine)
        return self

    def save(self, path: str | Path) -> None:
        """Write a safetensors file: spec and its hash, layout, words, scales, origins, floating rows, counts, checksum (SPEC 10)."""
        self._settled("save")
        with self._running("save"):
            held = storefile.snapshot(self)
        storefile.write(path, held, self.spec, self.geometry)

    @classmethod
    def load(
        cls,
        path: str | Path,
        spec: CacheSpec | str | Path | None = None,
        backend: str | Backend = "auto",
        mode: str | None = None,
        device: str = "auto",
    ) -> KVCache:
        """The cache of a file. Raises `SaveFileError` if it is damaged, or if `spec` is given and has another hash."""
        snapshot, stored_spec, geometry = storefile.read(path, None if spec is None else load_spec(spec))
        cache = storefile.restore(snapshot, stored_spec, geometry, resolve(backend, stored_spec, geometry, mode, device))
        cache._noted = int(cache._current.tokens.max(initial=0))  # another one served these
        return cache

    # -- helpers --------------------------------------------------------------------------------------------------------

    def _empty(self, batch: int) -> State:
        g, spec = self.geometry, self.spec
        zero = np.zeros(batch, np.int64)
        windows = Windows(
            self.backend.zeros((batch, g.kv_heads, spec.key.residual + SLACK, g.head_dim), g.dtype),
            self.backend.zeros((batch, g.kv_heads, spec.value.residual + SLACK, g.value_head_dim), g.dtype),
        )
        return State(zero, zero, zero, zero, zero, np.zeros((batch, 4, 2), np.int64), windows)

    def _drop(self, state: State) -> None:
        for b in range(len(state.pages)):
            for page in state.table[b, : state.pages[b], 0].tolist():
                self.pool.release(page)

    def _sealed(self, which: str, b: int) -> int:
        return int((self._state.key_sealed if which == "key" else self._state.value_sealed)[b])

    def _metadata(self, which: str) -> str:
        return metadata_dtype(self.spec, which, self.geometry.dtype)

    def _settled(self, what: str) -> State:
        """The state, if no tokens are pending. Raises `PendingTokensError`."""
        if self._state.pending.any():
            raise self._pending_error(what)
        self._note_served()
        return self._state

    def _note_served(self) -> None:
        """What served the lengths since the last note. Tokens grow by attending only; whatever makes them fewer notes before and after."""
        now = int(self._current.tokens.max(initial=0))
        if now > self._noted:
            be, layout = self.backend, self.pool.format.layout.name
            served = Served(be.name, be.mode, be.device, be.kernel, layout)
            self._served = {**self._served, **dict.fromkeys(buckets(self.geometry, self._noted + 1, now, self.batch), served)}
        self._noted = now

    def _pending_error(self, what: str) -> PendingTokensError:
        return PendingTokensError(
            f"{what} while tokens are pending ({memory.integers(self._state.pending)} by request): call commit() or rollback() first"
        )

    def _running(self, what: str) -> Running:
        """Errors from below come out of kivi's tree and name the backend."""
        return Running(self.backend, what)
