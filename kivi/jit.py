"""Generated source on disk, so that a warm process loads no compiler.

An entry holds the text that an emitter printed and the launch data of its kernel. Its name is a hash of everything that decides it:
what was asked for, the versions of the tools, and the sources of the compiler itself. Entries are written to a file of their own and
renamed into place, so readers and writers of several processes need no lock; one that is damaged or foreign is built again.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

FORMAT = 3


@dataclass(frozen=True)
class Generated:
    """A printed kernel: its source, name, argument types, grid (see `kivi.passes.tensors.Kernel`), the hash of its IR, and what else a
    launch needs (JSON data: threads, bytes of shared memory)."""

    name: str
    source: str
    signature: dict[str, str]
    grid: list[list[tuple[str, int]]]
    ir_hash: str
    launch: dict[str, int] = field(default_factory=dict)

    def programs(self, values: Mapping[str, int]) -> tuple[int, ...]:
        """The grid for these values of its arguments."""
        out = []
        for axis in self.grid:
            size = 1
            for argument, divisor in axis:
                size *= -(-values[argument] // divisor)
            out.append(size)
        return tuple(out)


def cache_folder() -> Path:
    """`KIVI_CACHE_DIR`, read at call time; by default `kivi` in the user's cache folder."""
    named = os.environ.get("KIVI_CACHE_DIR")
    if named:
        return Path(named)
    caches = os.environ.get("XDG_CACHE_HOME")
    if caches:
        return Path(caches) / "kivi"
    try:
        return Path.home() / ".cache" / "kivi"
    except RuntimeError:  # a user without a home
        return _own_folder()


@cache
def _own_folder() -> Path:
    """A folder of this process alone, for a user without a home or a cache folder that cannot be written."""
    folder = Path(tempfile.mkdtemp(prefix="kivi-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def compiler_hash(backend: str) -> str:
    """SHA-256 over the sources that decide the text of a backend's kernels: those of all backends, and its own folder in the tree."""
    digest = hashlib.sha256()
    root = resources.files("kivi")
    own = f"backends/{backend.partition('-')[0]}"  # a backend may keep kernels for each of its modes
    for place in ("layout.py", "pool.py", "dtypes.py", "schedule.py", "spec.py", "ir", "passes", "kernels", "emit", own):
        for path in sorted(Path(str(root / place)).rglob("*.py")) if not place.endswith(".py") else [Path(str(root / place))]:
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def generated(key: Mapping[str, Any], build: Callable[[], Generated], suffix: str = ".py") -> tuple[Generated, Path]:
    """The entry of `key`, built if there is none; and the file with its source, which ends in `suffix`.

    key: JSON data that names backend, spec hash, entry point, shapes, schedule and tool versions. `build` may import the compiler.
    """
    text = json.dumps({**key, "format": FORMAT, "compiler": compiler_hash(str(key["backend"]))}, sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()
    folder = cache_folder() / str(key["backend"])
    entry, source = folder / f"{name}.json", folder / f"k{name[:24]}{suffix}"
    found = _read(entry, text)
    body = None
    if found is None:
        found = build()
        written = json.dumps({"key": text, "entry": asdict(found)})  # the order of the signature is that of the arguments
        body = json.dumps({"sha256": hashlib.sha256(written.encode()).hexdigest(), "body": written})
    with suppress(OSError):  # what can be written nowhere is known to this process
        if body is not None:
            put_text(entry, body)
    with suppress(OSError):  # a loader that needs the file says so
        if not _holds(source, found.source):
            source = put_text(source, found.source)
    return found, source


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_text("utf-8") == text
    except (OSError, UnicodeDecodeError):
        return False


def put_text(path: Path, text: str) -> Path:
    """`put` of a text."""
    return put(path, lambda part: part.write_text(text, "utf-8"))


def put(path: Path, write: Callable[[Path], object]) -> Path:
    """Where the file lies that `write` writes to the path it is given: at `path`, whole or not at all; or with a warning in a folder of
    this process alone, if `path` cannot be written: no permission, no room. Raises `OSError` if there is no room there either."""
    folder = writable(path.parent)
    try:
        return _renamed(folder / path.name, write)
    except OSError as error:
        if folder != path.parent:
            raise
        _say_unwritable(folder, error.strerror or type(error).__name__)
        return _renamed(_own_part(folder) / path.name, write)


def _renamed(path: Path, write: Callable[[Path], object]) -> Path:
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        write(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


def writable(folder: Path) -> Path:
    """A folder that can be written: this one, made if there is none, or with a warning one of this process alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
        why = "no permission"
    except OSError as error:
        why = str(error)
    _say_unwritable(folder, why)
    return _own_part(folder)


def _own_part(folder: Path) -> Path:
    """What stands for `folder` in this process alone."""
    own = _own_folder() / folder.name
    own.mkdir(exist_ok=True)
    return own


@cache
def _say_unwritable(folder: Path, why: str) -> None:
    logging.getLogger("kivi").warning(
        "what is generated is not kept: %s cannot be written (%s); set KIVI_CACHE_DIR to a folder that can be",
        folder,
        why,
    )


def _read(path: Path, key: str) -> Generated | None:
    """The entry, or None if it is missing, damaged, or another key's."""
    try:
        outer = json.loads(path.read_text("utf-8"))
        if outer["sha256"] != hashlib.sha256(outer["body"].encode()).hexdigest():
            return None
        body = json.loads(outer["body"])
        if body["key"] != key:
            return None
        fields = body["entry"]
        grid = [[(str(a), int(d)) for a, d in axis] for axis in fields["grid"]]
        return Generated(fields["name"], fields["source"], fields["signature"], grid, fields["ir_hash"], fields["launch"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
