"""When tokens are sealed: by the totals, never by the length of a call, whatever chunks they come in."""

from __future__ import annotations

from typing import Any

import numpy as np

from kivi.conformance.case import Attend, Case, Geometry, Special, Stream, decode, spec_of
from kivi.conformance.compare import Mismatch, Tally
from kivi.conformance.inputs import make
from kivi.conformance.subject import Subject

ONE = Geometry(q_heads=2, dtype="float32")
R = 16


def stream(name: str, about: str, events: tuple[Any, ...], seed: int = 0, reports: tuple[int, ...] = (), geometry: Geometry = ONE, size: str = "quick", **changes: Any) -> Stream:
    spec = spec_of({k.replace("__", "."): v for k, v in changes.items()})
    return Stream(id=f"stream/schedule.{name}", about=about, spec=spec, geometry=geometry, inputs=make("rich", seed), events=events, reports=reports, size=size)  # type: ignore[arg-type]


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
                raise Mismatch(f"sealed {which} of token {start + int(error.argmin())} comes back exactly: it cannot have been quantized in a group")


def cases() -> list[Case]:
    both = {"": {}, "-paper": {"order": "seal_then_attend"}}
    out: list[Case] = [
        stream("single", "prefill R, then single steps: a rule that reads the call's length never seals", (Attend(R), *decode(R + 1)), 1, (17,)),
        Special(id="stream/schedule.error", profile="stream", about="sealing quantizes in whole groups", run=sealed_error, cost=19, reports=(18,)),
        stream("jump", "an append that jumps over R", (Attend(10), Attend(10), *decode(4), Attend(9)), 2, (19,)),
        stream("jump-two", "an append that fills two blocks and more", (Attend(7), Attend(2 * R + 5), *decode(5)), 3, (19,)),
        stream("many-pages", "block tables that grow, unequal lengths", (Attend(70, counts=(70, 40)), Attend(40, counts=(1, 40)), Attend(), Attend(30)), 12, (),
               Geometry(batch=2, dtype="float16")),
        stream("wide-value", "a value window of two key windows", (Attend(20), Attend(15), *decode(4)), 4, (), value__residual=2 * R),
        stream("odd-value", "a value window that is no multiple of anything", (Attend(20), Attend(15), *decode(4)), 5, (), value__residual=R + 3),
    ]
    for tag, changes in both.items():
        for i, chunks in enumerate(((40,), (1,) * 40, (7, 33), (15, 1, 1, 16, 7), (3, 17, 20))):
            size = "full" if tag and i < 4 else "quick"
            out.append(stream(f"chunks{i}{tag}", f"the same 40 tokens in {len(chunks)} calls", tuple(Attend(n) for n in chunks), 6, (18,), size=size, **changes))
        for prompt in (1, R - 1, R, R + 1, 2 * R):
            steps = 2 if prompt != R - 1 or tag else 18
            out.append(stream(f"prompt{prompt}{tag}", "exact up to R, then the stated split", (Attend(prompt), *decode(steps)), 7, (20,), **changes))
        out.append(stream(f"long{tag}", "every fill level of both windows", (Attend(1), *decode(3 * R)), 8, (20,), size="full", **changes))
    two = Geometry(batch=2, q_heads=4, kv_heads=2, dtype="bfloat16")
    out += [
        stream("sides", "keys and values with other bits, groups and windows", (Attend(19), Attend(2), *decode(3)), 9, (), two,
               key__bits=4, key__group=16, value__bits=2, value__group=32, value__residual=20),
        stream("sides-swapped", "the other way round", (Attend(19), Attend(2), *decode(3)), 10, (), two,
               key__bits=1, key__group=4, value__bits=8, value__group=64, value__residual=16, numerics="staged"),
        stream("large-residual", "R = 32, G = 16", (Attend(30), Attend(5), *decode(2), Attend(33), *decode(1)), 11, (),
               key__group=16, key__residual=32, value__group=16, value__residual=32),
    ]  # fmt: skip
    return out
