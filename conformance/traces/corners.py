"""Corners of the spec and of the number formats that the matrix does not visit: odd groups, three of a kind, bits of floating rows."""

from __future__ import annotations

from functools import partial
from typing import Any

from kivi.conformance.case import Attend, Case, Crop, Geometry, Poke, Reload, decode
from kivi.conformance.traces.build import Streams, Tensors
from kivi.conformance.traces.grids import tensor


def cases() -> list[Case]:
    whole, steps = Tensors("corners"), Streams("corners")
    odd: dict[str, Any] = {"key__group": 12, "key__residual": 24, "value__group": 24, "value__residual": 24}
    whole.add("group12.key", "groups of twelve tokens", "key", partial(tensor, (1, 2, 36, 40), 1), "float16", **odd)
    whole.add("group24.value", "groups of 24 channels over 64: 24, 24, 16", "value", partial(tensor, (1, 2, 30, 64), 2), "float16", **odd)
    wide: dict[str, Any] = {"value__group": 128, "key__group": 16}
    whole.add("group-beyond-dim", "a group larger than the head dimension", "value", partial(tensor, (1, 2, 5, 80), 3), "float32", **wide)
    whole.add("group-is-residual", "one key group a page", "key", partial(tensor, (1, 2, 32, 48), 4), "bfloat16", **wide)
    whole.add("one-token", "a single value token", "value", partial(tensor, (2, 1, 1, 64), 5), "float16")
    whole.add("one-channel", "a single channel: value groups of one element", "value", partial(tensor, (1, 1, 20, 1), 6), "float32")
    life = (Attend(25), *decode(2), Attend(23), Crop(29), Reload(), Attend(26))
    steps.add("odd-page", "pages of 24 tokens: unfinished words in every layout", *life, packing__layout="lanes32", **odd)
    steps.add("odd-page-official", "pages of 24 tokens, three bits", *life, key__bits=3, value__bits=3, **odd)
    steps.add(
        "group-is-residual",
        "one key group a page, one value group a token",
        Attend(15),
        *decode(2),
        Attend(18),
        Crop(20),
        Attend(17),
        **wide,
    )
    three = Geometry(batch=3, q_heads=9, kv_heads=3, dtype="float32")
    steps.add(
        "three",
        "three requests, three KV heads, nine query heads",
        Attend(18, counts=(18, 0, 7)),
        Attend(14, counts=(1, 14, 9)),
        Attend(),
        geometry=three,
    )
    bits = tuple(Poke(t, 0, 0, i, 2, x) for t in "kv" for i, x in enumerate((-0.0, 1e-40, -1e-44, 3e-39)))
    steps.add("row-bits", "floating rows keep -0 and fp32 subnormals", Attend(5, pokes=bits), Attend(13), Attend())
    half = tuple(Poke(t, 0, 0, i, 2, x) for t in "kv" for i, x in enumerate((-0.0, 6e-8, -3e-7, 6.1e-5)))
    steps.add(
        "row-bits.half", "floating rows keep -0 and fp16 subnormals", Attend(5, pokes=half), Attend(13), Attend(), geometry=Geometry()
    )
    flat = tuple(Poke("k", 0, 0, i, 2, 4097.9) for i in range(16)) + tuple(Poke("v", 0, 0, i, 32, -4098.1) for i in range(0, 20, 3))
    for dtype, metadata in (("float32", "float16"), ("float32", "bfloat16"), ("float16", "bfloat16")):
        steps.add(
            f"large-constants.{dtype}.{metadata}",
            "constant groups, one of a single channel, whose origins round below them by more than half of the scale 1",
            Attend(20, pokes=flat),
            *decode(3),
            Attend(14),
            geometry=Geometry(head_dim=20, value_head_dim=33, dtype=dtype),
            key__metadata=metadata,
            value__metadata=metadata,
        )
    strain = Streams("corners", "attention")
    huge = tuple(Poke("v", 0, 0, token, 3, 6e4) for token in range(8))
    about = "a sum of values overflows fp16, their average does not"
    strain.add("huge-values", about, Attend(8, pokes=huge), Attend(), Attend(9), inputs="uniform", geometry=Geometry())
    return [*whole.cases, *steps.cases, *strain.cases]
