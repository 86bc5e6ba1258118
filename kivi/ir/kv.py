"""Dialect `kv`: what a quantized KV cache computes, on whole tensors.

Floating tensors, scales and origins are builtin tensors [request, head, token, channel], codes and words types of this dialect. A type
says how its bits came about: `#kv.grid` holds axis, group, bits, metadata dtype and every rule of SPEC 3, `#kv.layout` where codes lie in
memory. So no pass asks a spec, and two tensors quantized by different rules cannot meet in one operation.

`!kv.rows` is one side of a cache, keys or values: for each request its sealed rows, then its floating ones, in token order. Operations on
it return a new value, so the order of seal and attention is an edge: `kv.scores` reads the rows before `kv.seal`, or those it returns.
And since `kv.scores` has one column for each token, sealed or floating, one softmax sees them all: keys and values each have a boundary
of their own, and probabilities have none.

Types are long, so `text` prints a module with a short alias for each, which the parser reads back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import StringIO
from typing import Any, ClassVar

from kivi.errors import SpecError
from kivi.ir.xdsl import (
    DYNAMIC_INDEX,
    Attribute,
    AttrParser,
    Dialect,
    EnumAttribute,
    IntAttr,
    IntegerAttr,
    IntegerType,
    IRDLOperation,
    ModuleOp,
    ParametrizedAttribute,
    Printer,
    Pure,
    Signedness,
    SpacedOpaqueSyntaxAttribute,
    StrEnum,
    StringAttr,
    TensorType,
    TypeAttribute,
    VarConstraint,
    VerifyException,
    base,
    bf16,
    f16,
    f32,
    i64,
    irdl_attr_definition,
    irdl_op_definition,
    operand_def,
    param_def,
    prop_def,
    result_def,
    traits_def,
)
from kivi.layout import Arrangement, Layout, Which, arrangement

FLOATS: dict[str, Attribute] = {"float16": f16, "bfloat16": bf16, "float32": f32}
WORDS: dict[str, IntegerType] = {
    **{f"uint{n}": IntegerType(n, Signedness.UNSIGNED) for n in (8, 16, 32)},
    "int32": IntegerType(32, Signedness.SIGNED),
}


def name_of(element: Attribute) -> str:
    """The dtype name of a float or a word type."""
    return next(name for name, kind in {**FLOATS, **WORDS}.items() if kind == element)


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise VerifyException(message)


def _show(size: int) -> str:
    return "?" if size == DYNAMIC_INDEX else str(size)


# -- enums ------------------------------------------------------------------------------------------------------------


class Axis(StrEnum):
    """What has scales of its own (SPEC 2.2, 2.3): "channel", a group is consecutive tokens of one channel, as keys have them;
    "token", consecutive channels of one token, as values have them."""

    CHANNEL = "channel"
    TOKEN = "token"


class Numerics(StrEnum):
    """Arithmetic of quantization: SPEC 3.2 and 3.3."""

    PORTABLE = "portable"
    STAGED = "staged"


class Rounding(StrEnum):
    """How every operation and every code is rounded (SPEC 3.1)."""

    HALF_EVEN = "half_even"


class Degenerate(StrEnum):
    """A constant group, or one whose scale rounds to 0: scale 1, codes 0 (SPEC 3.5)."""

    SCALE_ONE = "scale_one"


class NonFinite(StrEnum):
    """NaN and Inf: an error, or a group with origin NaN (SPEC 3.6)."""

    REJECT = "reject"
    PROPAGATE = "propagate"


class Overflow(StrEnum):
    """A scale or origin beyond the metadata dtype: an error, or clamped (SPEC 3.7)."""

    REJECT = "reject"
    SATURATE = "saturate"


class Policy(StrEnum):
    """When floating rows are sealed (SPEC 4.2): "block", while there are R or more, the oldest R together; "sliding", while there are
    more than R, the oldest."""

    BLOCK = "block"
    SLIDING = "sliding"


@irdl_attr_definition
class AxisAttr(EnumAttribute[Axis], SpacedOpaqueSyntaxAttribute):
    name = "kv.axis"


@irdl_attr_definition
class NumericsAttr(EnumAttribute[Numerics], SpacedOpaqueSyntaxAttribute):
    name = "kv.numerics"


@irdl_attr_definition
class RoundingAttr(EnumAttribute[Rounding], SpacedOpaqueSyntaxAttribute):
    name = "kv.rounding"


@irdl_attr_definition
class DegenerateAttr(EnumAttribute[Degenerate], SpacedOpaqueSyntaxAttribute):
    name = "kv.degenerate"


@irdl_attr_definition
class NonFiniteAttr(EnumAttribute[NonFinite], SpacedOpaqueSyntaxAttribute):
    name = "kv.nonfinite"


@irdl_attr_definition
class OverflowAttr(EnumAttribute[Overflow], SpacedOpaqueSyntaxAttribute):
    name = "kv.overflow"


@irdl_attr_definition
class PolicyAttr(EnumAttribute[Policy], SpacedOpaqueSyntaxAttribute):
    name = "kv.policy"


# -- grids and layouts ------------------------------------------------------------------------------------------------


def _key(parser: AttrParser, name: str) -> None:
    parser.parse_punctuation(",")
    parser.parse_keyword(name)
    parser.parse_punctuation("=")


@irdl_attr_definition
class GridAttr(ParametrizedAttribute):
    """`#kv.grid<channel, group = 32, bits = 2, metadata = f16, numerics = portable, round = half_even, degenerate = scale_one,
    nonfinite = reject, overflow = reject>`: all that decides codes, scales and origins of a tensor."""

    name = "kv.grid"
    axis: AxisAttr = param_def()
    group: IntAttr = param_def()
    bits: IntAttr = param_def()
    metadata: Attribute = param_def()
    numerics: NumericsAttr = param_def()
    rounding: RoundingAttr = param_def()
    degenerate: DegenerateAttr = param_def()
    nonfinite: NonFiniteAttr = param_def()
    overflow: OverflowAttr = param_def()

    @property
    def which(self) -> Which:
        """The side of a cache that is quantized along this axis."""
        return "key" if self.axis.data is Axis.CHANNEL else "value"

    def verify(self) -> None:
        _expect(self.bits.data in (1, 2, 3, 4, 8), f"a code has 1, 2, 3, 4 or 8 bits, not {self.bits.data} (SPEC 1.2)")
        _expect(2 <= self.group.data <= 4096, f"a group has 2 to 4096 elements, not {self.group.data} (SPEC 1.2)")
        _expect(self.metadata in FLOATS.values(), f"scale and origin are f16, bf16 or f32, not {self.metadata} (SPEC 1.2)")

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            out: list[Attribute] = [AxisAttr(parser.parse_str_enum(Axis))]
            for name in ("group", "bits"):
                _key(parser, name)
                out.append(IntAttr(parser.parse_integer()))
            _key(parser, "metadata")
            out.append(parser.parse_type())
            for name, enum, attribute in _RULES:
                _key(parser, name)
                out.append(attribute(parser.parse_str_enum(enum)))
        return out

    def print_parameters(self, printer: Printer) -> None:
        with printer.in_angle_brackets():
            printer.print_string(f"{self.axis.data.value}, group = {self.group.data}, bits = {self.bits.data}, metadata = {self.metadata}")
            rules = (self.numerics, self.rounding, self.degenerate, self.nonfinite, self.overflow)
            for (name, _, _), rule in zip(_RULES, rules, strict=True):
                printer.print_string(f", {name} = {rule.data.value}")


_RULES: tuple[tuple[str, type[StrEnum], Callable[[Any], Attribute]], ...] = (
    ("numerics", Numerics, NumericsAttr),
    ("round", Rounding, RoundingAttr),
    ("degenerate", Degenerate, DegenerateAttr),
    ("nonfinite", NonFinite, NonFiniteAttr),
    ("overflow", Overflow, OverflowAttr),
)


@irdl_attr_definition
class LayoutAttr(ParametrizedAttribute):
    """`#kv.layout<"hp16", word = ui16, digits = "c^slot w c* t*", page = 128>`: where the codes of a page of 128 tokens lie (SPEC 8.2)."""

    name = "kv.layout"
    label: StringAttr = param_def()
    word: IntegerType = param_def()
    digits: StringAttr = param_def()
    page: IntAttr = param_def()

    def verify(self) -> None:
        _expect(self.word in WORDS.values(), f"a word is ui8, ui16, ui32 or si32, not {self.word} (SPEC 8.2.1)")
        _expect(self.page.data > 0, f"a page of {self.page.data} tokens holds nothing (SPEC 9.1)")

    def arrangement(self, bits: int, tokens: int, channels: int) -> Arrangement:
        """The layout for pages of these extents. Raises `SpecError`."""
        digits = self.digits.data
        layout = Layout(name=self.label.data, word=name_of(self.word), key=digits, value=digits)  # type: ignore[arg-type]
        return arrangement(layout, "key", bits, tokens, channels)

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            label = StringAttr(parser.parse_str_literal())
            _key(parser, "word")
            word = parser.parse_type()
            _key(parser, "digits")
            digits = StringAttr(parser.parse_str_literal())
            _key(parser, "page")
            return label, word, digits, IntAttr(parser.parse_integer())

    def print_parameters(self, printer: Printer) -> None:
        with printer.in_angle_brackets():
            printer.print_string_literal(self.label.data)
            printer.print_string(f", word = {self.word}, digits = ")
            printer.print_string_literal(self.digits.data)
            printer.print_string(f", page = {self.page.data}")


# -- types ------------------------------------------------------------------------------------------------------------


def _check_quantized(source: TensorType, grid: GridAttr, layout: LayoutAttr | None = None) -> None:
    """The rules that tie a tensor, its grid and its layout together."""
    shape, element = source.get_shape(), source.element_type
    _expect(len(shape) == 4, f"a tensor to quantize is [request, head, token, channel], not of {len(shape)} dimensions (SPEC 2.1.4)")
    _expect(shape[3] != DYNAMIC_INDEX, "the number of channels is fixed; only requests, heads and tokens are counted at run time")
    _expect(element in FLOATS.values(), f"inputs are f16, bf16 or f32, not {element} (SPEC 3.1.3)")
    if grid.numerics.data is Numerics.STAGED:
        _expect(grid.metadata == element, f"staged numerics store metadata in the input dtype: {element}, not {grid.metadata} (SPEC 1.3.3)")
    if layout is not None:
        page, group = layout.page.data, grid.group.data
        whole = grid.axis.data is Axis.TOKEN or page % group == 0
        _expect(whole, f"a page of {page} tokens does not hold whole groups of {group}: a group never spans two pages (SPEC 1.3.1, 2.4.1)")
        try:
            layout.arrangement(grid.bits.data, page, shape[3])
        except SpecError as error:
            raise VerifyException(str(error)) from None


@irdl_attr_definition
class CodesType(ParametrizedAttribute, TypeAttribute):
    """`!kv.codes<tensor<?x?x?x64xf16>, #kv.grid<...>>`: the codes of such a tensor, a number of 0 to 2^bits - 1 each."""

    name = "kv.codes"
    source: TensorType = param_def()
    grid: GridAttr = param_def()

    def verify(self) -> None:
        _check_quantized(self.source, self.grid)


@irdl_attr_definition
class WordsType(ParametrizedAttribute, TypeAttribute):
    """`!kv.words<tensor<?x?x?x64xf16>, #kv.grid<...>, #kv.layout<...>>`: such codes packed, words restarting at each page (SPEC 8.4)."""

    name = "kv.words"
    source: TensorType = param_def()
    grid: GridAttr = param_def()
    layout: LayoutAttr = param_def()

    def verify(self) -> None:
        _check_quantized(self.source, self.grid, self.layout)


@irdl_attr_definition
class RowsType(ParametrizedAttribute, TypeAttribute):
    """`!kv.rows<tensor<?x2x?x64xf16>, #kv.grid<...>, #kv.layout<...>>`: keys or values of a cache, each request with its own number of
    tokens: sealed rows as codes, scales and origins, then floating rows."""

    name = "kv.rows"
    source: TensorType = param_def()
    grid: GridAttr = param_def()
    layout: LayoutAttr = param_def()

    def verify(self) -> None:
        _check_quantized(self.source, self.grid, self.layout)
        _, heads, tokens, _ = self.source.get_shape()
        _expect(heads != DYNAMIC_INDEX, "a cache has a fixed number of heads")
        _expect(tokens == DYNAMIC_INDEX, f"the tokens of a cache are counted at run time and request by request, so not {tokens} but ?")


def metadata_type(source: TensorType, grid: GridAttr) -> TensorType:
    """The type of scale and origin: [B, H, ceil(T/G), D] by channel, [B, H, T, ceil(D/G)] by token (SPEC 2.2, 2.3)."""
    shape, group = list(source.get_shape()), grid.group.data
    along = 2 if grid.axis.data is Axis.CHANNEL else 3
    if shape[along] != DYNAMIC_INDEX:
        shape[along] = -(-shape[along] // group)
    return TensorType(grid.metadata, shape)


def _check_metadata(source: TensorType, grid: GridAttr, given: Attribute) -> None:
    want = metadata_type(source, grid)
    rule = "one number for each group of tokens and channel" if grid.axis.data is Axis.CHANNEL else "for each token and group of channels"
    _expect(given == want, f"scale and origin are {want}, {rule}, not {given} (SPEC 2.2.2, 2.3.3)")


# -- whole tensors ----------------------------------------------------------------------------------------------------

_METADATA = VarConstraint("M", base(TensorType))


@irdl_op_definition
class QuantizeOp(IRDLOperation):
    """Codes, scales and origins of a tensor, by the grid of the result: SPEC 3."""

    name = "kv.quantize"
    M: ClassVar = _METADATA
    source = operand_def(TensorType)
    codes = result_def(CodesType)
    scale = result_def(M)
    origin = result_def(M)
    traits = traits_def(Pure())
    assembly_format = "$source attr-dict `:` type($source) `->` type($codes) `,` type($scale)"

    def verify_(self) -> None:
        codes = self.codes.type
        assert isinstance(codes, CodesType)
        _expect(codes.source == self.source.type, f"these are codes of {codes.source}, the operand is {self.source.type}")
        tokens, group = codes.source.get_shape()[2], codes.grid.group.data
        whole = codes.grid.axis.data is Axis.TOKEN or tokens == DYNAMIC_INDEX or tokens % group == 0
        _expect(whole, f"{tokens} tokens are not whole groups of {group}: keys are quantized in whole groups of tokens (SPEC 2.2.3)")
        _check_metadata(codes.source, codes.grid, self.scale.type)


@irdl_op_definition
class PackOp(IRDLOperation):
    """Words of codes; places left over hold code 0 (SPEC 8)."""

    name = "kv.pack"
    codes = operand_def(CodesType)
    words = result_def(WordsType)
    traits = traits_def(Pure())
    assembly_format = "$codes attr-dict `:` type($codes) `->` type($words)"

    def verify_(self) -> None:
        _check_same_codes(self.codes.type, self.words.type, "packing")


@irdl_op_definition
class UnpackOp(IRDLOperation):
    """Codes of words."""

    name = "kv.unpack"
    words = operand_def(WordsType)
    codes = result_def(CodesType)
    traits = traits_def(Pure())
    assembly_format = "$words attr-dict `:` type($words) `->` type($codes)"

    def verify_(self) -> None:
        _check_same_codes(self.words.type, self.codes.type, "unpacking")


@irdl_op_definition
class RepackOp(IRDLOperation):
    """The same codes in the words of another layout (SPEC 8.7)."""

    name = "kv.repack"
    source = operand_def(WordsType)
    words = result_def(WordsType)
    traits = traits_def(Pure())
    assembly_format = "$source attr-dict `:` type($source) `->` type($words)"

    def verify_(self) -> None:
        a, b = self.source.type, self.words.type
        _check_same_codes(a, b, "repacking")
        assert isinstance(a, WordsType)
        assert isinstance(b, WordsType)
        pages = a.layout.page.data, b.layout.page.data
        _expect(pages[0] == pages[1], f"repacking moves codes within pages; pages of {pages[0]} tokens cannot become pages of {pages[1]}")


def _check_same_codes(a: Attribute, b: Attribute, what: str) -> None:
    assert isinstance(a, CodesType | WordsType)
    assert isinstance(b, CodesType | WordsType)
    _expect(a.source == b.source, f"{what} keeps the tensor: {a.source} is not {b.source}")
    _expect(a.grid == b.grid, f"{what} changes no code, so the grid stays: {a.grid} is not {b.grid}")


@irdl_op_definition
class DequantizeOp(IRDLOperation):
    """f32 `scale * code`, then `+ origin`, two roundings, cast last to the result's element type: SPEC 3.4."""

    name = "kv.dequantize"
    M: ClassVar = _METADATA
    codes = operand_def(CodesType)
    scale = operand_def(M)
    origin = operand_def(M)
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$codes `,` $scale `,` $origin attr-dict `:` type($codes) `,` type($scale) `->` type($result)"

    def verify_(self) -> None:
        codes, result = self.codes.type, self.result.type
        assert isinstance(codes, CodesType)
        assert isinstance(result, TensorType)
        _check_metadata(codes.source, codes.grid, self.scale.type)
        _expect(result.get_shape() == codes.source.get_shape(), f"dequantizing keeps the shape of {codes.source}")
        _expect(result.element_type in FLOATS.values(), f"values are f16, bf16 or f32, not {result.element_type} (SPEC 3.4.1)")


