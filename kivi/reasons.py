"""Why a backend was not chosen, as data and in words, and what would change it."""

from __future__ import annotations

from dataclasses import dataclass

from kivi import plugins, probing, ranks
from kivi.backend import Manifest

#: Why a backend was not chosen, in a word; further ones are `kivi.probing`'s, and what a driver says of itself.
NOT_ASKED = "not asked for"
NO_MODE = "no such mode"
OTHER_DEVICE = "no such device"
CANNOT_SERVE = "cannot serve"
UNFIT = "unfit device"
FAILED_CHECK = "failed self-check"
BEHIND = "ranked behind"
UNUSABLE = "unusable"
#: States of a backend that was never a choice here: to pass it over is no fallback.
ABSENT = frozenset({NOT_ASKED, NO_MODE, OTHER_DEVICE, UNUSABLE, BEHIND, probing.NOT_INSTALLED, probing.NO_DEVICE, probing.UNAVAILABLE})


@dataclass(frozen=True)
class Rejected:
    """A backend that was not chosen, and why: `state` in a word, `reason` in full, `fix`: what would change it."""

    name: str
    mode: str
    reason: str
    state: str = ""
    fix: str = ""


def rejected(manifest: Manifest, mode: str, state: str, reason: str) -> Rejected:
    """With what would change it."""
    return Rejected(manifest.name, mode, reason, state, fix(manifest, mode, state))


def fix(manifest: Manifest, mode: str, state: str) -> str:
    """What would change a state: a command where there is one."""
    install = plugins.install_command(manifest.name) if manifest.name in plugins.found() else ""
    kinds = " or ".join(manifest.modes.get(mode, ()))  # type: ignore[call-overload]
    texts = {
        probing.NOT_INSTALLED: install,
        probing.WRONG_VERSION: install and install.replace("install", "install --upgrade", 1),
        probing.BROKEN: install and install.replace("install", "install --force-reinstall", 1),
        probing.NO_DEVICE: f"needs a {kinds} device and its driver",
        probing.OLD_DRIVER: "needs a newer driver, or packages for the one that is there",
        NOT_ASKED: f"backend = {manifest.name!r}",
        NO_MODE: f"ask for mode {' or '.join(repr(m) for m in manifest.modes)}",
        OTHER_DEVICE: f"ask for device {kinds}",
        CANNOT_SERVE: "needs a spec and shape within its capabilities",
        UNFIT: "needs another device, or a request that this one can serve",
        FAILED_CHECK: f"kivi conform --backend {manifest.name} --mode {mode} shows every case",
        BEHIND: f"backend = {manifest.name!r} takes it all the same",
    }
    return texts.get(state, "")


def why_first(winner: ranks.Contender, decided: str, seconds: dict[tuple[str, str], float], where: ranks.Bucket, others: bool) -> str:
    """Why a contender won. `seconds`: measured at `where`; `others`: it was not the only one."""
    if decided == "measured":
        mine = seconds[winner.backend, winner.mode]
        return f"fastest of {len(seconds)} measured at {where}: {_milliseconds(mine)} a decode step"
    reason = f"highest priority ({winner.priority}) of those that can serve the request"
    if others and seconds:
        reason += f"; at {where} only {', '.join(sorted(name for name, _ in seconds))} was measured, run kivi tune"
    return reason


def why_behind(
    loser: ranks.Contender, winner: ranks.Contender, decided: str, seconds: dict[tuple[str, str], float], where: ranks.Bucket
) -> str:
    """Why a contender that can serve the request did not win."""
    if decided == "measured":
        mine, best = (seconds[c.backend, c.mode] for c in (loser, winner))
        return f"{_milliseconds(mine)} a decode step at {where}, {mine / best:.2f} times that of {winner.backend!r}"
    if loser.priority == winner.priority:
        return f"same priority ({loser.priority}) as {winner.backend!r}, which comes first by name"
    return f"priority {loser.priority} is lower than {winner.priority} of {winner.backend!r}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
