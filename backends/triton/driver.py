"""The Triton backend's driver: torch tensors in, generated kernels launched on their device and the caller's stream."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import torch
import triton

from kivi.arrays import kind
from kivi.backend import Append, Backend, Manifest, Probe, Reading, Seal, overflow_error
from kivi.backends.triton.kernels import Library, Request
from kivi.backends.triton.schedule import schedules, shares
from kivi.dtypes import metadata_dtype
from kivi.errors import DeviceError
from kivi.layout import Layout, Which, arrangement
from kivi.pool import PageFormat, PagePool
from kivi.quantized import QuantizedTensor
from kivi.spec import CacheSpec

TORCH = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "int32": torch.int32,
}
#: How a tensor reads in a kernel: the dialect has signless integers, and bfloat16 is 16 bits.
SIGNLESS = {torch.bfloat16: torch.int16, torch.uint8: torch.int8, torch.uint16: torch.int16, torch.uint32: torch.int32}


def probe(mode: str, device: str) -> Probe:
    """Interpreter: always. Device: CUDA or ROCm devices that torch sees."""
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    if mode == "interpreter":
        return Probe(available=True, mode=mode, devices=("cpu",), versions=versions)
    if not torch.cuda.is_available():
        return Probe(available=False, mode=mode, reason=f"torch {torch.__version__} sees no CUDA or ROCm device", versions=versions)
    return Probe(available=True, mode=mode, devices=tuple(f"cuda:{i}" for i in range(torch.cuda.device_count())), versions=versions)


def create(manifest: Manifest, mode: str, device: str) -> Backend:
    return TritonBackend(manifest, mode, device, probe(mode, device).versions)


class TritonBackend(Backend):
    """Generated Triton kernels on torch tensors."""

    def __init__(self, manifest: Manifest, mode: str, device: str, versions: dict[str, str]) -> None:
        super().__init__(manifest, mode, device, versions)
        self.library = Library(versions, interpret=mode == "interpreter")

    @property
    def kernel(self) -> str:
        return "history, tail, merge"

    # array plumbing

    def adopt(self, x: Any, what: str) -> torch.Tensor:
        if kind(x, what) == "numpy":
            if not self.device.startswith("cpu"):
                raise DeviceError(
                    f"{what} is a NumPy array on the cpu, but backend 'triton' runs on {self.device}; pass a torch tensor there"
                )
            if not x.flags.writeable or any(s < 0 for s in x.strides):  # torch has no such views
                x = x.copy()
            if x.dtype == ml_dtypes.bfloat16:
                return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
            return torch.from_numpy(x)
        if kind(x, what) == "cupy":
            x = torch.from_dlpack(x)
        if str(x.device) != self.device:
            raise DeviceError(
                f"{what} lives on {x.device}, but backend 'triton' runs on {self.device}; move it, or choose a backend for {x.device}"
            )
        return x.detach()

    def give(self, a: torch.Tensor, like: Any) -> Any:
        which = kind(like, "like")
        if which == "torch":
            return a
        if which == "cupy":
            return sys.modules["cupy"].from_dlpack(a)
        return self.to_host(a)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.zeros(shape, dtype=TORCH[dtype], device=self.device)

    def to_host(self, a: torch.Tensor) -> np.ndarray:
        a = a.detach().cpu()
        return a.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if a.dtype is torch.bfloat16 else a.numpy()

    def from_host(self, a: np.ndarray) -> torch.Tensor:
        t = torch.from_numpy(a.view(np.int16).copy()).view(torch.bfloat16) if a.dtype == ml_dtypes.bfloat16 else torch.from_numpy(a.copy())
        return t.to(self.device)

    def page_views(self, raw: torch.Tensor, form: PageFormat) -> dict[str, torch.Tensor]:
        return {
            name: raw[..., f.offset : f.offset + f.bytes].view(TORCH[f.dtype]).unflatten(-1, f.shape) for name, f in form.fields.items()
        }

    def gather(self, a: torch.Tensor, index: list[int]) -> torch.Tensor:
        return a[torch.tensor(index, device=a.device)]

    def copy_page(self, pool: PagePool, source: int, target: int) -> None:
        (from_slab, i), (to_slab, j) = pool.where(source), pool.where(target)
        pool.raw[to_slab][j].copy_(pool.raw[from_slab][i])

    def first_bad(self, x: torch.Tensor, counts: np.ndarray, lowest: float) -> tuple[int, int, int, int] | None:
        bad = ~torch.isfinite(x) | (x.float() < lowest)
        if (counts < x.shape[2]).any():
            real = torch.arange(x.shape[2], device=x.device) < torch.from_numpy(counts).to(x.device)[:, None]
            bad &= real[:, None, :, None]
        if not bad.any():
            return None
        return tuple(torch.nonzero(bad)[0].tolist())  # type: ignore[return-value]

    # whole tensors

    def encode(self, x: torch.Tensor, which: Which, spec: CacheSpec, metadata: str, layout: Layout) -> tuple[torch.Tensor, ...]:
        batch, heads, tokens, channels = x.shape
        side = spec.key if which == "key" else spec.value
        dtype = str(x.dtype).removeprefix("torch.")
        rows, groups = (tokens // side.group, channels) if which == "key" else (tokens, -(-channels // side.group))
        scale, origin = (self.zeros((batch, heads, rows, groups), metadata) for _ in range(2))
        words = self._words(which, spec, layout, x.shape)
        if tokens:
            base = {"metadata": metadata}
            values = {"batch": batch, "heads": heads, "tokens": tokens, "channels": channels}
            strided = {"x": x, "scale": scale, "origin": origin, "tokens": tokens, "heads": heads, **_strides("x", x)}
            loaded = self.library.get(Request(f"{which}.metadata", spec, layout, dtype, channels, tuple(base.items())))
            programs = loaded.generated.programs(values)
            flag = torch.zeros(int(np.prod(programs)), dtype=torch.int32, device=self.device)
            self._launch(loaded, programs, {**strided, "flag": flag, "blocks": programs[1]})
            if spec.overflow == "reject" and bool(flag.any()):
                raise overflow_error(f"{which} tensor", which, *_extremes(x), spec, metadata)
            shape = arrangement(layout, which, side.bits, spec.key.residual, channels)
            loaded = self.library.get(Request(f"{which}.encode", spec, layout, dtype, channels, tuple(base.items())))
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
            request = Request(
                f"{qt.which}.repack", qt.spec, qt.packing, qt.dtype, qt.shape[3], (("metadata", self._metadata(qt)), ("target", layout))
            )
            loaded = self.library.get(request)
            values = {"batch": qt.shape[0], "heads": qt.shape[1], "tokens": qt.tokens}
            shape = arrangement(layout, qt.which, qt.bits, qt.spec.key.residual, qt.shape[3])
            arguments = {
                "tokens": qt.tokens,
                **_extent("words", words),
                "out": out,
                "out_row": out.shape[3],
                "out_total": out.shape[2] * out.shape[3],
            }
            self._launch(loaded, loaded.generated.programs({**values, "units": _units(shape)}), arguments)
        return self.give(out, qt.words)

    def _decode(self, qt: QuantizedTensor, dtype: str) -> Any:
        words, scale, origin = (self.adopt(a, "tensor") for a in (qt.words, qt.scale, qt.origin))
        out = self.zeros(qt.shape, dtype)
        if qt.tokens:
            request = Request(
                f"{qt.which}.decode", qt.spec, qt.packing, qt.dtype, qt.shape[3], (("metadata", self._metadata(qt)), ("out", dtype))
            )
            loaded = self.library.get(request)
            values = {"batch": qt.shape[0], "heads": qt.shape[1], "tokens": qt.tokens, "channels": qt.shape[3]}
            arguments = {**_extent("words", words), "scale": scale, "origin": origin, "out": out, "tokens": qt.tokens}
            self._launch(loaded, loaded.generated.programs(values), arguments)
        return self.give(out, qt.words)

    def _words(self, which: Which, spec: CacheSpec, layout: Layout, shape: Any) -> torch.Tensor:
        """Zeroed words of a whole tensor, pages joined along the token star."""
        bits = (spec.key if which == "key" else spec.value).bits
        page = spec.key.residual
        tokens, channels = int(shape[2]), int(shape[3])
        full = arrangement(layout, which, bits, page, channels)
        size = list(full.shape)
        rest = arrangement(layout, which, bits, tokens % page, channels).shape[full.token_axis] if tokens % page else 0
        size[full.token_axis] = tokens // page * full.shape[full.token_axis] + rest
        return self.zeros((int(shape[0]), int(shape[1]), *size), layout.word)

    def _metadata(self, qt: QuantizedTensor) -> str:
        return metadata_dtype(qt.spec, qt.which, qt.dtype)

    # a paged cache

    def append(self, pool: PagePool, step: Append, k: torch.Tensor | None, v: torch.Tensor | None) -> int:
        clamped = 0
        for which, chunk, source in (("key", k, step.source.key), ("value", v, step.source.value)):
            seals = [s for s in step.seals if s.which == which]
            if seals:
                clamped += self._seal(pool, step, which, seals, source, chunk)
        for chunk, source, target, keep in (
            (k, step.source.key, step.target.key, step.keep_key),
            (v, step.source.value, step.target.value, step.keep_value),
        ):
            if chunk is not None or target is not source:
                self._keep_rows(step, chunk, source, target, keep)
        return clamped

    def _seal(self, pool: PagePool, step: Append, which: str, seals: list[Seal], window: torch.Tensor, chunk: torch.Tensor | None) -> int:
        form = pool.format
        side, shape = (form.spec.key, form.key) if which == "key" else (form.spec.value, form.value)
        rows = [(s.request, s.first, s.count, self._page(pool, s.page), s.row, int(step.stored[s.request])) for s in seals]
        jobs = torch.tensor(rows, dtype=torch.int64).to(self.device)
        common = {"jobs": jobs, **self._pool(pool), **_rows("x", window, chunk)}
        values = {
            "jobs": len(seals),
            "heads": form.kv_heads,
            "count": max(s.count for s in seals),
            "channels": shape.channels,
            "units": _units(shape),
        }
        dtype = str(window.dtype).removeprefix("torch.")
        request = Request(f"{which}.seal_metadata", form.spec, form.layout, dtype, shape.channels, (("form", form),))
        loaded = self.library.get(request)
        programs = loaded.generated.programs(values)
        flag = torch.zeros(int(np.prod(programs)), dtype=torch.int32, device=self.device)
        self._launch(loaded, programs, {**common, "flag": flag, "blocks": programs[1]})
        if form.spec.overflow == "reject" and bool(flag.any()):
            bad = seals[int(torch.nonzero(flag.view(len(seals), -1).any(1))[0])]
            where = f"request {bad.request}, tokens {bad.first} to {bad.first + bad.count - 1}"
            metadata = form.key_metadata if which == "key" else form.value_metadata
            raise overflow_error(where, which, *_extremes(window if chunk is None else torch.cat([window, chunk], 2)), form.spec, metadata)
        loaded = self.library.get(Request(f"{which}.seal_words", form.spec, form.layout, dtype, shape.channels, (("form", form),)))
        self._launch(loaded, loaded.generated.programs(values), common)
        return int(flag.sum()) if form.spec.overflow == "saturate" else 0

    def _keep_rows(self, step: Append, chunk: torch.Tensor | None, source: torch.Tensor, target: torch.Tensor, keep: np.ndarray) -> None:
        batch, heads, _, channels = target.shape
        fresh = target is not source
        start = keep if fresh else np.maximum(keep, step.stored)
        count = int((step.stored + step.counts - start).max(initial=0))
        if count <= 0:
            return
        dtype = str(target.dtype).removeprefix("torch.")
        loaded = self.library.get(Request("rows.keep_rows", _NO_SPEC, _NO_LAYOUT, dtype, channels, (("heads", heads),)))
        counts = torch.from_numpy(np.stack([step.stored, step.counts, keep], 1)).to(self.device)
        arguments = {
            "counts": counts,
            **_rows("x", source, chunk),
            "target": target,
            "target_capacity": target.shape[2],
            "fresh": int(fresh),
        }
        values = {"batch": batch, "heads": heads, "count": count, "channels": channels}
        self._launch(loaded, loaded.generated.programs(values), arguments)

    def attend(self, reading: Reading, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        form = reading.pool.format
        batch, q_heads, rows, _ = q.shape
        dim, dtype = form.value_head_dim, str(q.dtype).removeprefix("torch.")
        counts, closed = self._counts(reading)
        count = shares(closed)
        splits, outputs = count + 1, batch * q_heads * rows
        top, total = (torch.empty((splits, outputs), dtype=torch.float32, device=self.device) for _ in range(2))
        part = torch.empty((splits, outputs, dim), dtype=torch.float32, device=self.device)
        table = self._table(reading)
        arguments = {
            "q": q,
            **_strides("q", q),
            **_rows("k", reading.windows.key, k),
            **_rows("v", reading.windows.value, v),
            **self._pool(reading.pool),
            "table": table,
            "table_rows": table.shape[1],
            "counts": counts,
            "scale": reading.scale * LOG2_E,
            "splits": splits,
            "rows": rows,
            "outputs": outputs,
            "top": top,
            "total": total,
            "part": part,
        }
        values = {"batch": batch, "heads": form.kv_heads, "shares": count, "rows": rows}
        for zone, chosen in schedules(self.mode, form, q_heads, rows).items():
            if zone == "tail" or count:
                options = (("form", form), ("q_heads", q_heads), ("schedule", chosen))
                loaded = self.library.get(Request(f"cache.{zone}", form.spec, form.layout, dtype, form.head_dim, options))
                self._launch(loaded, loaded.generated.programs(values), arguments, chosen.warps)
        out = torch.empty((batch, q_heads, rows, dim), dtype=q.dtype, device=self.device)
        loaded = self.library.get(Request("cache.merge", _NO_SPEC, _NO_LAYOUT, dtype, dim, (("q_heads", q_heads),)))
        arguments = {
            "top": top,
            "total": total,
            "part": part,
            "counts": counts,
            "out": out,
            "splits": splits,
            "rows_of_head": rows,
            "outputs": outputs,
        }
        self._launch(loaded, loaded.generated.programs({"outputs": outputs}), arguments)
        return out

    # helpers

    def _launch(self, loaded: Any, programs: tuple[int, ...], arguments: dict[str, Any], warps: int = 4) -> None:
        """Launch under the device of the tensors, whatever the current one is."""
        given = [_signless(arguments[name]) for name in loaded.generated.signature]
        with self._guard():
            if self.mode == "interpreter":
                loaded.launch[programs](*given)
            else:
                loaded.launch[programs](*given, enable_fp_fusion=False, num_warps=warps)

    def _guard(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.mode == "interpreter" else torch.cuda.device(self.device)

    def _pool(self, pool: PagePool) -> dict[str, Any]:
        """The pool's base through its typed pointers."""
        base = pool.raw[0] if pool.raw else _nothing(self.device)
        flat, form = base.view(-1), pool.format
        return {
            "page_words": flat.view(TORCH[form.layout.word]),
            "page_key_metadata": flat.view(TORCH[form.key_metadata]),
            "page_value_metadata": flat.view(TORCH[form.value_metadata]),
        }

    def _page(self, pool: PagePool, page: int) -> int:
        """Distance of a page from the pool's base in bytes."""
        slab, index = pool.where(page)
        return pool.raw[slab].data_ptr() - pool.raw[0].data_ptr() + index * pool.format.page_bytes

    def _table(self, reading: Reading) -> torch.Tensor:
        width = max(1, int(reading.pages.max(initial=0)))
        table = np.zeros((len(reading.pages), width, 2), np.int64)
        for b, count in enumerate(reading.pages.tolist()):
            for i, (page, first) in enumerate(reading.table[b, :count].tolist()):
                table[b, i] = self._page(reading.pool, page), first
        return torch.from_numpy(table).to(self.device)

    def _counts(self, reading: Reading) -> tuple[torch.Tensor, int]:
        """int64 [B, 7] as the kernel reads them, and the largest number of closed pages."""
        closed = np.zeros_like(reading.pages)
        for b, count in enumerate(reading.pages.tolist()):
            ends = np.append(reading.table[b, 1:count, 1], reading.key_sealed[b]) if count else np.zeros(0, np.int64)
            closed[b] = int((ends <= reading.value_sealed[b]).sum())
        r = reading
        columns = (r.stored, r.key_sealed, r.value_sealed, r.pages, closed, r.chunk, r.counts)
        return torch.from_numpy(np.stack(columns, 1).astype(np.int64)).to(self.device), int(closed.max(initial=0))


