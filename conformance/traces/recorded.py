"""Keys, values and queries of a real model after RoPE (golden/README.md): channel outliers as they are."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from kivi.conformance.case import Attend, Case, Geometry, Side, Size, decode
from kivi.conformance.inputs import golden, make
from kivi.conformance.traces.build import Streams, Tensors

SIDES: tuple[Side, Side] = ("key", "value")
LAYERS = (0, 15, 29)


def last(layer: int, side: int) -> np.ndarray:
    """The last 64 positions of a layer's keys (0) or values (1): [1, 3, 64, 64]."""
    return golden("smollm2")["kv"][layer, side, :, -64:][None]


def widths(group: int, residual: int) -> dict[str, Any]:
    return {f"{which}__{name}": n for which in ("key", "value") for name, n in (("group", group), ("residual", residual))}


def cases() -> list[Case]:
    whole, steps = Tensors("recorded"), Streams("recorded", geometry=Geometry(1, 3, 1, 64))
    for layer, number in enumerate(LAYERS):
        for head in range(3):
            name, inputs = f"layer{number}.head{head}", make("recorded", layer=layer, head=head)
            size: Size = "quick" if head == layer else "full"
            steps.add(
                name, "three query heads of SmolLM2-135M", Attend(50), *decode(4), Attend(16), inputs=inputs, size=size, **widths(32, 32)
            )
        for side, which in enumerate(SIDES):
            whole.add(f"layer{number}.{which}", "a layer of SmolLM2-135M", which, partial(last, layer, side), "float16", **widths(16, 64))
    about, inputs = "group and residual of the presets, 176 tokens", make("recorded", layer=1, head=1)
    steps.add("preset", about, Attend(112), *decode(60), Attend(4), inputs=inputs, size="full", **widths(32, 128))
    return [*whole.cases, *steps.cases]
