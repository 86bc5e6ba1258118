"""Groups at the edge: constant, one ulp wide, subnormal, one-sided, too narrow for the metadata, far from zero."""

from __future__ import annotations

import numpy as np

from kivi.conformance.case import Case
from kivi.conformance.floats import fmt
from kivi.conformance.traces.ties import of_groups as groups_of
from kivi.conformance.traces.ties import one_side_quick

CONSTANTS = [0.0, -0.0, 1.5, -1.5, 100.0, 1e-3, -65504.0, 0.1, 2.0**-24, 1e-6, -3.14159]


def one_ulp(dtype: str) -> np.ndarray:
    """Two neighbouring numbers of the dtype, at several sizes."""
    rows = []
    for low in (100.0, 1.0, -2.0, 0.0078125, -100.0, 1000.0):
        spacing = 2 * float(fmt(dtype).half_ulp(np.array(low * (1 + 1e-9) if low > 0 else low * (1 - 1e-9))))
        rows.append([low, low + spacing] * 4)
    return np.array(rows)


def narrow(base: float, step: float) -> np.ndarray:
    """Eight steps from base."""
    return np.array([[base + step * i for i in range(8)], [base - step * (i % 3) for i in range(8)], [base + step * (i == 5) for i in range(8)]])


def of_groups(name, about, groups, dtype, reports=(), **changes):
    return groups_of(name, about, groups, dtype, reports, family="degenerate", **changes)


def cases() -> list[Case]:
    constants = np.array([[c] * 8 for c in CONSTANTS])
    out: list[Case] = []
    for dtype in ("float16", "bfloat16", "float32"):
        out += of_groups(f"constant.{dtype}", "scale 1, codes 0, the constant comes back", constants, dtype, (1, 2, 3), bits=2, metadata="input")
        out += one_side_quick(of_groups(f"constant.staged.{dtype}", "the same, staged", constants, dtype, (1, 2, 3), bits=2, numerics="staged"), len(dtype))
        out += one_side_quick(of_groups(f"ulp.{dtype}", "one ulp wide is not constant", lambda d=dtype: one_ulp(d), dtype, (3,), bits=2, metadata="input"), len(dtype))
        out += one_side_quick(of_groups(f"ulp.staged.{dtype}", "one ulp wide, staged", lambda d=dtype: one_ulp(d), dtype, (3,), bits=4, numerics="staged"), len(dtype) + 1)
    for bits in (1, 3, 4, 8):
        out += of_groups(f"constant.b{bits}", "every width: all stored scales are finite", constants, "float16", (2,), bits=bits)
    out += of_groups("constant.rounded", "a constant that fp16 metadata cannot hold comes back as its rounding", constants + 1e-4, "float32", (2,), bits=8)
    signed_zero = [[-0.0, 0.0] * 4, [-0.0, 1.0] * 4, [0.0, -0.0, 2.0, 3.0] * 2, [-1.0, -0.0] * 4, [-1e-9, 1.0] * 4]
    out += of_groups("minus-zero", "an origin of -0 is stored as +0", signed_zero, "float32", (), bits=2)
    out += of_groups("minus-zero.half", "an origin of -0, fp16 staged", signed_zero[:4], "float16", (), bits=2, numerics="staged")
    for step, dtype, metadata in ((1e-39, "float32", "float32"), (1e-39, "float32", "float16"), (1e-39, "bfloat16", "bfloat16"), (1e-44, "float32", "float32"),
                                  (6e-8, "float16", "float16"), (6e-8, "float32", "float16"), (2e-8, "float32", "float16"), (1e-7, "float16", "float32")):  # fmt: skip
        tag = f"{step:g}.{dtype}.{metadata}"
        turn = len(out) // 4
        out += one_side_quick(of_groups(f"subnormal.{tag}", "subnormal ranges are not flushed", narrow(0.0, step), dtype, (7,), bits=2, metadata=metadata), turn)
        out += one_side_quick(of_groups(f"subnormal-wide.{tag}", "subnormal steps, eight bits", narrow(0.0, step), dtype, (7,), bits=8, metadata=metadata), turn + 1)
    out += of_groups("subnormal.staged", "fp16 subnormals, staged", narrow(0.0, 6e-8), "float16", (7,), bits=2, numerics="staged")
    out += of_groups("subnormal.staged4", "fp16 scale that underflows, staged", narrow(0.0, 6e-8), "float16", (7,), bits=8, numerics="staged")
    out += of_groups("one-sided", "the grid need not contain zero: [1, 2], [5, 6], [-6, -5]", [[1.0, 2.0] * 4, [5 + i / 7 for i in range(8)], [-5 - i / 7 for i in range(8)]],
                     "float16", (15, 27), bits=2)  # fmt: skip
    out += of_groups("one-sided4", "[0.4, 1.3, 2.0, 3.4] has origin 0.4, not 0", [[0.4, 1.3, 2.0, 3.4], [-0.4, -1.3, -2.0, -3.4]], "float32", (15,), bits=4, metadata="float32")
    out += of_groups("underflow", "a range too narrow for an fp16 scale, far from zero: scale 1, codes 0", [[0.0, 9e-9] * 4, [5.0, 5.0 + 2.0**-21] * 4], "float32", (2,), bits=8)
    far = np.array([[1000.3 + 0.01 * i for i in range(8)], [-1000.3 - 0.01 * i for i in range(8)], [5.0013 + 1e-3 * i for i in range(8)], [2049.0 + 0.25 * i for i in range(8)]])
    for bits in (2, 8):
        out += of_groups(f"offset.b{bits}", "the origin rounds past the elements: codes are clamped on both sides, with the stored origin", far, "float32", (), bits=bits)
        out += of_groups(f"offset.bf16.b{bits}", "bf16 metadata, fp32 input", far, "float32", (), bits=bits, metadata="bfloat16")
        out += of_groups(f"offset.half.b{bits}", "bf16 metadata, fp16 input", far, "float16", (), bits=bits, metadata="bfloat16")
    return out