LOG2_E = 1.4426950408889634
_NO_SPEC, _NO_LAYOUT = CacheSpec(), Layout(name="none", key="t:slot t* c*", value="c:slot c* t*")


def _signless(x: Any) -> Any:
    return x.view(SIGNLESS[x.dtype]) if isinstance(x, torch.Tensor) and x.dtype in SIGNLESS else x


def _extremes(x: torch.Tensor) -> tuple[float, float]:
    """The least and the greatest finite value of rows that hold an offending group."""
    finite = torch.nan_to_num(x.float(), nan=0.0, posinf=0.0, neginf=0.0)
    return float(finite.min()), float(finite.max())


def _strides(name: str, x: torch.Tensor) -> dict[str, int]:
    return {f"{name}_{axis}": stride for axis, stride in zip(("batch", "head", "token", "channel"), x.stride(), strict=True)}


def _rows(name: str, window: torch.Tensor, chunk: torch.Tensor | None) -> dict[str, Any]:
    """Arguments of `kivi.passes.pages.Rows`; without a chunk the window stands in, and is not read as one."""
    chunk = window if chunk is None else chunk
    return {f"{name}_window": window, f"{name}_capacity": window.shape[2], name: chunk, **_strides(name, chunk)}


def _extent(name: str, words: torch.Tensor) -> dict[str, Any]:
    return {name: words, "row": words.shape[3], "total": words.shape[2] * words.shape[3]}


@lru_cache(maxsize=1024)
def _units(shape: Any) -> int:
    """Units of a page: the places that are not words of a unit."""
    return int(np.prod([d.extent for d in shape.places if d.axis != "w"], dtype=np.int64))


@lru_cache(maxsize=8)
def _nothing(device: str) -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8, device=device)
