"""Rounding: engineered midpoints, quotients that a reciprocal gets wrong, products that a fused multiply-add gets wrong.

`sharp` searches for groups whose codes differ when one step is done otherwise; random data would hold a few in a million.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from kivi.conformance import quantizer
from kivi.conformance.case import Case
from kivi.conformance.floats import NUMPY, cast
from kivi.conformance.traces.build import Tensors

#: Input and metadata formats of the searched groups.
PORTABLE = (
    ("float32", "float32"),
    ("float32", "float16"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
)


def midpoints(bits: int) -> np.ndarray:
    """Elements halfway between neighbouring codes, on grids of scale 1, 2^-3 and 2^5, origins 0, 3 and -40."""
    top = 2**bits - 1
    rows = []
    for scale, origin in ((1.0, 0.0), (0.125, 3.0), (32.0, -64.0), (1.0, -top / 2)):
        for start in range(0, top, 6):
            inner = [min(start + i, top - 1) + 0.5 for i in range(6)]
            rows.append([origin + scale * c for c in (0.0, *inner, top)])
    return np.array(rows)


def sharp(dtype: str, bits: int, metadata: str, numerics: str, seed: int, wanted: int = 24) -> np.ndarray:
    """Groups of eight: minimum, maximum, and six elements whose code hangs on how a step is rounded."""
    rng = np.random.default_rng([seed, bits])
    rule = quantizer.Rule(bits, metadata, numerics)
    n = 4000
    low = cast(rng.normal(0, 2, n), dtype)
    high = cast(low.astype(np.float64) + np.exp(rng.normal(0, 1, n)), dtype)
    ends = np.stack([low, high], -1)
    grid = quantizer.quantize(ends, rule)
    scale, origin = (a.astype(np.float64)[:, None] for a in (grid.scale, grid.origin))
    half = rng.integers(0, 2**bits - 1, (n, 6)) + 0.5
    x = cast(origin + half * scale, dtype)
    for _ in range(2):  # and neighbours of the midpoint
        move = rng.random(x.shape) < 0.25
        x = np.where(move, cast(np.nextafter(x.astype(np.float32), np.float32(np.inf)), dtype), x)
    x = np.clip(x.astype(np.float32), low.astype(np.float32)[:, None], high.astype(np.float32)[:, None]).astype(NUMPY[dtype])
    codes = quantizer.quantize(np.concatenate([ends, x], -1), rule).codes[:, 2:]
    differ = np.zeros(x.shape, bool)
    for other in _other_ways(x, grid, bits):
        differ |= other != codes
    best = np.argsort(-differ.sum(-1), kind="stable")[:wanted]
    return np.concatenate([ends, x], -1)[best].astype(np.float64)


def _other_ways(x: np.ndarray, grid: quantizer.Grid, bits: int) -> list[np.ndarray]:
    """Codes by a reciprocal, by division in double precision, with ties away from zero, and truncated."""
    top = 2**bits - 1
    rise = x.astype(np.float32) - grid.origin.astype(np.float32)[:, None]
    scale = grid.scale.astype(np.float32)[:, None]
    ways = [
        np.rint(np.clip(rise * (np.float32(1) / scale), 0, top)),
        np.rint(np.clip((x.astype(np.float64) - grid.origin.astype(np.float64)[:, None]) / scale.astype(np.float64), 0, top)),
        np.floor(np.clip(rise / scale, 0, top) + np.float32(0.5)),
        np.rint(np.clip(np.nextafter(rise / scale, np.float32(np.inf)), 0, top)),
        np.rint(np.clip(np.nextafter(rise / scale, np.float32(0)), 0, top)),
    ]
    return [w.astype(np.uint8) for w in ways]


def cases() -> list[Case]:
    out = Tensors("ties", reports=(9,))
    for bits in (2, 1, 3, 4, 8):
        for dtype in ("float32", "float16") if bits in (2, 4) else ("float32",):
            out.groups(f"middle.b{bits}.{dtype}", "halves go to the even code", partial(midpoints, bits), dtype, bits=bits)
    fp32: dict[str, Any] = {"dtype": "float32", "metadata": "float32"}
    below = "0.7744140625 on [0, 1.548828125] is 1.5 steps, which a reciprocal makes 1.4999999"
    out.groups("reciprocal", below, [[0.0, 0.7744140625, 1.0, 1.548828125]], reports=(9, 11), **fp32)
    out.groups("reciprocal4", "0.79296875 on [0, 1.5859375] at 4 bits", [[0.0, 0.79296875, 1.0, 1.5859375]], bits=4, **fp32)
    twice = "scale 2.0989582538604736, code 3, origin -3.0703125: 3.2265625 in two roundings, 3.2265623 fused"
    out.groups("fused", twice, [[-3.0703125, 0.0, 3.2265625, 1.0]], reports=(12,), **fp32)
    group = [[0.9375, -4.0, -1.125, 1.75]]
    out.groups("staged", "fp16 steps: the third quotient rounds to 1.5", group, "float16", reports=(), numerics="staged")
    out.groups("portable", "the same group in fp32 steps: 1.4997", group, "float16", reports=())
    for bits in (2, 4, 8, 3, 1):
        about = "codes that hang on one rounding"
        for i, (dtype, metadata) in enumerate(PORTABLE):
            groups = partial(sharp, dtype, bits, metadata, "portable", 9)
            name = f"sharp.b{bits}.{dtype}.{metadata}"
            out.groups(name, about, groups, dtype, sides="kv"[(i + bits // 2) % 2], bits=bits, metadata=metadata, reports=(9, 11))
        for i, dtype in enumerate(("float16", "bfloat16", "float32")):
            groups = partial(sharp, dtype, bits, "input", "staged", 10)
            out.groups(f"sharp.staged.b{bits}.{dtype}", about, groups, dtype, sides="kv"[(i + bits // 2) % 2], bits=bits, numerics="staged")
    return out.cases
