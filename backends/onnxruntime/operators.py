"""What SPEC 3 asks of the runtime's operators, tried on this very runtime: one small graph, numbers that tell wrong rounding from right.

A release of ONNX Runtime truncated where it quantized half precision; others have removed a pair of conversions that rounds. Such a
runtime is refused at selection, with the operator named.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from functools import cache

import numpy as np

from kivi import jit
from kivi.backends.onnxruntime.kernels import CPU, Session
from kivi.dtypes import np_dtype
from kivi.jit import Generated

_X = np.array(
    [
        0.05002,
        -0.05002,
        0.5,
        1.5,
        2.5,
        -2.5,
        0.50030,
        2049.0,
        2051.0,
        65519.0,
        65520.0,
        3e-8,
        2e-8,
        1e-40,
        1.0039062,
        1.0117188,
        0.1,
        1 / 3,
    ],
    np.float32,
)
_Y = np.array([0.09998, 0.09998, 3.0, 0.7, 7.0, 49.0, 1.1, 3.0, 7.0, 3.0, 0.3, 2e-3, 0.5, 0.5, 3.0, 10.0, 3.0, 2.0989583], np.float32)


@cache
def wrong_operators() -> tuple[str, ...]:
    """What this runtime does not compute as SPEC 3.1 says; empty if it may be used."""
    generated, _ = jit.generated({"backend": "onnxruntime", "entry": "operators"}, _printed, ".b64")
    expected = _expected()
    out = {name: np.empty(a.shape, a.dtype) for name, a in expected.items()}
    Session(generated, CPU)({"x": _X, "y": _Y}, out)
    return tuple(name.replace("_", " ") for name, a in expected.items() if a.tobytes() != out[name].tobytes())


def _expected() -> dict[str, np.ndarray]:
    half, brain = np_dtype("float16"), np_dtype("bfloat16")
    with np.errstate(over="ignore", under="ignore"):
        return {
            "float32_to_float16": _X.astype(half),
            "float32_to_bfloat16": _X.astype(brain),
            "there_and_back_in_float16": _X.astype(half).astype(np.float32),
            "there_and_back_in_bfloat16": _X.astype(brain).astype(np.float32),
            "rounding_to_an_integer": np.rint(_X),
            "rounding_a_quotient_in_half_precision": np.rint((_X / _Y).astype(half).astype(np.float32)),
            "a_quotient": _X / _Y,
            "a_product_and_a_sum": _X * _Y + _X,
            "subnormal_numbers": _X * np.float32(1e-38),
        }


def _printed() -> Generated:
    """Imports `onnx`."""
    from kivi.backends.onnxruntime import emit
    from kivi.backends.onnxruntime.graph import Graph

    g = Graph("operators")
    x, y = (g.input(name, "float32", ("n",)) for name in "xy")
    made = {
        "float32_to_float16": x.to("float16"),
        "float32_to_bfloat16": x.to("bfloat16"),
        "there_and_back_in_float16": x.to("float16").to("float32"),
        "there_and_back_in_bfloat16": x.to("bfloat16").to("float32"),
        "rounding_to_an_integer": g.op("Round", x),
        "rounding_a_quotient_in_half_precision": g.op("Round", (x / y).to("float16").to("float32")),
        "a_quotient": x / y,
        "a_product_and_a_sum": x * y + x,
        "subnormal_numbers": x * 1e-38,
    }
    for name, value in made.items():
        g.output(name, value, ("n",))
    data = emit.emit(g, {"kivi.entry": g.name})
    signature = {port.name: port.dtype for port in g.inputs}
    return Generated(g.name, b64encode(data).decode(), signature, [], hashlib.sha256(data).hexdigest())
