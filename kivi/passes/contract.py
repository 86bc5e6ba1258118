"""Rewrite `contract`: products may be fused with the sums they go to.

Sets the `contract` flag of every float multiplication, addition and subtraction: a compiler may then round a * b + c once. It is for
kernels with a bound; a kernel whose bits are promised never has the flag.

Bound. A fused operation leaves out the rounding of a product, so every running error bound that counts it still holds.
"""

from __future__ import annotations

from kivi.ir.xdsl import FastMathFlag, ModuleOp, arith

FLAG = arith.FastMathFlagsAttr([FastMathFlag.ALLOW_CONTRACT])
KINDS = (arith.MulfOp, arith.AddfOp, arith.SubfOp)


def contract(module: ModuleOp) -> int:
    """Flag every operation that may be fused; returns how many."""
    found = [op for op in module.walk() if isinstance(op, KINDS)]
    for op in found:
        op.fastmath = FLAG
    return len(found)


def may_contract(module: ModuleOp) -> bool:
    """Whether every multiplication, addition and subtraction of floats has the flag."""
    return all(op.fastmath is not None and FastMathFlag.ALLOW_CONTRACT in op.fastmath.data for op in module.walk() if isinstance(op, KINDS))
