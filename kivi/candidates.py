"""A backend in the light of one request: whether it can serve it here and on which devices, and starting it on one of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kivi import plugins, probing, ranks, reasons, selfcheck
from kivi.backend import Backend, DeviceInfo, Manifest
from kivi.capability import incapable, unfit
from kivi.config import Wish
from kivi.geometry import Geometry
from kivi.reasons import Rejected
from kivi.spec import CacheSpec


@dataclass(frozen=True)
class Candidate:
    """`devices` that can serve the request, in order; or none, and why. `notes`: why others of its devices cannot; `lost`: those of which
    none is left."""

    manifest: Manifest
    mode: str
    devices: tuple[DeviceInfo, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    state: str = ""
    reason: str = ""
    lost: tuple[DeviceInfo, ...] = ()

    @property
    def contender(self) -> ranks.Contender:
        """As it is ranked, or would be if it had not lost its devices."""
        first = (self.devices or self.lost)[0]
        return ranks.Contender(self.manifest.name, self.mode, self.manifest.priority, first, dict(self.versions))

    @property
    def rejected(self) -> Rejected:
        """As one that was not chosen."""
        return reasons.rejected(self.manifest, self.mode, self.state, self.reason)

    def out(self, state: str, reason: str) -> Candidate:
        """It cannot serve the request, and why."""
        return replace(self, devices=(), state=state, reason=reason)

    def without(self, failed: dict[str, str], state: str) -> Candidate:
        """Without the devices of `failed`, whose values are reasons."""
        if not failed:
            return self
        left = tuple(info for info in self.devices if info.device not in failed)
        notes = (*self.notes, *failed.values())
        return replace(self, devices=left, notes=notes) if left else replace(self.out(state, "; ".join(notes)), lost=self.devices)


def examine(manifest: Manifest, spec: CacheSpec, g: Geometry, mode: str, device: str, wanted: Wish) -> Candidate:
    """Whether a backend can serve a request here, and on which devices. Imports nothing of it, and checks nothing that was not checked."""
    one = Candidate(manifest, mode)
    if mode not in manifest.modes:
        return one.out(reasons.NO_MODE, f"it has no mode {mode!r}, it has {', '.join(manifest.modes)}")
    reason = incapable(manifest, spec, g)
    if reason:
        return one.out(reasons.CANNOT_SERVE, reason)
    kinds = manifest.modes[mode]  # type: ignore[index]
    if device != "auto" and device.partition(":")[0] not in kinds:
        return one.out(reasons.OTHER_DEVICE, f"it has no device {device!r}, it has {', '.join(kinds)}")
    state = probing.probe(manifest.name, mode)
    if not state.available:
        return one.out(state.state, state.reason)
    asked = tuple(info for info in probing.devices(state) if matches(info.device, device))
    if not asked:
        return one.out(reasons.OTHER_DEVICE, f"no device {device!r}, it has {', '.join(state.devices)}")
    one = replace(one, devices=asked, versions=tuple(state.versions.items()))
    judged = {info.device: info.reason or (unfit(info, manifest, spec, g) if mode == "device" else "") for info in asked}
    one = one.without({name: why for name, why in judged.items() if why}, reasons.UNFIT)
    if not _checked(one, wanted):
        return one
    results = {info: selfcheck.known(manifest.name, mode, info, state.versions, g.dtype) for info in one.devices}
    failed = {info.device: _failed_check(info, result) for info, result in results.items() if result is not None and not result.ok}
    return one.without(failed, reasons.FAILED_CHECK)


def start(candidate: Candidate, wanted: Wish, dtype: str) -> tuple[Backend | None, Candidate]:
    """The backend on the first of its devices that passes the self-check, and the candidate with that device first; or None, and why."""
    manifest, mode = candidate.manifest, candidate.mode
    for info in candidate.devices:
        if _checked(candidate, wanted):
            result = selfcheck.check(manifest.name, mode, info, dict(candidate.versions), dtype)
            if not result.ok:
                candidate = candidate.without({info.device: _failed_check(info, result)}, reasons.FAILED_CHECK)
                continue
        try:
            return plugins.create(plugins.driver(manifest.name), manifest, mode, info.device), candidate
        except (Exception, SystemExit) as error:  # what could run when it was probed may be gone
            text = f"it cannot be started on {info}: {type(error).__name__}: {error}"
            candidate = candidate.without({info.device: text}, probing.BROKEN)
            probing.forget(manifest.name)
    return None, candidate


def matches(device: str, wanted: str) -> bool:
    """Whether a device is one that was asked for: any, one of a kind, or that very one."""
    return wanted in ("auto", device) or (":" not in wanted and device.partition(":")[0] == wanted)


def _checked(candidate: Candidate, wanted: Wish) -> bool:
    """Whether the self-check applies to a candidate."""
    return bool(candidate.devices) and candidate.manifest.self_check and wanted.self_check and candidate.mode == "device"


def _failed_check(info: DeviceInfo, result: selfcheck.Checked) -> str:
    return f"its self-check failed on {info}: {result.reason}"
