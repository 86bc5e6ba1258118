"""Subnormal numbers in the calling thread. Scales, codes and products of small numbers count on them (SPEC 3.1); a thread whose processor
flushes them to zero, by `torch.set_flush_denormal(True)` or a library built with fast mathematics, would store other codes in silence.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys
from functools import cache
from types import TracebackType
from typing import Any

import numpy as np

from kivi.errors import BackendError

#: By its bits: a conversion would flush it, in a thread that flushes when this is imported.
_ONE, _SUBNORMAL = np.float32(1), np.uint32(1 << 16).view(np.float32)
#: Where `fenv_t` of Linux holds the control register, and its bits that flush results and operands.
PLACES = {"x86_64": (28, 1 << 15 | 1 << 6), "aarch64": (0, 1 << 24)}
ROOM = 64  # bytes, more than any `fenv_t` has


def flushed() -> bool:
    """Whether this thread flushes subnormal numbers."""
    return bool(_SUBNORMAL * _ONE == 0)


class Kept:
    """A context in which this thread computes with subnormal numbers; what it did before comes back after it. Raises `BackendError` where
    the processor's setting cannot be changed from here."""

    def __enter__(self) -> None:
        self._before = _unflush() if flushed() else None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before is not None:
            _library().fesetenv(self._before)


@cache
def _library() -> Any:
    return ctypes.CDLL("libm.so.6")


def _unflush() -> Any:
    """Switch flushing off; returns the environment as it was."""
    place = PLACES.get(platform.machine()) if sys.platform == "linux" else None
    try:
        if place is None:
            raise OSError(f"its setting is not known on {sys.platform} {platform.machine()}")
        library, offset, bits = _library(), *place
        before, now = ((ctypes.c_uint8 * ROOM)() for _ in range(2))
        library.fegetenv(before)
        library.fegetenv(now)
        [word] = struct.unpack_from("<I", now, offset)
        struct.pack_into("<I", now, offset, word & ~bits)
        library.fesetenv(now)
        if flushed():
            library.fesetenv(before)
            raise OSError("the setting did not take")
    except OSError as error:
        raise BackendError(
            f"this thread flushes subnormal numbers to zero, and kivi cannot switch that off ({error}); call "
            f"torch.set_flush_denormal(False), or use kivi in another thread"
        ) from None
    return before
