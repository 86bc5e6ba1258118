"""Clean modules: constants folded and moved out of loops, common subexpressions joined, dead code removed, in place.

One walk down folds and joins, since an operation is visited after everything it depends on; one walk up removes what has no use left.
xDSL's own canonicalization and common subexpression passes come to the same result by repeated walks, at several times the cost, and
kernels are cleaned while a user waits for them. The rules for constants are those of xDSL's `fold` methods. Floating-point arithmetic is
left alone: what rounds, rounds at run time.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache

from kivi.ir.xdsl import (
    Attribute,
    Block,
    Commutative,
    InsertPoint,
    IntegerAttr,
    IsTerminator,
    MemoryReadEffect,
    MemoryWriteEffect,
    ModuleOp,
    NoMemoryEffect,
    Operation,
    RecursiveMemoryEffect,
    Rewriter,
    SSAValue,
    arith,
    memref,
    scf,
)

IntegerOp = arith.SignlessIntegerBinaryOperation
ALLOCATIONS = (memref.AllocOp, memref.AllocaOp)


def clean(module: ModuleOp) -> None:
    """Fold, join and sweep the functions of a module."""
    for function in module.ops:
        for region in function.regions:
            for block in region.blocks:
                _Down(block).walk(block)
    sweep(module)


def sweep(module: ModuleOp) -> None:
    """Dead code removed, in place."""
    for block in module.body.blocks:
        _up(block)


# -- down: fold and join ----------------------------------------------------------------------------------------------


class _Down:
    """The walk down one function: what is known at this place, by all that decides a value."""

    def __init__(self, top: Block) -> None:
        self.top = top
        self.known: dict[Hashable, Sequence[SSAValue]] = {}
        self.place: Operation | None = None  # in `top`: what the walk is inside of

    def walk(self, block: Block) -> None:
        mine: list[Hashable] = []  # known in this block only
        reads: dict[Hashable, Sequence[SSAValue]] = {}  # since the last write
        op = block.first_op
        while op is not None:
            if block is self.top:
                self.place = op
            op = self._visit(op, block, mine, reads)
        for key in mine:
            del self.known[key]

    def _visit(self, op: Operation, block: Block, mine: list[Hashable], reads: dict[Hashable, Sequence[SSAValue]]) -> Operation | None:
        """Simplify one operation; returns the next one to visit."""
        following = op.next_op
        if type(op) is arith.ConstantOp:
            self._constant(op)
            return following
        body = _taken(op)
        if body is not None:
            first = body[0].first_op
            _inline(op, *body)
            return first if first is not None and first.parent is block else following
        values = _folded(op)
        if values is not None:
            _replace(op, [self._value(v, op) for v in values])
            return following
        if op.regions:
            for region in op.regions:
                for inner in region.blocks:
                    self.walk(inner)
            reads.clear()
            return following
        effect = _effect(type(op))
        if effect == "none":
            key = _key(op)
            found = self.known.get(key)
            if found is None:
                self.known[key] = op.results
                mine.append(key)
            else:
                _replace(op, found)
        elif effect == "read":
            key = _key(op)
            if key in reads:
                _replace(op, reads[key])
            else:
                reads[key] = op.results
        elif effect != "alloc":  # it may write
            reads.clear()
        return following

    def _constant(self, op: arith.ConstantOp) -> None:
        """One of a kind, outside of all loops."""
        key = (arith.ConstantOp, op.value, op.result.type)
        if key in self.known:
            _replace(op, self.known[key])
            return
        if op.parent is not self.top:
            assert self.place is not None
            op.detach()
            self.top.insert_op_before(op, self.place)
        self.known[key] = op.results

    def _value(self, value: SSAValue | Attribute, op: Operation) -> SSAValue:
        if isinstance(value, SSAValue):
            return value
        assert isinstance(value, IntegerAttr)
        constant = arith.ConstantOp(value, op.results[0].type)
        assert op.parent is not None
        op.parent.insert_op_before(constant, op)
        key = (arith.ConstantOp, constant.value, constant.result.type)
        self._constant(constant)
        return self.known[key][0]


def _key(op: Operation) -> Hashable:
    properties = tuple(sorted(op.properties.items())) if len(op.properties) > 1 else tuple(op.properties.items())
    attributes = tuple(sorted(op.attributes.items())) if op.attributes else ()
    return type(op), tuple(op.operands), properties, attributes, tuple(r.type for r in op.results)


def _number(value: SSAValue) -> int | None:
    """The integer that a value is known to be."""
    owner = value.owner
    if type(owner) is arith.ConstantOp and isinstance(owner.value, IntegerAttr):
        return owner.value.value.data
    return None


def _folded(op: Operation) -> Sequence[SSAValue | Attribute] | None:
    """What an operation's results are known to be."""
    if _of_integers(type(op)):
        assert isinstance(op, IntegerOp)
        left, right = op.operands
        if _number(left) is not None and _number(right) is None and _commutative(type(op)):
            op.operands[0], op.operands[1] = left, right = right, left
        constant = right.owner
        if type(constant) is not arith.ConstantOp:
            return None
        if isinstance(constant.value, IntegerAttr) and op.is_right_zero(constant.value):
            return (right,)
        return op.fold()
    if type(op) is arith.SelectOp:
        condition, first, second = op.operands
        chosen = _number(condition)
        if chosen is not None:
            return (first,) if chosen else (second,)
        return (first,) if first is second else None
    return None


