"""The `kv` level: text, verifiers, its interpreter against the reference backend and the oracle, and its lowering to `tile`."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

import kivi
from kivi.conformance import bounds, model, oracle
from kivi.dtypes import metadata_dtype, np_dtype
from kivi.errors import MetadataOverflowError, NonFiniteError, ShapeError
from kivi.ir.interp import kv as interp
from kivi.ir.interp.tile import UnknownOperationError
from kivi.ir.kv import Kv, text
from kivi.ir.xdsl import ParseError, VerifyException, parse
from kivi.layout import Layout, layouts, named_layout
from kivi.passes import spec_to_kv
from kivi.passes.address import units
from kivi.passes.attention import Schedule
from kivi.passes.kv_to_tile import LoweringError, lower, page_format
from kivi.pool import PageFormat
from tests.ir.interpreted import Interpreted
from tests.ir.test_kernels import launch, spec_of

BE = kivi.get_backend("reference")
FP32 = bounds.Numerics(accumulate="float32", exp_ulp=2.0)
PAPER = {"order": "seal_then_attend"}


def words_type(spec, which, dtype, channels, shape=(-1, -1, -1), layout=None):
    layout = BE.layout_for(spec) if layout is None else named_layout(layout)
    kind = spec_to_kv.words_type(spec, which, layout, dtype, channels, metadata_dtype(spec, which, dtype))
    return replace_shape(kind, shape)


def replace_shape(kind, shape):
    source = type(kind.source)(kind.source.element_type, [n if n >= 0 else spec_to_kv.ANY for n in shape] + [kind.source.get_shape()[3]])
    return type(kind)(source, kind.grid, kind.layout)


def format_of(spec, kv_heads=2, head_dim=20, value_head_dim=None, dtype="float16"):
    metadata = [metadata_dtype(spec, which, dtype) for which in ("key", "value")]
    return PageFormat(spec, BE.layout_for(spec), kv_heads, head_dim, value_head_dim or head_dim, *metadata)


def entry_points(spec, dtype="float16"):
    """Every module of a spec, by name."""
    out = {}
    for which in ("key", "value"):
        words = words_type(spec, which, dtype, 20)
        out[f"quantize {which}"] = spec_to_kv.quantize(words)
        out[f"codes {which}"] = spec_to_kv.codes(words)
        out[f"dequantize {which}"] = spec_to_kv.dequantize(words, "float32")
        out[f"repack {which}"] = spec_to_kv.repack(words, named_layout("official_int32"))
    form = format_of(spec, value_head_dim=12, dtype=dtype)
    return {**out, "decode": spec_to_kv.decode(form, 4, dtype), "prefill": spec_to_kv.prefill(form, 4, dtype)}


OWN = {"name": "own.1", "word": "uint16", "key": "c0 t1 c1 w t0 c* t*", "value": "t0 c1 c0 w t1 c* t*"}
SPECS = {
    **{name: kivi.load_spec(name) for name in kivi.presets()},
    "own layout": spec_of(2, OWN),
    "propagate": kivi.load_spec("teaching").override({"nonfinite": "propagate", "overflow": "saturate", "value.bits": 1}),
}


# -- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
def test_every_entry_point_is_text(name):
    for module in entry_points(SPECS[name]).values():
        for write in (str, text):
            written = write(module)
            again = parse(written, Kv)
            assert write(again) == written
            assert str(again) == str(module)


def test_a_quantization_reads_as_what_it_is():
    assert text(spec_to_kv.quantize(words_type(kivi.load_spec("kivi-official"), "key", "bfloat16", 64))) == (
        "#by_channel = #kv.grid<channel, group = 32, bits = 2, metadata = bf16, numerics = staged, round = half_even, "
        "degenerate = scale_one, nonfinite = reject, overflow = reject>\n"
        '#layout = #kv.layout<"official_int32", word = si32, digits = "t:slot t* c*", page = 128>\n'
        "!words = !kv.words<tensor<?x?x?x64xbf16>, #by_channel, #layout>\n"
        "!codes = !kv.codes<tensor<?x?x?x64xbf16>, #by_channel>\n"
        """builtin.module {
  func.func @quantize(%x: tensor<?x?x?x64xbf16>) -> (!words, tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16>) {
    %codes, %scale, %origin = kv.quantize %x : tensor<?x?x?x64xbf16> -> !codes, tensor<?x?x?x64xbf16>
    %words = kv.pack %codes : !codes -> !words
    func.return %words, %scale, %origin : !words, tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16>
  }
}
"""
    )


HEAD = """#by_channel = #kv.grid<channel, group = 2, bits = 2, metadata = f32, numerics = portable, round = half_even, \
degenerate = scale_one, nonfinite = reject, overflow = reject>
#layout = #kv.layout<"bytes_lsb", word = ui8, digits = "t:slot t* c*", page = 4>
!keys = !kv.rows<tensor<?x1x?x8xf32>, #by_channel, #layout>
#by_token = #kv.grid<token, group = 2, bits = 2, metadata = f32, numerics = portable, round = half_even, degenerate = scale_one, \
nonfinite = reject, overflow = reject>
#layout2 = #kv.layout<"bytes_lsb", word = ui8, digits = "c:slot c* t*", page = 4>
!values = !kv.rows<tensor<?x1x?x6xf32>, #by_token, #layout2>
builtin.module {
  func.func @decode(%keys: !keys, %values: !values, %q: tensor<?x2x?x8xf32>, %k: tensor<?x1x?x8xf32>, %v: tensor<?x1x?x6xf32>, \
%counts: tensor<?xi64>, %scale: f32) -> (tensor<?x2x?x6xf32>, !keys, !values) {
    %appended = kv.append %keys, %k, %counts : tensor<?x1x?x8xf32>, tensor<?xi64> -> !keys
    %appended_1 = kv.append %values, %v, %counts : tensor<?x1x?x6xf32>, tensor<?xi64> -> !values
"""
SEAL = """    %sealed = kv.seal block 4 %appended : !keys
    %sealed_1 = kv.seal sliding 4 %appended_1 : !values
"""
ATTEND = """    %scores = kv.scores %q, {keys}, %counts, %scale : tensor<?x2x?x8xf32>, !keys, tensor<?xi64> -> tensor<?x2x?x?xf32>
    %weights = kv.softmax %scores : tensor<?x2x?x?xf32>
    %out = kv.output %weights, {values}, %counts : tensor<?x2x?x?xf32>, !values, tensor<?xi64> -> tensor<?x2x?x6xf32>
"""
TAIL = """    func.return %out, %sealed, %sealed_1 : tensor<?x2x?x6xf32>, !keys, !values
  }
}
"""


def test_the_order_of_seal_and_attention_is_an_edge():
    spec = kivi.load_spec("teaching")
    form = format_of(spec, kv_heads=1, head_dim=8, value_head_dim=6, dtype="float32")
    before = HEAD + ATTEND.format(keys="%appended", values="%appended_1") + SEAL + TAIL
    after = HEAD + SEAL + ATTEND.format(keys="%sealed", values="%sealed_1") + TAIL
    paper = replace(form, spec=spec.override(PAPER))
    assert text(spec_to_kv.decode(form, 2, "float32")) == before
    assert text(spec_to_kv.decode(paper, 2, "float32")) == after
    assert text(spec_to_kv.prefill(paper, 2, "float32")) == before.replace("@decode", "@prefill")  # SPEC 6.3.1


# -- verifiers --------------------------------------------------------------------------------------------------------

GRID = "#kv.grid<{axis}, group = {group}, bits = {bits}, metadata = {metadata}, numerics = {numerics}, round = half_even, \
degenerate = scale_one, nonfinite = reject, overflow = reject>"
LAYOUT = '#kv.layout<"mine", word = {word}, digits = "{digits}", page = {page}>'
PARTS = {"axis": "channel", "group": 4, "bits": 2, "metadata": "f16", "numerics": "portable"}
PLACES = {"word": "ui32", "digits": "t:slot t* c*", "page": 8}
SHORT = {"bits": 2, "group": 4}


def grid(**changes):
    return GRID.format(**{**PARTS, **changes})


def layout(**changes):
    return LAYOUT.format(**{**PLACES, **changes})


K, WIDE, M, V = "tensor<1x2x8x6xf16>", "tensor<1x2x8x6xf32>", "tensor<1x2x2x6xf16>", "tensor<1x2x8x2xf16>"
CODES, WORDS = f"!kv.codes<{K}, {grid()}>", f"!kv.words<{K}, {grid()}, {layout()}>"
ROW, STATE = "tensor<1x2x?x6xf16>", f"!kv.rows<tensor<1x2x?x6xf16>, {grid()}, {layout()}>"
VALUES = f"!kv.rows<tensor<1x2x?x6xf16>, {grid(axis='token')}, {layout(digits='c:slot c* t*')}>"
COUNTS = "tensor<1xi64>"


def uses(operands: str, line: str) -> str:
    return f"func.func @f({operands}) {{\n{line}\nfunc.return\n}}"


def declared(kind: str) -> str:
    return f"func.func private @f({kind}) -> ()"


def scored(query: str, result: str, counts: str = COUNTS) -> str:
    line = f"%s = kv.scores %q, %k, %c, %a : {query}, {STATE}, {counts} -> {result}"
    return uses(f"%q: {query}, %k: {STATE}, %c: {counts}, %a: f32", line)


def weighed(weights: str, result: str) -> str:
    line = f"%o = kv.output %p, %v, %c : {weights}, {VALUES}, {COUNTS} -> {result}"
    return uses(f"%p: {weights}, %v: {VALUES}, %c: {COUNTS}", line)


INVALID = {
    "five bits": (declared(f"!kv.codes<{K}, {grid(bits=5)}>"), "1, 2, 3, 4 or 8 bits, not 5"),
    "group of one": (declared(f"!kv.codes<{K}, {grid(group=1)}>"), "2 to 4096 elements, not 1"),
    "integer metadata": (declared(f"!kv.codes<{K}, {grid(metadata='i8')}>"), "f16, bf16 or f32, not i8"),
    "unknown numerics": (declared(f"!kv.codes<{K}, {grid(numerics='fast')}>"), "portable"),
    "staged in another dtype": (declared(f"!kv.codes<{K}, {grid(numerics='staged', metadata='f32')}>"), "metadata in the input dtype: f16"),
    "integer input": (declared(f"!kv.codes<tensor<1x2x8x6xi8>, {grid()}>"), "inputs are f16, bf16 or f32, not i8"),
    "three dimensions": (declared(f"!kv.codes<tensor<2x8x6xf16>, {grid()}>"), r"\[request, head, token, channel\], not of 3"),
    "unknown channels": (declared(f"!kv.codes<tensor<1x2x8x?xf16>, {grid()}>"), "the number of channels is fixed"),
    "word of 64 bits": (declared(f"!kv.words<{K}, {grid()}, {layout(word='i64')}>"), "ui8, ui16, ui32 or si32, not i64"),
    "empty page": (declared(f"!kv.words<{K}, {grid()}, {layout(page=0)}>"), "a page of 0 tokens"),
    "page that cuts a group": (declared(f"!kv.words<{K}, {grid()}, {layout(page=6)}>"), "a group never spans two pages"),
    "digits that are no layout": (declared(f"!kv.words<{K}, {grid()}, {layout(digits='t:slot c*')}>"), r"needs t\* and c\* once each"),
    "cache of eight tokens": (declared(f"!kv.rows<{K}, {grid()}, {layout()}>"), "counted at run time"),
    "cache of any heads": (declared(f"!kv.rows<tensor<1x?x?x6xf16>, {grid()}, {layout()}>"), "a fixed number of heads"),
    "codes of another tensor": (
        uses(f"%x: {ROW}", f"%c, %s, %o = kv.quantize %x : {ROW} -> {CODES}, {M}"),
        "these are codes of",
    ),
    "half a key group": (
        uses(
            "%x: tensor<1x2x6x6xf16>",
            f"%c, %s, %o = kv.quantize %x : tensor<1x2x6x6xf16> -> !kv.codes<tensor<1x2x6x6xf16>, {grid()}>, {M}",
        ),
        "whole groups of tokens",
    ),
    "value metadata for keys": (uses(f"%x: {K}", f"%c, %s, %o = kv.quantize %x : {K} -> {CODES}, {V}"), "each group of tokens and channel"),
    "packing into another grid": (
        uses(f"%c: {CODES}", f"%w = kv.pack %c : {CODES} -> !kv.words<{K}, {grid(bits=4)}, {layout()}>"),
        "packing changes no code",
    ),
    "unpacking another tensor": (
        uses(f"%w: {WORDS}", f"%c = kv.unpack %w : {WORDS} -> !kv.codes<tensor<1x2x4x6xf16>, {grid()}>"),
        "unpacking keeps the tensor",
    ),
    "repacking into other pages": (
        uses(f"%w: {WORDS}", f"%r = kv.repack %w : {WORDS} -> !kv.words<{K}, {grid()}, {layout(page=16)}>"),
        "pages of 8 tokens cannot become pages of 16",
    ),
    "dequantizing to another shape": (
        uses(f"%c: {CODES}, %s: {M}", f"%x = kv.dequantize %c, %s, %s : {CODES}, {M} -> {M}"),
        "keeps the shape",
    ),
    "dequantizing to integers": (
        uses(f"%c: {CODES}, %s: {M}", f"%x = kv.dequantize %c, %s, %s : {CODES}, {M} -> tensor<1x2x8x6xi8>"),
        "not i8",
    ),
    "appending another dtype": (
        uses(f"%k: {STATE}, %x: {M}, %c: {COUNTS}", f"%r = kv.append %k, %x, %c : {M}, {COUNTS} -> {STATE}").replace(
            M, "tensor<1x2x3x6xf32>"
        ),
        "stored unchanged",
    ),
    "counts of two requests": (
        uses(f"%k: {STATE}, %x: {M}, %c: tensor<2xi64>", f"%r = kv.append %k, %x, %c : {M}, tensor<2xi64> -> {STATE}"),
        "one number a request",
    ),
    "sliding keys": (uses(f"%k: {STATE}", f"%r = kv.seal sliding 8 %k : {STATE}"), "a group is several tokens"),
    "blocks of values": (uses(f"%k: {VALUES}", f"%r = kv.seal block 8 %k : {VALUES}"), "each has its own groups"),
    "block of half a page": (uses(f"%k: {STATE}", f"%r = kv.seal block 4 %k : {STATE}"), "its residual is that, not 4"),
    "values before their keys": (uses(f"%k: {VALUES}", f"%r = kv.seal sliding 7 %k : {VALUES}"), "may not be sealed before their keys"),
    "queries of other channels": (scored("tensor<1x4x1x8xf16>", "tensor<1x4x1x?xf32>"), "do not fit keys"),
    "queries of another dtype": (scored("tensor<1x4x1x6xf32>", "tensor<1x4x1x?xf32>"), "the dtype of the cache"),
    "three heads on two": (scored("tensor<1x3x1x6xf16>", "tensor<1x3x1x?xf32>"), "3 query heads cannot share 2 heads"),
    "scores of some tokens": (scored("tensor<1x4x1x6xf16>", "tensor<1x4x1x8xf32>"), "one column for every token"),
    "softmax of halves": (uses("%s: tensor<1x4x1x?xf16>", "%p = kv.softmax %s : tensor<1x4x1x?xf16>"), "in f32"),
    "weights without tokens": (weighed("tensor<1x4x1xf32>", "tensor<1x4x1x6xf16>"), "one column for every token"),
    "output in f32": (weighed("tensor<1x4x1x?xf32>", "tensor<1x4x1x6xf32>"), "in the dtype of the cache"),
}


@pytest.mark.parametrize("what", INVALID)
def test_invalid_modules_are_refused(what):
    written, word = INVALID[what]
    with pytest.raises((VerifyException, ParseError), match=word):
        parse(written, Kv)


# -- the interpreter: whole tensors -------------------------------------------------------------------------------------


def check_tensor(spec, which, dtype, shape, x=None):
    """Words, scales, origins, codes, values and repacked words of one tensor, all bit for bit those of the reference backend."""
    if x is None:
        x = np.random.default_rng(1).standard_normal(shape).astype(np_dtype(dtype))
        x[0, 0, :2] = 1.5
    want = BE.quantize(x, spec, which)
    kind = words_type(spec, which, dtype, shape[3], shape[:3])
    words, scale, origin = interp.run(spec_to_kv.quantize(kind), "quantize", {"x": x})
    for got, expected in ((words, want.words), (scale, want.scale), (origin, want.origin)):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert got.tobytes() == expected.tobytes()
    [codes] = interp.run(spec_to_kv.codes(kind), "codes", {"words": words})
    assert codes.tobytes() == want.codes().tobytes()
    for out in ("float32", "bfloat16", "float16"):
        [decoded] = interp.run(spec_to_kv.dequantize(kind, out), "dequantize", {"words": words, "scale": scale, "origin": origin})
        assert decoded.tobytes() == want.dequantize(out).tobytes()
    for target in ("hp16", "lanes32"):
        [other] = interp.run(spec_to_kv.repack(kind, named_layout(target)), "repack", {"words": words})
        assert other.tobytes() == want.repack(target).words.tobytes()
    return x, words, scale, origin


@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize(("bits", "layout"), [*itertools.product((1, 2, 3, 4, 8), layouts()), (2, OWN)])
def test_any_layout_and_width(which, bits, layout):
    check_tensor(spec_of(bits, layout), which, "float16", (1, 2, 24 if which == "key" else 21, 20))


@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("numerics", ["portable", "staged"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_any_numerics(which, numerics, dtype):
    spec = spec_of(2, "official_int32", numerics).override({"overflow": "saturate", "nonfinite": "propagate"})
    x = np.random.default_rng(2).standard_normal((2, 2, 24, 20)).astype(np_dtype(dtype))
    x[0, 0] = 0.0
    x[0, 1, :3, :3] *= 2.0**-24
    x[1, 0] *= 1e4
    x[1, 1, 0, 0], x[1, 1, 20, 19], x[1, 1, 9, 9] = np.nan, np.inf, -0.0
    big = kivi.dtypes.largest(dtype)
    x[0, 1, 8, :2], x[0, 1, 9, :2] = -big, big
    check_tensor(spec, which, dtype, x.shape, x)


@pytest.mark.parametrize("which", ["key", "value"])
def test_saturated_metadata(which):
    spec = spec_of(2, "hp16").override({"overflow": "saturate", "key.metadata": "float16", "value.metadata": "float16"})
    x = np.random.default_rng(3).normal(0, 1e5, (1, 1, 16, 20)).astype(np.float32)
    check_tensor(spec, which, "float32", x.shape, x)


def test_what_a_grid_rejects():
    spec = kivi.load_spec("kivi-2bit")
    quantize = spec_to_kv.quantize(words_type(spec, "key", "float32", 4))
    for value, error in ((np.nan, NonFiniteError), (1e6, MetadataOverflowError)):
        x = np.zeros((1, 1, 32, 4), np.float32)
        x[0, 0, 3, 1] = value
        with pytest.raises(error):
            interp.run(quantize, "quantize", {"x": x})
    with pytest.raises(ShapeError, match="33 tokens"):
        interp.run(quantize, "quantize", {"x": np.zeros((1, 1, 33, 4), np.float32)})


def test_an_unknown_operation_is_named():
    module = parse("func.func @f(%x: f32) -> f32 {\n%y = math.exp %x : f32\nfunc.return %y : f32\n}", Kv)
    with pytest.raises(UnknownOperationError, match=r"math\.exp"):
        interp.run(module, "f", {"x": 1.0})
    with pytest.raises(LoweringError, match=r"math\.exp"):
        lower(module)


# -- the interpreter: a cache -------------------------------------------------------------------------------------------


class Cache:
    """A cache that is a `kv` module and its state: @prefill while a request is empty, then @decode."""

    def __init__(self, spec, batch, q_heads, kv_heads, head_dim, value_head_dim, dtype, scale=None):
        self.form = format_of(spec, kv_heads, head_dim, value_head_dim, dtype)
        self.decode = spec_to_kv.decode(self.form, q_heads, dtype)
        self.prefill = spec_to_kv.prefill(self.form, q_heads, dtype)
        self.kinds = {which: spec_to_kv.rows_type(self.form, which, dtype) for which in ("key", "value")}
        self.state = [interp.empty(self.kinds[which], batch) for which in ("key", "value")]
        self.scale = 1 / math.sqrt(head_dim) if scale is None else scale

    def attend(self, q, k, v, counts):
        first = self.state[0][0].tokens == 0
        module, name = (self.prefill, "prefill") if first else (self.decode, "decode")
        given = {"keys": self.state[0], "values": self.state[1], "q": q, "k": k, "v": v, "counts": np.array(counts), "scale": self.scale}
        out, *self.state = interp.run(module, name, given)
        return out


def rows(rng, batch, heads, n, dim, dtype):
    return rng.normal(0.2, 1.0, (batch, heads, n, dim)).astype(np_dtype(dtype))


def within_bound(out, seen, scale, dtype):
    for b, request in enumerate(seen):
        for h, exact in enumerate(oracle.attend(request, scale) if request else []):
            limit = bounds.output_bound(exact, FP32, dtype).total
            got = out[b, h, : len(exact.out)].astype(np.float64)
            assert (np.abs(got - exact.out) <= limit).all()


def same_sealed(histories, cache, which, kind):
    """A state of the kv interpreter holds what a `KVCache` holds, bit for bit."""
    for b, h in enumerate(histories):
        segments = cache.sealed(b)[which]
        assert h.codes.shape[1] == sum(qt.tokens for _, qt in segments)
        for _, qt in segments:
            assert h.codes.tobytes() == qt.codes().tobytes()
            assert h.scale.tobytes() == qt.scale.tobytes()
            assert h.origin.tobytes() == qt.origin.tobytes()
            assert interp.packed(h.codes, kind).tobytes() == qt.words.tobytes()
        assert h.floating.tobytes() == cache.residual(b)[which].tobytes()


@pytest.mark.parametrize("order", ["attend_then_seal", "seal_then_attend"])
@pytest.mark.parametrize(
    ("changes", "dtype"),
    [({}, "float32"), ({"key.bits": 3, "value.bits": 4, "value.residual": 11, "packing.layout": "lanes32"}, "float16"), ({}, "bfloat16")],
)
def test_a_stream_in_both_orders(order, changes, dtype):
    """Prefill, steps and ragged chunks over two sealed blocks: outputs within the bound of the oracle, state that of the reference."""
    spec = spec_of(2, "hp16", group=4, residual=8).override({**changes, "order": order})
    shape = {"batch": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 12, "value_head_dim": 10, "dtype": dtype}
    cache, naive, ours = kivi.KVCache(spec, backend="reference", **shape), model.NaiveCache(spec, 2), Cache(spec, **shape)
    rng = np.random.default_rng(5)
    for n, counts in ((5, [5, 3]), *[(1, [1, 1])] * 4, (9, [9, 2]), (3, [0, 3]), *[(1, [1, 1])] * 3):
        q, k, v = (rows(rng, 2, heads, n, dim, dtype) for heads, dim in ((4, 12), (2, 12), (2, 10)))
        cache.attend(q, k, v, counts=counts)
        out = ours.attend(q, k, v, counts)
        within_bound(out, naive.attend(q, k, v, counts), ours.scale, dtype)
        for b, count in enumerate(counts):
            assert not out[b, :, count:].any()
    for which, histories in zip(("key", "value"), ours.state, strict=True):
        same_sealed(histories, cache, which, ours.kinds[which])


def example(values, heads=1):
    return np.array(values, np.float32)[None, None, :, :]


@pytest.mark.parametrize("order", ["attend_then_seal", "seal_then_attend"])
def test_one_softmax_over_all_zones(order):
    """Eight logits 0 and one ln 9, values 1 to 9: 117/17; softmaxes of the parts would give 13.5 (SPEC 5.2)."""
    spec = kivi.load_spec("teaching").override({"order": order})
    cache = Cache(spec, 1, 1, 1, 2, 2, "float32", scale=1.0)
    for t in range(1, 10):
        k = example([[math.log(9) if t == 9 else 0.0, 0.0]])
        out = cache.attend(example([[1.0, 0.0]]), k, example([[t, t]]), [1])
        assert np.allclose(out, 117 / 17 if t == 9 else (t + 1) / 2, rtol=0, atol=1e-6)
    assert [h[0].floating.shape[1] for h in cache.state] == [1, 4]


ORDERS = {
    "attend_then_seal": [(2.07373, 4.903662, 0.784142, 1.238466), (2.128507, 4.676657, 1.118463, 2.453681)],
    "seal_then_attend": [(1.971041, 4.979605, 0.778497, 1.270857), (2.128507, 4.642511, 1.118463, 2.453681)],
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_worked_example_of_both_orders(order):
    """SPEC 6.4: R = 4, G = 4, five calls of one token."""
    spec = kivi.load_spec("teaching").override({"order": order, "key.group": 4, "value.group": 4})
    cache = Cache(spec, 1, 1, 1, 4, 4, "float32", scale=0.5)
    k = [(0, 0, 0, 0), (1, 2, 0, 0), (2, 4, 0, 0), (6, 6, 0, 0), (3, 1, 0, 0)]
    v = [(0, 1, 2, 6), (6, 2, 1, 0), (1, 0, 6, 2), (2, 6, 0, 1), (3, 3, 3, 9)]
    outs = [cache.attend(example([[1, 0, 0, 0]]), example([a]), example([b]), [1])[0, 0, 0] for a, b in zip(k, v, strict=True)]
    assert np.allclose(outs[3:], ORDERS[order], rtol=0, atol=1e-6)


def test_nan_reaches_those_who_see_it_and_nobody_else():
    spec = kivi.load_spec("teaching").override({"nonfinite": "propagate"})
    cache = Cache(spec, 2, 1, 1, 2, 2, "float32")
    x = np.ones((2, 1, 6, 2), np.float32)
    v = x.copy()
    v[0, 0, 4, 0] = np.nan
    out = cache.attend(x, x, v, [6, 6])
    assert np.isnan(out[0, 0, 4:, 0]).all()
    assert np.array_equal(out[0, 0, :4], x[0, 0, :4])
    assert np.array_equal(out[1], x[1])


# -- lowering -----------------------------------------------------------------------------------------------------------


def names(module):
    return [launch.name for launch in lower(module)]


def test_launches_follow_the_edges():
    form = format_of(kivi.load_spec("kivi-2bit"))
    seal = [f"{which}.seal_{part}" for which in ("key", "value") for part in ("metadata", "words")]
    attend, keep = ["cache.history", "cache.tail", "cache.merge"], ["key.keep_rows", "value.keep_rows"]
    assert names(spec_to_kv.decode(form, 4, "float16")) == [*attend, *seal, *keep]
    assert names(spec_to_kv.decode(replace(form, spec=kivi.load_spec("kivi-paper")), 4, "float16")) == [*seal, *attend, *keep]
    modules = entry_points(kivi.load_spec("kivi-2bit"))
    assert names(modules["quantize key"]) == ["key.metadata", "key.encode"]
    assert names(modules["codes value"]) == names(modules["dequantize value"]) == ["value.decode"]
    assert names(modules["repack value"]) == ["value.repack"]


@pytest.mark.parametrize("name", SPECS)
def test_a_page_is_read_off_the_types(name):
    """What kernels ask of a page format comes back from a module's text, whichever spec it was written from."""
    spec = SPECS[name]
    form = format_of(spec, head_dim=20, value_head_dim=12)
    keys, values = parse(str(spec_to_kv.decode(form, 4, "float16")), Kv).body.block.first_op.body.block.arg_types[:2]
    got = page_format(keys, values)
    assert got.layout == form.layout
    assert got.fields == form.fields
    for field in ("kv_heads", "head_dim", "value_head_dim", "key_metadata", "value_metadata", "tokens"):
        assert getattr(got, field) == getattr(form, field)
    for field in ("numerics", "nonfinite", "overflow"):
        assert getattr(got.spec, field) == getattr(spec, field)
    for side in ("key", "value"):
        a, b = getattr(got.spec, side), getattr(spec, side)
        assert (a.bits, a.group) == (b.bits, b.group)


