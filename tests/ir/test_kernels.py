"""Generated kernels under the `tile` interpreter: bit-identical to the reference backend, whatever bits, group and layout a spec names."""

from __future__ import annotations

import math

import numpy as np
import pytest

import kivi
from kivi.dtypes import np_dtype
from kivi.ir.tile import Tile
from kivi.ir.xdsl import parse
from kivi.layout import Layout, arrangement, layouts, named_layout
from kivi.passes import tensors
from kivi.passes.address import units
from kivi.passes.clean import clean
from kivi.passes.numbers import Numbers
from tests.ir.test_tile import execute

BE = kivi.get_backend("reference")

#: A layout that ships nowhere: an index-bit permutation for 2-bit codes in 16-bit words.
OWN = Layout(name="own", word="uint16", key="c0 t1 c1 w t0 c* t*", value="t0 c1 c0 w t1 c* t*")


def signless(a):
    """An array as kernels see it: bfloat16 is 16 bits."""
    return a.view(np.int16) if a.dtype == np_dtype("bfloat16") else a


def launch(kernel, values, arguments):
    grid = [math.prod(-(-values[name] // divisor) for name, divisor in axis) for axis in kernel.grid]
    return execute(kernel.module, kernel.name, grid, {n: signless(a) if isinstance(a, np.ndarray) else a for n, a in arguments.items()})


def spec_of(bits, layout, numerics="portable", group=8, residual=16):
    sides = {
        f"{side}.{name}": value
        for side in ("key", "value")
        for name, value in (("bits", bits), ("group", group), ("residual", residual), ("metadata", "input"))
    }
    return kivi.CacheSpec(name="kernels").override({**sides, "numerics": numerics}).override({"packing.layout": layout})


def check_tensor(spec, which, dtype, shape, run=launch):
    """Scales, origins, words, codes, dequantized values and repacked words of one tensor, all bit for bit."""
    x = np.random.default_rng(1).standard_normal(shape).astype(np_dtype(dtype))
    x[0, 0, :2] = 1.5
    batch, heads, tokens, channels = shape
    n = Numbers.of(spec, which, dtype, dtype)
    form = arrangement(BE.layout_for(spec), which, n.bits, spec.key.residual, channels)
    want = BE.quantize(x, spec, which)
    scale, origin, words = np.zeros_like(want.scale), np.zeros_like(want.origin), np.zeros_like(want.words)
    values = {"batch": batch, "heads": heads, "tokens": tokens, "channels": channels, "units": units(form)}
    strides = {f"x_{axis}": s // x.itemsize for axis, s in zip(("batch", "head", "token", "channel"), x.strides, strict=True)}
    given = {"x": x, "scale": scale, "origin": origin, "flat": np.zeros(scale.size, np.uint8)}
    extent = {"row": words.shape[3], "total": words.shape[2] * words.shape[3]}

    kernel = tensors.metadata_kernel(which, n, channels)
    grid = [math.prod(-(-values[a] // d) for a, d in axis) for axis in kernel.grid]
    flag = np.full(math.prod(grid), -1, np.int32)
    run(kernel, values, {**given, "flag": flag, "tokens": tokens, "heads": heads, **strides, "blocks": grid[1]})
    assert scale.tobytes() == want.scale.tobytes()
    assert origin.tobytes() == want.origin.tobytes()
    assert not flag.any()

    run(tensors.encode_kernel(which, n, form), values, {**given, "words": words, "tokens": tokens, "heads": heads, **strides, **extent})
    assert words.tobytes() == want.words.tobytes()

    for out_dtype in ("uint8", "float32", "bfloat16", "float16"):
        out = np.zeros(shape, np_dtype(out_dtype))
        stored = {"words": words, "scale": scale, "origin": origin}
        run(tensors.decode_kernel(which, n, form, out_dtype), values, {**stored, "out": out, "tokens": tokens, **extent})
        assert out.tobytes() == (want.codes() if out_dtype == "uint8" else want.dequantize(out_dtype)).tobytes()

    target = arrangement(named_layout("hp16"), which, n.bits, spec.key.residual, channels)
    other = want.repack("hp16").words
    out = np.zeros_like(other)
    given = {"words": words, "out": out, "tokens": tokens, **extent, "out_row": out.shape[3], "out_total": out.shape[2] * out.shape[3]}
    run(tensors.repack_kernel(which, form, target), {**values, "units": units(target)}, given)
    assert out.tobytes() == other.tobytes()


@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("layout", layouts())
def test_any_layout_and_width(which, bits, layout):
    check_tensor(spec_of(bits, layout), which, "float16", (1, 2, 24 if which == "key" else 21, 20))


@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("numerics", ["portable", "staged"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_any_numerics(which, numerics, dtype):
    check_tensor(spec_of(2, "official_int32", numerics), which, dtype, (2, 1, 24, 20))


@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize(("bits", "group", "residual"), [(3, 16, 32), (1, 64, 64), (2, 12, 24), (4, 2, 6)])
def test_any_group(which, bits, group, residual):
    check_tensor(
        spec_of(bits, "hp16", group=group, residual=residual), which, "float16", (1, 1, 2 * group + (0 if which == "key" else 5), 40)
    )


@pytest.mark.parametrize("which", ["key", "value"])
def test_a_layout_written_in_a_spec(which):
    check_tensor(spec_of(2, {"name": OWN.name, "word": OWN.word, "key": OWN.key, "value": OWN.value}), which, "float16", (1, 2, 40, 20))


def test_kernels_are_text():
    """A module prints, parses and verifies to the same text, and cleaning it changes no result."""
    spec = spec_of(3, "lanes32")
    n = Numbers.of(spec, "key", "float16", "float16")
    kernel = tensors.encode_kernel("key", n, arrangement(named_layout("lanes32"), "key", 3, 16, 20))
    text = str(kernel.module)
    assert str(parse(text, Tile)) == text
    before = len(list(kernel.module.walk()))
    clean(kernel.module)
    assert len(list(kernel.module.walk())) < 0.8 * before

    def cleaned(kernel, values, arguments):
        clean(kernel.module)
        return launch(kernel, values, arguments)

    check_tensor(spec, "key", "float16", (1, 2, 24, 20), run=cleaned)