# -- a cache ----------------------------------------------------------------------------------------------------------

_ROWS = VarConstraint("R", base(RowsType))
_COUNTS = VarConstraint("C", base(TensorType))


@irdl_op_definition
class AppendOp(IRDLOperation):
    """The first counts[b] rows of `source` added to request b, floating (SPEC 4.7)."""

    name = "kv.append"
    R: ClassVar = _ROWS
    C: ClassVar = _COUNTS
    rows = operand_def(R)
    source = operand_def(TensorType)
    counts = operand_def(C)
    result = result_def(R)
    traits = traits_def(Pure())
    assembly_format = "$rows `,` $source `,` $counts attr-dict `:` type($source) `,` type($counts) `->` type($rows)"

    def verify_(self) -> None:
        rows, source = self.rows.type, self.source.type
        assert isinstance(rows, RowsType)
        assert isinstance(source, TensorType)
        a, b = rows.source.get_shape(), source.get_shape()
        same = len(b) == 4 and (a[0], a[1], a[3]) == (b[0], b[1], b[3]) and rows.source.element_type == source.element_type
        _expect(same, f"new rows are {rows.source} with any number of tokens, stored unchanged; {source} is not")
        _check_counts(self.counts.type, a[0])


@irdl_op_definition
class SealOp(IRDLOperation):
    """Floating rows that are due, quantized by the grid of the rows, the oldest first: `block` while there are `residual` or more,
    that many together; `sliding` while there are more than `residual`, one (SPEC 4.2). Sealed rows never change."""

    name = "kv.seal"
    R: ClassVar = _ROWS
    policy = prop_def(PolicyAttr)
    residual = prop_def(IntegerAttr.constr(i64))
    rows = operand_def(R)
    result = result_def(R)
    traits = traits_def(Pure())
    assembly_format = "$policy $residual $rows attr-dict `:` type($rows)"

    def verify_(self) -> None:
        rows, residual = self.rows.type, self.residual.value.data
        assert isinstance(rows, RowsType)
        page, by_channel = rows.layout.page.data, rows.grid.axis.data is Axis.CHANNEL
        if self.policy.data is Policy.BLOCK:
            _expect(by_channel, "rows with scales by token are sealed `sliding`, one by one: each has its own groups (SPEC 1.5, 4.2)")
            _expect(residual == page, f"a block fills one page of {page} tokens, so its residual is that, not {residual} (SPEC 9.1)")
        else:
            _expect(not by_channel, "rows with scales by channel are sealed in a `block`: a group is several tokens (SPEC 1.5, 4.2)")
            _expect(residual >= page, f"values may not be sealed before their keys: a residual of {residual} is below {page} (SPEC 1.3.2)")


