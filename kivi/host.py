"""Arrays in host memory, for backends whose kernels run there: NumPy arrays, and torch tensors on the CPU as views of theirs."""

from __future__ import annotations

from typing import Any

import numpy as np

from kivi.arrays import as_numpy, from_numpy
from kivi.backend import Append, Backend, Seal
from kivi.dtypes import np_dtype
from kivi.pool import PageFormat, PagePool


class HostArrays(Backend):
    """The array plumbing of `Backend` in NumPy."""

    def adopt(self, x: Any, what: str) -> np.ndarray:
        """A view; a copy of what does not lie at multiples of its element's size, such as a field of records."""
        a = as_numpy(x, what, self.name)
        return a if a.flags.aligned else a.copy()

    def give(self, a: np.ndarray, like: Any) -> Any:
        return from_numpy(a, like)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return np.zeros(shape, np_dtype(dtype))

    def to_host(self, a: np.ndarray) -> np.ndarray:
        return a

    def from_host(self, a: np.ndarray) -> np.ndarray:
        return a.copy()

    def gather(self, a: np.ndarray, index: list[int]) -> np.ndarray:
        return a[index]

    def page_views(self, raw: np.ndarray, form: PageFormat) -> dict[str, np.ndarray]:
        return {
            name: raw[..., f.offset : f.offset + f.bytes].view(np_dtype(f.dtype)).reshape(*raw.shape[:2], *f.shape)
            for name, f in form.fields.items()
        }

    def copy_page(self, pool: PagePool, source: int, target: int) -> None:
        (from_slab, i), (to_slab, j) = pool.where(source), pool.where(target)
        pool.raw[to_slab][j] = pool.raw[from_slab][i]

    def first_bad(self, x: np.ndarray, counts: np.ndarray, lowest: float) -> tuple[int, int, int, int] | None:
        real = np.arange(x.shape[2]) < counts[:, None]
        bad = (~np.isfinite(x) | (x.astype(np.float32) < lowest)) & real[:, None, :, None]
        found = np.argwhere(bad)
        return tuple(int(i) for i in found[0]) if len(found) else None  # type: ignore[return-value]


def keep_rows(step: Append, k: np.ndarray | None, v: np.ndarray | None) -> None:
    """The rows from the first kept token on into the target windows: older ones into a fresh window, and those of this call."""
    for source, target, chunk, keep in (
        (step.source.key, step.target.key, k, step.keep_key),
        (step.source.value, step.target.value, v, step.keep_value),
    ):
        for b, stored in enumerate(step.stored.tolist()):
            if target is not source:
                old = np.arange(keep[b], stored)
                target[b][:, old % target.shape[2]] = source[b][:, old % source.shape[2]]
            if chunk is not None:
                new = np.arange(max(int(keep[b]), stored), stored + int(step.counts[b]))
                target[b][:, new % target.shape[2]] = chunk[b][:, new - stored]


def floating_rows(seal: Seal, stored: int, window: np.ndarray, chunk: np.ndarray | None) -> np.ndarray:
    """The floating rows that `seal` quantizes, [Hkv, count, D]: tokens below `stored` from the window, later ones from this call."""
    b = seal.request
    tokens = np.arange(seal.first, seal.first + seal.count)
    old = window[b][:, tokens[tokens < stored] % window.shape[2]]
    if chunk is None or old.shape[1] == seal.count:
        return old
    return np.concatenate([old, chunk[b][:, tokens[tokens >= stored] - stored]], axis=1)
