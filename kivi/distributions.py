"""Which packages are installed, in which version, and what they announce: what importlib.metadata says, remembered.

To read the metadata of every package takes tens of milliseconds, so what was read is kept on disk under the state of the folders on
`sys.path`: the names and times of the metadata folders in them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sys
import time
from contextlib import suppress
from typing import Any

from kivi import records

FOLDER = "distributions"
#: Seconds for which the state of the folders is not looked at again, so that one selection looks once.
FRESH = 1.0

_known: dict[str, Any] = {}
_state: tuple[float, tuple[str, ...], str] = (-FRESH, (), "")


def version(package: str) -> str | None:
    """The installed version of a package; None if it is not installed. Nothing is imported."""
    versions: dict[str, str | None] = _facts()["versions"]
    if package not in versions:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
        _keep()
    return versions[package]


def entry_points(group: str) -> list[tuple[str, str]]:
    """(name, value) of every entry point of a group."""
    groups: dict[str, list[list[str]]] = _facts()["entry_points"]
    if group not in groups:
        groups[group] = [[point.name, point.value] for point in importlib.metadata.entry_points(group=group)]
        _keep()
    return [(name, value) for name, value in groups[group]]


def forget(kept: bool = False) -> None:
    """Look at the folders again; with `kept`, forget what is on disk, too."""
    global _state
    if kept:
        records.forget(FOLDER)
    _state = (-FRESH, (), "")
    _known.clear()


def _facts() -> dict[str, Any]:
    """What is known of the folders as they are now."""
    state = _folders()
    if _known.get("state") != state:
        _known.clear()
        kept = records.read(FOLDER, "known", {"folders": state}) or {}
        _known.update(state=state, versions=kept.get("versions", {}), entry_points=kept.get("entry_points", {}))
    return _known


def _keep() -> None:
    data = {name: _known[name] for name in ("versions", "entry_points")}
    records.write(FOLDER, "known", {"folders": _known["state"]}, data)


def _folders() -> str:
    """A hash of `sys.path` and of the metadata folders that lie there."""
    global _state
    now, path = time.monotonic(), tuple(sys.path)
    if now - _state[0] < FRESH and _state[1] == path:
        return _state[2]
    digest = hashlib.sha256()
    for folder in path:
        digest.update(f"{folder}\0".encode())
        try:
            with os.scandir(folder or ".") as entries:
                metadata = sorted((e.name, _changed(e)) for e in entries if e.name.endswith((".dist-info", ".egg-info")))
            digest.update(repr(metadata).encode())
        except OSError:  # not a folder, or none any more
            continue
    _state = (now, path, digest.hexdigest())
    return _state[2]


def _changed(entry: os.DirEntry[str]) -> list[int]:
    """When a metadata folder changed. Installers make a new one; an egg-info in a source folder is written in place."""
    times = [entry.stat().st_mtime_ns]
    if entry.name.endswith(".egg-info"):
        for file in ("PKG-INFO", "entry_points.txt"):
            with suppress(OSError):
                times.append(os.stat(os.path.join(entry.path, file)).st_mtime_ns)
    return times
