"""Memory of an interpreted kernel: arrays at their real addresses, every access checked and counted.

A kernel may compute an address from any pointer it was given, so memory is flat: an access is legal if it lies within one of the
arrays handed to the interpreter, wherever its pointer came from. Bytes are counted by the array that they belong to.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from kivi.errors import KiviError


class AccessError(KiviError):
    """A kernel read or wrote outside the arrays it was given, or two programs wrote to one address."""


@dataclass
class Memory:
    """Arrays that a kernel may touch, by name. `read` and `written` count bytes by name; `owner` finds write races."""

    arrays: dict[str, np.ndarray]
    read: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    check_races: bool = True

    def __post_init__(self) -> None:
        self._spans = []
        for name, a in self.arrays.items():
            if not a.flags.c_contiguous:
                raise AccessError(f"array {name!r} is not contiguous; the interpreter addresses flat memory")
            flat = a.reshape(-1).view(np.uint8)
            self._spans.append((a.ctypes.data, a.ctypes.data + flat.size, name, flat))
        self._writer: dict[str, np.ndarray] = {}

    def address(self, name: str) -> int:
        return self.arrays[name].ctypes.data

    def load(self, addresses: np.ndarray, dtype: np.dtype, mask: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Elements at `addresses` where `mask`, `other` elsewhere; all of one shape."""
        out = np.array(np.broadcast_to(other, addresses.shape), dtype)
        for inside, name, flat, start in self._found(addresses, dtype, mask, "reads"):
            at = addresses[inside] - start
            out[inside] = flat[at[:, None] + np.arange(dtype.itemsize)].copy().view(dtype)[:, 0]
            self.read[name] += at.size * dtype.itemsize
        return out

    def store(self, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray, program: int) -> None:
        """Write `values` where `mask`."""
        values = np.ascontiguousarray(np.broadcast_to(values, addresses.shape))
        for inside, name, flat, start in self._found(addresses, values.dtype, mask, "writes"):
            at = (addresses[inside] - start)[:, None] + np.arange(values.dtype.itemsize)
            self._own(name, flat, at.reshape(-1), program)
            flat[at] = values[inside].reshape(-1, 1).view(np.uint8)
            self.written[name] += at.size

    def _own(self, name: str, flat: np.ndarray, at: np.ndarray, program: int) -> None:
        if not self.check_races:
            return
        writer = self._writer.setdefault(name, np.full(flat.size, -1, np.int64))
        if (np.bincount(at - at.min()) > 1).any() if at.size else False:
            raise AccessError(f"program {program} writes one byte of {name!r} twice in one store")
        other = writer[at]
        if ((other != -1) & (other != program)).any():
            raise AccessError(f"programs {int(other[(other != -1) & (other != program)][0])} and {program} write one byte of {name!r}")
        writer[at] = program

    def _found(self, addresses: np.ndarray, dtype: np.dtype, mask: np.ndarray, what: str):
        left = np.broadcast_to(mask, addresses.shape).copy()
        for start, end, name, flat in self._spans:
            inside = left & (addresses >= start) & (addresses + dtype.itemsize <= end)
            if inside.any():
                left &= ~inside
                yield inside, name, flat, start
        if left.any():
            raise AccessError(f"the kernel {what} {int(left.sum())} elements outside its arrays, the first at {int(addresses[left][0]):#x}")
