"""Lowering of `kv` to ONNX graphs: which graphs compute a module.

    kv.quantize, kv.pack                encode: x -> words, scale, origin, clamped
    kv.unpack, kv.dequantize            decode: words, tokens, scale, origin -> values; without kv.dequantize, codes
    kv.repack                           repack: words, tokens -> words
    kv.seal                             seal: as encode; where rows share words with their neighbours, with the old words and a place
    kv.scores, kv.softmax, kv.output    history, page, open, floating, planes, output: one softmax in parts

Tensors of whole requests come in blocks of one page (`kivi.backends.onnxruntime.tensors`). `kv.append` has no graph: runs of attention
read a call's rows where the caller left them. What decides a graph is read from the types and attributes of the operations; an operation
for which there is none is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kivi.backends.onnxruntime import attention, tensors
from kivi.backends.onnxruntime.graph import Graph, Value, join
from kivi.backends.onnxruntime.planes import masked_apart
from kivi.ir import kv
from kivi.ir.kv import RowsType, WordsType, name_of
from kivi.ir.xdsl import ModuleOp, Operation, SSAValue, TensorType, func
from kivi.layout import Arrangement
from kivi.passes.kv_to_tile import FUSED, LoweringError, numbers_of, page_format

Build = Callable[[], Graph]

#: Clauses of SPEC.md that a graph carries out, by the last part of its name.
CLAUSES = {
    "encode": "2.2, 2.3, 3.1, 3.2, 3.3, 3.5, 3.6.3, 3.7, 8.2 to 8.5",
    "decode": "3.4, 8.2 to 8.5",
    "repack": "8.7",
    "seal": "2.2, 2.3, 3.1, 3.2, 3.3, 3.5, 3.6.3, 3.7, 4.2.2, 8.2 to 8.5",
    "history": "5.1, 5.2, 5.3",
    "page": "5.1, 5.2, 5.3, 5.4",
    "open": "5.1, 5.2, 5.3, 5.4",
    "floating": "5.1, 5.2, 5.3, 5.4",
    "planes": "8.2",
    "output": "5.2, 5.5",
}


def graphs(module: ModuleOp, fold: bool = True, apart: bool = False) -> dict[str, Build]:
    """The graphs of a module with one function, by name. `fold`: whether `history` folds scales; `apart`: whether it is given the planes
    that `planes` masks. Both change speed only.

    Raises `LoweringError`.
    """
    functions = [op for op in module.ops if isinstance(op, func.FuncOp)]
    if len(functions) != 1:
        raise LoweringError(f"a module to lower holds one function, not {len(functions)}")
    block = functions[0].body.block
    out: dict[str, Build] = {}
    for op in block.ops:
        if isinstance(op, kv.PackOp):
            out |= _encode(op)
        elif isinstance(op, kv.UnpackOp):
            out |= _decode(op)
        elif isinstance(op, kv.RepackOp):
            out |= _repack(op)
        elif isinstance(op, kv.SealOp):
            out |= _seal(op)
        elif isinstance(op, kv.OutputOp):
            out |= _attend(op, fold, apart)
        elif not isinstance(op, func.ReturnOp):
            _check_fused(op)
    return out


def _check_fused(op: Operation) -> None:
    """An operation that is part of the graphs of those that use its result."""
    wanted = FUSED.get(type(op))
    if wanted is None:
        raise LoweringError(f"there is no ONNX graph for {op.name}")
    for use in op.results[0].uses:
        if not isinstance(use.operation, wanted):
            names = " or ".join(kind.name for kind in wanted)
            raise LoweringError(f"{op.name} has no graph of its own; its result may only go to {names}, not to {use.operation.name}")


# -- whole tensors ----------------------------------------------------------------------------------------------------


def _arrangement(kind: WordsType | RowsType) -> Arrangement:
    return kind.layout.arrangement(kind.grid.bits.data, kind.layout.page.data, kind.source.get_shape()[3])


def _words_shape(form: Arrangement) -> tuple[int | str, ...]:
    shape: list[int | str] = ["blocks", *form.shape]
    shape[1 + form.token_axis] = "steps"
    return tuple(shape)


def _word(form: Arrangement) -> str:
    return f"uint{form.word_bits}"


def _metadata_shape(kind: WordsType | RowsType, channels: int) -> tuple[int | str, ...]:
    group = kind.grid.group.data
    return ("blocks", "groups", channels) if kind.grid.which == "key" else ("blocks", "tokens", -(-channels // group))


def _sealing(name: str, kind: WordsType | RowsType, merge: bool) -> Graph:
    """x -> words, scale, origin, clamped. With `merge`, x goes to the tokens from `row` on of the words given."""
    form, which, n = _arrangement(kind), kind.grid.which, numbers_of(kind.source, kind.grid)
    g = Graph(name)
    x = g.input("x", n.dtype, ("blocks", "tokens", form.channels))
    codes, scale, origin, clamped = tensors.quantize(x, which, n, form.channels)
    shape = _metadata_shape(kind, form.channels)
    if merge:
        old = tensors.unpack(g.input("old", _word(form), _words_shape(form)), form)
        row = g.input("row", "int64", (1,))
        codes = join([old.slice(1, 0, row), codes, old.slice(1, row + x.size(1), old.size(1))], 1)
    g.output("words", tensors.pack(codes, form), _words_shape(form))
    for label, value in (("scale", scale), ("origin", origin)):
        g.output(label, value, shape)
    g.output("clamped", clamped, (1,))
    return g


def _encode(op: kv.PackOp) -> dict[str, Build]:
    kind = op.words.type
    assert isinstance(kind, WordsType)
    if not isinstance(op.codes.owner, kv.QuantizeOp):
        raise LoweringError("kv.pack has a graph for codes that come from kv.quantize only")
    name = f"{kind.grid.which}.encode"
    return {name: partial(_sealing, name, kind, False)}


def _decode(op: kv.UnpackOp) -> dict[str, Build]:
    kind = op.words.type
    assert isinstance(kind, WordsType)
    name = f"{kind.grid.which}.decode"
    out: dict[str, Build] = {}
    for use in op.codes.uses:
        if isinstance(use.operation, kv.DequantizeOp):
            result = use.operation.result.type
            assert isinstance(result, TensorType)
            out[name] = partial(_decoding, name, kind, name_of(result.element_type))
        elif isinstance(use.operation, func.ReturnOp):
            out[name] = partial(_decoding, name, kind, "uint8")
        else:
            raise LoweringError(f"codes that leave kv.unpack are returned or go to kv.dequantize, not to {use.operation.name}")
    return out


def _unpacked(g: Graph, kind: WordsType) -> Value:
    """The codes of input `words`, of which the first `tokens` tokens are some."""
    form = _arrangement(kind)
    codes = tensors.unpack(g.input("words", _word(form), _words_shape(form)), form)
    return codes.slice(1, 0, g.input("tokens", "int64", (1,)))


def _decoding(name: str, kind: WordsType, dtype: str) -> Graph:
    g, form = Graph(name), _arrangement(kind)
    out = _unpacked(g, kind)
    if dtype != "uint8":
        shape, metadata = _metadata_shape(kind, form.channels), name_of(kind.grid.metadata)
        scale, origin = (g.input(label, metadata, shape) for label in ("scale", "origin"))
        out = tensors.dequantize(out, scale, origin, kind.grid.which, kind.grid.group.data, form.channels).to(dtype)
    g.output("out", out, ("blocks", "count", form.channels))
    return g


def _repack(op: kv.RepackOp) -> dict[str, Build]:
    source, target = op.source.type, op.words.type
    assert isinstance(source, WordsType)
    assert isinstance(target, WordsType)
    name = f"{source.grid.which}.repack"

    def build() -> Graph:
        g, form = Graph(name), _arrangement(target)
        major, minor = _words_shape(form)[1:]
        shape = tuple("new_steps" if size == "steps" else size for size in (major, minor))
        g.output("out", tensors.pack(_unpacked(g, source), form), ("blocks", *shape))
        return g

    return {name: build}


# -- a cache ----------------------------------------------------------------------------------------------------------


def _seal(op: kv.SealOp) -> dict[str, Build]:
    kind = op.rows.type
    assert isinstance(kind, RowsType)
    merge = op.policy.data is kv.Policy.SLIDING and _arrangement(kind).token_step > 1
    name = f"{kind.grid.which}.seal"
    return {name: partial(_sealing, name, kind, merge)}


def _attend(op: kv.OutputOp, fold: bool, apart: bool) -> dict[str, Build]:
    softmax = op.weights.owner
    scores = softmax.scores.owner if isinstance(softmax, kv.SoftmaxOp) else None
    if not isinstance(scores, kv.ScoresOp):
        raise LoweringError("kv.output has graphs for the kv.softmax of kv.scores only: one softmax over all tokens (SPEC 5.2)")
    if scores.counts is not op.counts:
        raise LoweringError("kv.scores and kv.output must count the same new tokens")
    if _is_sealed(scores.keys) != _is_sealed(op.values):
        raise LoweringError("the graphs read one state: keys and values both before they are sealed, or both after (SPEC 6)")
    keys, values = scores.keys.type, op.values.type
    assert isinstance(keys, RowsType)
    assert isinstance(values, RowsType)
    if (keys.grid.which, values.grid.which) != ("key", "value"):
        raise LoweringError("the graphs read keys with scales by channel and values with scales by token")
    form, dtype = page_format(keys, values), name_of(keys.source.element_type)
    given = masked_apart(form) if fold and apart else ()

    def zone(name: str) -> Graph:
        return attention.Zone(name, form, dtype, fold, given, f"cache.{name}").build()

    out: dict[str, Build] = {f"cache.{name}": partial(zone, name) for name in attention.ZONES}
    out["cache.planes"] = partial(attention.planes, form, "cache.planes")
    out["cache.output"] = partial(attention.output, form, dtype, "cache.output")
    return out


def _is_sealed(rows: SSAValue) -> bool:
    return isinstance(rows.owner, kv.SealOp)
