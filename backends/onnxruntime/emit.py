"""Printer: a `Graph` as an ONNX model. It only prints; what is computed was decided in the lowering."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from kivi.backends.onnxruntime.graph import Graph, Node, Port

TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
    **{f"uint{n}": getattr(TensorProto, f"UINT{n}", None) for n in (2, 4, 8, 16, 32, 64)},
}


def emit(graph: Graph, properties: Mapping[str, str]) -> bytes:
    """The model, checked; `properties` become its metadata. Raises `onnx.checker.ValidationError`, `RuntimeError`."""
    body = helper.make_graph(
        [_node(node) for node in graph.nodes],
        graph.name,
        [_port(port) for port in graph.inputs],
        [_port(port) for port in graph.outputs],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in graph.constants.items()],
    )
    opset = helper.make_opsetid("", graph.opset)
    model = helper.make_model(body, opset_imports=[opset], ir_version=helper.find_min_ir_version_for([opset]), producer_name="kivi")
    helper.set_model_props(model, dict(properties))
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString(deterministic=True)


def text(model: bytes) -> str:
    """A model in ONNX's text format."""
    return onnx.printer.to_text(onnx.load_model_from_string(model))


def _node(node: Node) -> Any:
    attributes = {name: TYPES[value] if name == "to" else value for name, value in node.attributes.items()}
    return helper.make_node(node.op, list(node.inputs), list(node.outputs), **attributes)


def _port(port: Port) -> Any:
    return helper.make_tensor_value_info(port.name, TYPES[port.dtype], list(port.shape))
