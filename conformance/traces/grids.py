"""Whole tensors over the matrix of dtype, bits, numerics, metadata, group and head dimension."""

from __future__ import annotations

import numpy as np

from kivi.conformance.case import Case, Quantize, spec_of
from kivi.conformance.pairs import covering


def tensor(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Offsets and sizes by head, token and channel."""
    rng = np.random.default_rng(seed)
    b, h, t, d = shape
    size = np.exp(rng.normal(0, 1, (b, h, 1, d))) * np.exp(rng.normal(0, 0.5, (b, h, t, 1)))
    return rng.standard_normal(shape) * size + rng.normal(0, 2, (b, h, 1, d)) + rng.normal(0, 1, (b, h, t, 1))


def cases() -> list[Case]:
    axes = {
        "which": ("key", "value"),
        "dtype": ("float16", "bfloat16", "float32"),
        "bits": (2, 1, 3, 4, 8),
        "numerics": ("portable", "staged"),
        "metadata": ("float16", "bfloat16", "float32", "input"),
        "dim": (64, 80, 96, 112, 128, 256),
        "group": (8, 16, 32),
    }
    out: list[Case] = []
    for strength, size in ((2, "quick"), (3, "full")):
        for row in covering(axes, strength, lambda r: not (r.get("numerics") == "staged" and r.get("metadata", "input") != "input")):
            name = ".".join(str(row[a]) for a in axes)
            if any(one.id.endswith(name) for one in out):
                continue
            group, which = row["group"], row["which"]
            spec = spec_of({"key.group": group, "key.residual": 64, "value.group": group, "value.residual": 64, "numerics": row["numerics"],
                            f"{which}.bits": row["bits"], f"{which}.metadata": row["metadata"]})  # fmt: skip
            tokens = 64 if which == "key" else 35
            shape, seed = ((1 + (len(out) % 4 == 0), 2, tokens, row["dim"]), len(out))
            out.append(Quantize(id=f"quantize/grids.{name}", about="codes, scales, origins and decoded values of a tensor", spec=spec, which=which, dtype=row["dtype"],
                                make=lambda shape=shape, seed=seed: tensor(shape, seed), layouts=(), size=size))  # type: ignore[arg-type]  # fmt: skip
    return out
