"""Whole tensors over the matrix of dtype, bits, numerics, metadata, group and head dimension."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from kivi.conformance.case import Case, Size
from kivi.conformance.pairs import covering
from kivi.conformance.traces.build import Tensors, seed_of

AXES: dict[str, tuple[Any, ...]] = {
    "which": ("key", "value"),
    "dtype": ("float16", "bfloat16", "float32"),
    "bits": (2, 1, 3, 4, 8),
    "numerics": ("portable", "staged"),
    "metadata": ("float16", "bfloat16", "float32", "input"),
    "dim": (64, 80, 96, 112, 128, 256),
    "group": (8, 16, 32),
}


def tensor(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Offsets and sizes by head, token and channel."""
    rng = np.random.default_rng(seed)
    b, h, t, d = shape
    size = np.exp(rng.normal(0, 1, (b, h, 1, d))) * np.exp(rng.normal(0, 0.5, (b, h, t, 1)))
    return rng.standard_normal(shape) * size + rng.normal(0, 2, (b, h, 1, d)) + rng.normal(0, 1, (b, h, t, 1))


def allowed(row: dict[str, Any]) -> bool:
    """Staged numerics store metadata in the input dtype."""
    return row.get("numerics") != "staged" or row.get("metadata", "input") == "input"


def cases() -> list[Case]:
    out, seen = Tensors("grids"), set()
    sizes: tuple[tuple[int, Size], ...] = ((2, "quick"), (3, "full"))
    for strength, size in sizes:
        for row in covering(AXES, strength, allowed):
            name, which = ".".join(str(setting) for setting in row.values()), row["which"]
            if name in seen:
                continue
            seen.add(name)
            shape = (1 + (len(seen) % 4 == 0), 2, 64 if which == "key" else 35, row["dim"])
            changes = {"key__group": row["group"], "key__residual": 64, "value__group": row["group"], "value__residual": 64}
            changes |= {f"{which}__bits": row["bits"], f"{which}__metadata": row["metadata"], "numerics": row["numerics"]}
            about = "codes, scales, origins and decoded values of a tensor"
            out.add(name, about, which, partial(tensor, shape, seed_of(name)), row["dtype"], size=size, **changes)
    return out.cases
