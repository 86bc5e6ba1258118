"""The reference backend's driver: NumPy arrays in host memory, every operation in its plainest form."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from kivi import layout as layouts
from kivi.arrays import as_numpy, from_numpy
from kivi.backend import Append, Backend, Manifest, Probe, Reading, Seal, group_overflow_error
from kivi.backends.reference import attention, quantize
from kivi.host import HostArrays, floating_rows, keep_rows
from kivi.layout import Layout, Which
from kivi.pool import PagePool
from kivi.quantized import QuantizedTensor
from kivi.spec import CacheSpec


def probe(mode: str, device: str) -> Probe:
    """NumPy is a dependency of kivi, so this backend is always there."""
    return Probe(available=True, mode=mode, devices=("cpu",), versions={"numpy": np.__version__, "ml_dtypes": ml_dtypes.__version__})


def create(manifest: Manifest, mode: str, device: str) -> Backend:
    return ReferenceBackend(manifest, mode, device, probe(mode, device).versions)


class ReferenceBackend(HostArrays):
    """SPEC.md in NumPy."""

    # whole tensors

    def encode(
        self, x: np.ndarray, which: Which, spec: CacheSpec, metadata: str, layout: Layout
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rule = quantize.rule_of(spec, which, metadata)
        try:
            codes, scale, origin, _ = quantize.quantize(x, rule)
        except quantize.Overflow:
            raise group_overflow_error(f"{which} tensor", which, x, spec, metadata) from None
        return layouts.pack(codes, layout, which, rule.bits, spec.key.residual), scale, origin

    def codes(self, qt: QuantizedTensor) -> Any:
        return from_numpy(self._codes(qt), qt.words)

    def dequantize(self, qt: QuantizedTensor, dtype: str) -> Any:
        scale, origin = (as_numpy(a, "metadata", self.name) for a in (qt.scale, qt.origin))
        return from_numpy(quantize.dequantize(self._codes(qt), scale, origin, qt.which, qt.group, dtype), qt.words)

    def relayout(self, qt: QuantizedTensor, layout: Layout) -> Any:
        words = layouts.pack(self._codes(qt), layout, qt.which, qt.bits, qt.spec.key.residual)
        return from_numpy(words, qt.words)

    def _codes(self, qt: QuantizedTensor) -> np.ndarray:
        words = as_numpy(qt.words, "words", self.name)
        return layouts.unpack(words, qt.packing, qt.which, qt.bits, qt.spec.key.residual, qt.tokens, qt.shape[3])

    # a paged cache

    def append(self, pool: PagePool, step: Append, k: np.ndarray | None, v: np.ndarray | None) -> int:
        clamped = sum(self._seal(pool, step, seal, k if seal.which == "key" else v) for seal in step.seals)
        keep_rows(step, k, v)
        return clamped

    def attend(self, reading: Reading, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):  # what NumPy is told to raise is the caller's affair; weights may underflow
            return attention.attend(reading, q, k, v)

    def _seal(self, pool: PagePool, step: Append, seal: Seal, chunk: np.ndarray | None) -> int:
        form = pool.format
        arrangement, metadata = (form.key, form.key_metadata) if seal.which == "key" else (form.value, form.value_metadata)
        window = step.source.key if seal.which == "key" else step.source.value
        rows = floating_rows(seal, int(step.stored[seal.request]), window, chunk)
        try:
            codes, scale, origin, clamped = quantize.quantize(rows, quantize.rule_of(form.spec, seal.which, metadata))
        except quantize.Overflow:
            where = f"request {seal.request}, tokens {seal.first} to {seal.first + seal.count - 1}"
            raise group_overflow_error(where, seal.which, rows, form.spec, metadata, seal.first) from None
        words, scales, origins = (pool.view(seal.page, f"{seal.which}.{part}") for part in ("words", "scale", "origin"))
        # Rows are rewritten in whole steps of the token star: the least that shares no word with other tokens.
        grain, per_grain, axis = arrangement.token_step, arrangement.words_per_step, arrangement.token_axis
        first, last = seal.row // grain, -(-(seal.row + seal.count) // grain)
        part = layouts.arrangement(form.layout, seal.which, arrangement.bits, (last - first) * grain, arrangement.channels)
        touched = (slice(None), *(slice(first * per_grain, last * per_grain) if a == axis else slice(None) for a in (0, 1)))
        page_codes = part.unpack(words[touched])
        page_codes[:, seal.row - first * grain : seal.row - first * grain + seal.count] = codes
        words[touched] = part.pack(page_codes)
        at = seal.row // form.spec.key.group if seal.which == "key" else seal.row
        scales[:, at : at + scale.shape[1]] = scale
        origins[:, at : at + origin.shape[1]] = origin
        return clamped