def _taken(op: Operation) -> tuple[Block, Sequence[SSAValue]] | None:
    """The body that runs exactly once, with its arguments; an empty one if none ever runs."""
    if type(op) is scf.IfOp:
        condition = _number(op.cond)
        if condition is None:
            return None
        region = op.true_region if condition else op.false_region
        return (region.block if region.blocks else Block(), ())
    if type(op) is scf.ForOp:
        low, high = _number(op.lb), _number(op.ub)
        if low is None or high is None:
            return None
        if high <= low:
            never = Block([scf.YieldOp(*op.iter_args)])
            return (never, ())
        step = _number(op.step)
        if step is not None and step >= high - low:
            return (op.body.block, (op.lb, *op.iter_args))
    return None


def _inline(op: Operation, body: Block, arguments: Sequence[SSAValue]) -> None:
    last = body.last_op
    results: Sequence[SSAValue] = ()
    if last is not None:
        results = tuple(arguments[body.args.index(v)] if v in body.args else v for v in last.operands)  # type: ignore[arg-type]
        last.detach()
        last.erase()
    if body.ops:
        Rewriter.inline_block(body, InsertPoint.before(op), arguments)
    _replace(op, results)


def _replace(op: Operation, values: Sequence[SSAValue]) -> None:
    for old, new in zip(op.results, values, strict=True):
        old.replace_all_uses_with(new)
    op.detach()
    op.erase()


# -- up: sweep --------------------------------------------------------------------------------------------------------


def _up(block: Block) -> bool:
    """Remove what has no use and no effect. Returns whether what stays has an effect."""
    effects = False
    op = block.last_op
    while op is not None:
        above = op.prev_op
        inside = False
        for region in op.regions:
            for inner in region.blocks:
                inside |= _up(inner)
        kind = _effect(type(op))
        lasting = inside if kind == "inner" else kind in ("write", "unknown")
        if not lasting and kind != "end" and all(r.first_use is None for r in op.results):
            op.detach()
            op.erase()
        else:
            effects |= lasting
        op = above
    return effects


@cache
def _of_integers(kind: type[Operation]) -> bool:
    return issubclass(kind, IntegerOp)


@cache
def _commutative(kind: type[Operation]) -> bool:
    return kind.has_trait(Commutative)


@cache
def _effect(kind: type[Operation]) -> str:
    """Of an operation on memory: none, read, write, inner (that of its regions), alloc, end (a terminator), or unknown."""
    if kind.has_trait(IsTerminator):
        return "end"
    if kind.has_trait(RecursiveMemoryEffect):
        return "inner"
    if kind.has_trait(NoMemoryEffect):
        return "none"
    if issubclass(kind, ALLOCATIONS):
        return "alloc"
    if kind.has_trait(MemoryWriteEffect):
        return "write"
    return "read" if kind.has_trait(MemoryReadEffect) else "unknown"
