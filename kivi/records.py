"""Small JSON records in the cache folder: what was found out once and need not be found out again.

A record has a folder, a name, and a key: data that says when it holds. The file's name contains a hash of the key, so another driver,
version or environment is another file. Files are renamed into place; one that is damaged is as good as none.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kivi import jit

FORMAT = 1
#: Seconds for which a bad result holds: a device may be busy, a package may be mended.
BAD_FOR = 3600.0

_unwritten: dict[Path, dict[str, Any]] = {}  # what could not be kept on disk; empty for what could not be deleted there


def path_of(folder: str, name: str, key: Mapping[str, Any]) -> Path:
    """The file of a record."""
    text = json.dumps({**key, "format": FORMAT}, sort_keys=True)
    return jit.cache_folder() / folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"


def read(folder: str, name: str, key: Mapping[str, Any], now: float | None = None) -> dict[str, Any] | None:
    """The data of a record, or None: no file, a damaged one, another key's, or a bad result that is older than `BAD_FOR`."""
    path = path_of(folder, name, key)
    try:
        found = _unwritten[path] if path in _unwritten else json.loads(path.read_text("utf-8"))
        if found["format"] != FORMAT or found["key"] != json.loads(json.dumps(key)):
            return None
        if not isinstance(found["data"], dict):
            return None
        age = (time.time() if now is None else now) - found["when"]
        return found["data"] if found["good"] or 0 <= age < BAD_FOR else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(folder: str, name: str, key: Mapping[str, Any], data: Mapping[str, Any], good: bool = True) -> None:
    """Keep a record. `good`: it holds as long as its key; else for `BAD_FOR` seconds. Where the folder cannot be written, this process
    remembers it."""
    path = path_of(folder, name, key)
    text = json.dumps({"format": FORMAT, "key": key, "when": time.time(), "good": good, "data": data}, indent=1)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, "utf-8")
        os.replace(part, path)
        _unwritten.pop(path, None)
    except OSError:
        _unwritten[path] = json.loads(text)
        with suppress(OSError):
            part.unlink(missing_ok=True)


def all_of(folder: str) -> list[Any]:
    """The data of every record in a folder."""
    out = []
    for path in sorted((jit.cache_folder() / folder).glob("*.json")):
        try:
            out.append(json.loads(path.read_text("utf-8"))["data"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return out


def forget(folder: str, name: str = "") -> None:
    """Delete the records of a folder, or those of one name. Where they cannot be deleted, this process takes them for deleted."""
    place, pattern = jit.cache_folder() / folder, f"{name}-*.json" if name else "*.json"
    for path in [p for p in _unwritten if p.parent == place and p.match(pattern)]:
        del _unwritten[path]
    for path in place.glob(pattern):
        try:
            path.unlink(missing_ok=True)
        except OSError:
            _unwritten[path] = {}


def stamp(*folders: Path) -> str:
    """A hash that changes when a Python or TOML file of these folders does: names, sizes and times, no contents."""
    return hashlib.sha256(os.fsencode("".join(text for folder in folders for text in _files(str(folder))))).hexdigest()


def _files(folder: str) -> list[str]:
    out = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                out += _files(entry.path)
            elif entry.name.endswith((".py", ".toml")):
                status = entry.stat()
                out.append(f"{entry.path}\0{status.st_size}\0{status.st_mtime_ns}\n")
    return sorted(out)
