"""The pass `tile` to `simt`: its text, and its results under the interpreter, in every order of threads."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from kivi.ir.build import Aligned, full, indices, kernel, loop, pointer
from kivi.ir.interp.tile import UnknownOperationError
from kivi.ir.simt import Simt
from kivi.ir.tile import Tile
from kivi.ir.xdsl import i8, i32, parse
from kivi.passes.simt_memory import Memory, SharedMemoryError
from kivi.passes.tile_to_simt import lower
from tests.ir import test_attention
from tests.ir.foreign import FOREIGN, aligned
from tests.ir.test_kernels import check_tensor, signless, spec_of
from tests.simt import interpreted
from tests.simt.interpreted import ORDERS, THREADS, execute

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", ["prefix_minimum", "row_softmax", "row_totals", "strided_copy"])
def test_golden_text(name):
    """What becomes of the foreign kernels, to the letter. Execution is the proof; this shows what changed."""
    module = lower(next(f for f in FOREIGN if f.name == name).module(), THREADS)
    text = str(module)
    assert str(parse(text, Tile, Simt)) == text
    assert text + "\n" == (GOLDEN / f"{name}.mlir").read_text()


@pytest.mark.parametrize("threads", [32, 96])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("foreign", FOREIGN, ids=lambda f: f.name)
def test_foreign_kernels(foreign, order, threads):
    arguments = foreign.make()
    execute(lower(foreign.module(), threads), foreign.name, foreign.grid, arguments, order=order)
    if foreign.exact:
        assert np.array_equal(arguments["o"], foreign.expected(arguments))
    else:
        np.testing.assert_allclose(arguments["o"], foreign.expected(arguments), rtol=2e-6)


def test_an_unknown_operation_is_named():
    module = parse("func.func @k(%n: i32) {\n%x = arith.constant 1.0 : f32\n%a = math.sin %x : f32\nfunc.return\n}", Tile)
    with pytest.raises(UnknownOperationError, match=r"math\.sin"):
        lower(module)


def test_a_carried_tile_may_decide_where_a_run_lies():
    """The tile stays with its threads only if each reads its own elements, and a run begins at another one's."""

    def body(x, o, n):
        r = indices(16)
        [total] = loop(0, n, [full((16,), 1, i32)], lambda i, t: [t + x.load(t * 0 + r)])
        o.store(r, total)

    module = kernel("k", {"x": Aligned(pointer(i32), 16), "o": pointer(i32), "n": i32}, body)
    x, o = aligned(np.arange(16, dtype=np.int32)), np.zeros(16, np.int32)
    lowered = lower(module, 32)
    assert "simt.copy" in str(lowered)
    execute(lowered, "k", (1,), {"x": x, "o": o, "n": 3})
    assert np.array_equal(o, 1 + 3 * x)


def test_aligned_arrays_count_with_what_lies_between_them():
    memory = Memory()
    for count in (4, 24560, 12, 24560, 16):
        memory.shared(i8, count)
    with pytest.raises(SharedMemoryError, match="keeps 49168 bytes in shared memory, a block has 49152"):
        memory.check("k")


# -- kernels of kivi --------------------------------------------------------------------------------------------------


def launch_in(order, threads=THREADS):
    def launch(kernel, values, arguments):
        grid = [math.prod(-(-values[name] // divisor) for name, divisor in axis) for axis in kernel.grid]
        given = {n: signless(a) if isinstance(a, np.ndarray) else a for n, a in arguments.items()}
        return execute(lower(kernel.module, threads), kernel.name, grid, given, order=order)

    return launch


@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize(("bits", "order"), [(2, "ascending"), (3, "descending")])
def test_codes_are_those_of_the_reference(which, bits, order):
    """kv, tile and simt agree to the bit: the tile level with the reference in tests/ir/test_kernels.py, this one here."""
    check_tensor(spec_of(bits, "hp16"), which, "float16", (1, 1, 16, 20), run=launch_in(order))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("numerics", ["portable", "staged"])
@pytest.mark.parametrize(
    ("bits", "layout", "dtype"),
    [(1, "official_int32", "float32"), (2, "lanes32", "bfloat16"), (4, "hp16.mma", "float16"), (8, "planes8", "float16")],
)
def test_more_codes(which, numerics, bits, layout, dtype):
    check_tensor(spec_of(bits, layout, numerics), which, dtype, (1, 1, 16, 20), run=launch_in("random", threads=64))


@pytest.fixture(params=ORDERS)
def attend(request, monkeypatch):
    """`check` of tests/ir/test_attention.py, its kernels at this level."""
    monkeypatch.setattr(interpreted.InterpretedSimt, "order", request.param)
    monkeypatch.setattr(
        test_attention, "Interpreted", lambda schedule, pages: interpreted.InterpretedSimt(schedule=schedule, pages_per_share=pages)
    )
    return test_attention.check


def test_attention_is_within_its_bound(attend):
    cache, naive = test_attention.caches({"packing.layout": "hp16"}, head_dim=16)
    test_attention.fill(cache, naive, [37], 37)
    attend(cache, naive, 1, test_attention.Schedule(tokens=8, slots="lanes"))
