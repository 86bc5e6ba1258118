"""Words of every layout, from an independent packer; repacked there and back; a cache stored in each."""

from __future__ import annotations

from functools import partial
from typing import Any

from kivi.conformance.case import Attend, Case, Crop, Geometry, Reload, Side, decode
from kivi.conformance.traces.build import Streams, Tensors
from kivi.conformance.traces.grids import tensor

LAYOUTS = ("official_int32", "lanes32", "hp16", "hp16.mma", "planes8", "bytes_lsb")
SIDES: tuple[Side, Side] = ("key", "value")
LIFE = (Attend(19), *decode(2), Attend(15), Crop(21), Reload(), Attend(18))


def cases() -> list[Case]:
    whole = Tensors("layouts")
    for bits in (2, 3, 1, 4, 8):
        quick = LAYOUTS if bits in (2, 3) else ("official_int32", "hp16.mma", "planes8")
        for which in SIDES:
            tokens = 24 if which == "key" else 21  # a whole page and part of one
            widths: dict[str, Any] = {"key__bits": bits, "value__bits": bits, "value__group": 16}
            small, large = partial(tensor, (1, 1, tokens, 40), 200 + bits), partial(tensor, (2, 2, 40, 96), 210 + bits)
            whole.add(f"b{bits}.{which}", "each code in its place, padding zero", which, small, "float32", layouts=quick, **widths)
            whole.add(
                f"wide.b{bits}.{which}", "two requests and heads, D = 96", which, large, "float16", layouts=LAYOUTS, size="full", **widths
            )
    steps = Streams("layouts", geometry=Geometry(q_heads=2, dtype="float32"))
    for layout in LAYOUTS:
        for bits in (2, 3, 1, 4, 8):
            quick_size = bits == 2 or (bits == 3 and layout in ("hp16.mma", "lanes32"))
            steps.add(
                f"{layout}.b{bits}",
                "a cache stored in this layout",
                *LIFE,
                geometry=None if quick_size else Geometry(q_heads=2, head_dim=80, dtype="float32"),
                size="quick" if quick_size else "full",
                packing__layout=layout,
                key__bits=bits,
                value__bits=bits,
            )
    return [*whole.cases, *steps.cases]
