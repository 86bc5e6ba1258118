"""The intrinsic that moves a run, executed: its source, with Numba's extension point for CPUs in place of that for GPUs."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from numba import njit

from kivi.backends.numba_cuda import runs
from tests.ir.foreign import aligned

SOURCE = inspect.getsource(runs)
ON_CPU: dict = {}
exec(SOURCE.replace("from numba.cuda.extending import intrinsic", "from numba.extending import intrinsic"), ON_CPU)
copy_run = ON_CPU["copy_run"]


@njit
def masked(array, place, pointer, offset, mask):
    copy_run(array, place, pointer, offset, mask)


@njit
def unmasked(array, place, pointer, offset):
    copy_run(array, place, pointer, offset, True)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "float32", "float64"])
def test_a_run_is_moved_and_nothing_else(dtype):
    assert SOURCE.count("from numba.cuda.extending import intrinsic") == 1
    length = 16 // np.dtype(dtype).itemsize
    source = aligned(np.arange(1, 8 * length + 1).astype(dtype))
    for mask in (True, False):
        target = aligned(np.full(4 * length, 99, dtype))
        masked(target, np.uint32(2 * length), source, np.uint64(5 * length), mask)
        expected = np.full(4 * length, 99, dtype)
        expected[2 * length : 3 * length] = source[5 * length : 6 * length] if mask else 0
        assert np.array_equal(target, expected)
    target = aligned(np.full(2 * length, 99, dtype))
    unmasked(target, np.uint32(length), source[4 * length :], np.uint64(2**64 - 2 * length))  # offsets wrap, as pages lie on both sides
    assert np.array_equal(target[length:], source[2 * length : 3 * length])
    assert np.array_equal(target[:length], np.full(length, 99, dtype))
