"""Scales and origins beyond the metadata dtype: an error that says what would do, or clamped numbers; never an infinity."""

from __future__ import annotations

from typing import Any

import numpy as np

from kivi.conformance.case import Attend, Case, Geometry, Poke, Quantize, Refused, Stream, decode, spec_of
from kivi.conformance.inputs import make
from kivi.conformance.traces.ties import as_key, as_value


def outlier() -> np.ndarray:
    """Report 4: one value token of 128 bf16 numbers in [-1, 4] with one at -70000, between ordinary tokens."""
    x = np.random.default_rng(4).uniform(-1, 4, (1, 2, 3, 128))
    x[0, 1, 1, 77] = -70000.0
    return x


def case(name: str, about: str, make: Any, dtype: str, which: str = "value", error: str | None = None, says: tuple[str, ...] = (), reports: tuple[int, ...] = (), **changes: Any) -> Case:
    spec = spec_of({k.replace("__", "."): v for k, v in changes.items()})
    return Quantize(id=f"quantize/overflow.{name}", about=about, spec=spec, which=which, make=make, dtype=dtype, error=error, says=says, reports=reports)  # type: ignore[arg-type]


def cases() -> list[Case]:
    over, says = "MetadataOverflowError", ("metadata", "bfloat16")
    wide = {"value__group": 32, "key__group": 8}
    full = [[-3e38, 3e38, 0.0, 1.0, -1.0, 1e38, -1e38, 2e38]]
    edge = np.array([[-65519.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    out: list[Case] = [
        case("origin.reject", "bf16 outlier, fp16 metadata: an error", outlier, "bfloat16", error=over, says=says, reports=(4,), **wide),
        case("origin.saturate", "bf16 outlier, clamped: neighbours are not infected", outlier, "bfloat16", reports=(4,), overflow="saturate", **wide),
        case("origin.saturate8", "the same at eight bits", outlier, "bfloat16", reports=(4,), overflow="saturate", value__bits=8, **wide),
        case("origin.bf16", "bf16 outlier, bf16 metadata", outlier, "bfloat16", reports=(4,), value__metadata="bfloat16", **wide),
        case("origin.fp32", "bf16 outlier, fp32 metadata", outlier, "bfloat16", reports=(4,), value__metadata="float32", **wide),
        case("edge", "-65519 still rounds to a finite fp16 origin", lambda: as_value(edge), "float32", value__bits=8),
        case("edge.over", "-65520 does not", lambda: as_value(edge - 1), "float32", error=over, value__bits=8),
        case("high", "70000 is fine as a maximum: only scale and origin are stored", lambda: as_value(-edge + 4481.0), "float32"),
        case("key.reject", "keys are checked too", lambda: as_key(edge * 2), "float32", "key", error=over, says=says),
        case("key.saturate", "keys are clamped too", lambda: as_key(np.concatenate([edge * 2, edge, -edge * 2])), "float32", "key", overflow="saturate"),
        case("scale.reject", "one bit: the whole fp16 range is the scale", lambda: as_value([[-65504.0, 65504.0] * 4]), "float16", error=over, value__bits=1),
        case("scale.saturate", "the scale is clamped on its own", lambda: as_value([[-65504.0, 65504.0, 0.0, 100.0] * 2]), "float16", value__bits=1, overflow="saturate"),
        case("staged.reject", "staged: the difference itself overflows", lambda: as_value([[-60000.0, 60000.0] * 4]), "float16", error=over, numerics="staged"),
        case("staged.saturate", "staged, clamped", lambda: as_value([[-60000.0, 60000.0, 0.0, 5.0] * 2]), "float16", numerics="staged", overflow="saturate"),
        case("full.reject", "the difference overflows fp32", lambda: as_value(full), "float32", error=over, value__metadata="float32"),
        case("full.saturate", "quotients of 1e34 are clamped, not cast", lambda: as_value(full), "float32", overflow="saturate"),
        case("full.saturate32", "fp32 metadata, clamped", lambda: as_value(full), "float32", overflow="saturate", value__metadata="float32", value__bits=4),
        case("full.saturate-bf16", "bf16 metadata, clamped", lambda: as_value(full), "bfloat16", overflow="saturate", value__metadata="bfloat16", value__bits=8),
    ]  # fmt: skip
    low = Poke("v", 0, 0, 0, 9, -70000.0)
    g = Geometry(dtype="bfloat16")
    out += [
        Stream(id="stream/overflow.reject", about="an append that could not be sealed later changes nothing", spec=spec_of({}), geometry=g, inputs=make("rich", 1), reports=(4,),
               events=(Attend(15), Refused(Attend(3, pokes=(low,)), over), Refused(Attend(2, commit=False, pokes=(low,)), over), Attend(3), *decode(2))),
        Stream(id="stream/overflow.saturate", about="a clamped row infects nothing else", spec=spec_of({"overflow": "saturate"}), geometry=g, inputs=make("rich", 2), reports=(4,),
               events=(Attend(15), Attend(3, pokes=(low,)), Attend(20), *decode(2))),
        Stream(id="stream/overflow.scale", about="a key block whose scale overflows: the step that seals it is refused as a whole", spec=spec_of({"key.bits": 1}), geometry=Geometry(batch=2),
               inputs=make("rich", 3), events=(Attend(14, pokes=(Poke("k", 1, 0, 3, 5, -60000.0), Poke("k", 1, 0, 4, 5, 60000.0))), Refused(Attend(2), over), Attend(1), Refused(Attend(1), over))),
    ]  # fmt: skip
    return out
