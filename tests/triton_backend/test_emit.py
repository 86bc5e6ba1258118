"""The Triton printer prints the dialect: kernels that have nothing to do with caches run, and an unknown operation is named."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kivi import jit
from kivi.backends.triton import emit
from kivi.backends.triton.kernels import load
from kivi.ir.interp.tile import UnknownOperationError
from kivi.ir.tile import Tile
from kivi.ir.xdsl import parse
from tests.ir.foreign import FOREIGN


def printed(module, name) -> jit.Generated:
    return jit.Generated(name, emit.emit(module), emit.signature(module, name), [], "")


@pytest.mark.parametrize("foreign", FOREIGN, ids=lambda f: f.name)
def test_foreign_kernels_run(foreign, tmp_path):
    module = foreign.module()
    generated = printed(module, foreign.name)
    path = tmp_path / f"{foreign.name}.py"
    path.write_text(generated.source)
    arguments = foreign.make()
    given = [torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in arguments.values()]
    load(generated, path, interpret=True)[foreign.grid](*given)
    if foreign.exact:
        assert np.array_equal(arguments["o"], foreign.expected(arguments))
    else:
        np.testing.assert_allclose(arguments["o"], foreign.expected(arguments), rtol=2e-6)


def test_signatures_name_types():
    assert emit.signature(FOREIGN[0].module(), "row_softmax") == {"x": "*fp32", "o": "*fp32", "n": "i32"}
    assert emit.signature(FOREIGN[2].module(), "strided_copy") == {"x": "*i16", "o": "*i16", "stride": "i64", "n": "i64"}


def test_an_unknown_operation_is_named():
    module = parse("func.func @k(%n: i32) {\n%x = arith.constant 1.0 : f32\n%a = math.sin %x : f32\nfunc.return\n}", Tile)
    with pytest.raises(UnknownOperationError, match=r"math\.sin"):
        emit.emit(module)


def test_values_that_change_places_in_a_loop(tmp_path):
    """A carried value read after it was overwritten would be wrong: Fibonacci numbers swap two."""
    text = """
    func.func @fibonacci(%o: !tile.ptr<i32>, %n: i32) {
      %zero = arith.constant 0 : i32
      %one = arith.constant 1 : i32
      %a, %b = scf.for %i = %zero to %n step %one iter_args(%x = %zero, %y = %one) -> (i32, i32) : i32 {
        %z = arith.addi %x, %y : i32
        scf.yield %y, %z : i32, i32
      }
      %c, %d = scf.for %i = %zero to %one step %one iter_args(%x = %a, %y = %b) -> (i32, i32) : i32 {
        scf.yield %y, %x : i32, i32
      }
      tile.store %c, %o[%zero] : i32, !tile.ptr<i32>, i32
      tile.store %d, %o[%one] : i32, !tile.ptr<i32>, i32
      func.return
    }"""
    module = parse(text, Tile)
    generated = printed(module, "fibonacci")
    path = tmp_path / "fibonacci.py"
    path.write_text(generated.source)
    o = torch.zeros(2, dtype=torch.int32)
    load(generated, path, interpret=True)[(1,)](o, 10)
    assert o.tolist() == [89, 55]
