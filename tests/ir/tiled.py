"""A backend whose arithmetic is all done by the `tile` kernels of a `kv` module, under the tile interpreter, one launch after another."""

from __future__ import annotations

import math

import numpy as np

import kivi
from kivi.ir.interp.memory import Memory
from kivi.ir.interp.tile import run
from kivi.ir.tile import Tile
from kivi.ir.xdsl import clean
from kivi.passes import kv_to_tile, spec_to_kv
from kivi.passes.address import units
from tests.ir import paged
from tests.ir.test_kernels import signless

REFERENCE = kivi.get_backend("reference")


class Tiled(type(REFERENCE)):
    """The reference backend's arrays, with append and attend by kernels for `q_heads` query heads."""

    def __init__(self, q_heads: int, dtype: str) -> None:
        super().__init__(REFERENCE.manifest, REFERENCE.mode, REFERENCE.device, REFERENCE.versions)
        self.q_heads, self.dtype = q_heads, dtype
        self.built: dict = {}

    def kernels(self, form) -> dict:
        if form not in self.built:
            launches = kv_to_tile.lower(spec_to_kv.decode(form, self.q_heads, self.dtype))
            self.built[form] = {launch.name: launch.build() for launch in launches}
            for kernel in self.built[form].values():
                clean(kernel.module, Tile)
        return self.built[form]

    def append(self, pool, step, k, v):
        form, kernels = pool.format, self.kernels(pool.format)
        assert form.spec.overflow == "reject"
        sides = (("key", k, "key", step.keep_key), ("value", v, "value", step.keep_value))
        for which, chunk, side, _ in sides:
            seals = [s for s in step.seals if s.which == which]
            if seals:
                self._seal_rows(pool, step, which, seals, getattr(step.source, side), chunk, kernels)
        for which, chunk, side, keep in sides:
            source, target = getattr(step.source, side), getattr(step.target, side)
            count = int((step.stored + step.counts - keep).max())
            if count > 0:
                arrays = {"counts": np.stack([step.stored, step.counts, keep], 1), "x_window": source, "target": target}
                given = {"target_capacity": target.shape[2], "fresh": int(target is not source)}
                values = {"batch": target.shape[0], "heads": target.shape[1], "count": count, "channels": target.shape[3]}
                self._run(kernels[f"{which}.keep_rows"], values, arrays, given, source, chunk)
        return 0

    def attend(self, reading, q, k, v):
        kernels = self.kernels(reading.pool.format)
        return paged.launch(reading, q, k, v, [kernels[f"cache.{part}"] for part in ("history", "tail", "merge")], shares=2).out

    def _seal_rows(self, pool, step, which, seals, window, chunk, kernels):
        form = pool.format
        side = form.key if which == "key" else form.value
        rows = []
        for s in seals:
            slab, index = pool.where(s.page)
            page = pool.raw[slab].ctypes.data - pool.raw[0].ctypes.data + index * form.page_bytes
            rows.append((s.request, s.first, s.count, page, s.row, int(step.stored[s.request])))
        most = max(s.count for s in seals)
        values = {"jobs": len(seals), "heads": form.kv_heads, "count": most, "channels": side.channels, "units": units(side)}
        slabs = {f"slab{i}": raw for i, raw in enumerate(pool.raw)}
        for part in ("seal_metadata", "seal_words"):
            kernel = kernels[f"{which}.{part}"]
            programs = grid(kernel, values)
            arrays = {"jobs": np.array(rows, np.int64), "x_window": window, "flag": np.zeros(math.prod(programs), np.int32), **slabs}
            self._run(kernel, values, arrays, {"blocks": programs[1]}, window, chunk)
            assert not arrays["flag"].any()

    def _run(self, kernel, values, arrays, given, window, chunk):
        chunk = window if chunk is None else np.ascontiguousarray(chunk)
        strides = {f"x_{axis}": s // chunk.itemsize for axis, s in zip(("batch", "head", "token", "channel"), chunk.strides, strict=True)}
        arrays = {name: signless(a) for name, a in arrays.items()}
        if chunk is not window:
            arrays["x"] = signless(chunk)
        given = {**given, **strides, "x_capacity": window.shape[2], **{name: name for name in arrays}}
        given |= {f"page_{part}": "slab0" for part in ("words", "key_metadata", "value_metadata")}
        given.setdefault("x", "x_window")
        memory = Memory(arrays)
        run(kernel.module, kernel.name, grid(kernel, values), {name: given[name] for name in kernel.arguments}, memory)


def grid(kernel, values):
    return [math.prod(-(-values[name] // divisor) for name, divisor in axis) for axis in kernel.grid]
