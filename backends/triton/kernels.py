"""From a request to a callable kernel: lowering and printing on a miss, the file on disk otherwise.

Triton reads a kernel's source from its file, so a kernel is a module loaded from the cache folder. Whether it is interpreted is fixed
when its module runs.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kivi import jit
from kivi.jit import Generated
from kivi.layout import Layout, named_layout
from kivi.pool import PageFormat
from kivi.spec import CacheSpec

if TYPE_CHECKING:
    from kivi.ir.xdsl import ModuleOp
    from kivi.passes.tensors import Kernel


@dataclass(frozen=True)
class Request:
    """Which kernel: an entry point and all that decides its text. `options` are (name, value) pairs."""

    entry: str
    spec: CacheSpec
    layout: Layout
    dtype: str
    channels: int
    options: tuple[tuple[str, Any], ...] = ()

    def key(self, versions: dict[str, str]) -> dict[str, Any]:
        layout = {name: getattr(self.layout, name) for name in ("name", "word", "key", "value")}
        return {
            "backend": "triton",
            "entry": self.entry,
            "spec": self.spec.canonical(),
            "layout": layout,
            "dtype": self.dtype,
            "channels": self.channels,
            "options": [[name, repr(value)] for name, value in self.options],
            "triton": versions["triton"],
        }


def generate(request: Request) -> Generated:
    """Lower and print. Imports the compiler."""
    from kivi.backends.triton import emit
    from kivi.ir.tile import Tile
    from kivi.ir.xdsl import clean

    kernel = lower(request)
    clean(kernel.module, Tile)
    text = str(kernel.module)
    return Generated(
        kernel.name,
        emit.emit(kernel.module),
        emit.signature(kernel.module, kernel.name),
        kernel.grid,
        hashlib.sha256(text.encode()).hexdigest(),
    )


def lower(request: Request) -> Kernel:
    """The `tile` kernel of a request: spec to `kv`, `kv` to `tile`."""
    from kivi.passes import kv_to_tile

    option: dict[str, Any] = dict(request.options)
    schedules = {request.entry.removeprefix("cache."): option["schedule"]} if "schedule" in option else {}
    launches = kv_to_tile.lower(module(request), schedules)
    name = request.entry.replace("rows.", "key.")  # rows of keys and of values are kept alike
    return next(launch for launch in launches if launch.name == name).build()


def module(request: Request) -> ModuleOp:
    """The `kv` module that holds a request."""
    from kivi.passes import spec_to_kv

    option: dict[str, Any] = dict(request.options)
    which, _, entry = request.entry.partition(".")
    spec, dtype, channels = request.spec, request.dtype, request.channels
    if entry in ("metadata", "encode", "decode", "repack"):
        words = spec_to_kv.words_type(spec, which, request.layout, dtype, channels, option["metadata"])  # type: ignore[arg-type]
        if entry == "repack":
            return spec_to_kv.repack(words, option["target"])
        if entry == "decode":
            return spec_to_kv.codes(words) if option["out"] == "uint8" else spec_to_kv.dequantize(words, option["out"])
        return spec_to_kv.quantize(words)
    if entry in ("keep_rows", "merge"):  # the same for any spec, so that caches of different specs share them
        heads = option.get("heads", 1)
        form = PageFormat(CacheSpec(), named_layout("hp16"), heads, channels, channels, "float16", "float16")
    else:
        form = option["form"]
    return spec_to_kv.decode(form, option.get("q_heads", form.kv_heads), dtype)


@dataclass(frozen=True)
class Loaded:
    """A kernel ready to launch."""

    generated: Generated
    launch: Callable[..., Any]


def load(generated: Generated, source: Path, interpret: bool) -> Loaded:
    """Run the kernel's file under the asked-for mode and take the kernel from it."""
    import triton

    name = f"kivi_generated_{source.stem}{'_interpreted' if interpret else ''}"
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = triton.knobs.runtime.interpret
    triton.knobs.runtime.interpret = interpret
    try:
        spec.loader.exec_module(module)
    finally:
        triton.knobs.runtime.interpret = before
    return Loaded(generated, getattr(module, generated.name))


#: Kernels of this process by text and mode: a text is compiled, or prepared for interpretation, once.
LOADED: dict[tuple[str, bool], Loaded] = {}


class Library:
    """The kernels of one backend instance."""

    def __init__(self, versions: dict[str, str], interpret: bool) -> None:
        self.versions = versions
        self.interpret = interpret
        self.get = lru_cache(maxsize=None)(self._get)

    def _get(self, request: Request) -> Loaded:
        generated, source = jit.generated(request.key(self.versions), lambda: generate(request))
        same = (generated.source, self.interpret)  # requests that differ in what does not matter have the same text
        if same not in LOADED:
            LOADED[same] = load(generated, source, self.interpret)
        return Loaded(generated, LOADED[same].launch)