@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize(
    ("bits", "numerics", "layout"), [(2, "portable", "hp16"), (3, "staged", "lanes32"), (4, "portable", "official_int32")]
)
def test_a_tensor_at_both_levels(which, bits, numerics, layout):
    """The same tensor at kv and at tile level, through the interpreters: the same scales, origins, words and codes."""
    spec = spec_of(bits, layout, numerics)
    shape = (1, 2, 24 if which == "key" else 21, 20)
    x, words, scale, origin = check_tensor(spec, which, "float16", shape)
    kind = words_type(spec, which, "float16", 20)
    form = kind.layout.arrangement(bits, kind.layout.page.data, 20)
    batch, heads, tokens, channels = shape
    values = {"batch": batch, "heads": heads, "tokens": tokens, "channels": channels, "units": units(form)}
    strides = {f"x_{axis}": s // x.itemsize for axis, s in zip(("batch", "head", "token", "channel"), x.strides, strict=True)}
    arrays = {"x": x, "scale": np.zeros_like(scale), "origin": np.zeros_like(origin), "words": np.zeros_like(words)}
    arrays["flat"] = np.zeros(scale.size, np.uint8)
    scalars = {"tokens": tokens, "heads": heads, **strides, "row": words.shape[3], "total": words.shape[2] * words.shape[3]}
    metadata, encode = (step.build() for step in lower(spec_to_kv.quantize(kind)))
    programs = [math.prod(-(-values[a] // d) for a, d in axis) for axis in metadata.grid]
    scalars |= {"blocks": programs[1], "flag": np.zeros(math.prod(programs), np.int32)}
    codes = np.zeros(shape, np.uint8)
    for kernel in (metadata, encode, lower(spec_to_kv.codes(kind))[0].build()):
        given = {**arrays, **scalars, "out": codes}
        launch(kernel, values, {name: given[name] for name in kernel.arguments})
    for name, want in (("scale", scale), ("origin", origin), ("words", words)):
        assert arrays[name].tobytes() == want.tobytes()
    [want] = interp.run(spec_to_kv.codes(words_type(spec, which, "float16", 20, shape[:3])), "codes", {"words": words})
    assert codes.tobytes() == want.tobytes()


@pytest.mark.parametrize("order", ["attend_then_seal", "seal_then_attend"])
def test_a_trace_at_both_levels(order):
    """The same trace at kv and at tile level, through the interpreters: codes, scales and origins bit for bit, outputs within the bound."""
    spec = spec_of(2, "hp16", group=4, residual=8).override({"order": order, "value.bits": 3})
    shape = {"batch": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 12, "value_head_dim": 10, "dtype": "float16"}
    cache, naive, ours = kivi.KVCache(spec, backend=Interpreted(), **shape), model.NaiveCache(spec, 2), Cache(spec, **shape)
    rng = np.random.default_rng(6)
    for n, counts in ((7, [7, 4]), (1, [1, 1]), (1, [1, 1]), (8, [3, 8]), (1, [1, 1])):
        q, k, v = (rows(rng, 2, heads, n, dim, "float16") for heads, dim in ((4, 12), (2, 12), (2, 10)))
        seen = naive.attend(q, k, v, counts)
        within_bound(cache.attend(q, k, v, counts=counts), seen, ours.scale, "float16")
        within_bound(ours.attend(q, k, v, counts), seen, ours.scale, "float16")
        for which, histories in zip(("key", "value"), ours.state, strict=True):
            same_sealed(histories, cache, which, ours.kinds[which])
    assert cache.lengths(0).key_sealed == 8
    assert cache.lengths(1).value_sealed == 7


def test_a_schedule_changes_the_kernel_and_not_the_module():
    module = spec_to_kv.decode(format_of(kivi.load_spec("kivi-2bit"), head_dim=32), 4, "float16")
    tails = [lower(module, {"tail": Schedule(tokens=tokens)})[1].build() for tokens in (8, 32)]
    assert str(tails[0].module) != str(tails[1].module)


DECODED = f"%x = kv.dequantize %c, %s, %s : {CODES}, {M} -> {K}"
LOST = {
    "codes that are not packed": (
        f"func.func @f(%x: {K}) -> ({CODES}, {M}, {M}) {{\n%c, %s, %o = kv.quantize %x : {K} -> {CODES}, {M}\n"
        f"func.return %c, %s, %o : {CODES}, {M}, {M}\n}}",
        "kv.quantize has no kernel of its own",
    ),
    "codes from nowhere": (uses(f"%c: {CODES}", f"%w = kv.pack %c : {CODES} -> {WORDS}"), "come from kv.quantize only"),
    "values dequantized from codes": (
        uses(
            f"%c: {CODES}, %s: {M}",
            f"%x = kv.dequantize %c, %s, %s : {CODES}, {M} -> {K}\n%d, %t, %o = kv.quantize %x : {K} -> {CODES}, {M}",
        ),
        "kv.dequantize has no kernel of its own",
    ),
    "keys without values": (uses(f"%k: {STATE}", f"%r = kv.seal block 8 %k : {STATE}"), "takes one of each"),
    "words of two widths": (
        uses(f"%k: {STATE}, %v: {VALUES}", f"%r = kv.seal block 8 %k : {STATE}").replace(
            f"%v: {VALUES}", f"%v: {VALUES}".replace("word = ui32", "word = ui8")
        ),
        "they share word",
    ),
    "two chunks": (
        uses(
            f"%k: {STATE}, %v: {VALUES}, %x: {ROW}, %c: {COUNTS}",
            f"%a = kv.append %k, %x, %c : {ROW}, {COUNTS} -> {STATE}\n%b = kv.append %a, %x, %c : {ROW}, {COUNTS} -> {STATE}",
        ),
        "kv.append has no kernel of its own",
    ),
    "rows after a seal": (
        uses(
            f"%k: {STATE}, %v: {VALUES}, %x: {ROW}, %c: {COUNTS}",
            f"%a = kv.seal block 8 %k : {STATE}\n%b = kv.append %a, %x, %c : {ROW}, {COUNTS} -> {STATE}",
        ),
        "takes the rows that the function was given",
    ),
    "a softmax of something else": (weighed("tensor<1x4x1x?xf32>", "tensor<1x4x1x6xf16>"), "one softmax over all tokens"),
}


@pytest.mark.parametrize("what", LOST)
def test_what_has_no_kernel_is_named(what):
    written, word = LOST[what]
    with pytest.raises(LoweringError, match=word):
        lower(parse(written, Kv))


def test_keys_and_values_are_read_in_one_state():
    written = str(spec_to_kv.decode(format_of(kivi.load_spec("teaching")), 4, "float32"))
    line = next(row for row in written.splitlines() if "kv.scores" in row)
    rest = [row for row in written.splitlines() if "kv.scores" not in row and "kv.softmax" not in row and "kv.output" not in row]
    softmax, output = (next(row for row in written.splitlines() if op in row) for op in ("kv.softmax", "kv.output"))
    at = next(i for i, row in enumerate(rest) if "kv.seal block" in row) + 1
    mixed = "\n".join([*rest[:at], line.replace("%appended", "%sealed"), softmax, output, *rest[at:]])
    with pytest.raises(LoweringError, match="read one state"):
        lower(parse(mixed, Kv))


def test_layouts_of_two_names_do_not_share_a_page():
    form = format_of(kivi.load_spec("kivi-2bit"))
    keys = spec_to_kv.rows_type(form, "key", "float16")
    other = Layout(name="other", word=form.layout.word, key=form.layout.key, value=form.layout.value)
    values = spec_to_kv.rows_type(replace(form, layout=other), "value", "float16")
    with pytest.raises(LoweringError, match=f"share layout: {form.layout.name} is not other"):
        page_format(keys, values)
