"""Which backend serves a request, on which device, and why the others do not.

In this order: manifests; what their capabilities exclude; packages, drivers and devices (`kivi.probing`); what the request needs of a
device (`kivi.capability`); measured speed (`kivi.ranks`), else declared priority; a self-check of the winner on its device
(`kivi.selfcheck`). Every candidate is examined, so every rejection has its reason, as data. The nearest choice wins: an argument of the
call, then `KIVI_BACKEND` and `KIVI_MODE`, then the configuration file (`kivi.config`), then the ranking. A choice that cannot be honoured
raises. To pass over a better backend that is installed here is logged once for each reason, to the logger "kivi", and under `strict`
raises.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from kivi import plugins, probing, ranks, reasons
from kivi.backend import Backend, DeviceInfo, Manifest, Probe
from kivi.candidates import Candidate, examine, matches, start
from kivi.capability import incapable, unfit
from kivi.config import Wish, wish
from kivi.errors import BackendUnavailableError, UnknownBackendError, UnsupportedError
from kivi.geometry import Geometry, positive
from kivi.geometry import geometry as checked_geometry
from kivi.reasons import Rejected
from kivi.spec import CacheSpec, load_spec

logger = logging.getLogger("kivi")

TOKENS = 32768  # of a request that does not say how long it gets


@dataclass(frozen=True)
class BackendInfo:
    """One line of `kivi.backends()`. `reason` says why a backend is not available; empty if it is.

    state  "available", or why not, in a word; fix: what would make it available, a command where there is one
    found  data of the devices that were seen, unusable ones too
    """

    name: str
    available: bool
    mode: str
    devices: tuple[str, ...]
    reason: str
    summary: str = ""
    priority: int = 0
    state: str = ""
    fix: str = ""
    found: tuple[DeviceInfo, ...] = ()


@dataclass(frozen=True)
class Selection:
    """The chosen backend, why it won, and every backend that lost with its reason.

    source   what decided: "argument", "environment", "config", "measured" or "priority"
    device   the device that it runs on
    bucket   the shapes that this ranking is for
    seconds  (backend, mode) -> measured seconds of a decode step in this bucket, for those that were measured
    """

    backend: Backend
    reason: str
    rejected: tuple[Rejected, ...]
    source: str
    device: DeviceInfo
    bucket: ranks.Bucket
    seconds: dict[tuple[str, str], float]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        be = self.backend
        return {
            "backend": be.name,
            "mode": be.mode,
            "device": be.device,
            "device_name": self.device.name,
            "reason": self.reason,
            "source": self.source,
            "bucket": asdict(self.bucket),
            "seconds": {f"{name} ({mode})": s for (name, mode), s in self.seconds.items()},
            "rejected": [asdict(r) for r in self.rejected],
        }


def backends() -> list[BackendInfo]:
    """Every installed backend in each of its modes, best first. Never raises for a broken vendor package."""
    out = []
    for name, found in plugins.found().items():
        for mode, kinds in found.manifest.modes.items():
            state = probing.probe(name, mode)
            out.append(
                BackendInfo(
                    name,
                    state.available,
                    mode,
                    state.devices or kinds,
                    state.reason,
                    found.manifest.summary,
                    found.manifest.priority,
                    "available" if state.available else state.state,
                    "" if state.available else reasons.fix(found.manifest, mode, state.state),
                    probing.devices(state),
                )
            )
    out += [BackendInfo(name, False, "", (), reason, state=reasons.UNUSABLE) for name, reason in plugins.broken().items()]
    return sorted(out, key=lambda info: (not info.available, info.mode != "device", -info.priority, info.name))


def get_backend(name: str, mode: str | None = None, device: str | None = None) -> Backend:
    """A backend by name, taken as it is; never another one.

    Without `mode`, `KIVI_MODE` or the configuration file names it, else it is the first one of the backend that can run here; if that is
    not its first one, a warning says so, and under strict it is an error.
    Raises `UnknownBackendError`, `BackendUnavailableError`, `UnsupportedError`, `ConfigError`.
    """
    if not isinstance(name, str):
        raise UnknownBackendError(f"a backend is chosen by name, not by a {type(name).__name__}; see kivi.backends()")
    manifest, device = plugins.get(name).manifest, None if device is None else str(device)
    if mode is not None:
        _check_mode(manifest, mode, f"mode = {mode!r}")
    wanted = wish(name, mode)
    if wanted.mode is not None:
        _check_mode(manifest, wanted.mode, wanted.mode_from)
    wrong = []
    for candidate in [wanted.mode] if wanted.mode else list(manifest.modes):
        state = _loaded(name, candidate)
        if not state.available:
            wrong.append(f"{candidate}: {state.reason}")
            continue
        chosen = next((d for d in state.devices if matches(d, device or "auto")), None)
        if chosen is None:
            wrong.append(f"{candidate}: no device {device!r}, it has {', '.join(state.devices)}")
            continue
        if wrong:
            _stands_in(name, candidate, "; ".join(wrong), wanted.strict)
        return plugins.create(plugins.driver(name), manifest, candidate, chosen)
    raise BackendUnavailableError(f"backend {name!r} cannot run here: {'; '.join(wrong)}")


def _stands_in(name: str, mode: str, why: str, strict: bool) -> None:
    """A mode that was not asked for runs in place of one that cannot: said once, refused under strict. Raises `BackendUnavailableError`."""
    if strict:
        raise BackendUnavailableError(f"backend {name!r} cannot run here: {why}; mode {mode!r} can, if it is asked for (strict)")
    _say_mode(f"backend {name!r} runs in mode {mode!r}, since it cannot otherwise ({why}); name the mode if that is what you want")


@cache
def _say_mode(line: str) -> None:
    logger.warning("%s", line)


def select(
    spec: CacheSpec | str,
    device: str = "auto",
    head_dim: int = 128,
    q_heads: int = 32,
    kv_heads: int = 8,
    dtype: str = "float16",
    batch: int = 1,
    tokens: int = TOKENS,
    mode: str | None = None,
    value_head_dim: int | None = None,
    backend: str | None = None,
    strict: bool | None = None,
) -> Selection:
    """The best backend for a cache of this shape, and why.

    device: "auto", a kind such as "cuda", or a device such as "cuda:1". backend, mode: nearer than `KIVI_BACKEND`, `KIVI_MODE` and the
    configuration file, which are read now. strict: raise where a better backend that is installed here would be passed over.

    Raises `UnsupportedError` listing every backend with its reason when none can serve the request, `UnknownBackendError`, `ConfigError`.
    """
    positive(batch, "batch")
    positive(tokens, "tokens")
    g = checked_geometry(q_heads, kv_heads, head_dim, value_head_dim, dtype, None, None, None)
    return _select(load_spec(spec), g, wish(backend, mode, strict), str(device), batch, tokens)


def check_servable(spec: CacheSpec, g: Geometry, mode: str | None, device: str) -> None:
    """Raises what `select` raises if no backend can serve a cache here. Chooses none, starts none, checks none."""
    wanted = wish(None, mode)
    able, _, rejected = _examined(spec, g, wanted, str(device))
    if not able:
        raise _nobody(spec, g, wanted, rejected)


def resolve(backend: str | Backend, spec: CacheSpec, g: Geometry, mode: str | None, device: str, batch: int = 1) -> Backend:
    """The backend that a cache asked for. Raises what `get_backend` and `select` raise."""
    device = str(device)
    if isinstance(backend, Backend):
        if mode not in (None, backend.mode) or device not in ("auto", backend.device):
            raise UnsupportedError(f"{backend!r} was given together with mode = {mode!r}, device = {device!r}; leave them out")
        chosen = backend
    elif backend == "auto":
        return _select(spec, g, wish(None, mode), device, batch, g.max_tokens or TOKENS).backend
    else:
        chosen = get_backend(backend, mode, None if device == "auto" else device)
    reason = incapable(chosen.manifest, spec, g) or _unfit_here(chosen, spec, g)
    if reason:
        raise UnsupportedError(f"backend {chosen.name!r} cannot serve this cache: {reason}")
    return chosen


def ready(spec: CacheSpec, g: Geometry, device: str) -> tuple[list[ranks.Contender], list[Rejected]]:
    """Every backend that can serve a request in mode "device" here and passes its self-check, with the device that it would take; and the
    others with their reasons."""
    wanted = wish("auto", "device")
    able, _, rejected = _examined(spec, g, wanted, device)
    started = [start(candidate, wanted, g.dtype) for candidate in able]
    rejected += [candidate.rejected for backend, candidate in started if backend is None]
    return [candidate.contender for backend, candidate in started if backend is not None], rejected


# -- the steps of a selection -------------------------------------------------------------------------------------------


def _select(spec: CacheSpec, g: Geometry, wanted: Wish, device: str, batch: int, tokens: int) -> Selection:
    """Every candidate is examined, so that each loser has its own reason; only the winner is imported and created."""
    able, lost, rejected = _examined(spec, g, wanted, device)
    where, left = ranks.bucket(g, tokens, batch), {c.manifest.name: c for c in able}
    passed: list[Rejected] = []
    while left:  # what fails is out of the ranking, as it will be in the next selection, which knows
        order, decided = ranks.order(spec, where, [c.contender for c in left.values()])
        first = order[0]
        backend, winner = start(left.pop(first.backend), wanted, g.dtype)
        if backend is None:
            rejected.append(winner.rejected)
            passed.append(winner.rejected)
            _refuse_fallback(passed, wanted, spec, g)
            continue
        before = {c.manifest.name: _before(c.contender, spec, where, order) for c in lost}
        passed += [r for r in rejected if r not in passed and _ranks_higher(r, winner.manifest, before)]
        _refuse_fallback(passed, wanted, spec, g)
        seconds = ranks.rates(spec, where, order)
        for loser in order[1:]:
            why = reasons.why_behind(loser, first, decided, seconds, where)
            rejected.append(reasons.rejected(left[loser.backend].manifest, loser.mode, reasons.BEHIND, why))
        named = wanted.backend is not None
        reason = wanted.backend_from if named else reasons.why_first(first, decided, seconds, where, len(order) > 1)
        if winner.notes:
            reason += f", on {backend.device} ({'; '.join(winner.notes)})"
        info = winner.devices[0]
        out = Selection(backend, reason, tuple(rejected), wanted.source if named else decided, info, where, seconds)
        _say(out, passed, spec, g)
        return out
    raise _nobody(spec, g, wanted, rejected)


def _examined(spec: CacheSpec, g: Geometry, wanted: Wish, device: str) -> tuple[list[Candidate], list[Candidate], list[Rejected]]:
    """Backends that can serve a request, by declared priority; those that could if their devices did; and all that cannot, with their
    reasons."""
    if wanted.backend is not None:
        plugins.get(wanted.backend)
    mode = wanted.mode or "device"  # only real execution is chosen unasked: an interpreter or simulator is for testing
    rejected = [Rejected(name, mode, reason, reasons.UNUSABLE) for name, reason in plugins.broken().items()]
    able, lost = [], []
    for found in sorted(plugins.found().values(), key=lambda f: (-f.manifest.priority, f.manifest.name)):
        manifest = found.manifest
        if wanted.backend not in (None, manifest.name):
            rejected.append(reasons.rejected(manifest, mode, reasons.NOT_ASKED, wanted.backend_from))
            continue
        candidate = examine(manifest, spec, g, mode, device, wanted)
        if not candidate.reason:
            able.append(candidate)
            continue
        rejected.append(candidate.rejected)
        if candidate.lost:
            lost.append(candidate)
    return able, lost, rejected


def _before(lost: ranks.Contender, spec: CacheSpec, where: ranks.Bucket, order: Sequence[ranks.Contender]) -> bool:
    """Whether a contender would have come before the first of an order if its devices could serve the request."""
    ranked, _ = ranks.order(spec, where, [*order, lost])
    return ranked.index(lost) < ranked.index(order[0])


def _ranks_higher(rejected: Rejected, winner: Manifest, before: dict[str, bool]) -> bool:
    """Whether a rejected backend is installed here and would have come before the winner: by its rank where that is known, else by its
    priority."""
    if rejected.state in reasons.ABSENT or rejected.name not in plugins.found():
        return False
    if not before.get(rejected.name, plugins.get(rejected.name).manifest.priority > winner.priority):
        return False
    return rejected.state != reasons.CANNOT_SERVE or probing.probe(rejected.name, rejected.mode).available


def _refuse_fallback(passed: Sequence[Rejected], wanted: Wish, spec: CacheSpec, g: Geometry) -> None:
    if passed and wanted.strict:
        raise _unsupported(
            f"strict: for spec {spec.name!r} with {_shape(g)} a better backend that is installed here would be passed over: "
            f"{_list(passed)}; mend it, name a backend, or leave strict",
            passed,
        )


def _nobody(spec: CacheSpec, g: Geometry, wanted: Wish, rejected: Sequence[Rejected]) -> UnsupportedError:
    asked = "; ".join(words for words in (wanted.backend_from, wanted.mode_from) if words)
    asked = f" ({asked})" if asked else ""
    why = _list(rejected) or plugins.NONE
    return _unsupported(f"no backend can serve spec {spec.name!r} with {_shape(g)}{asked}: {why}", rejected)


def _unsupported(message: str, rejected: Sequence[Rejected]) -> UnsupportedError:
    error = UnsupportedError(message)
    error.rejected = tuple(rejected)
    return error


_said: set[str] = set()


def _say(out: Selection, passed: Sequence[Rejected], spec: CacheSpec, g: Geometry) -> None:
    """One line for each decision that this process has not seen, whatever the number of layers that ask."""
    be = out.backend
    chosen = f"backend {be.name!r} (mode {be.mode}, {be.device}) serves spec {spec.name!r} with {_shape(g)}: {out.reason}"
    over = f"was passed over for {be.name!r} on {be.device}"
    lines = [(logging.INFO, chosen), *((logging.WARNING, f"backend {r.name!r} (mode {r.mode}) {over}: {r.reason}") for r in passed)]
    for level, line in lines:
        if line not in _said:
            _said.add(line)
            logger.log(level, "%s", line)


def _shape(g: Geometry) -> str:
    return f"{g.q_heads} query heads, {g.kv_heads} KV heads, head_dim {g.head_dim}, {g.dtype}"


def _list(rejected: Sequence[Rejected]) -> str:
    return "; ".join(f"{r.name} ({r.mode}): {r.reason}" for r in rejected)


# -- a backend that was named -------------------------------------------------------------------------------------------


def _loaded(name: str, mode: str) -> Probe:
    """What a backend says that will be loaded anyway, in this process."""
    missing = plugins.missing_packages(name, mode)
    return probing.probe(name, mode) if missing else probing.probe_here(name, mode)


def _unfit_here(backend: Backend, spec: CacheSpec, g: Geometry) -> str:
    """Why the device of a backend that exists does not fit a cache."""
    if backend.mode != "device" or not backend.manifest.requires_device or backend.name not in plugins.found():
        return ""
    infos = probing.devices(_loaded(backend.name, backend.mode))
    return next((unfit(info, backend.manifest, spec, g) for info in infos if info.device == backend.device), "")


def _check_mode(manifest: Manifest, mode: str, asked: str) -> None:
    if not isinstance(mode, str) or mode not in manifest.modes:
        raise UnsupportedError(f"{asked}: backend {manifest.name!r} has no mode {mode!r}; it has {', '.join(manifest.modes)}")
