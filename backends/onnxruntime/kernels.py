"""Graphs of this backend: lowering, printing, and sessions that run them.

A printed model is kept on disk as text (base64), so a warm process loads neither the compiler nor `onnx`.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime

from kivi import jit
from kivi.dtypes import np_dtype
from kivi.errors import InputError
from kivi.jit import Generated
from kivi.kernels.library import Library
from kivi.kernels.request import Request, module

if TYPE_CHECKING:
    from kivi.backends.onnxruntime.graph import Graph

CPU = ("CPUExecutionProvider",)
THREADS = "KIVI_ORT_THREADS"  # environment, read when a model is loaded: threads of an operator; default: those of the runtime
#: dtype -> element type as `onnx.TensorProto` numbers them, which is what a binding is told.
_NUMBERS = {
    "float32": 1,
    "uint8": 2,
    "uint16": 4,
    "int64": 7,
    "float16": 10,
    "uint32": 12,
    "int32": 12,
    "uint64": 13,
    "bfloat16": 16,
}
ELEMENT = {np_dtype(name): number for name, number in _NUMBERS.items()}


class OnnxLibrary(Library):
    """The models of one list of execution providers."""

    def __init__(self, providers: tuple[str, ...]) -> None:
        super().__init__(
            "onnxruntime", {"opset": "21"}, lambda kernel, request: printed(request), lambda g, path: Session(g, providers), ".b64"
        )

    def printed(self, request: Request) -> tuple[Generated, Path]:
        return jit.generated(request.key(self.backend, self.versions), lambda: printed(request), self.suffix)


@cache
def library(providers: tuple[str, ...]) -> OnnxLibrary:
    """The models of this process."""
    return OnnxLibrary(providers)


def lowered(request: Request) -> Graph:
    """The graph of a request. Imports the compiler."""
    from kivi.backends.onnxruntime import lower

    fold, apart = request.option("fold", True), request.option("apart", False)
    return lower.graphs(module(request), fold, apart)[request.entry]()


def model(request: Request, graph: Graph) -> bytes:
    """The serialized model of a request, which says what it is. Imports the compiler and `onnx`."""
    from kivi.backends.onnxruntime import emit, lower

    properties = {
        "kivi.entry": request.entry,
        "kivi.spec": request.spec.name,
        "kivi.spec_hash": request.spec.hash,
        "kivi.layout": request.layout.name,
        "kivi.clauses": lower.CLAUSES[request.entry.rpartition(".")[2]],
    }
    return emit.emit(graph, properties)


def printed(request: Request) -> Generated:
    """The model of a request as text, and the dtype of each input."""
    graph = lowered(request)
    data, signature = model(request, graph), {port.name: port.dtype for port in graph.inputs}
    return Generated(request.entry, base64.b64encode(data).decode(), signature, [], hashlib.sha256(data).hexdigest())


def options() -> Any:
    """How models are loaded. Raises `InputError` for a bad `KIVI_ORT_THREADS`."""
    named = os.environ.get(THREADS) or "0"
    if not named.isdecimal():
        raise InputError(f"{THREADS} = {named!r} is not a number of threads; use 1 or more, or unset it")
    out = onnxruntime.SessionOptions()
    out.log_severity_level = 3  # errors
    out.intra_op_num_threads = int(named)
    out.add_session_config_entry("session.intra_op.allow_spinning", "0")  # threads that wait leave the processor to others
    return out


class Session:
    """A model of this process. `session(inputs, outputs)` runs it on arrays in place: nothing is copied in or out."""

    def __init__(self, generated: Generated, providers: tuple[str, ...]) -> None:
        self.name = generated.name
        self._session = onnxruntime.InferenceSession(base64.b64decode(generated.source), options(), providers=list(providers))
        self.inputs = generated.signature

    def __call__(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> None:
        """Arrays are contiguous and of the dtypes of the model. Raises `ValueError`, and what the runtime raises."""
        binding = self._session.io_binding()
        scattered = [name for name, a in (*inputs.items(), *outputs.items()) if not a.flags.c_contiguous]
        if scattered:
            raise ValueError(f"{', '.join(scattered)}: a binding is told an address and a shape, so its array must be contiguous")
        for name, a in inputs.items():
            binding.bind_input(name, "cpu", 0, element(a), a.shape, a.ctypes.data)
        for name, a in outputs.items():
            binding.bind_output(name, "cpu", 0, element(a), a.shape, a.ctypes.data)
        self._session.run_with_iobinding(binding)


def element(a: np.ndarray) -> int:
    """The element type that an array is bound as. Signed words are bound as what they are, bits."""
    return ELEMENT[a.dtype]
