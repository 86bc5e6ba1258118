"""Every kernel that a cache of one shape needs, for tools that compile or show them without a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kivi.dtypes import metadata_dtype
from kivi.geometry import Geometry
from kivi.kernels.request import Request, decoding
from kivi.layout import Layout, Which, named_layout
from kivi.pool import PageFormat
from kivi.schedule import Schedule
from kivi.spec import CacheSpec


def entries(
    spec: CacheSpec, g: Geometry, layout: Layout, schedules: Callable[[PageFormat, int, int], dict[str, Schedule]]
) -> dict[str, Request]:
    """Requests by entry point, for one query position. `schedules(form, q_heads, rows)` as of `KernelBackend`."""
    metadata = [metadata_dtype(spec, which, g.dtype) for which in ("key", "value")]
    form = PageFormat(spec, layout, g.kv_heads, g.head_dim, g.value_head_dim, *metadata)
    out: dict[str, Request] = {}

    def add(entry: str, channels: int, *options: tuple[str, Any]) -> None:
        out[entry] = Request(entry, spec, layout, g.dtype, channels, options)

    sides: list[tuple[Which, int, str]] = [("key", g.head_dim, metadata[0]), ("value", g.value_head_dim, metadata[1])]
    for which, channels, stored in sides:
        add(f"{which}.metadata", channels, ("metadata", stored))
        add(f"{which}.encode", channels, ("metadata", stored))
        out[f"{which}.decode"] = decoding(spec, which, layout, channels, stored, "float32")
        add(f"{which}.repack", channels, ("metadata", stored), ("target", named_layout("official_int32")))
        add(f"{which}.seal_metadata", channels, ("form", form))
        add(f"{which}.seal_words", channels, ("form", form))
    add("rows.keep_rows", g.head_dim, ("heads", g.kv_heads))
    for zone, schedule in schedules(form, g.q_heads, 1).items():
        add(f"cache.{zone}", g.head_dim, ("form", form), ("q_heads", g.q_heads), ("schedule", schedule))
    add("cache.merge", g.value_head_dim, ("q_heads", g.q_heads))
    return out
