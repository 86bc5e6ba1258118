"""When tokens are sealed: by the totals, never by the length of a call, whatever chunks they come in."""

from __future__ import annotations

from typing import Any

import numpy as np

from kivi.conformance.case import Attend, Case, Geometry, Size, Special, decode, spec_of
from kivi.conformance.compare import Mismatch, Tally
from kivi.conformance.inputs import make
from kivi.conformance.subject import Subject
from kivi.conformance.traces.build import Streams

R = 16


def sealed_error(subject: Subject, tally: Tally) -> None:
    """Keys and values that are sealed differ from what came in: a group of one token would come back exactly (report 18)."""
    cache = subject.cache(spec_of({}), batch=1, q_heads=1, kv_heads=1, head_dim=64, dtype="float32")
    rng = np.random.default_rng(18)
    k, v = (rng.standard_normal((1, 1, 40, 64)).astype(np.float32) for _ in range(2))
    for start, end in ((0, 16), *((t, t + 1) for t in range(16, 33)), (33, 40)):
        cache.attend(k[:, :, start:end], k[:, :, start:end], v[:, :, start:end])
    for which, x in (("key", k), ("value", v)):
        for start, qt in cache.sealed(0)[which]:
            tokens = np.asarray(qt.dequantize())[0, 0]
            error = np.abs(tokens - x[0, 0, start : start + len(tokens)]).max(-1)
            if (error < 1e-3).any():
                raise Mismatch(f"sealed {which} of token {start + int(error.argmin())} comes back exactly: it was not quantized in a group")


def cases() -> list[Case]:
    out = Streams("schedule", geometry=Geometry(q_heads=2, dtype="float32"))
    out.add("single", "single steps: a rule that reads the call's length never seals", Attend(R), *decode(R + 1), reports=(17,))
    out.add("jump", "an append that jumps over R", Attend(10), Attend(10), *decode(4), Attend(9), reports=(19,))
    out.add("jump-two", "an append that fills two blocks and more", Attend(7), Attend(2 * R + 5), *decode(5), reports=(19,))
    out.add(
        "many-pages",
        "block tables that grow, unequal lengths",
        Attend(70, counts=(70, 40)),
        Attend(40, counts=(1, 40)),
        Attend(),
        Attend(30),
        geometry=Geometry(batch=2),
    )
    out.add("wide-value", "a value window of two key windows", Attend(20), Attend(15), *decode(4), value__residual=2 * R)
    out.add("odd-value", "a value window that is no multiple of anything", Attend(20), Attend(15), *decode(4), value__residual=R + 3)
    for tag, order in (("", "attend_then_seal"), ("-paper", "seal_then_attend")):
        for i, chunks in enumerate(((40,), (1,) * 40, (7, 33), (15, 1, 1, 16, 7), (3, 17, 20))):
            calls = tuple(Attend(n) for n in chunks)
            size: Size = "full" if tag and i < 4 else "quick"
            same = make("rich", 18)
            out.add(
                f"chunks{i}{tag}", f"the same 40 tokens in {len(chunks)} calls", *calls, inputs=same, reports=(18,), size=size, order=order
            )
        for prompt in (1, R - 1, R, R + 1, 2 * R):
            steps = 18 if prompt == R - 1 and not tag else 2
            out.add(
                f"prompt{prompt}{tag}", "exact up to R, then the stated split", Attend(prompt), *decode(steps), reports=(20,), order=order
            )
        out.add(f"long{tag}", "every fill level of both windows", Attend(1), *decode(3 * R), reports=(20,), size="full", order=order)
    two, sides = Geometry(batch=2, q_heads=4, kv_heads=2, dtype="bfloat16"), (Attend(19), Attend(2), *decode(3))
    wide: dict[str, Any] = {"key__bits": 4, "key__group": 16, "value__group": 32, "value__residual": 20}
    tall: dict[str, Any] = {"key__bits": 1, "key__group": 4, "value__bits": 8, "value__group": 64, "numerics": "staged"}
    large: dict[str, Any] = {f"{which}__{name}": size for which in ("key", "value") for name, size in (("group", 16), ("residual", 32))}
    out.add("sides", "keys and values with other bits, groups and windows", *sides, geometry=two, **wide)
    out.add("sides-swapped", "the other way round", *sides, geometry=two, **tall)
    out.add("large-residual", "R = 32, G = 16", Attend(30), Attend(5), *decode(2), Attend(33), *decode(1), **large)
    about = "sealing quantizes in whole groups"
    return [*out.cases, Special(id="stream/schedule.error", profile="stream", about=about, run=sealed_error, cost=19, reports=(18,))]
