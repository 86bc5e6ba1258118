"""Words of every layout, from an independent packer; repacked there and back; a cache stored in each."""

from __future__ import annotations

from kivi.conformance.case import Attend, Case, Crop, Geometry, Quantize, Reload, Stream, decode, spec_of
from kivi.conformance.inputs import make
from kivi.conformance.traces.grids import tensor

LAYOUTS = ("official_int32", "lanes32", "hp16", "hp16.mma", "planes8", "bytes_lsb")


def cases() -> list[Case]:
    out: list[Case] = []
    for bits in (2, 3, 1, 4, 8):
        for which in ("key", "value"):
            spec = spec_of({"key.bits": bits, "value.bits": bits, "value.group": 16})
            tokens = 24 if which == "key" else 21  # a whole page and part of one
            out.append(Quantize(id=f"quantize/layouts.b{bits}.{which}", about="each code in its place, padding zero", spec=spec, which=which, layouts=LAYOUTS if bits in (2, 3) else LAYOUTS[:1] + LAYOUTS[3:5], dtype="float32",  # type: ignore[arg-type]
                                make=lambda t=tokens, b=bits: tensor((1, 1, t, 40), 200 + b)))  # fmt: skip
            out.append(Quantize(id=f"quantize/layouts.wide.b{bits}.{which}", about="the same, two requests and heads, D = 96", spec=spec, which=which, layouts=LAYOUTS, dtype="float16",  # type: ignore[arg-type]
                                make=lambda b=bits: tensor((2, 2, 40, 96), 210 + b), size="full"))  # fmt: skip
    for i, layout in enumerate(LAYOUTS):
        for bits in (2, 3) if layout in ("hp16.mma", "lanes32") else (2,):
            spec = spec_of({"packing.layout": layout, "key.bits": bits, "value.bits": bits})
            out.append(Stream(id=f"stream/layouts.{layout}.b{bits}", about="a cache stored in this layout", spec=spec, inputs=make("rich", 40 + i), geometry=Geometry(q_heads=2, dtype="float32"),
                              events=(Attend(19), *decode(2), Attend(15), Crop(21), Reload(), Attend(18))))  # fmt: skip
    for bits in (1, 3, 4, 8):
        for i, layout in enumerate(LAYOUTS):
            spec = spec_of({"packing.layout": layout, "key.bits": bits, "value.bits": bits})
            out.append(Stream(id=f"stream/layouts.full.{layout}.b{bits}", about="a cache stored in this layout, D = 80", spec=spec, inputs=make("rich", 50 + i), size="full",
                              geometry=Geometry(q_heads=2, head_dim=80, dtype="float32"), events=(Attend(19), *decode(2), Attend(15), Crop(21), Reload(), Attend(18))))  # fmt: skip
    return out
