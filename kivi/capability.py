"""Whether a backend can serve a cache, by data: its declared capabilities, and what requests need of a device."""

from __future__ import annotations

from typing import Any

from packaging.version import InvalidVersion, Version

from kivi.backend import DeviceInfo, DeviceRule, Manifest
from kivi.dtypes import metadata_dtype
from kivi.geometry import Geometry
from kivi.layout import Layout
from kivi.spec import CacheSpec


def incapable(manifest: Manifest, spec: CacheSpec, g: Geometry) -> str:
    """Why a backend's declared capabilities exclude a cache; empty if they do not. Raises `SpecError` for a contradiction."""
    can = manifest.capabilities
    wanted: list[tuple[str, Any, tuple[Any, ...]]] = [
        ("key.bits", spec.key.bits, can.bits),
        ("value.bits", spec.value.bits, can.bits),
        ("dtype", g.dtype, can.dtypes),
        ("key.metadata", metadata_dtype(spec, "key", g.dtype), can.metadata),
        ("value.metadata", metadata_dtype(spec, "value", g.dtype), can.metadata),
        ("numerics", spec.numerics, can.numerics),
        ("order", spec.order, can.order),
        ("nonfinite", spec.nonfinite, can.nonfinite),
        ("overflow", spec.overflow, can.overflow),
    ]
    for name, value, allowed in wanted:
        if value not in allowed:
            return f"{name} = {value!r}, it has {', '.join(str(a) for a in allowed)}"
    layout = spec.packing.layout
    name = layout.name if isinstance(layout, Layout) else layout
    if name != "auto" and can.layouts != "any" and name not in can.layouts:
        return f"packing.layout = {name!r}, it has {', '.join(can.layouts)}"
    for what, dim in (("head_dim", g.head_dim), ("value_head_dim", g.value_head_dim)):
        if dim > can.head_dim_max or dim % can.head_dim_multiple:
            several = f"multiples of {can.head_dim_multiple} up to" if can.head_dim_multiple > 1 else "at most"
            return f"{what} = {dim}, it takes {several} {can.head_dim_max}"
    return ""


def unfit(device: DeviceInfo, manifest: Manifest, spec: CacheSpec, g: Geometry) -> str:
    """Why a device does not meet what a manifest requires of it for a cache; empty if it does."""
    dtypes = {g.dtype, metadata_dtype(spec, "key", g.dtype), metadata_dtype(spec, "value", g.dtype)}
    return breach(device, manifest.requires_device, dtypes, max(g.head_dim, g.value_head_dim))


def breach(device: DeviceInfo, rules: tuple[DeviceRule, ...], dtypes: set[str], head_dim: int) -> str:
    """The first rule that a device breaks for a request with these dtypes and this head_dim, in words; empty if it breaks none."""
    for rule in rules:
        if rule.api != device.api or head_dim <= rule.head_dim_above or (rule.dtypes and not dtypes & set(rule.dtypes)):
            continue
        if not serves(rule, device.capability):
            what = " and ".join(
                [*sorted(dtypes & set(rule.dtypes)), *([f"head_dim above {rule.head_dim_above}"] if rule.head_dim_above else [])]
            )
            newer = " or newer" if rule.newer else ""
            needs = f"{what or 'it'} needs capability {', '.join(rule.capabilities)}{newer}"
            return f"{device} does not fit: {needs}: {rule.reason}"
    return ""


def serves(rule: DeviceRule, capability: str) -> bool:
    """Whether a rule names a capability, or takes it as a newer one. Only capabilities that are version numbers are newer or older."""
    if capability in rule.capabilities:
        return True
    if not rule.newer:
        return False
    try:
        return Version(capability) > max(Version(known) for known in rule.capabilities)
    except InvalidVersion:
        return False
