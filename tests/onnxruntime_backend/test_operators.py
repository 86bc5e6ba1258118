"""What the graphs lean on in this runtime: conversions round half to even, rounding is to even, nothing is fused or flushed."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

import kivi
from kivi.backends.onnxruntime import kernels, operators
from kivi.backends.onnxruntime.emit import emit
from kivi.backends.onnxruntime.graph import Graph
from kivi.dtypes import np_dtype
from kivi.errors import BackendUnavailableError


def run(build, out, **inputs):
    """What the graph of `build`, a function of its inputs, makes of these arrays; `out`: dtype."""
    g = Graph("tried")
    value = build(g, *(g.input(name, str(a.dtype), ("n",)) for name, a in inputs.items()))
    g.output("out", value, ("n",))
    options = kernels.options()
    session = onnxruntime.InferenceSession(emit(g, {}), options, providers=["CPUExecutionProvider"])
    binding, result = session.io_binding(), np.empty(len(next(iter(inputs.values()))), np_dtype(out))
    for name, a in inputs.items():
        binding.bind_input(name, "cpu", 0, kernels.element(a), a.shape, a.ctypes.data)
    binding.bind_output("out", "cpu", 0, kernels.element(result), result.shape, result.ctypes.data)
    session.run_with_iobinding(binding)
    return result


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_conversions_to_and_from_narrow_floats(name):
    """Every number of the format, and float32 numbers at and around every tie."""
    dtype = np_dtype(name)
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    wide = run(lambda g, x: x.to("float32"), "float32", x=every)
    assert np.array_equal(wide, every.astype(np.float32), equal_nan=True)
    numbers = np.sort(wide[np.isfinite(wide)])
    ties = ((numbers[:-1].astype(np.float64) + numbers[1:]) / 2).astype(np.float32)
    with np.errstate(over="ignore"):
        edges = np.array([65519.9, 65520.0, 3.3961e38, 1e-40, np.inf, -np.inf], np.float32)
        x = np.concatenate([numbers, ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf)), edges])
        expected = x.astype(dtype)
    assert run(lambda g, x: x.to(name), name, x=x).tobytes() == expected.tobytes()
    back = run(lambda g, x: x.to(name).to("float32") * 3.0, "float32", x=x[np.abs(x) < 1e4])  # no pair of conversions is taken out
    assert back.tobytes() == (expected[np.abs(x) < 1e4].astype(np.float32) * np.float32(3)).tobytes()


def test_rounding_and_arithmetic():
    rng = np.random.default_rng(0)
    x = np.concatenate([np.arange(-512, 512) / 2, rng.normal(0, 3, 4096), rng.normal(0, 1e-39, 256)]).astype(np.float32)
    y = rng.uniform(0.01, 9, len(x)).astype(np.float32)
    assert run(lambda g, x: g.op("Round", x), "float32", x=x).tobytes() == np.rint(x).tobytes()
    assert run(lambda g, x, y: x / y, "float32", x=x, y=y).tobytes() == (x / y).tobytes()
    for top in (1.0, 3.0, 7.0, 15.0, 255.0):
        assert run(lambda g, x, top=top: x / top, "float32", x=x).tobytes() == (x / np.float32(top)).tobytes()
    assert run(lambda g, x, y: x * y + x, "float32", x=x, y=y).tobytes() == (x * y + x).tobytes()


def test_exponentials():
    """Within the error that the manifest declares."""
    rng = np.random.default_rng(2)
    x = np.concatenate([-rng.uniform(0, 87, 1 << 18), -np.exp2(rng.uniform(-30, 6.4, 1 << 18))]).astype(np.float32)
    got, exact = run(lambda g, x: g.op("Exp", x), "float32", x=x), np.exp(x.astype(np.float64))
    ulp = np.abs(got - exact) / np.spacing(exact.astype(np.float32)).astype(np.float64)
    assert ulp.max() < kivi.get_backend("onnxruntime").manifest.numerics.exp_ulp
    special = run(lambda g, x: g.op("Exp", x), "float32", x=np.array([-np.inf, 0.0, np.nan], np.float32))
    assert np.array_equal(special, [0.0, 1.0, np.nan], equal_nan=True)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("numerics", ["portable", "staged"])
def test_half_precision_is_not_truncated(dtype, numerics):
    """Report 14: 0.05002 / 0.09998 is just above one half and is rounded to 1; a release of the runtime made it 0. Codes of such
    quotients, for either input, are those of the reference."""
    x = np.array([0.05002, -0.05002, 0.04998, 0.15], np.float32).astype(dtype)
    scale = np.float32(0.09998).astype(dtype)
    quotient = run(lambda g, x, s: x.to("float32") / s.to("float32"), "float32", x=x[:2], s=np.full(2, scale))
    assert run(lambda g, q: g.op("Round", q), "float32", q=quotient).tolist() == [1.0, -1.0]
    rng = np.random.default_rng(14)
    steps = rng.integers(0, 30, (1, 2, 64, 32)) / 2 + rng.choice([0.0, 0.003, -0.003], (1, 2, 64, 32))  # halves, and just beside them
    rows = (steps * float(scale)).astype(dtype)
    spec = kivi.load_spec("kivi-4bit").override(
        {"numerics": numerics, **({"key.metadata": "input", "value.metadata": "input"} if numerics == "staged" else {})}
    )
    for which in ("key", "value"):
        ours, theirs = (kivi.get_backend(name).quantize(rows, spec, which) for name in ("onnxruntime", "reference"))
        assert np.array_equal(ours.codes(), theirs.codes())
        assert len(np.unique(ours.codes())) > 8


def test_a_runtime_that_rounds_otherwise_is_refused(monkeypatch):
    assert operators.wrong_operators() == ()
    expected = operators._expected()
    truncated = {**expected, "rounding_to_an_integer": np.trunc(operators._X)}
    monkeypatch.setattr(operators, "_expected", lambda: truncated)
    operators.wrong_operators.cache_clear()
    try:
        assert operators.wrong_operators() == ("rounding to an integer",)
        with pytest.raises(BackendUnavailableError, match="rounding to an integer"):
            kivi.get_backend("onnxruntime")
    finally:
        operators.wrong_operators.cache_clear()
