"""Groups at the edge: constant, one ulp wide, subnormal, one-sided, too narrow for the metadata, far from zero."""

from __future__ import annotations

from functools import partial

import numpy as np

from kivi.conformance.case import Case
from kivi.conformance.floats import fmt
from kivi.conformance.traces.build import Tensors

CONSTANTS = np.repeat([[0.0], [-0.0], [1.5], [-1.5], [100.0], [1e-3], [-65504.0], [0.1], [2.0**-24], [1e-6], [-3.14159]], 8, axis=1)

#: Steps of subnormal ranges, with input and metadata formats.
SUBNORMAL = (
    (1e-39, "float32", "float32"),
    (1e-39, "float32", "float16"),
    (1e-39, "bfloat16", "bfloat16"),
    (1e-44, "float32", "float32"),
    (6e-8, "float16", "float16"),
    (6e-8, "float32", "float16"),
    (2e-8, "float32", "float16"),
    (1e-7, "float16", "float32"),
)


def one_ulp(dtype: str) -> np.ndarray:
    """Two neighbouring numbers of the dtype, at several sizes."""
    rows = []
    for low in (100.0, 1.0, -2.0, 0.0078125, -100.0, 1000.0):
        inside = np.array(low * (1 + 1e-9) if low > 0 else low * (1 - 1e-9))
        rows.append([low, low + 2 * float(fmt(dtype).half_ulp(inside))] * 4)
    return np.array(rows)


def narrow(base: float, step: float) -> np.ndarray:
    """A few steps from base."""
    rows = [[base + step * i for i in range(8)], [base - step * (i % 3) for i in range(8)], [base + step * (i == 5) for i in range(8)]]
    return np.array(rows)


def constants(out: Tensors) -> None:
    for i, dtype in enumerate(("float16", "bfloat16", "float32")):
        side, other = "kv"[i % 2], "vk"[i % 2]
        out.groups(f"constant.{dtype}", "scale 1, codes 0, the constant comes back", CONSTANTS, dtype, metadata="input", reports=(1, 2, 3))
        out.groups(f"constant.staged.{dtype}", "the same, staged", CONSTANTS, dtype, sides=side, reports=(1, 2, 3), numerics="staged")
        out.groups(
            f"ulp.{dtype}", "one ulp wide is not constant", partial(one_ulp, dtype), dtype, sides=side, metadata="input", reports=(3,)
        )
        about = "one ulp wide, staged"
        out.groups(f"ulp.staged.{dtype}", about, partial(one_ulp, dtype), dtype, sides=other, bits=4, reports=(3,), numerics="staged")
    for bits in (1, 3, 4, 8):
        out.groups(f"constant.b{bits}", "every width: all stored scales are finite", CONSTANTS, "float16", bits=bits, reports=(2,))
    out.groups(
        "constant.rounded", "a constant that fp16 cannot hold comes back as its rounding", CONSTANTS + 1e-4, "float32", bits=8, reports=(2,)
    )
    large = np.repeat([[4097.9], [-4098.1], [2049.9], [30001.0], [-60010.0]], 8, axis=1)  # their roundings lie a half to 16 below
    for bits in (1, 2, 3, 4, 8):
        about = "a large constant, whose origin rounds below it by more than half of the scale 1: codes 0 all the same"
        one, other = ("k", "v") if bits == 2 else ("", "")
        out.groups(f"constant.large.b{bits}", about, large, "float32", sides=one, bits=bits)
        out.groups(f"constant.large.bf16.b{bits}", about, large / 8, "float32", sides=other, bits=bits, metadata="bfloat16")
        out.groups(f"constant.large.half.b{bits}", about, np.trunc(large), "float16", sides=one, bits=bits, metadata="bfloat16")
    signed_zero = [[-0.0, 0.0] * 4, [-0.0, 1.0] * 4, [0.0, -0.0, 2.0, 3.0] * 2, [-1.0, -0.0] * 4, [-1e-9, 1.0] * 4]
    out.groups("minus-zero", "an origin of -0 is stored as +0", signed_zero, "float32")
    out.groups("minus-zero.half", "an origin of -0, fp16 staged", signed_zero[:4], "float16", numerics="staged")


def subnormals(out: Tensors) -> None:
    for i, (step, dtype, metadata) in enumerate(SUBNORMAL):
        tag, groups = f"{step:g}.{dtype}.{metadata}", narrow(0.0, step)
        about = "subnormal ranges are not flushed"
        out.groups(f"subnormal.{tag}", about, groups, dtype, sides="kv"[i % 2], metadata=metadata, reports=(7,))
        out.groups(f"subnormal-wide.{tag}", about, groups, dtype, sides="vk"[i % 2], bits=8, metadata=metadata, reports=(7,))
    out.groups("subnormal.staged", "fp16 subnormals, staged", narrow(0.0, 6e-8), "float16", reports=(7,), numerics="staged")
    out.groups(
        "subnormal.staged8", "an fp16 scale that underflows, staged", narrow(0.0, 6e-8), "float16", bits=8, reports=(7,), numerics="staged"
    )
    thin = [[0.0, 9e-9] * 4, [5.0, 5.0 + 2.0**-21] * 4]
    out.groups("underflow", "too narrow for an fp16 scale: scale 1, codes 0", thin, "float32", bits=8, reports=(2,))


def offsets(out: Tensors) -> None:
    sides = [[1.0, 2.0] * 4, [5 + i / 7 for i in range(8)], [-5 - i / 7 for i in range(8)]]
    out.groups("one-sided", "the grid need not contain zero: [1, 2], [5, 6], [-6, -5]", sides, "float16", reports=(15, 27))
    origin = [[0.4, 1.3, 2.0, 3.4], [-0.4, -1.3, -2.0, -3.4]]
    out.groups("one-sided4", "[0.4, 1.3, 2.0, 3.4] has origin 0.4, not 0", origin, "float32", bits=4, metadata="float32", reports=(15,))
    far = np.array([[1000.3], [-1000.3], [5.0013], [2049.0]]) + np.array([[0.01], [-0.01], [1e-3], [0.25]]) * np.arange(8)
    for bits in (2, 8):
        about = "the origin rounds past the elements: codes are clamped on both sides, with the stored origin"
        out.groups(f"offset.b{bits}", about, far, "float32", bits=bits)
        out.groups(f"offset.bf16.b{bits}", "bf16 metadata, fp32 input", far, "float32", bits=bits, metadata="bfloat16")
        out.groups(f"offset.half.b{bits}", "bf16 metadata, fp16 input", far, "float16", bits=bits, metadata="bfloat16")


def cases() -> list[Case]:
    out = Tensors("degenerate")
    for part in (constants, subnormals, offsets):
        part(out)
    return out.cases
