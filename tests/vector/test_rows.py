"""Kernels at `vec` level for the rows of a call, under the interpreter: what is not finite is found, and rows go where they belong."""

from __future__ import annotations

import numpy as np
import pytest

from kivi.dtypes import np_dtype
from kivi.passes.vector_rows import finite_kernel, keep_rows_kernel
from kivi.passes.vector_target import TARGETS
from tests.vector.interpreted import execute

LARGEST = float(np.finfo(np.float32).max)
STRANGE = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "low": -70.0}


def strided(name: str, x: np.ndarray) -> dict:
    steps = [s // x.itemsize for s in x.strides]
    return {name: x.reshape(-1) if x.base is None else x.base.reshape(-1), **dict(zip([f"{name}_{a}" for a in AXES], steps, strict=True))}


AXES = ("batch", "head", "token", "channel")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_what_is_not_finite_is_found_in_its_row(dtype, target):
    batch, heads, rows, channels = 2, 3, 2, 21
    kernel = finite_kernel(dtype, channels, TARGETS[target])
    for value in (None, *STRANGE.values()):
        memory = np.random.default_rng(0).normal(0, 9, (batch, rows, heads, channels)).clip(-60, 60).astype(np_dtype(dtype))
        memory[0, 0, 0, 0] = -64.0  # the lowest that is allowed
        x, flag = memory.transpose(0, 2, 1, 3), np.full((batch * heads, rows), -1, np.int32)
        places = [(0, 0, 1, 0), (1, 2, 0, 15), (1, 1, 1, 16), (0, 1, 1, 20)] if value is not None else []
        for place in places:
            x[place] = value
        given = {**strided("x", x), "heads": heads, "rows": rows, "lowest": -64.0, "highest": LARGEST, "flag": flag.reshape(-1)}
        execute(kernel.module, "finite", (batch * heads, rows, 1), given)
        expected = {(b * heads + h, t) for b, h, t, _ in places}
        assert {tuple(map(int, at)) for at in np.argwhere(flag)} == expected
        assert (flag >= 0).all()


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_are_kept_as_they_are(dtype, fresh):
    """Two requests: one keeps older rows and all new ones, the other part of the new ones; nothing else is written."""
    heads, channels, capacity, target_capacity, new = 2, 19, 8, 11 if fresh else 8, 5
    kernel, rng = keep_rows_kernel(dtype, heads, channels, TARGETS["x86-64-v3"]), np.random.default_rng(1)
    window, chunk, target = (rng.standard_normal((2, heads, n, channels)).astype(np_dtype(dtype)) for n in (capacity, new, target_capacity))
    target = target if fresh else window
    chunk[0, 0, 0, 0] = np.nan
    counts = np.array([[13, 3, 9], [4, 5, 6]], np.int64)  # stored, new, first to keep
    expected = target.copy()
    for b, (stored, count, keep) in enumerate(counts):
        for token in range(keep if fresh else max(keep, stored), stored + count):
            row = window[b, :, token % capacity] if token < stored else chunk[b, :, token - stored]
            expected[b, :, token % target_capacity] = row
    given = {"counts": counts.reshape(-1), "x_window": window.reshape(-1), "x_capacity": capacity, **strided("x", chunk)}
    given |= {"target": given["x_window"] if not fresh else target.reshape(-1), "target_capacity": target_capacity, "fresh": int(fresh)}
    execute(kernel.module, "keep_rows", (2 * heads, 1, 1), given)
    assert target.tobytes() == expected.tobytes()
