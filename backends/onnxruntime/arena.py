"""Memory of page slabs: cut from large regions, so that a graph that is given a region reaches the pages of many slabs.

A pool grows by small slabs. Were each one an array of its own, a history that grew token by token would be read a page at a time. A region
costs what is touched of it, and goes when no slab of it is left.
"""

from __future__ import annotations

import threading

import numpy as np

REGION = 64 << 20  # bytes


class Arena:
    """Zeroed memory, cut from regions one after another."""

    def __init__(self) -> None:
        self._region = np.empty(0, np.uint8)
        self._used = 0
        self._lock = threading.Lock()  # caches of several threads may share a backend

    def zeros(self, count: int, step: int) -> np.ndarray:
        """`count` zeroed bytes that begin at a multiple of `step` in their region. Raises `MemoryError`."""
        with self._lock:
            start = -(-self._used // step) * step
            if start + count > len(self._region):
                self._region, start = np.zeros(max(REGION, count), np.uint8), 0
            self._used = start + count
            return self._region[start : self._used]


def region_of(slab: np.ndarray) -> tuple[np.ndarray, int]:
    """The region of a slab, uint8, and where in it the slab begins."""
    region = slab.base
    assert region is not None
    return region, slab.ctypes.data - region.ctypes.data
