"""What a wrong lowering would print is killed: barriers left out, shuffles and masks changed, in kernels of kivi and under every order."""

from __future__ import annotations

import numpy as np
import pytest

from kivi.errors import KiviError
from kivi.ir.simt import BarrierOp, CopyOp, ShuffleOp
from kivi.ir.xdsl import IndexType, IntegerAttr, arith, grouped, i64
from kivi.passes.tile_to_simt import lower
from tests.ir.foreign import FOREIGN
from tests.simt.interpreted import ORDERS, THREADS, execute

SOFTMAX = next(f for f in FOREIGN if f.name == "row_softmax")
SCAN = next(f for f in FOREIGN if f.name == "prefix_minimum")
TOTALS = next(f for f in FOREIGN if f.name == "row_totals")
COPY = next(f for f in FOREIGN if f.name == "strided_copy")


def survives(foreign, module, **how) -> bool:
    """Whether a changed kernel still gives the right result."""
    arguments = foreign.make()
    try:
        execute(module, foreign.name, foreign.grid, arguments, **how)
    except KiviError:
        return False
    return np.allclose(arguments["o"], foreign.expected(arguments), rtol=2e-6, atol=0)


def ops_of(module, kind):
    return [op for op in module.walk() if isinstance(op, kind)]


def without_barriers(module):
    """The module without its first barrier, without its second, ..."""
    for i in range(len(ops_of(module, BarrierOp))):
        mutant = module.clone()
        ops_of(mutant, BarrierOp)[i].detach()
        yield mutant


#: Barriers that nobody misses: between what one thread writes and the same thread reads, which the pass does not tell apart.
SPARE = {"row_softmax": 0, "prefix_minimum": 1, "row_totals": 0}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("foreign", [SOFTMAX, SCAN, TOTALS], ids=lambda f: f.name)
def test_every_barrier_is_needed(foreign, order):
    whole = lower(foreign.module(), 2 * THREADS)
    assert survives(foreign, whole, order=order)
    alive = [survives(foreign, module, order=order) for module in without_barriers(whole)]
    assert len(alive) >= 2
    assert sum(alive) == SPARE[foreign.name]


@pytest.mark.parametrize("foreign", [SOFTMAX, SCAN, TOTALS], ids=lambda f: f.name)
def test_a_missing_barrier_shows_without_looking_for_races(foreign):
    """On a device nobody looks: some order of threads gives a wrong result."""
    whole = lower(foreign.module(), 2 * THREADS)
    alive = [all(survives(foreign, module, order=o, check_races=False) for o in ORDERS) for module in without_barriers(whole)]
    assert sum(alive) == SPARE[foreign.name]


@pytest.mark.parametrize(("what", "value"), [("mask", 0x7FFFFFFF), ("mask", 0xFFFF), ("offset", None)])
def test_every_shuffle_is_right(what, value):
    whole = lower(SOFTMAX.module(), THREADS)
    shuffles = len(ops_of(whole, ShuffleOp))
    assert shuffles == 10  # a maximum and a sum, over 32 lanes; a maximum may be right by luck. An offset that another step has loses lanes
    for i in range(0 if what == "mask" else 5, shuffles):
        module = whole.clone()
        op = ops_of(module, ShuffleOp)[i]
        op.properties[what] = IntegerAttr(value or op.offset.value.data // 2 or 2, i64)
        module.verify()
        assert not survives(SOFTMAX, module), f"shuffle {i} of {shuffles}"


@pytest.mark.parametrize("foreign", [SOFTMAX, COPY, TOTALS], ids=lambda f: f.name)
def test_a_tail_mask_that_is_one_too_wide(foreign):
    wider = {"slt": 3, "ult": 7}  # sle, ule
    whole = lower(foreign.module(), THREADS)
    arguments = foreign.make()
    width = arguments.get("n")
    masks = [i for i, op in enumerate(ops_of(whole, arith.CmpiOp)) if op.rhs.name_hint == "n"]
    assert masks
    assert width
    for i in masks:
        module = whole.clone()
        op = ops_of(module, arith.CmpiOp)[i]
        op.properties["predicate"] = IntegerAttr(wider["ult" if op.predicate.value.data == 6 else "slt"], i64)
        assert not survives(foreign, module), f"mask {i}"


@pytest.mark.parametrize("what", ["mask", "offset", "place"])
def test_every_run_is_the_right_one(what):
    whole = lower(TOTALS.module(), THREADS)
    assert survives(TOTALS, whole)
    [op] = ops_of(whole, CopyOp)
    within_the_row = next(o for o in ops_of(whole, arith.MuliOp) if o.parent is op.parent)
    mask, offset, place = [op.mask], op.offset, op.place
    if what == "mask":
        mask = []
    elif what == "offset":
        offset = within_the_row.result
    else:
        cast = arith.IndexCastOp(within_the_row.result, IndexType())
        op.parent.insert_op_before(cast, op)
        place = cast.result
    op.parent.insert_op_before(grouped(CopyOp, [[op.pointer], [offset], mask, [op.array], [place]]), op)
    op.detach()
    whole.verify()
    assert not survives(TOTALS, whole)
