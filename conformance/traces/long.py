"""Long histories: past the blocks of 128 and 256 tokens that kernels like, past eight and sixteen pages, block tables that grow again."""

from __future__ import annotations

from typing import Any

from kivi.conformance.case import Attend, Case, Commit, Crop, Geometry, decode, draft
from kivi.conformance.traces.build import Streams

#: Pages of four tokens.
SMALL: dict[str, Any] = {f"{which}__{name}": size for which in ("key", "value") for name, size in (("group", 2), ("residual", 4))}


def cases() -> list[Case]:
    out = Streams("long", "attention", geometry=Geometry(head_dim=16, dtype="float32"))
    whole = (draft(289), draft(1), Commit(), *decode(2))
    out.add("tokens", "290 tokens of one weight, in the chunk, floating and sealed: one lost shows", *whole, inputs="uniform")
    # Tables begin with room for four pages and double: 4, 8, 9, 16 and 17 pages of 4 tokens.
    grown = (Attend(16), Attend(18), *decode(3), Attend(30), *decode(2))
    out.add("pages", "17 pages of one request, each read as itself", *grown, **SMALL)
    out.add("pages-paper", "the same, sealing first", *grown[:-3], order="seal_then_attend", **SMALL)
    two = Geometry(batch=2, head_dim=16, dtype="float32")
    ragged = (Attend(43, counts=(3, 43)), Attend(40, counts=(40, 1)), Crop((38, 21)), Attend(33, counts=(1, 33)), *decode(1))
    out.add("pages-ragged", "more than eight pages beside few, and after a crop", *ragged, geometry=two, **SMALL)
    return out.cases
