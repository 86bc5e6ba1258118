"""Rewrite `join_sums`: sums of reductions become one reduction of sums.

    reduce(x) + reduce(y)  =  reduce(x + y)          spread(a) + spread(b)  =  spread(a + b)

A score is a sum over all lanes of a token's channels, each reduced across the threads that hold a tile: with the lanes added first, every
thread adds what it has and the exchange between threads happens once.

Bound. The same number of additions in another order; a reduction's order is free, and every bound of SPEC 7 holds for any order.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

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
            joined = _joined(_terms(op))
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
        if isinstance(inner, arith.AddfOp) and inner.parent is op.parent and len(list(value.uses)) == 1:
            out += _terms(inner)
        else:
            out.append(value)
    return out


def _joined(terms: list[SSAValue]) -> Tile | None:
    """The sum of the terms, those of one kind joined; None if no two join."""
    kinds: dict[object, list[Term]] = defaultdict(list)
    for i, value in enumerate(terms):
        term = Term.of(value)
        kinds[term.kind or i].append(term)
    if len(kinds) == len(terms):
        return None
    total = None
    for group in kinds.values():
        one = Tile(group[0].value) if len(group) == 1 else group[0].joined(group[1:])
        total = one if total is None else total + one
    return total


@dataclass(frozen=True)
class Term:
    """A term of a sum. If it is a reduction that nothing else uses, `reduction`, and the `moves` of its result to the term's shape."""

    value: SSAValue
    reduction: tile.ReduceOp | None
    moves: tuple[Operation, ...]

    @classmethod
    def of(cls, value: SSAValue) -> Term:
        moves, at = [], value
        while len(list(at.uses)) == 1:
            op = at.owner
            if isinstance(op, tile.ReduceOp) and op.combine.data is tile.Combine.ADD:
                return cls(value, op, tuple(moves))
            if not isinstance(op, tile.ReshapeOp | tile.BroadcastOp | tile.ExpandOp):
                break
            moves.append(op)
            at = op.source
        return cls(value, None, ())

    @property
    def kind(self) -> tuple | None:
        """Terms of one kind join: reductions along one axis of tiles of one shape, moved in one way."""
        if self.reduction is None:
            return None
        moves = tuple((type(op), shape_of(op.results[0].type)) for op in self.moves)
        return self.reduction.axis.value.data, shape_of(self.reduction.source.type), moves

    def joined(self, others: list[Term]) -> Tile:
        """The sum of this term and others of its kind."""
        assert self.reduction is not None
        total = Tile(self.reduction.source)
        for other in others:
            assert other.reduction is not None
            total = total + Tile(other.reduction.source)
        out = total.reduce("add", self.reduction.axis.value.data)
        for op in reversed(self.moves):
            shape = shape_of(op.results[0].type)
            if isinstance(op, tile.ReshapeOp):
                out = out.reshape(*shape)
            elif isinstance(op, tile.ExpandOp):
                out = out.expand(op.axis.value.data)
            else:
                out = out.spread(shape)
        return out
