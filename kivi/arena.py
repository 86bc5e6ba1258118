"""Memory of a cache in host memory. Page slabs are cut from large regions of the operating system.

A pool grows by small slabs, smaller than a huge page. The history of one head lies in records that are a page apart, so with small pages of
memory nearly every record costs the processor several walks of its page tables; a region asks for huge ones as a whole. And whoever is
given a region reaches the pages of many slabs. A region costs what is touched of it, and goes when no slab of it is left.
"""

from __future__ import annotations

import math
import mmap
import threading

import numpy as np

from kivi.dtypes import np_dtype

REGION = 64 << 20  # bytes
MAPPED = 64 << 10  # bytes from which an array has pages of its own


class Arena:
    """Zeroed pages, cut from regions one after another."""

    def __init__(self) -> None:
        self._region = np.empty(0, np.uint8)
        self._used = 0
        self._pages: dict[tuple[int, int], np.ndarray] = {}  # the region as pages, by their shape
        self._lock = threading.Lock()  # caches of several threads may share a backend

    def slab(self, count: int, heads: int, size: int) -> tuple[np.ndarray, int]:
        """`count` pages [heads, size], uint8: all pages of a region [P, heads, size], and which is the first of them. Raises `MemoryError`.

        A region has one such array for all slabs of a shape. Each array has a few bytes in the heap of the process. One a slab, made when
        a prefill has its activations there, would leave holes between them that no later chunk fits in.
        """
        page = heads * size
        with self._lock:
            first = -(-self._used // page)
            if (first + count) * page > len(self._region):
                self._region, self._pages, first = mapped(max(REGION, count * page), huge=True), {}, 0
            if (heads, size) not in self._pages:
                whole = len(self._region) // page
                self._pages[heads, size] = self._region[: whole * page].reshape(whole, heads, size)
            self._used = (first + count) * page
            return self._pages[heads, size], first


def region_of(slab: np.ndarray) -> np.ndarray:
    """The region, uint8, that a slab is an array of."""
    region = slab.base
    assert isinstance(region, np.ndarray)
    return region


def zeros(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """A zero-filled array. One that is not small is mapped: windows come and go with the chunks of a prefill, and in the heap of the
    process they would leave holes."""
    kind = np_dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    return mapped(size).view(kind).reshape(shape) if size >= MAPPED else np.zeros(shape, kind)


def mapped(size: int, huge: bool = False) -> np.ndarray:
    """`size` > 0 zeroed bytes, uint8, of pages that go back to the operating system with the array. Raises `MemoryError`."""
    flags = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    try:
        region = mmap.mmap(-1, size, flags=flags) if flags else mmap.mmap(-1, size)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"{size} bytes could not be mapped: {error}") from error
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            region.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them: small pages do
            pass
    return np.frombuffer(region, np.uint8)