@irdl_op_definition
class ScoresOp(IRDLOperation):
    """scale * q . k for every token of a request, sealed or floating, in token order: one column a token (SPEC 5.2 to 5.4).

    Query row i of request b belongs to the i-th of its last counts[b] tokens and sees everything up to that one. The score of a token
    that it does not see is minus infinity, and so are all scores of rows from counts[b] on. Query head h reads head h // (Hq / Hkv). A
    sealed element is the number scale * code + origin within the error model of SPEC 7, sums are taken in the result's element type.
    """

    name = "kv.scores"
    C: ClassVar = _COUNTS
    query = operand_def(TensorType)
    keys = operand_def(RowsType)
    counts = operand_def(C)
    scale = operand_def(f32)
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = (
        "$query `,` $keys `,` $counts `,` $scale attr-dict `:` type($query) `,` type($keys) `,` type($counts) `->` type($result)"
    )

    def verify_(self) -> None:
        query, keys = self.query.type, self.keys.type
        assert isinstance(query, TensorType)
        assert isinstance(keys, RowsType)
        q, k = query.get_shape(), keys.source.get_shape()
        _expect(len(q) == 4 and q[0] == k[0] and q[3] == k[3], f"queries [B, Hq, n, D] do not fit keys {keys.source}: {query}")
        _expect(query.element_type == keys.source.element_type, "queries have the dtype of the cache (SPEC 5.5)")
        _check_heads(q[1], k[1])
        _check_counts(self.counts.type, k[0])
        want = TensorType(f32, [*q[:3], DYNAMIC_INDEX])
        _expect(self.result.type == want, f"scores have one column for every token: {want}, not {self.result.type} (SPEC 5.2.1)")


