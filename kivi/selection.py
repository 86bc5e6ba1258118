"""Which backend serves a request, and why the others do not.

Candidates are filtered by what their manifests say (mode, device, packages, capabilities), then probed, then ranked by declared
priority. Every rejection is data. An explicit choice that cannot be honoured raises; there is no silent fallback. The nearest choice wins:
an argument of the call, then `KIVI_BACKEND`, then the ranking. Ranking by
measured speed and the self-check on first use are not built yet.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from kivi import plugins
from kivi.backend import Backend, Manifest, Probe
from kivi.dtypes import metadata_dtype
from kivi.errors import BackendUnavailableError, UnknownBackendError, UnsupportedError
from kivi.geometry import Geometry, positive
from kivi.geometry import geometry as checked_geometry
from kivi.layout import Layout
from kivi.spec import CacheSpec, load_spec


@dataclass(frozen=True)
class BackendInfo:
    """One line of `kivi.backends()`. `reason` says why a backend is not available; empty if it is."""

    name: str
    available: bool
    mode: str
    devices: tuple[str, ...]
    reason: str
    summary: str = ""
    priority: int = 0


@dataclass(frozen=True)
class Rejected:
    """A backend that was not chosen, and why."""

    name: str
    mode: str
    reason: str


@dataclass(frozen=True)
class Selection:
    """The chosen backend, why it won, and every backend that lost with its reason."""

    backend: Backend
    reason: str
    rejected: tuple[Rejected, ...]


def backends() -> list[BackendInfo]:
    """Every installed backend in each of its modes, best first. Never raises for a broken vendor package."""
    out = []
    for name, found in plugins.found().items():
        for mode, devices in found.manifest.modes.items():
            state = _probe(found.manifest, mode, "auto")
            out.append(
                BackendInfo(
                    name, state.available, mode, state.devices or devices, state.reason, found.manifest.summary, found.manifest.priority
                )
            )
    out += [BackendInfo(name, False, "", (), reason) for name, reason in plugins.broken().items()]
    return sorted(out, key=lambda info: (not info.available, info.mode != "device", -info.priority, info.name))


def get_backend(name: str, mode: str | None = None, device: str | None = None) -> Backend:
    """A backend by name. Raises `UnknownBackendError`, `BackendUnavailableError`, `UnsupportedError`; never another backend."""
    if not isinstance(name, str):
        raise UnknownBackendError(f"a backend is chosen by name, not by a {type(name).__name__}; see kivi.backends()")
    manifest = plugins.get(name).manifest
    reasons = []
    for candidate in _modes(manifest, mode):
        state = _probe(manifest, candidate, device or "auto")
        if state.available:
            chosen = device if device not in (None, "auto") else state.devices[0]
            if chosen not in state.devices:
                reasons.append(f"{candidate}: no device {chosen!r}, it has {', '.join(state.devices)}")
                continue
            return plugins.driver(name).create(manifest, candidate, chosen)
        reasons.append(f"{candidate}: {state.reason}")
    raise BackendUnavailableError(f"backend {name!r} cannot run here: {'; '.join(reasons)}")


def select(
    spec: CacheSpec | str,
    device: str = "auto",
    head_dim: int = 128,
    q_heads: int = 32,
    kv_heads: int = 8,
    dtype: str = "float16",
    batch: int = 1,
    tokens: int = 32768,
    mode: str | None = None,
    value_head_dim: int | None = None,
) -> Selection:
    """The best backend for a cache of this shape. `KIVI_BACKEND` in the environment, read at call time, names it instead.

    Raises `UnsupportedError` listing every backend with its reason when none can serve the request.
    """
    positive(batch, "batch")
    positive(tokens, "tokens")
    g = checked_geometry(q_heads, kv_heads, head_dim, value_head_dim, dtype, None, None, None)
    return _select(load_spec(spec), g, mode, str(device))


def resolve(backend: str | Backend, spec: CacheSpec, g: Geometry, mode: str | None, device: str) -> Backend:
    """The backend that a cache asked for. Raises what `get_backend` and `select` raise."""
    device = str(device)
    if isinstance(backend, Backend):
        if mode not in (None, backend.mode) or device not in ("auto", backend.device):
            raise UnsupportedError(f"{backend!r} was given together with mode = {mode!r}, device = {device!r}; leave them out")
        chosen = backend
    elif backend == "auto":
        return _select(spec, g, mode, device).backend
    else:
        chosen = get_backend(backend, mode, None if device == "auto" else device)
    reason = incapable(chosen.manifest, spec, g)
    if reason:
        raise UnsupportedError(f"backend {chosen.name!r} cannot serve this cache: {reason}")
    return chosen


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


def _select(spec: CacheSpec, g: Geometry, mode: str | None, device: str) -> Selection:
    """Every candidate is examined, so that each loser has its own reason; only the winner is created."""
    forced = os.environ.get("KIVI_BACKEND")
    if forced:
        plugins.get(forced)
    wanted = mode or "device"  # only real execution is chosen unasked: an interpreter or simulator is for testing
    able: list[Manifest] = []
    rejected = [Rejected(name, wanted, reason) for name, reason in plugins.broken().items()]
    for found in sorted(plugins.found().values(), key=lambda f: (-f.manifest.priority, f.manifest.name)):
        manifest = found.manifest
        reason = f"KIVI_BACKEND = {forced!r}" if forced and manifest.name != forced else _why_not(manifest, spec, g, wanted, device)
        if reason:
            rejected.append(Rejected(manifest.name, wanted, reason))
        else:
            able.append(manifest)
    if not able:
        reasons = "; ".join(f"{r.name} ({r.mode}): {r.reason}" for r in rejected)
        shape = f"{g.q_heads} query heads, {g.kv_heads} KV heads, head_dim {g.head_dim}, {g.dtype}"
        raise UnsupportedError(f"no backend can serve spec {spec.name!r} with {shape}: {reasons}")
    winner, *losers = able
    rejected += [Rejected(m.name, wanted, _why_behind(m, winner)) for m in losers]
    because = f"KIVI_BACKEND = {forced!r}" if forced else f"highest priority ({winner.priority}) of those that can serve the request"
    return Selection(get_backend(winner.name, wanted, device), because, tuple(rejected))


def _why_behind(loser: Manifest, winner: Manifest) -> str:
    if loser.priority == winner.priority:
        return f"same priority ({loser.priority}) as {winner.name!r}, which comes first by name"
    return f"priority {loser.priority} is lower than {winner.priority} of {winner.name!r}"


def _why_not(manifest: Manifest, spec: CacheSpec, g: Geometry, mode: str, device: str) -> str:
    """Why a backend cannot serve a request here; empty if it can."""
    if mode not in manifest.modes:
        return f"it has no mode {mode!r}, it has {', '.join(manifest.modes)}"
    reason = incapable(manifest, spec, g)
    if reason:
        return reason
    if device != "auto" and device.split(":")[0] not in manifest.modes[mode]:
        return f"it has no device {device!r}, it has {', '.join(manifest.modes[mode])}"
    state = _probe(manifest, mode, device)
    if not state.available:
        return state.reason
    return "" if device == "auto" or device in state.devices else f"no device {device!r}, it has {', '.join(state.devices)}"


def _modes(manifest: Manifest, mode: str | None) -> list[str]:
    if mode is None:
        return list(manifest.modes)
    if not isinstance(mode, str) or mode not in manifest.modes:
        raise UnsupportedError(f"backend {manifest.name!r} has no mode {mode!r}; it has {', '.join(manifest.modes)}")
    return [mode]


def _probe(manifest: Manifest, mode: str, device: str) -> Probe:
    missing = plugins.missing_packages(manifest.name)
    if missing:
        return Probe(available=False, mode=mode, reason=f"{'; '.join(missing)}; {plugins.install_hint(manifest.name)}")
    try:
        state = plugins.driver(manifest.name).probe(mode, device)
        if not isinstance(state, Probe):
            raise TypeError(f"probe() returned a {type(state).__name__}, not a kivi.backend.Probe")
        return state
    except Exception as error:  # a probe must never take the caller down
        return Probe(available=False, mode=mode, reason=f"{type(error).__name__}: {error}")
