"""The lowering and the printer: every operator is a standard one, foreign `kv` modules lower, and what has no graph is named."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

import kivi
from kivi.backends.onnxruntime import emit, kernels, lower, offline
from kivi.backends.onnxruntime.graph import Graph, join
from kivi.errors import InputError
from kivi.geometry import geometry
from kivi.ir import kv
from kivi.ir.interp import kv as interpreter
from kivi.ir.kv import Kv
from kivi.ir.xdsl import parse
from kivi.passes.kv_to_tile import LoweringError

GRID = (
    "#kv.grid<channel, group = 4, bits = 2, metadata = f32, numerics = portable, round = half_even, degenerate = scale_one, "
    "nonfinite = reject, overflow = reject>"
)
LAYOUT = '#kv.layout<"mine", word = ui16, digits = "c0 t0 c1 c* t*", page = 8>'
SOURCE = "tensor<?x?x?x6xf32>"
#: A module that no spec of kivi's writes: quantize, pack and unpack again in one function.
FOREIGN = f"""
func.func @round_trip(%x: {SOURCE}) -> (!kv.codes<{SOURCE}, {GRID}>, tensor<?x?x?x6xf32>, tensor<?x?x?x6xf32>) {{
  %codes, %scale, %origin = kv.quantize %x : {SOURCE} -> !kv.codes<{SOURCE}, {GRID}>, tensor<?x?x?x6xf32>
  %words = kv.pack %codes : !kv.codes<{SOURCE}, {GRID}> -> !kv.words<{SOURCE}, {GRID}, {LAYOUT}>
  %again = kv.unpack %words : !kv.words<{SOURCE}, {GRID}, {LAYOUT}> -> !kv.codes<{SOURCE}, {GRID}>
  func.return %again, %scale, %origin : !kv.codes<{SOURCE}, {GRID}>, tensor<?x?x?x6xf32>, tensor<?x?x?x6xf32>
}}
"""
#: Codes that leave without being packed.
CODES_ALONE = f"""
func.func @codes(%x: {SOURCE}) -> !kv.codes<{SOURCE}, {GRID}> {{
  %codes, %scale, %origin = kv.quantize %x : {SOURCE} -> !kv.codes<{SOURCE}, {GRID}>, tensor<?x?x?x6xf32>
  func.return %codes : !kv.codes<{SOURCE}, {GRID}>
}}
"""


def run(graph, **inputs):
    session = onnxruntime.InferenceSession(emit.emit(graph, {}), kernels.options(), providers=["CPUExecutionProvider"])
    names = [port.name for port in graph.outputs]
    return dict(zip(names, session.run(names, inputs), strict=True))


def test_a_foreign_module_lowers_and_runs():
    module = parse(FOREIGN, Kv)
    module.verify()
    x = np.random.default_rng(0).normal(0, 2, (1, 3, 8, 6)).astype(np.float32)
    codes, scale, origin = interpreter.run(module, "round_trip", {"x": x})
    graphs = lower.graphs(module)
    assert list(graphs) == ["key.encode", "key.decode"]
    made = run(graphs["key.encode"](), x=x[0])
    assert made["scale"].tobytes() == scale.tobytes()
    assert made["origin"].tobytes() == origin.tobytes()
    words = interpreter.packed(codes, module.body.block.first_op.body.block.ops.first.next_op.words.type)
    assert made["words"].tobytes() == words.tobytes()
    assert run(graphs["key.decode"](), words=made["words"], tokens=np.array([8]))["out"].tobytes() == codes.tobytes()


def requests(preset, **override):
    spec = kivi.load_spec(preset).override(override)
    return offline.entries(spec, geometry(8, 2, 64, None, "float16", None, None, None))


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_every_graph_is_standard(bits):
    """One set of operators, that of the standard, in the version that the model names."""
    for name, request in requests("kivi-2bit", **{"key.bits": bits, "value.bits": bits}).items():
        made = onnx.load_model_from_string(offline.emit(request, "onnx"))
        assert [(o.domain, o.version) for o in made.opset_import] == [("", 21)], name
        for node in made.graph.node:
            assert onnx.defs.has(node.op_type, ""), f"{name}: {node.op_type}"


def test_scales_are_folded_where_planes_allow_it():
    """Codes of planes go from their mask to the product; without folding each is multiplied by its scale first."""
    folds = {}
    for layout in ("planes8", "lanes32"):
        request = requests("kivi-2bit", **{"packing.layout": layout})["cache.history"]
        ops = [n.op for n in kernels.lowered(request).nodes]
        folds[layout] = (ops.count("BitShift"), ops.count("BitwiseAnd"))
    assert folds == {"planes8": (0, 2), "lanes32": (2, 2)}


def test_models_are_the_same_every_time():
    request = requests("kivi-2bit")["cache.history"]
    assert offline.emit(request, "onnx") == offline.emit(request, "onnx")


def test_what_has_no_graph_is_named():
    function = "func.func @f(%x: i32) -> i32 {\n%y = arith.addi %x, %x : i32\nfunc.return %y : i32\n}\n"
    for text, words in (
        (CODES_ALONE, r"kv\.quantize has no graph of its own; its result may only go to kv\.pack"),
        ("builtin.module {}", "one function, not 0"),
        (function + function.replace("@f", "@g"), "one function, not 2"),
        (function, r"no ONNX graph for arith\.addi"),
    ):
        with pytest.raises(LoweringError, match=words):
            lower.graphs(parse(text, Kv))
    request = requests("teaching")["key.encode"]
    for stage, target, word in (("tile", "onnx", "tile"), ("onnx", "sm_90", "sm_90")):
        with pytest.raises(InputError, match=word):
            offline.emit(request, stage, target)


def test_numbers_become_constants_once():
    g = Graph("g")
    x = g.input("x", "float32", ("n",))
    g.output("y", join([(x + 1.0) * 1.0, x + 1], 0), ("m",))
    assert len(g.constants) == 1
    assert run(g, x=np.array([2.0], np.float32))["y"].tolist() == [3.0, 3.0]


def test_a_wrong_graph_is_not_printed():
    g = Graph("g")
    x, y = g.input("x", "float32", ("n",)), g.input("y", "int64", ("n",))
    g.output("z", g.op("Add", x, y), ("n",))
    with pytest.raises(onnx.shape_inference.InferenceError, match="y"):
        emit.emit(g, {})


def test_the_kv_stage_shows_the_order():
    text = offline.emit(requests("kivi-paper")["cache.history"], "kv")
    assert kv.SealOp.name in text
    assert text.index("kv.seal") < text.index("kv.scores")
