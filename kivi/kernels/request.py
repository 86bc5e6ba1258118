"""A request for a kernel, and its way down: spec to `kv`, `kv` to `tile`, rewrites. Nothing here prints or launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kivi.layout import Layout, Which, named_layout
from kivi.pool import PageFormat
from kivi.spec import CacheSpec, KeySpec, ValueSpec

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

    def key(self, backend: str, versions: dict[str, str]) -> dict[str, Any]:
        """The request as JSON data, with the backend and the tools that print it."""
        layout = {name: getattr(self.layout, name) for name in ("name", "word", "key", "value")}
        return {
            "backend": backend,
            "entry": self.entry,
            "spec": self.spec.canonical(),
            "layout": layout,
            "dtype": self.dtype,
            "channels": self.channels,
            "options": [[name, repr(value)] for name, value in self.options],
            "versions": versions,
        }

    def option(self, name: str, default: Any = None) -> Any:
        return dict(self.options).get(name, default)


def decoding(spec: CacheSpec, which: Which, layout: Layout, channels: int, metadata: str, out: str) -> Request:
    """The request for elements of packed words as `out`, or for the codes with "uint8". Specs that differ in what decoding does not ask,
    such as rules for bad input or the other side, share it."""
    side, page = spec.key if which == "key" else spec.value, spec.key.residual
    bits, group = side.bits, side.group
    least = next(n for n in range(2, page + 1) if page % n == 0)  # the least group that such a page holds whole
    if out == "uint8":
        group, metadata = least, "float16"  # codes are not scaled
    key, value = KeySpec(group=least, residual=page), ValueSpec(residual=page)
    if which == "key":
        key = KeySpec(bits=bits, group=group, residual=page)
    else:
        value = ValueSpec(bits=bits, group=group, residual=page)
    options = (("metadata", metadata), ("out", out))
    return Request(f"{which}.decode", CacheSpec(key=key, value=value), layout, "float32", channels, options)


def lower(request: Request) -> Kernel:
    """The `tile` kernel of a request, clean; who prints it, or what it is lowered to, verifies that. Imports the compiler."""
    from kivi.passes import kv_to_tile
    from kivi.passes.clean import clean

    schedule = request.option("schedule")
    schedules = {request.entry.removeprefix("cache."): schedule} if schedule else {}
    launches = kv_to_tile.lower(module(request), schedules)
    name = request.entry.replace("rows.", "key.")  # rows of keys and of values are kept alike
    kernel = next(launch for launch in launches if launch.name == name).build()
    if schedule is None:  # kernels with a schedule are clean after its rewrites
        clean(kernel.module)
    return kernel


def module(request: Request) -> ModuleOp:
    """The `kv` module that holds a request."""
    from kivi.passes import spec_to_kv

    which, _, entry = request.entry.partition(".")
    spec, dtype, channels = request.spec, request.dtype, request.channels
    if entry in ("metadata", "encode", "decode", "repack"):
        words = spec_to_kv.words_type(spec, which, request.layout, dtype, channels, request.option("metadata"))  # type: ignore[arg-type]
        if entry == "repack":
            return spec_to_kv.repack(words, request.option("target"))
        if entry == "decode":
            out = request.option("out")
            return spec_to_kv.codes(words) if out == "uint8" else spec_to_kv.dequantize(words, out)
        return spec_to_kv.quantize(words)
    if entry in ("keep_rows", "merge"):  # the same for any spec, so that caches of different specs share them
        form = PageFormat(CacheSpec(), named_layout("hp16"), request.option("heads", 1), channels, channels, "float16", "float16")
    else:
        form = request.option("form")
    return spec_to_kv.decode(form, request.option("q_heads", form.kv_heads), dtype)
