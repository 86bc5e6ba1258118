"""Base class of backends with generated kernels: plans every operation in NumPy on the host and launches kernels for it.

A backend adds the plumbing of its arrays, a `Library` that knows how to print and load, and `launch`. What a kernel is given is decided
here, once: a scalar, an array, or an array read as the words of a pool.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from kivi.backend import Append, Backend, Manifest, Reading, Seal, Windows, extremes, group_overflow_error, overflow_error
from kivi.dtypes import metadata_dtype
from kivi.errors import BackendError, KiviError, MetadataOverflowError, UnsupportedError
from kivi.host import floating_rows
from kivi.kernels.library import Library, Loaded
from kivi.kernels.request import Request, decoding
from kivi.layout import Layout, Which, arrangement
from kivi.pool import PageFormat, PagePool
from kivi.quantized import QuantizedTensor
from kivi.schedule import Schedule, shares
from kivi.spec import CacheSpec

LOG2_E = 1.4426950408889634
NO_SPEC, NO_LAYOUT = CacheSpec(), Layout(name="none", key="t:slot t* c*", value="c:slot c* t*")


class KernelBackend(Backend):
    """A backend whose operations are generated kernels."""

    #: Pages of a program of the history kernel: enough work to hide the merge.
    pages_per_share = 16

    def __init__(self, manifest: Manifest, mode: str, device: str, versions: dict[str, str], library: Library) -> None:
        super().__init__(manifest, mode, device, versions)
        self.library = library
        self._placed: WeakKeyDictionary[PagePool, np.ndarray] = WeakKeyDictionary()  # `_places`

    @property
    def kernel(self) -> str:
        return "history, tail, merge"

    def kernels(self) -> dict[str, list[str]]:
        return self.library.loaded()

    # what a backend adds

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """An array with any contents; dtypes by name."""

    @abstractmethod
    def dtype_of(self, a: Any) -> str:
        """The name of an array's dtype."""

    @abstractmethod
    def strides(self, a: Any) -> tuple[int, ...]:
        """Elements from one index of an axis to the next."""

    @abstractmethod
    def address(self, a: Any) -> int:
        """Where an array's first element lies."""

    @abstractmethod
    def flat(self, a: Any, dtype: str) -> Any:
        """The bytes of a contiguous array as one row of another dtype."""

    @abstractmethod
    def launch(self, loaded: Loaded, programs: tuple[int, ...], arguments: list[Any]) -> None:
        """Start a kernel on the caller's stream; `arguments` are arrays and numbers in the order of its signature."""

    @abstractmethod
    def schedules(self, form: PageFormat, q_heads: int, rows: int) -> dict[str, Schedule]:
        """Zone, "history" and "tail", -> schedule of its kernel, for calls with `rows` query rows."""

    # capturing a step

    #: Whether `capture` works in this mode.
    can_capture = False

    def capture(self, launches: Callable[[], None]) -> Callable[[], None]:
        """Record what `launches` launches, as a function that does it again on the same arrays."""
        raise UnsupportedError(f"backend {self.name!r} (mode {self.mode}) cannot capture launches")

    def write(self, target: Any, source: Any) -> None:
        """Copy an array of the backend, or of NumPy, into another of the same shape, in the order of launches."""
        raise NotImplementedError

    def first_bad_place(self, x: Any, lowest: float) -> Any:
        """1 + the place, in row-major order, of the first element that is not finite or below `lowest`; 0 if none. int32 [], no waiting."""
        raise NotImplementedError

    def total(self, flag: Any) -> Any:
        """The sum of an int32 array as int32 [], no waiting."""
        raise NotImplementedError

    # recording a step

    def record(self, phases: Sequence[Callable[[Any], None]]) -> Callable[[], None]:
        """What the phases launch, as a function that does it again on the same arrays.

        Each phase is called once with a stand-in for this backend, which launches nothing. Launches of one phase do not depend on one
        another. Arrays that the stand-in makes by `empty` hold nothing beyond a replay.
        """
        raise UnsupportedError(f"backend {self.name!r} (mode {self.mode}) cannot record launches")

    def outside(self, x: Any, lowest: float) -> Any:
        """int32 array with a positive number for each row of x [B, H, n, D] that holds NaN, an infinity or an element below `lowest`."""
        raise NotImplementedError

    # whole tensors

    def encode(self, x: Any, which: Which, spec: CacheSpec, metadata: str, layout: Layout) -> tuple[Any, ...]:
        batch, heads, tokens, channels = (int(n) for n in x.shape)
        side = spec.key if which == "key" else spec.value
        rows, groups = (tokens // side.group, channels) if which == "key" else (tokens, -(-channels // side.group))
        scale, origin = (self.zeros((batch, heads, rows, groups), metadata) for _ in range(2))
        words = self._words(which, spec, layout, x.shape)
        if tokens:
            values = {"batch": batch, "heads": heads, "tokens": tokens, "channels": channels}
            strided = {"x": x, "scale": scale, "origin": origin, "tokens": tokens, "heads": heads, **self._strides("x", x)}
            dtype, options = self.dtype_of(x), (("metadata", metadata),)
            loaded = self.library.get(Request(f"{which}.metadata", spec, layout, dtype, channels, options))
            programs = loaded.generated.programs(values)
            flag = self.zeros((int(np.prod(programs)),), "int32")
            strided["flat"] = self.empty((batch * heads * rows * groups,), "uint8")
            self._launch(loaded, programs, {**strided, "flag": flag, "blocks": programs[1]})
            if spec.overflow == "reject" and self.to_host(flag).any():
                raise group_overflow_error(f"{which} tensor", which, self.to_host(x), spec, metadata)
            shape = arrangement(layout, which, side.bits, spec.key.residual, channels)
            loaded = self.library.get(Request(f"{which}.encode", spec, layout, dtype, channels, options))
            self._launch(loaded, loaded.generated.programs({**values, "units": _units(shape)}), {**strided, **_extent("words", words)})
        return words, scale, origin

    def codes(self, qt: QuantizedTensor) -> Any:
        return self._decode(qt, "uint8")

    def dequantize(self, qt: QuantizedTensor, dtype: str) -> Any:
        return self._decode(qt, dtype)

    def relayout(self, qt: QuantizedTensor, layout: Layout) -> Any:
        words = self.adopt(qt.words, "words")
        out = self._words(qt.which, qt.spec, layout, qt.shape)
        if qt.tokens:
            options = (("metadata", metadata_dtype(qt.spec, qt.which, qt.dtype)), ("target", layout))
            loaded = self.library.get(Request(f"{qt.which}.repack", qt.spec, qt.packing, qt.dtype, qt.shape[3], options))
            shape = arrangement(layout, qt.which, qt.bits, qt.spec.key.residual, qt.shape[3])
            values = {"batch": qt.shape[0], "heads": qt.shape[1], "tokens": qt.tokens, "units": _units(shape)}
            row, total = int(out.shape[3]), int(out.shape[2] * out.shape[3])
            arguments = {"tokens": qt.tokens, **_extent("words", words), "out": out, "out_row": row, "out_total": total}
            self._launch(loaded, loaded.generated.programs(values), arguments)
        return self.give(out, qt.words)

    def _decode(self, qt: QuantizedTensor, dtype: str) -> Any:
        words, scale, origin = (self.adopt(a, "tensor") for a in (qt.words, qt.scale, qt.origin))
        out = self.zeros(qt.shape, dtype)
        if qt.tokens:
            metadata = metadata_dtype(qt.spec, qt.which, qt.dtype)
            loaded = self.library.get(decoding(qt.spec, qt.which, qt.packing, qt.shape[3], metadata, dtype))
            values = {"batch": qt.shape[0], "heads": qt.shape[1], "tokens": qt.tokens, "channels": qt.shape[3]}
            arguments = {**_extent("words", words), "scale": scale, "origin": origin, "out": out, "tokens": qt.tokens}
            self._launch(loaded, loaded.generated.programs(values), arguments)
        return self.give(out, qt.words)

    def _words(self, which: Which, spec: CacheSpec, layout: Layout, shape: Any) -> Any:
        """Zeroed words of a whole tensor, pages joined along the token star."""
        bits = (spec.key if which == "key" else spec.value).bits
        page = spec.key.residual
        tokens, channels = int(shape[2]), int(shape[3])
        full = arrangement(layout, which, bits, page, channels)
        size = list(full.shape)
        rest = arrangement(layout, which, bits, tokens % page, channels).shape[full.token_axis] if tokens % page else 0
        size[full.token_axis] = tokens // page * full.shape[full.token_axis] + rest
        return self.zeros((int(shape[0]), int(shape[1]), *size), layout.word)

    # a paged cache

    def append(self, pool: PagePool, step: Append, k: Any, v: Any) -> int:
        clamped = 0
        for which, chunk, source in (("key", k, step.source.key), ("value", v, step.source.value)):
            seals = [s for s in step.seals if s.which == which]
            if seals:
                clamped += self._seal(pool, step, which, seals, source, chunk)
        for chunk, source, target, keep in (
            (k, step.source.key, step.target.key, step.keep_key),
            (v, step.source.value, step.target.value, step.keep_value),
        ):
            start = keep if target is not source else np.maximum(keep, step.stored)
            most = int((step.stored + step.counts - start).max(initial=0))
            if (chunk is not None or target is not source) and most > 0:
                self.keep_rows(self.from_host(np.stack([step.stored, step.counts, keep], 1)), most, chunk, source, target)
        return clamped

    def _seal(self, pool: PagePool, step: Append, which: str, seals: list[Seal], window: Any, chunk: Any) -> int:
        form = pool.format
        jobs = self.from_host(self.jobs(pool, seals, step.stored))
        flag, flat = self.seal_metadata(pool, which, jobs, max(s.count for s in seals), window, chunk)
        exceeded = self.to_host(flag)
        if form.spec.overflow == "reject" and exceeded.any():
            bad = seals[int(np.flatnonzero(exceeded.reshape(len(seals), -1).any(1))[0])]
            new = None if chunk is None else self.to_host(chunk)
            rows = floating_rows(bad, int(step.stored[bad.request]), self.to_host(window), new)
            where = f"request {bad.request}, tokens {bad.first} to {bad.first + bad.count - 1}"
            raise group_overflow_error(where, which, rows, form.spec, self._metadata(form, which), bad.first)
        self.seal_words(pool, which, jobs, max(s.count for s in seals), window, chunk, flat)
        return int(exceeded.sum()) if form.spec.overflow == "saturate" else 0

    def attend(self, reading: Reading, q: Any, k: Any, v: Any) -> Any:
        counts, closed = self.counts(reading)
        table = self.table(reading)
        programs = self.shares_of(reading.pool.format, q, closed)
        return self.attention(
            reading.pool, reading.windows, self.from_host(table), self.from_host(counts), programs, reading.scale, q, k, v
        )

    def shares_of(self, form: PageFormat, q: Any, closed: int) -> int:
        """Programs that share a history of `closed` pages."""
        history = self.schedules(form, int(q.shape[1]), int(q.shape[2]))["history"]
        return shares(closed, self.pages_per_share) if "split_kv" in history.rewrites else min(closed, 1)

    # its launches, on numbers that lie on the device

    def seal_metadata(self, pool: PagePool, which: str, jobs: Any, count: int, window: Any, chunk: Any) -> tuple[Any, Any]:
        """Scales and origins of `jobs`, of at most `count` rows each. Returns what each program could not represent, int32 [jobs, ...], and
        which groups are flat, for `seal_words`."""
        loaded, values, given = self._sealing("seal_metadata", pool, which, jobs, count, window, chunk)
        programs = loaded.generated.programs(values)
        flag = self.zeros((int(np.prod(programs)),), "int32")
        flat = self.empty((len(jobs) * pool.format.kv_heads * _groups(pool.format, which),), "uint8")
        self._launch(loaded, programs, {**given, "flat": flat, "flag": flag, "blocks": programs[1]})
        return flag, flat

    def seal_words(self, pool: PagePool, which: str, jobs: Any, count: int, window: Any, chunk: Any, flat: Any) -> None:
        """Words of `jobs`, whose scales and origins are in their pages; `flat` as `seal_metadata` returned it."""
        loaded, values, given = self._sealing("seal_words", pool, which, jobs, count, window, chunk)
        self._launch(loaded, loaded.generated.programs(values), {**given, "flat": flat})

    def _sealing(self, entry: str, pool: PagePool, which: str, jobs: Any, count: int, window: Any, chunk: Any) -> tuple[Loaded, dict, dict]:
        form = pool.format
        shape = form.key if which == "key" else form.value
        request = Request(f"{which}.{entry}", form.spec, form.layout, self.dtype_of(window), shape.channels, (("form", form),))
        values = {"jobs": len(jobs), "heads": form.kv_heads, "count": count, "channels": shape.channels, "units": _units(shape)}
        return self.library.get(request), values, {"jobs": jobs, **self._pool(pool), **self._rows("x", window, chunk)}

    def keep_rows(self, counts: Any, most: int, chunk: Any, source: Any, target: Any) -> None:
        """Rows into the target window: `counts` int64 [B, 3] stored, new, first to keep; at most `most` rows a request."""
        batch, heads, capacity, channels = (int(n) for n in target.shape)
        loaded = self.library.get(Request("rows.keep_rows", NO_SPEC, NO_LAYOUT, self.dtype_of(target), channels, (("heads", heads),)))
        given = {"counts": counts, **self._rows("x", source, chunk), "target": target, "target_capacity": capacity}
        values = {"batch": batch, "heads": heads, "count": most, "channels": channels}
        self._launch(loaded, loaded.generated.programs(values), {**given, "fresh": int(target is not source)})

    def attention(
        self, pool: PagePool, windows: Windows, table: Any, counts: Any, programs: int, scale: float, q: Any, k: Any, v: Any
    ) -> Any:
        """`attend` with its table and counts on the device, the history shared by `programs` programs."""
        batch, q_heads, rows, _ = (int(n) for n in q.shape)
        parts = self.parts(pool, windows, table, counts, programs, scale, q, k, v)
        out = self.empty((batch, q_heads, rows, pool.format.value_head_dim), self.dtype_of(q))
        self.merge(parts, counts, out)
        return out

    def parts(
        self, pool: PagePool, windows: Windows, table: Any, counts: Any, programs: int, scale: float, q: Any, k: Any, v: Any
    ) -> tuple[Any, Any, Any]:
        """Partial results of `attention`: maxima and sums of weights [parts, B * Hq * n], weighted values [parts, B * Hq * n, Dv]."""
        form = pool.format
        batch, q_heads, rows, _ = (int(n) for n in q.shape)
        dim, dtype = form.value_head_dim, self.dtype_of(q)
        splits, outputs = programs + 1, batch * q_heads * rows
        top, total = (self.empty((splits, outputs), "float32") for _ in range(2))
        part = self.empty((splits, outputs, dim), "float32")
        given = {
            "q": q,
            **self._strides("q", q),
            **self._rows("k", windows.key, k),
            **self._rows("v", windows.value, v),
            **self._pool(pool),
            "table": table,
            "table_rows": int(table.shape[1]),
            "counts": counts,
            "scale": scale * LOG2_E,
            "shares": programs,
            "rows": rows,
            "outputs": outputs,
            "top": top,
            "total": total,
            "part": part,
        }
        values = {"batch": batch, "heads": form.kv_heads, "shares": programs, "rows": rows}
        for zone, schedule in self.schedules(form, q_heads, rows).items():
            if zone == "tail" or programs:
                options = (("form", form), ("q_heads", q_heads), ("schedule", schedule))
                loaded = self.library.get(Request(f"cache.{zone}", form.spec, form.layout, dtype, form.head_dim, options))
                self._launch(loaded, loaded.generated.programs(values), {**given, "slot": programs if zone == "tail" else 0})
        return top, total, part

    def merge(self, parts: tuple[Any, Any, Any], counts: Any, out: Any) -> None:
        """Partial results as the output, rows past the counts 0."""
        top, total, part = parts
        _, q_heads, rows, dim = (int(n) for n in out.shape)
        splits, outputs = (int(n) for n in top.shape)
        loaded = self.library.get(Request("cache.merge", NO_SPEC, NO_LAYOUT, self.dtype_of(out), dim, (("q_heads", q_heads),)))
        given = {"top": top, "total": total, "part": part, "counts": counts, "out": out}
        given |= {"splits": splits, "rows_of_head": rows, "outputs": outputs}
        self._launch(loaded, loaded.generated.programs({"outputs": outputs}), given)

    # those numbers, on the host

    def jobs(self, pool: PagePool, seals: Sequence[Seal], stored: np.ndarray) -> np.ndarray:
        """int64 [seals, 6] as `kivi.passes.append.JOB` names them."""
        places = self._places(pool)
        rows = [(s.request, s.first, s.count, places[s.page], s.row, stored[s.request]) for s in seals]
        return np.array(rows, np.int64).reshape(-1, 6)

    def counts(self, reading: Reading) -> tuple[np.ndarray, int]:
        """int64 [B, 7] as `kivi.passes.attention.COUNTS` names them, and the largest number of closed pages."""
        closed = _closed_pages(reading)
        r = reading
        columns = (r.stored, r.key_sealed, r.value_sealed, r.pages, closed, r.chunk, r.counts)
        return np.stack(columns, 1).astype(np.int64), int(closed.max(initial=0))

    def table(self, reading: Reading, width: int = 1) -> np.ndarray:
        """int64 [B, M, 2]: (distance of the page, first token), M at least `width`; rows past a request's pages mean nothing."""
        width = max(width, int(reading.pages.max(initial=0)))
        table = np.zeros((len(reading.pages), width, 2), np.int64)
        valid = np.arange(width) < reading.pages[:, None]
        found = reading.table[:, :width][valid[:, : reading.table.shape[1]]]
        table[valid] = np.stack([self._places(reading.pool)[found[:, 0]], found[:, 1]], 1) if len(found) else 0
        return table

    def overflow(self, pool: PagePool, which: str, where: str, window: Any, chunk: Any) -> MetadataOverflowError:
        """The error for rows somewhere in `window` and `chunk` that need numbers which the metadata dtype cannot hold."""
        given = [self.to_host(a) for a in (window, chunk) if a is not None]
        form = pool.format
        return overflow_error(where, which, *extremes(np.concatenate(given, 2)), form.spec, self._metadata(form, which))

    @staticmethod
    def _metadata(form: PageFormat, which: str) -> str:
        return form.key_metadata if which == "key" else form.value_metadata

    # arguments

    def _launch(self, loaded: Loaded, programs: tuple[int, ...], given: dict[str, Any]) -> None:
        """Launch with the arguments of its signature; whatever the vendor's compiler or launcher says comes out with the source's path."""
        try:
            self.launch(loaded, programs, [given[name] for name in loaded.generated.signature])
        except (KiviError, MemoryError):
            raise
        except Exception as error:
            raise BackendError(
                f"kernel {loaded.generated.name!r} failed on backend {self.name!r} (mode {self.mode}, {self.device}): "
                f"{type(error).__name__}: {error}; its source is {loaded.source}"
            ) from error

    def _pool(self, pool: PagePool) -> dict[str, Any]:
        """The pool's base through its typed pointers."""
        base, form = pool.raw[0] if pool.raw else self._nothing, pool.format
        return {
            "page_words": self.flat(base, form.layout.word),
            "page_key_metadata": self.flat(base, form.key_metadata),
            "page_value_metadata": self.flat(base, form.value_metadata),
        }

    @cached_property
    def _nothing(self) -> Any:
        """What stands for a pool that has no page yet; no kernel reads it."""
        return self.zeros((16,), "uint8")

    def _places(self, pool: PagePool) -> np.ndarray:
        """Distance of every page from the pool's base in bytes, int64 [pages]. Slabs lie where the allocator put them, and stay there."""
        places, pages = self._placed.get(pool, np.zeros(0, np.int64)), len(pool.refs)  # counted first: another thread may add slabs
        if len(places) < pages:
            starts = np.array([self.address(raw) for raw in pool.raw], np.int64)
            slab, index = np.array([pool.where(page) for page in range(len(places), pages)], np.int64).T
            places = np.concatenate([places, starts[slab] - starts[0] + index * pool.format.page_bytes])
            self._placed[pool] = places
        return places

    def _strides(self, name: str, x: Any) -> dict[str, int]:
        return {f"{name}_{axis}": stride for axis, stride in zip(("batch", "head", "token", "channel"), self.strides(x), strict=True)}

    def _rows(self, name: str, window: Any, chunk: Any) -> dict[str, Any]:
        """Arguments of `kivi.passes.pages.Rows`; without a chunk the window stands in, and is not read as one."""
        chunk = window if chunk is None else chunk
        return {f"{name}_window": window, f"{name}_capacity": int(window.shape[2]), name: chunk, **self._strides(name, chunk)}


def _closed_pages(reading: Reading) -> np.ndarray:
    """Pages of each request whose keys and values are all sealed: they come first. int64 [B]."""
    count, width = reading.pages, reading.table.shape[1]
    number = np.arange(width)
    following = np.pad(reading.table[:, 1:, 1], ((0, 0), (0, 1 if width else 0)))
    end = np.where(number + 1 == count[:, None], reading.key_sealed[:, None], following)
    return ((number < count[:, None]) & (end <= reading.value_sealed[:, None])).sum(1)


def _extent(name: str, words: Any) -> dict[str, Any]:
    return {name: words, "row": int(words.shape[3]), "total": int(words.shape[2] * words.shape[3])}


def _groups(form: PageFormat, which: str) -> int:
    """Groups of one head of a page."""
    if which == "key":
        return form.tokens // form.spec.key.group * form.head_dim
    return form.tokens * -(-form.value_head_dim // form.spec.value.group)


@lru_cache(maxsize=1024)
def _units(shape: Any) -> int:
    """Units of a page: the places that are not words of a unit."""
    return int(np.prod([d.extent for d in shape.places if d.axis != "w"], dtype=np.int64))
