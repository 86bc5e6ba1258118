"""Rewrite `join_sums`: sums of reductions become one reduction of sums.

    reduce(x) + reduce(y)  =  reduce(x + y)          spread(a) + spread(b)  =  spread(a + b)

A score is a sum over all lanes of a token's channels, each reduced across the threads that hold a tile: with the lanes added first, every
thread adds what it has and the exchange between threads happens once.

Bound. The same number of additions in another order; a reduction's order is free, and every bound of SPEC 7 holds for any order.
"""

from __future__ import annotations

from collections import defaultdict

from kivi.ir import tile
from kivi.ir.build import Tile
from kivi.ir.tile import shape_of
from kivi.ir.xdsl import ModuleOp, Operation, SSAValue, arith
from kivi.passes.contraction import before, replace


def join_sums(module: ModuleOp) -> int:
    """Rewrite every sum with two terms that join; returns how many sums."""
    count = 0
    for op in [op for op in module.walk() if isinstance(op, arith.AddfOp)]:
        if op.parent is None or _belongs_to_a_sum(op):
            continue
        with before(op):
            joined = _joined([Tile(term) for term in _terms(op)])
        if joined is not None:
            replace(op, joined)
            count += 1
    return count


def _belongs_to_a_sum(op: arith.AddfOp) -> bool:
    uses = list(op.result.uses)
    return len(uses) == 1 and isinstance(uses[0].operation, arith.AddfOp) and uses[0].operation.parent is op.parent


def _terms(op: arith.AddfOp) -> list[SSAValue]:
    """What a tree of additions adds, in order."""
    out = []
    for value in (op.lhs, op.rhs):
        inner = value.owner
        alone = isinstance(inner, arith.AddfOp) and inner.parent is op.parent and len(list(value.uses)) == 1
        out += _terms(inner) if alone else [value]
    return out


def _joined(terms: list[Tile]) -> Tile | None:
    """The sum of the terms, those of one kind joined; None if no two join."""
    kinds: dict[object, list[Tile]] = defaultdict(list)
    for i, term in enumerate(terms):
        kinds[_kind(term) or i].append(term)
    if len(kinds) == len(terms):
        return None
    total = None
    for kind, group in kinds.items():
        one = group[0] if isinstance(kind, int) else _join(group)
        total = one if total is None else total + one
    return total


def _kind(term: Tile) -> tuple | None:
    """Terms of one kind join: reductions of tiles of one shape along one axis, or tiles of one shape spread in one way."""
    steps, op = [], term.value.owner
    while isinstance(op, tile.ReshapeOp | tile.BroadcastOp | tile.ExpandOp) and len(list(op.results[0].uses)) == 1:
        steps.append((type(op), shape_of(op.result.type)))
        op = op.source.owner
    if isinstance(op, tile.ReduceOp) and op.combine.data is tile.Combine.ADD and len(list(op.result.uses)) == 1:
        return (*steps, op.axis.value.data, shape_of(op.source.type))
    return None


def _join(group: list[Tile]) -> Tile:
    """The sum of terms of one kind."""
    if len(group) == 1:
        return group[0]
    chain: list[Operation] = []
    op = group[0].value.owner
    while not isinstance(op, tile.ReduceOp):
        chain.append(op)
        op = op.source.owner
    total = None
    for term in group:
        source = term.value.owner
        while not isinstance(source, tile.ReduceOp):
            source = source.source.owner
        total = Tile(source.source) if total is None else total + Tile(source.source)
    out = total.reduce("add", op.axis.value.data)  # type: ignore[union-attr]
    for step in reversed(chain):
        if isinstance(step, tile.ReshapeOp):
            out = out.reshape(*shape_of(step.result.type))
        elif isinstance(step, tile.ExpandOp):
            out = out.expand(step.axis.value.data)
        else:
            out = out.spread(shape_of(step.results[0].type))
    return out
