"""Memory of page slabs in huge pages of the operating system.

The history of one head lies in records that are a page apart, so with small pages nearly every record costs the processor several walks
of its page tables. Slabs are smaller than a huge page; so they are cut from a region that asks for huge pages as a whole. A region costs
what is touched of it, and goes when no slab of it is left.
"""

from __future__ import annotations

import mmap

import numpy as np

REGION = 64 << 20  # bytes
ALIGN = 64  # bytes, a line of the processor's caches


class Arena:
    """Zeroed memory, cut from regions one after another."""

    def __init__(self) -> None:
        self._region: mmap.mmap | None = None
        self._used = 0

    def zeros(self, count: int) -> np.ndarray:
        """`count` zeroed bytes, uint8. Raises `MemoryError`."""
        if self._region is None or self._used + count > len(self._region):
            self._region, self._used = _region(max(REGION, count)), 0
        out = np.frombuffer(self._region, np.uint8, count, self._used)
        self._used += -(-count // ALIGN) * ALIGN
        return out


def _region(size: int) -> mmap.mmap:
    flags = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    try:
        region = mmap.mmap(-1, size, flags=flags) if flags else mmap.mmap(-1, size)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"{size} bytes could not be mapped: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            region.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them: small pages do
            pass
    return region
