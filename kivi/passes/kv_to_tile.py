"""Lowering of `kv` to `tile`: which kernels compute a module, in the order in which they are launched.

    kv.quantize, kv.pack                  metadata, encode: groups are reduced, then words are owned (`kivi.passes.quantize`)
    kv.unpack, kv.dequantize              decode
    kv.repack                             repack
    kv.scores, kv.softmax, kv.output      history, tail, merge: one softmax in parts, over pages and floating rows
    kv.seal                               seal_metadata, seal_words
    rows that the function returns        keep_rows: what is still floating goes to the window

What decides a kernel is read from the types and attributes of the operations. `kv.append` has no kernel of its own: the others read a
call's rows where the caller left them. An operation for which there is no kernel is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from kivi.errors import KiviError
from kivi.ir import kv
from kivi.ir.kv import GridAttr, LayoutAttr, RowsType, WordsType, name_of
from kivi.ir.xdsl import ModuleOp, Operation, SSAValue, TensorType, func
from kivi.layout import Arrangement, Layout
from kivi.passes import append, attention, tensors
from kivi.passes.numbers import Numbers
from kivi.passes.tensors import Kernel
from kivi.pool import PageFormat
from kivi.schedule import Schedule
from kivi.spec import CacheSpec, KeySpec, ValueSpec


class LoweringError(KiviError, NotImplementedError):
    """A module holds something for which there is no kernel."""


@dataclass(frozen=True)
class Launch:
    """One kernel of a module: its name, such as "key.encode" or "cache.tail", and how to build it."""

    name: str
    build: Callable[[], Kernel]


def lower(module: ModuleOp, schedules: Mapping[str, Schedule] | None = None) -> list[Launch]:
    """The kernels of a module with one function. `schedules`: choices for "history" and "tail"; they change speed only.

    Raises `LoweringError`.
    """
    functions = [op for op in module.ops if isinstance(op, func.FuncOp)]
    if len(functions) != 1:
        raise LoweringError(f"a module to lower holds one function, not {len(functions)}")
    return [launch for op in functions[0].body.block.ops for launch in _launches(op, functions[0], schedules or {})]


def _launches(op: Operation, function: func.FuncOp, schedules: Mapping[str, Schedule]) -> list[Launch]:
    if isinstance(op, kv.PackOp):
        return _encode(op)
    if isinstance(op, kv.UnpackOp):
        return _decode(op)
    if isinstance(op, kv.RepackOp):
        return _repack(op)
    if isinstance(op, kv.SealOp):
        return _seal(op, function)
    if isinstance(op, kv.OutputOp):
        return _attend(op, function, schedules)
    if isinstance(op, func.ReturnOp):
        return _keep(op)
    if isinstance(op, kv.AppendOp) and op.rows.owner is not function.body.block:
        raise LoweringError("kernels read the new rows of one call: kv.append takes the rows that the function was given")
    wanted = FUSED.get(type(op))
    if wanted is None:
        raise LoweringError(f"there is no tile kernel for {op.name}")
    for result in op.results[:1]:
        if any(not isinstance(use.operation, wanted) for use in result.uses):
            names = " or ".join(kind.name for kind in wanted)
            raise LoweringError(f"{op.name} has no kernel of its own; its result may only go to {names}")
    return []


#: Operations that are part of the kernels of the one that uses their result, and which that may be.
FUSED: dict[type[Operation], tuple[type[Operation], ...]] = {
    kv.QuantizeOp: (kv.PackOp,),
    kv.DequantizeOp: (func.ReturnOp,),
    kv.AppendOp: (kv.SealOp, kv.ScoresOp, kv.OutputOp, func.ReturnOp),
    kv.ScoresOp: (kv.SoftmaxOp,),
    kv.SoftmaxOp: (kv.OutputOp,),
}


def numbers_of(source: TensorType, grid: GridAttr) -> Numbers:
    """The arithmetic of a grid on a tensor."""
    return Numbers(
        grid.bits.data,
        grid.group.data,
        grid.numerics.data.value,
        name_of(source.element_type),
        name_of(grid.metadata),
        grid.nonfinite.data.value,
        grid.overflow.data.value,
    )


# -- whole tensors ----------------------------------------------------------------------------------------------------


def _page(kind: WordsType) -> Arrangement:
    return kind.layout.arrangement(kind.grid.bits.data, kind.layout.page.data, kind.source.get_shape()[3])


def _encode(op: kv.PackOp) -> list[Launch]:
    kind = op.words.type
    assert isinstance(kind, WordsType)
    if not isinstance(op.codes.owner, kv.QuantizeOp):
        raise LoweringError("kv.pack has a kernel for codes that come from kv.quantize only")
    which, n, channels = kind.grid.which, numbers_of(kind.source, kind.grid), kind.source.get_shape()[3]
    return [
        Launch(f"{which}.metadata", partial(tensors.metadata_kernel, which, n, channels)),
        Launch(f"{which}.encode", partial(tensors.encode_kernel, which, n, _page(kind))),
    ]


def _decode(op: kv.UnpackOp) -> list[Launch]:
    kind = op.words.type
    assert isinstance(kind, WordsType)
    which, n, out = kind.grid.which, numbers_of(kind.source, kind.grid), []
    for use in op.codes.uses:
        if isinstance(use.operation, kv.DequantizeOp):
            result = use.operation.result.type
            assert isinstance(result, TensorType)
            out.append(name_of(result.element_type))
        elif isinstance(use.operation, func.ReturnOp):
            out.append("uint8")
        else:
            raise LoweringError(f"codes that leave kv.unpack are returned or go to kv.dequantize, not to {use.operation.name}")
    return [Launch(f"{which}.decode", partial(tensors.decode_kernel, which, n, _page(kind), dtype)) for dtype in out]


def _repack(op: kv.RepackOp) -> list[Launch]:
    source, target = op.source.type, op.words.type
    assert isinstance(source, WordsType)
    assert isinstance(target, WordsType)
    which = source.grid.which
    return [Launch(f"{which}.repack", partial(tensors.repack_kernel, which, _page(source), _page(target)))]


# -- a cache ----------------------------------------------------------------------------------------------------------


def page_format(keys: RowsType, values: RowsType) -> PageFormat:
    """What a page of a cache with these two sides holds: both lie in one record (SPEC 9.1)."""
    grids: tuple[GridAttr, GridAttr] = (keys.grid, values.grid)
    layouts: tuple[LayoutAttr, LayoutAttr] = (keys.layout, values.layout)
    for what, a, b in (
        ("page", *(x.page.data for x in layouts)),
        ("word", *(x.word for x in layouts)),
        ("layout", *(x.label.data for x in layouts)),
        ("dtype", *(x.source.element_type for x in (keys, values))),
        ("heads", *(x.source.get_shape()[1] for x in (keys, values))),
        *((rule, *(getattr(g, rule).data.value for g in grids)) for rule in ("numerics", "nonfinite", "overflow")),
    ):
        if a != b:
            raise LoweringError(f"keys and values lie in the records of one page, so they share {what}: {a} is not {b}")
    key, value = grids
    sides = [
        {"bits": g.bits.data, "group": g.group.data, "residual": keys.layout.page.data, "metadata": name_of(g.metadata)} for g in grids
    ]
    rules = {name: getattr(key, name).data.value for name in ("numerics", "nonfinite", "overflow")}
    form = CacheSpec(key=KeySpec(**sides[0]), value=ValueSpec(**sides[1]), **rules)  # as kernels ask for it
    layout = Layout(
        name=keys.layout.label.data,
        word=name_of(keys.layout.word),  # type: ignore[arg-type]
        key=keys.layout.digits.data,
        value=values.layout.digits.data,
    )
    heads, head_dim = keys.source.get_shape()[1], keys.source.get_shape()[3]
    return PageFormat(form, layout, heads, head_dim, values.source.get_shape()[3], name_of(key.metadata), name_of(value.metadata))


def _sides(function: func.FuncOp) -> tuple[RowsType, RowsType]:
    """The keys and the values that a function is given."""
    rows = [a.type for a in function.body.block.args if isinstance(a.type, RowsType)]
    found = {kind.grid.which: kind for kind in rows}
    if len(rows) != 2 or len(found) != 2:
        raise LoweringError("a page holds keys, with scales by channel, and values, with scales by token: the function takes one of each")
    return found["key"], found["value"]


def _seal(op: kv.SealOp, function: func.FuncOp) -> list[Launch]:
    kind, form = op.rows.type, page_format(*_sides(function))
    assert isinstance(kind, RowsType)
    which, dtype = kind.grid.which, name_of(kind.source.element_type)
    return [
        Launch(f"{which}.seal_metadata", partial(append.seal_metadata_kernel, which, form, dtype)),
        Launch(f"{which}.seal_words", partial(append.seal_words_kernel, which, form, dtype)),
    ]


def _keep(op: func.ReturnOp) -> list[Launch]:
    out = []
    for value in op.operands:
        kind = value.type
        if isinstance(kind, RowsType):
            _, heads, _, channels = kind.source.get_shape()
            build = partial(append.keep_rows_kernel, name_of(kind.source.element_type), heads, channels)
            out.append(Launch(f"{kind.grid.which}.keep_rows", build))
    return out


def _attend(op: kv.OutputOp, function: func.FuncOp, schedules: Mapping[str, Schedule]) -> list[Launch]:
    softmax = op.weights.owner
    scores = softmax.scores.owner if isinstance(softmax, kv.SoftmaxOp) else None
    if not isinstance(scores, kv.ScoresOp):
        raise LoweringError("kv.output has a kernel for the kv.softmax of kv.scores only: one softmax over all tokens (SPEC 5.2)")
    keys, values = scores.keys.type, op.values.type
    assert isinstance(keys, RowsType)
    assert isinstance(values, RowsType)
    if scores.counts is not op.counts:
        raise LoweringError("kv.scores and kv.output must count the same new tokens")
    if _is_sealed(scores.keys) != _is_sealed(op.values):
        raise LoweringError("the attention kernels read one state: keys and values both before they are sealed, or both after (SPEC 6)")
    if (keys.grid.which, values.grid.which) != ("key", "value"):
        raise LoweringError("the attention kernels read keys with scales by channel and values with scales by token")
    form, dtype = page_format(*_sides(function)), name_of(keys.source.element_type)
    query = scores.query.type
    assert isinstance(query, TensorType)
    q_heads = query.get_shape()[1]
    zones = [
        Launch(f"cache.{zone}", partial(attention.attention_kernel, zone, form, q_heads, dtype, schedules.get(zone, Schedule())))
        for zone in ("history", "tail")
    ]
    return [*zones, Launch("cache.merge", partial(attention.merge_kernel, q_heads, form.value_head_dim, dtype))]


def _is_sealed(rows: SSAValue) -> bool:
    return isinstance(rows.owner, kv.SealOp)
