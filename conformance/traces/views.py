"""Arrays whose memory is not what their shape suggests: transposed, strided, padded, offset, reversed, read-only (report 35)."""

from __future__ import annotations

from kivi.conformance.case import Attend, Case, Geometry, Quantize, Stream, spec_of
from kivi.conformance.inputs import VIEWS, make
from kivi.conformance.traces.grids import tensor


def cases() -> list[Case]:
    out: list[Case] = []
    for i, view in enumerate(VIEWS):
        for which in ("key", "value"):
            dtype = ("float16", "bfloat16", "float32")[i % 3]
            out.append(Quantize(id=f"quantize/views.{view}.{which}", about="the numbers count, not where they lie", spec=spec_of({}), which=which, dtype=dtype, view=view,  # type: ignore[arg-type]
                                make=lambda i=i: tensor((1, 2, 16, 48), 100 + i), reports=(35,)))  # fmt: skip
        out.append(Stream(id=f"stream/views.{view}", about="q, k and v as views", spec=spec_of({}), inputs=make("rich", 30 + i), reports=(35,),
                          geometry=Geometry(batch=2, q_heads=2, kv_heads=1, dtype=("float32", "float16", "bfloat16")[i % 3]),
                          events=(Attend(17, view=view, counts=(17, 9)), Attend(3, view=view), Attend(1, view=view))))  # fmt: skip
    return out
