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
from dataclasses import asdict, dataclass, field

import msgspec

from kivi import records

FOLDER = "distributions"
#: Seconds for which the state of the folders is not looked at again, so that one selection looks once.
FRESH = 1.0


@dataclass
class _Known:
    """What was read: package -> version or None, and group of entry points -> (name, value)."""

    versions: dict[str, str | None] = field(default_factory=dict)
    entry_points: dict[str, list[tuple[str, str]]] = field(default_factory=dict)


_known: tuple[str, _Known] = ("", _Known())  # and the state of the folders that it holds for
_state: tuple[float, tuple[str, ...], str] = (-FRESH, (), "")


def version(package: str) -> str | None:
    """The installed version of a package; None if it is not installed. Nothing is imported."""
    state, known = _facts()
    if package not in known.versions:
        try:
            known.versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            known.versions[package] = None
        _keep(state, known)
    return known.versions[package]


def entry_points(group: str) -> list[tuple[str, str]]:
    """(name, value) of every entry point of a group."""
    state, known = _facts()
    if group not in known.entry_points:
        known.entry_points[group] = [(point.name, point.value) for point in importlib.metadata.entry_points(group=group)]
        _keep(state, known)
    return list(known.entry_points[group])


def forget(kept: bool = False) -> None:
    """Look at the folders again; with `kept`, forget what is on disk, too."""
    global _known, _state
    if kept:
        records.forget(FOLDER)
    _state = (-FRESH, (), "")
    _known = ("", _Known())


def _facts() -> tuple[str, _Known]:
    """What is known of the folders as they are now, and their state. Another thread may ask at the same time: no answer changes hands."""
    global _known
    state, known = _folders(), _known
    if known[0] != state:
        known = (state, _read(state))
        _known = known
    return known


def _read(state: str) -> _Known:
    data = records.read(FOLDER, "known", {"folders": state})
    try:
        return _Known() if data is None else msgspec.convert(data, _Known)
    except msgspec.ValidationError:  # of another release
        return _Known()


def _keep(state: str, known: _Known) -> None:
    whole = _Known(dict(known.versions), dict(known.entry_points))  # copies at once, while another thread may add to it
    records.write(FOLDER, "known", {"folders": state}, asdict(whole))


def _folders() -> str:
    """A hash of `sys.path` and of the metadata folders that lie there."""
    global _state
    now, path = time.monotonic(), tuple(os.fspath(entry) for entry in sys.path if isinstance(entry, (str, os.PathLike)))
    if now - _state[0] < FRESH and _state[1] == path:
        return _state[2]
    digest = hashlib.sha256()
    for folder in path:
        digest.update(os.fsencode(f"{folder}\0"))
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
