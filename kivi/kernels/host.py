"""`KernelBackend` on arrays in host memory."""

from __future__ import annotations

import numpy as np

from kivi.dtypes import np_dtype
from kivi.host import HostArrays
from kivi.kernels.backend import KernelBackend


class HostBackend(HostArrays, KernelBackend):
    """The array plumbing of `KernelBackend` in NumPy; a backend adds `launch` and `schedules`."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return np.empty(shape, np_dtype(dtype))

    def dtype_of(self, a: np.ndarray) -> str:
        return str(a.dtype)

    def strides(self, a: np.ndarray) -> tuple[int, ...]:
        return tuple(s // a.itemsize for s in a.strides)

    def address(self, a: np.ndarray) -> int:
        return a.ctypes.data

    def flat(self, a: np.ndarray, dtype: str) -> np.ndarray:
        return a.reshape(-1).view(np_dtype(dtype))
