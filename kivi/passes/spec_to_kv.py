"""From a spec to `kv` modules, one for each entry point of a backend.

Everything that a later pass needs is written into the types and operations here; no pass behind this one reads a spec. Requests, and the
heads of a stand-alone tensor, are counted at run time; channels and the heads of a cache are fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kivi.ir.kv import (
    FLOATS,
    WORDS,
    AppendOp,
    Axis,
    AxisAttr,
    CodesType,
    Degenerate,
    DegenerateAttr,
    DequantizeOp,
    GridAttr,
    LayoutAttr,
    NonFinite,
    NonFiniteAttr,
    Numerics,
    NumericsAttr,
    OutputOp,
    Overflow,
    OverflowAttr,
    PackOp,
    Policy,
    PolicyAttr,
    QuantizeOp,
    RepackOp,
    Rounding,
    RoundingAttr,
    RowsType,
    ScoresOp,
    SealOp,
    SoftmaxOp,
    UnpackOp,
    WordsType,
    metadata_type,
)
from kivi.ir.xdsl import (
    DYNAMIC_INDEX,
    Attribute,
    Block,
    FunctionType,
    ImplicitBuilder,
    IntAttr,
    IntegerAttr,
    IRDLOperation,
    ModuleOp,
    Region,
    SSAValue,
    StringAttr,
    TensorType,
    f32,
    func,
    i64,
)
from kivi.layout import Layout, Which
from kivi.pool import PageFormat
from kivi.spec import CacheSpec

ANY = DYNAMIC_INDEX


def grid(spec: CacheSpec, which: Which, metadata: str) -> GridAttr:
    """How one side of a spec is quantized, with metadata of a dtype by name."""
    side = spec.key if which == "key" else spec.value
    return GridAttr(
        AxisAttr(Axis(side.axis)),
        IntAttr(side.group),
        IntAttr(side.bits),
        FLOATS[metadata],
        NumericsAttr(Numerics(spec.numerics)),
        RoundingAttr(Rounding.HALF_EVEN),
        DegenerateAttr(Degenerate.SCALE_ONE),
        NonFiniteAttr(NonFinite(spec.nonfinite)),
        OverflowAttr(Overflow(spec.overflow)),
    )


def layout_of(layout: Layout, which: Which, page: int) -> LayoutAttr:
    """One side of a layout, for pages of `page` tokens."""
    return LayoutAttr(StringAttr(layout.name), WORDS[layout.word], StringAttr(getattr(layout, which)), IntAttr(page))


# -- whole tensors ----------------------------------------------------------------------------------------------------


def words_type(
    spec: CacheSpec, which: Which, layout: Layout, dtype: str, channels: int, metadata: str, shape: Sequence[int] = (ANY, ANY, ANY)
) -> WordsType:
    """The type of the words of a tensor; `shape`: requests, heads and tokens, where they are known."""
    source = TensorType(FLOATS[dtype], [*shape, channels])
    return WordsType(source, grid(spec, which, metadata), layout_of(layout, which, spec.key.residual))


def quantize(words: WordsType) -> ModuleOp:
    """@quantize: x -> words, scale, origin."""
    stored = metadata_type(words.source, words.grid)

    def body(x: SSAValue) -> list[SSAValue]:
        made = QuantizeOp.create(operands=[x], result_types=[CodesType(words.source, words.grid), stored, stored])
        for result, label in zip(made.results, ("codes", "scale", "origin"), strict=True):
            result.name_hint = label
        return [_one(PackOp, [made.results[0]], words, "words"), *made.results[1:]]

    return _function("quantize", {"x": words.source}, body)


def codes(words: WordsType) -> ModuleOp:
    """@codes: words -> codes."""
    kind = CodesType(words.source, words.grid)
    return _function("codes", {"words": words}, lambda w: [_one(UnpackOp, [w], kind, "codes")])


def dequantize(words: WordsType, dtype: str) -> ModuleOp:
    """@dequantize: words, scale, origin -> values of `dtype`."""
    stored = metadata_type(words.source, words.grid)
    out = TensorType(FLOATS[dtype], words.source.get_shape())

    def body(w: SSAValue, scale: SSAValue, origin: SSAValue) -> list[SSAValue]:
        unpacked = _one(UnpackOp, [w], CodesType(words.source, words.grid), "codes")
        return [_one(DequantizeOp, [unpacked, scale, origin], out, "decoded")]

    return _function("dequantize", {"words": words, "scale": stored, "origin": stored}, body)


def repack(words: WordsType, target: Layout) -> ModuleOp:
    """@repack: words -> words of another layout."""
    to = WordsType(words.source, words.grid, layout_of(target, words.grid.which, words.layout.page.data))
    return _function("repack", {"words": words}, lambda w: [_one(RepackOp, [w], to, "repacked")])


# -- a cache ----------------------------------------------------------------------------------------------------------


def rows_type(form: PageFormat, which: Which, dtype: str) -> RowsType:
    """One side of a cache."""
    channels, metadata = (form.head_dim, form.key_metadata) if which == "key" else (form.value_head_dim, form.value_metadata)
    source = TensorType(FLOATS[dtype], [ANY, form.kv_heads, ANY, channels])
    return RowsType(source, grid(form.spec, which, metadata), layout_of(form.layout, which, form.tokens))


def decode(form: PageFormat, q_heads: int, dtype: str) -> ModuleOp:
    """@decode: keys, values, q, k, v, counts, scale -> output, keys, values; append, seal and attend in the order of the spec (SPEC 6)."""
    return _step("decode", form, q_heads, dtype, form.spec.order)


def prefill(form: PageFormat, q_heads: int, dtype: str) -> ModuleOp:
    """@prefill: the same for requests that hold no token yet, which attend to floating rows in either order (SPEC 6.3.1)."""
    return _step("prefill", form, q_heads, dtype, "attend_then_seal")


def _step(name: str, form: PageFormat, q_heads: int, dtype: str, order: str) -> ModuleOp:
    spec = form.spec
    kinds = [rows_type(form, "key", dtype), rows_type(form, "value", dtype)]
    query = TensorType(FLOATS[dtype], [ANY, q_heads, ANY, form.head_dim])
    scores = TensorType(f32, [ANY, q_heads, ANY, ANY])
    out = TensorType(FLOATS[dtype], [ANY, q_heads, ANY, form.value_head_dim])

    def body(keys, values, q, k, v, counts, scale) -> list[SSAValue]:
        def append(rows: SSAValue, new: SSAValue) -> SSAValue:
            return _one(AppendOp, [rows, new, counts], rows.type, "appended")

        def seal(rows: SSAValue, policy: str, residual: int) -> SSAValue:
            return _one(SealOp, [rows], rows.type, "sealed", policy=PolicyAttr(Policy(policy)), residual=IntegerAttr(residual, i64))

        def sealed(keys: SSAValue, values: SSAValue) -> tuple[SSAValue, SSAValue]:
            return seal(keys, spec.key.seal, spec.key.residual), seal(values, spec.value.seal, spec.value.residual)

        def attend(keys: SSAValue, values: SSAValue) -> SSAValue:
            weights = _one(SoftmaxOp, [_one(ScoresOp, [q, keys, counts, scale], scores, "scores")], scores, "weights")
            return _one(OutputOp, [weights, values, counts], out, "out")

        keys, values = append(keys, k), append(values, v)
        if order == "seal_then_attend":
            keys, values = sealed(keys, values)
            return [attend(keys, values), keys, values]
        result = attend(keys, values)
        return [result, *sealed(keys, values)]

    new = [TensorType(FLOATS[dtype], kind.source.get_shape()) for kind in kinds]
    arguments = {"keys": kinds[0], "values": kinds[1], "q": query, "k": new[0], "v": new[1], "counts": TensorType(i64, [ANY]), "scale": f32}
    return _function(name, arguments, body)


def _one(op: type[IRDLOperation], operands: list[SSAValue], kind: Attribute, label: str, **properties: Attribute) -> SSAValue:
    """The only result of a new operation, which prints as %label."""
    result = op.create(operands=operands, result_types=[kind], properties=properties).results[0]
    result.name_hint = label
    return result


def _function(name: str, arguments: dict[str, Attribute], body: Callable[..., list[SSAValue]]) -> ModuleOp:
    """A verified module with one function; `body` gets its arguments and returns its results."""
    block = Block(arg_types=list(arguments.values()))
    for argument, label in zip(block.args, arguments, strict=True):
        argument.name_hint = label
    with ImplicitBuilder(block):
        results = body(*block.args)
        func.ReturnOp(*results)
    kind = FunctionType.from_lists(list(arguments.values()), [r.type for r in results])
    module = ModuleOp([func.FuncOp(name, kind, Region(block))])
    module.verify()
    return module
