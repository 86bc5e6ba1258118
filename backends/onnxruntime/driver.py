"""The ONNX Runtime backend's driver: NumPy arrays, and torch tensors in host memory as views of theirs; graphs run on them in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime

from kivi import arena
from kivi.arrays import as_numpy, from_numpy
from kivi.backend import Append, Backend, Manifest, Probe, Reading, Seal, group_overflow_error
from kivi.backends.onnxruntime.blocks import blocks, joined_shape
from kivi.backends.onnxruntime.kernels import CPU, Session, library
from kivi.backends.onnxruntime.operators import wrong_operators
from kivi.backends.onnxruntime.planes import channels_of_plane, masked_apart
from kivi.backends.onnxruntime.runs import Run, ints, runs, visible
from kivi.dtypes import metadata_dtype, np_dtype
from kivi.errors import BackendError
from kivi.host import HostArrays, floating_rows, keep_rows
from kivi.kernels.request import Request
from kivi.layout import Layout, Which
from kivi.pool import PageFormat, PagePool
from kivi.quantized import QuantizedTensor
from kivi.spec import CacheSpec

ROWS = 256  # query rows of all heads of a KV head in one call, at most


def probe(mode: str, device: str) -> Probe:
    """A runtime whose operators round as SPEC 3 asks."""
    versions = {"onnxruntime": onnxruntime.__version__}
    wrong = wrong_operators()
    if wrong:
        reason = f"onnxruntime {onnxruntime.__version__} does not compute as SPEC 3 asks: {'; '.join(wrong)}; install another release"
        return Probe(available=False, mode=mode, reason=reason, versions=versions)
    return Probe(available=True, mode=mode, devices=("cpu",), versions=versions)


def create(manifest: Manifest, mode: str, device: str) -> Backend:
    return OnnxBackend(manifest, mode, device, probe(mode, device).versions)


class OnnxBackend(HostArrays):
    """Every operation of a cache as sessions on the caller's memory."""

    #: Query rows of a KV head up to which folding scales into them is less work than decoding the history.
    fold_rows = 16
    #: Whether words of the history are masked by a graph of their own, as wide integers.
    apart = True

    def __init__(self, manifest: Manifest, mode: str, device: str, versions: dict[str, str]) -> None:
        super().__init__(manifest, mode, device, versions)
        self.library = library(CPU)
        self._arena = arena.Arena()

    @property
    def kernel(self) -> str:
        return "history, planes, page, open, floating, output"

    def kernels(self) -> dict[str, list[str]]:
        return self.library.loaded()

    # array plumbing

    def adopt(self, x: Any, what: str) -> np.ndarray:
        """A view, or a contiguous copy of a call's rows; stored history is never copied."""
        return np.ascontiguousarray(super().adopt(x, what))

    def zeros(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return arena.zeros(shape, dtype)

    def slab(self, pages: int, heads: int, size: int) -> tuple[np.ndarray, int]:
        return self._arena.slab(pages, heads, size)

    # whole tensors

    def encode(self, x: np.ndarray, which: Which, spec: CacheSpec, metadata: str, layout: Layout) -> tuple[Any, Any, Any]:
        batch, heads, tokens, channels = x.shape
        side = spec.key if which == "key" else spec.value
        request = Request(f"{which}.encode", spec, layout, str(x.dtype), channels, (("metadata", metadata),))
        words = np.empty(joined_shape(which, side.bits, spec, layout, x.shape), layout.word)
        rows, groups = (tokens // side.group, channels) if which == "key" else (tokens, -(-channels // side.group))
        scale, origin = (np.empty((batch, heads, rows, groups), np_dtype(metadata)) for _ in range(2))
        for block in blocks(which, side.bits, spec, layout, tokens, channels):
            given = block.rows(x, 1)
            per_row = side.group if which == "key" else 1
            out = {
                "words": np.empty((len(given), *block.form.shape), layout.word),
                **{name: np.empty((len(given), block.tokens // per_row, groups), np_dtype(metadata)) for name in ("scale", "origin")},
                "clamped": np.empty(1, np.int64),
            }
            self._run(request, {"x": given}, out)
            if spec.overflow == "reject" and out["clamped"][0]:
                raise group_overflow_error(f"{which} tensor", which, x, spec, metadata)
            block.put_words(words, out["words"])
            for name, target in (("scale", scale), ("origin", origin)):
                block.put(target, out[name], per_row)
        return words, scale, origin

    def codes(self, qt: QuantizedTensor) -> Any:
        return self._decode(qt, "uint8")

    def dequantize(self, qt: QuantizedTensor, dtype: str) -> Any:
        return self._decode(qt, dtype)

    def relayout(self, qt: QuantizedTensor, layout: Layout) -> Any:
        words = as_numpy(qt.words, "words", self.name)
        out = np.empty(joined_shape(qt.which, qt.bits, qt.spec, layout, qt.shape), layout.word)
        options = (("metadata", metadata_dtype(qt.spec, qt.which, qt.dtype)), ("target", layout))
        request = Request(f"{qt.which}.repack", qt.spec, qt.packing, qt.dtype, qt.shape[3], options)
        olds = blocks(qt.which, qt.bits, qt.spec, qt.packing, qt.tokens, qt.shape[3])
        for old, new in zip(olds, blocks(qt.which, qt.bits, qt.spec, layout, qt.tokens, qt.shape[3]), strict=True):
            given = old.words(words)
            made = np.empty((len(given), *new.form.shape), layout.word)
            self._run(request, {"words": given, "tokens": ints(old.tokens)}, {"out": made})
            new.put_words(out, made)
        return from_numpy(out, qt.words)

    def _decode(self, qt: QuantizedTensor, dtype: str) -> Any:
        words, scale, origin = (as_numpy(a, "tensor", self.name) for a in (qt.words, qt.scale, qt.origin))
        out = np.empty(qt.shape, np_dtype(dtype))
        options = (("metadata", metadata_dtype(qt.spec, qt.which, qt.dtype)), ("out", dtype))
        request = Request(f"{qt.which}.decode", qt.spec, qt.packing, qt.dtype, qt.shape[3], options)
        for block in blocks(qt.which, qt.bits, qt.spec, qt.packing, qt.tokens, qt.shape[3]):
            given = block.words(words)
            made = np.empty((len(given), block.tokens, qt.shape[3]), np_dtype(dtype))
            inputs = {"words": given, "tokens": ints(block.tokens)}
            if dtype != "uint8":
                per_row = qt.group if qt.which == "key" else 1
                inputs |= {"scale": block.rows(scale, per_row), "origin": block.rows(origin, per_row)}
            self._run(request, inputs, {"out": made})
            block.put(out, made, 1)
        return from_numpy(out, qt.words)

    # a paged cache

    def append(self, pool: PagePool, step: Append, k: np.ndarray | None, v: np.ndarray | None) -> int:
        clamped = sum(self._seal(pool, step, seal, k if seal.which == "key" else v) for seal in step.seals)
        keep_rows(step, k, v)
        return clamped

    def _seal(self, pool: PagePool, step: Append, seal: Seal, chunk: np.ndarray | None) -> int:
        form, which = pool.format, seal.which
        shape, metadata = (form.key, form.key_metadata) if which == "key" else (form.value, form.value_metadata)
        window = step.source.key if seal.which == "key" else step.source.value
        rows = np.ascontiguousarray(floating_rows(seal, int(step.stored[seal.request]), window, chunk))
        words, scale, origin = (pool.view(seal.page, f"{which}.{part}") for part in ("words", "scale", "origin"))
        # Rows are rewritten in whole steps of the token star: the least that shares no word with other tokens.
        grain, per_step = shape.token_step, shape.words_per_step
        first, last = seal.row // grain, -(-(seal.row + seal.count) // grain)
        touched = (slice(None), *(slice(first * per_step, last * per_step) if a == shape.token_axis else slice(None) for a in (0, 1)))
        at = seal.row // form.spec.key.group if which == "key" else seal.row
        count = seal.count // form.spec.key.group if which == "key" else seal.count
        inputs = {"x": rows}
        if which == "value" and grain > 1:
            inputs |= {"old": np.ascontiguousarray(words[touched]), "row": ints(seal.row - first * grain)}
        out = {
            "words": np.empty(words[touched].shape, words.dtype),
            **{name: np.empty((len(rows), count, scale.shape[2]), scale.dtype) for name in ("scale", "origin")},
            "clamped": np.empty(1, np.int64),
        }
        self._run(Request(f"{which}.seal", form.spec, form.layout, str(rows.dtype), shape.channels, (("form", form),)), inputs, out)
        if form.spec.overflow == "reject" and out["clamped"][0]:
            where = f"request {seal.request}, tokens {seal.first} to {seal.first + seal.count - 1}"
            raise group_overflow_error(where, which, rows, form.spec, metadata, seal.first)
        words[touched] = out["words"]
        scale[:, at : at + count], origin[:, at : at + count] = out["scale"], out["origin"]
        return int(out["clamped"][0])

    def attend(self, reading: Reading, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        out = np.zeros((*q.shape[:3], v.shape[3]), q.dtype)
        for b, count in enumerate(reading.counts.tolist()):
            parts = runs(reading, b, k, v) if count else []
            heads = q.shape[1] // reading.pool.format.kv_heads
            step = max(1, ROWS // heads)
            for at in range(0, count, step):
                rows = slice(at, min(at + step, count))
                first = int(reading.stored[b] + reading.chunk[b]) - count + at  # the token of the first row
                out[b, :, rows] = self._attend_rows(reading, parts, q[b, :, rows], first)
        return out

    def _attend_rows(self, reading: Reading, parts: list[Run], q: np.ndarray, first: int) -> np.ndarray:
        """Query rows [Hq, n, D], of which row i belongs to token first + i, over all runs: [Hq, n, Dv]."""
        form, (q_heads, n, dim) = reading.pool.format, q.shape
        heads, rows = form.kv_heads, q_heads // form.kv_heads * n
        given = {"q": np.ascontiguousarray(q.reshape(heads, rows, dim)), "scale": np.array(reading.scale, np.float32)}
        sizes = {"top": 1, "total": 1, "part": form.value_head_dim}
        carry = {name: np.full((heads, rows, size), -np.inf if name == "top" else 0.0, np.float32) for name, size in sizes.items()}
        spare = {name: np.empty_like(a) for name, a in carry.items()}
        position = np.tile(np.arange(first, first + n, dtype=np.int64), q_heads // heads)
        fold = rows <= self.fold_rows
        apart = fold and self.apart
        options = (("form", form), ("fold", fold), ("apart", apart))
        for run in parts:
            if run.first >= first + n:  # no row sees any of it
                break
            for part in visible(run, first, form.tokens):
                request = Request(f"cache.{part.zone}", form.spec, form.layout, str(q.dtype), dim, options)
                inputs = {**given, **carry, **part.inputs}
                if part.zone == "history":
                    inputs |= self._planes(form, part, str(q.dtype)) if apart else {}
                else:
                    inputs["seen"] = position - part.first + 1
                self._run(request, inputs, {f"{name}_out": a for name, a in spare.items()})
                carry, spare = spare, carry
        out = np.empty((heads, rows, form.value_head_dim), q.dtype)
        request = Request("cache.output", form.spec, form.layout, str(q.dtype), dim, options)
        self._run(request, {"total": carry["total"], "part": carry["part"]}, {"out": out})
        return out.reshape(q_heads, n, form.value_head_dim)

    def _planes(self, form: PageFormat, part: Run, dtype: str) -> dict[str, np.ndarray]:
        """The words of a history, masked."""
        out, word = {}, np_dtype("uint32" if form.layout.word == "int32" else form.layout.word)
        for which in masked_apart(form):
            shape = form.key if which == "key" else form.value
            size = (len(part.inputs["pages"]), form.kv_heads, shape.unit, shape.tokens, channels_of_plane(shape))
            out[f"{which}_planes"] = np.empty(size, word)
        if out:
            wide = {name: a.reshape(*a.shape[:3], -1).view(np.uint64) for name, a in out.items()}
            self._run(Request("cache.planes", form.spec, form.layout, dtype, form.head_dim, (("form", form),)), part.inputs, wide)
        return out

    def _run(self, request: Request, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> None:
        """Run one graph on these arrays."""
        loaded = self.library.get(request)
        session: Session = loaded.launch
        try:
            session({name: a for name, a in inputs.items() if name in session.inputs}, outputs)
        except Exception as error:
            raise BackendError(
                f"graph {request.entry!r} failed on backend {self.name!r} (mode {self.mode}, {self.device}): "
                f"{type(error).__name__}: {error}; its model is {loaded.source} (base64)"
            ) from error
