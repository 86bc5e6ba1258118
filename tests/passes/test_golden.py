"""What each rewrite makes of a small kernel, checked by FileCheck: every rewrite has a file in golden/, CHECK lines after the input."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from filecheck.finput import FInput
from filecheck.matcher import Matcher
from filecheck.options import Options
from filecheck.parser import Parser, pattern_for_opts

from kivi.ir.tile import Tile
from kivi.ir.xdsl import func, parse
from kivi.passes.rewrites import REWRITES, rewrite
from kivi.passes.tensors import Kernel

GOLDEN = Path(__file__).parent / "golden"


def kernel_of(text: str) -> Kernel:
    """A kernel from text, with an empty grid."""
    module = parse(text, Tile)
    function = next(op for op in module.ops if isinstance(op, func.FuncOp))
    names = [str(a.name_hint) for a in function.body.block.args]
    return Kernel(function.sym_name.data, module, [[], [], []], names)


def check(text: str, golden: str) -> int:
    """FileCheck's exit status: 0 if `text` is what the CHECK lines of `golden` ask for."""
    options = Options(match_filename="golden")
    return Matcher(options, FInput("output", text), Parser(options, StringIO(golden), *pattern_for_opts(options))).run()


@pytest.mark.parametrize("name", REWRITES)
def test_golden(name):
    golden = (GOLDEN / f"{name}.mlir").read_text()
    assert check(str(rewrite(kernel_of(golden), [name]).module), golden) == 0


@pytest.mark.parametrize("name", REWRITES)
def test_a_golden_file_fails_on_the_input(name):
    golden = (GOLDEN / f"{name}.mlir").read_text()
    assert check(str(kernel_of(golden).module), golden) != 0
