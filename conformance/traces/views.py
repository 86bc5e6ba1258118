"""Arrays whose memory is not what their shape suggests: transposed, strided, padded, offset, reversed, read-only (report 35)."""

from __future__ import annotations

from functools import partial

from kivi.conformance.case import Attend, Case, Geometry, Side
from kivi.conformance.inputs import VIEWS
from kivi.conformance.traces.build import Streams, Tensors
from kivi.conformance.traces.grids import tensor

SIDES: tuple[Side, Side] = ("key", "value")
DTYPES = ("float16", "bfloat16", "float32")


def cases() -> list[Case]:
    whole, steps = Tensors("views", reports=(35,)), Streams("views", reports=(35,))
    for i, view in enumerate(VIEWS):
        for which in SIDES:
            about = "the numbers count, not where they lie"
            whole.add(f"{view}.{which}", about, which, partial(tensor, (1, 2, 16, 48), 100 + i), DTYPES[i % 3], view=view)
        calls = (Attend(17, view=view, counts=(17, 9)), Attend(3, view=view), Attend(1, view=view))
        steps.add(view, "q, k and v as views", *calls, geometry=Geometry(batch=2, q_heads=2, dtype=DTYPES[(i + 2) % 3]))
    return [*whole.cases, *steps.cases]
