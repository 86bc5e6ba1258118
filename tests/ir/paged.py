"""Running the attention kernels on a cache of the reference backend, through any launcher: what a driver does, in NumPy."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from kivi.backend import Reading
from kivi.ir.interp.memory import Memory
from kivi.ir.interp.tile import run
from kivi.ir.tile import Tile
from kivi.ir.xdsl import clean
from kivi.passes import attention
from kivi.passes.tensors import Kernel
from tests.ir.test_kernels import signless


@dataclass
class Launched:
    """Output, and the memory of each kernel by its name."""

    out: np.ndarray
    memory: dict[str, Memory] = field(default_factory=dict)


def attend(cache, q, k, v, schedule: attention.Schedule, shares: int = 1) -> Launched:
    """Attention of the next tokens over the state of `cache`, as `attend_then_seal` reads it; the cache does not change."""
    form, counts, dtype = cache.pool.format, np.full(cache.batch, q.shape[2]), cache.geometry.dtype
    zones = [attention.attention_kernel(zone, form, q.shape[1], dtype, schedule) for zone in ("history", "tail")]
    kernels = [*zones, attention.merge_kernel(q.shape[1], form.value_head_dim, dtype)]
    return launch(cache._reading(cache._state, counts, counts), q, k, v, kernels, shares)


def launch(reading: Reading, q, k, v, kernels: list[Kernel], shares: int = 1) -> Launched:
    """The kernels history, tail and merge on what `reading` says."""
    form = reading.pool.format
    slabs = reading.pool.raw or [np.zeros(16, np.uint8)]
    base = slabs[0].ctypes.data
    batch, heads, rows, dim = *q.shape[:3], v.shape[3]
    outputs, splits = batch * heads * rows, shares + 1
    table, numbers = tables(reading, base)
    arrays = {f"slab{i}": raw for i, raw in enumerate(slabs)}
    arrays |= {
        "q": q,
        "k": k,
        "v": v,
        "k_window": reading.windows.key,
        "v_window": reading.windows.value,
        "table": table,
        "counts": numbers,
    }
    arrays |= {name: np.full((splits, outputs), np.nan, np.float32) for name in ("top", "total")}
    arrays |= {"part": np.full((splits, outputs, dim), np.nan, np.float32), "out": np.zeros((batch, heads, rows, dim), q.dtype)}
    arrays = {name: signless(a) for name, a in arrays.items()}
    names = {name: name for name in arrays} | {f"page_{part}": "slab0" for part in ("words", "key_metadata", "value_metadata")}
    scalars = {"scale": reading.scale * attention.LOG2_E, "splits": splits, "rows": rows, "outputs": outputs, "rows_of_head": rows}
    scalars |= {"table_rows": table.shape[1]}
    for name, x, window in (("q", q, None), ("k", k, reading.windows.key), ("v", v, reading.windows.value)):
        scalars |= {f"{name}_{axis}": s // x.itemsize for axis, s in zip(("batch", "head", "token", "channel"), x.strides, strict=True)}
        scalars |= {} if window is None else {f"{name}_capacity": window.shape[2]}
    values = {"batch": batch, "heads": form.kv_heads, "shares": shares, "rows": rows, "outputs": outputs}
    result = Launched(arrays["out"].view(q.dtype))
    for kernel in kernels:
        clean(kernel.module, Tile)
        grid = [math.prod(-(-values[a] // d) for a, d in axis) for axis in kernel.grid]
        memory = Memory(arrays)
        given = {a: names[a] if a in names else scalars[a] for a in kernel.arguments}
        run(kernel.module, kernel.name, grid, given, memory)
        result.memory[kernel.name] = memory
    return result


def tables(reading: Reading, base: int) -> tuple[np.ndarray, np.ndarray]:
    """The block table with distances in bytes, and the counts, as kernels read them."""
    width = max(1, int(reading.pages.max()))
    table, closed = np.zeros((len(reading.pages), width, 2), np.int64), np.zeros_like(reading.pages)
    for b, count in enumerate(reading.pages.tolist()):
        rows = reading.table[b, :count].tolist()
        ends = [first for _, first in rows[1:]] + [int(reading.key_sealed[b])]
        for i, ((page, first), end) in enumerate(zip(rows, ends[:count], strict=True)):
            slab, index = reading.pool.where(page)
            table[b, i] = reading.pool.raw[slab].ctypes.data - base + index * reading.pool.format.page_bytes, first
            closed[b] += end <= reading.value_sealed[b]
    columns = (reading.stored, reading.key_sealed, reading.value_sealed, reading.pages, closed, reading.chunk, reading.counts)
    return table, np.stack(columns, 1).astype(np.int64)