@irdl_op_definition
class SoftmaxOp(IRDLOperation):
    """exp(s_j) / sum of exp(s_l) over the last axis, every token of every zone in one sum (SPEC 5.2); 0 for a row that sees nothing."""

    name = "kv.softmax"
    T: ClassVar = VarConstraint("T", base(TensorType))
    scores = operand_def(T)
    result = result_def(T)
    traits = traits_def(Pure())
    assembly_format = "$scores attr-dict `:` type($scores)"

    def verify_(self) -> None:
        kind = self.scores.type
        assert isinstance(kind, TensorType)
        _expect(kind.element_type == f32 and len(kind.get_shape()) == 4, f"a softmax is of scores [B, Hq, n, T] in f32, not of {kind}")


@irdl_op_definition
class OutputOp(IRDLOperation):
    """sum of p_j v_j over the tokens that a row sees, sealed or floating; 0 for rows from counts[b] on (SPEC 5.2 to 5.5)."""

    name = "kv.output"
    C: ClassVar = _COUNTS
    weights = operand_def(TensorType)
    values = operand_def(RowsType)
    counts = operand_def(C)
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$weights `,` $values `,` $counts attr-dict `:` type($weights) `,` type($values) `,` type($counts) `->` type($result)"

    def verify_(self) -> None:
        weights, values = self.weights.type, self.values.type
        assert isinstance(weights, TensorType)
        assert isinstance(values, RowsType)
        p, v = weights.get_shape(), values.source.get_shape()
        fits = len(p) == 4 and p[0] == v[0] and p[3] == DYNAMIC_INDEX and weights.element_type == f32
        _expect(fits, f"weights are [B, Hq, n, ?] in f32, one column for every token of {values.source}: {weights} is not")
        _check_heads(p[1], v[1])
        _check_counts(self.counts.type, v[0])
        want = TensorType(values.source.element_type, [*p[:3], v[3]])
        _expect(self.result.type == want, f"the output is {want}, in the dtype of the cache, not {self.result.type} (SPEC 5.5)")


