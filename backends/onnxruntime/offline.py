"""Graphs as files: what `kivi compile` shows of this backend. A model needs no kivi to run; its metadata say which spec it is of."""

from __future__ import annotations

from typing import Any

from kivi import plugins
from kivi.backend import layout_for
from kivi.backends.onnxruntime import kernels
from kivi.backends.onnxruntime.emit import text
from kivi.dtypes import metadata_dtype
from kivi.errors import InputError
from kivi.geometry import Geometry
from kivi.ir import kv
from kivi.kernels.request import Request, module
from kivi.layout import named_layout
from kivi.pool import PageFormat
from kivi.spec import CacheSpec

#: Models are the same for every execution provider.
TARGETS = ("onnx",)
#: What `emit` can show, from the first to the last: "source" is ONNX's text format, "onnx" the model.
STAGES = ("kv", "source", "onnx")


def entries(spec: CacheSpec, g: Geometry) -> dict[str, Request]:
    """Every graph of a cache of this shape, by entry point; those of attention as a decode step takes them."""
    layout = layout_for(plugins.get("onnxruntime").manifest, spec)
    metadata = [metadata_dtype(spec, which, g.dtype) for which in ("key", "value")]
    form = PageFormat(spec, layout, g.kv_heads, g.head_dim, g.value_head_dim, *metadata)
    out: dict[str, Request] = {}
    options: tuple[tuple[str, Any], ...]
    for which, channels, stored in (("key", g.head_dim, metadata[0]), ("value", g.value_head_dim, metadata[1])):
        tensor = (("metadata", stored),)
        for entry, options in (
            ("encode", tensor),
            ("codes", (*tensor, ("out", "uint8"))),
            ("decode", (*tensor, ("out", "float32"))),
            ("repack", (*tensor, ("target", named_layout("official_int32")))),
            ("seal", (("form", form),)),
        ):
            name = f"{which}.{entry}"
            out[name] = Request(name.replace("codes", "decode"), spec, layout, g.dtype, channels, options)
    for zone in ("history", "page", "open", "floating", "planes", "output"):
        options = (("form", form), ("q_heads", g.q_heads), ("fold", True))
        out[f"cache.{zone}"] = Request(f"cache.{zone}", spec, layout, g.dtype, g.head_dim, options)
    return out


def emit(request: Request, stage: str, target: str = TARGETS[0]) -> str | bytes:
    """What one stage of compilation makes of a graph. Raises `InputError` for an unknown stage or target."""
    for name, value, known in (("stage", stage, STAGES), ("target", target, TARGETS)):
        if value not in known:
            raise InputError(f"{name} = {value!r}; known are {', '.join(known)}")
    if stage == "kv":
        return kv.text(module(request))
    made = kernels.model(request, kernels.lowered(request))
    return made if stage == "onnx" else text(made)