def _check_heads(query: int, rows: int) -> None:
    fits = query != DYNAMIC_INDEX and query % rows == 0
    _expect(fits, f"{_show(query)} query heads cannot share {rows} heads: each of these serves the same number of them (SPEC 5.3)")


def _check_counts(kind: Attribute, batch: int) -> None:
    want = TensorType(i64, [batch])
    _expect(kind == want, f"counts are new tokens, one number a request: {want}, not {kind} (SPEC 4.7)")


Kv = Dialect(
    "kv",
    [QuantizeOp, PackOp, UnpackOp, RepackOp, DequantizeOp, AppendOp, SealOp, ScoresOp, SoftmaxOp, OutputOp],
    [
        CodesType,
        WordsType,
        RowsType,
        GridAttr,
        LayoutAttr,
        AxisAttr,
        NumericsAttr,
        RoundingAttr,
        DegenerateAttr,
        NonFiniteAttr,
        OverflowAttr,
        PolicyAttr,
    ],
)


# -- text -------------------------------------------------------------------------------------------------------------


class _Aliases(Printer):
    """A printer that writes grids, layouts and types of this dialect as aliases, and collects their definitions."""

    def __init__(self, stream: StringIO) -> None:
        super().__init__(stream=stream)
        self.names: dict[Attribute, str] = {}
        self.definitions: list[str] = []

    def print_attribute(self, attribute: Attribute) -> None:
        if not isinstance(attribute, GridAttr | LayoutAttr | CodesType | WordsType | RowsType):
            super().print_attribute(attribute)
            return
        if attribute not in self.names:
            stem = _alias(attribute)
            taken = sum(name.rstrip("0123456789") == stem for name in self.names.values())
            self.names[attribute] = f"{stem}{taken + 1 if taken else ''}"
            outer, self.stream = self.stream, StringIO()
            super().print_attribute(attribute)
            self.definitions.append(f"{self.names[attribute]} = {self.stream.getvalue()}\n")
            self.stream = outer
        self.print_string(self.names[attribute])


def _alias(attribute: GridAttr | LayoutAttr | CodesType | WordsType | RowsType) -> str:
    if isinstance(attribute, GridAttr):
        return f"#by_{attribute.axis.data.value}"
    if isinstance(attribute, LayoutAttr):
        return "#layout"
    if isinstance(attribute, RowsType):
        return "!keys" if attribute.grid.which == "key" else "!values"
    return "!codes" if isinstance(attribute, CodesType) else "!words"


def text(module: ModuleOp) -> str:
    """A module of this dialect, each grid, layout and type written out once."""
    body = StringIO()
    printer = _Aliases(body)
    printer.print_op(module)
    return "".join(printer.definitions) + body.getvalue() + "\n"
