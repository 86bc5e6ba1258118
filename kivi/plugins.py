"""The only dynamic imports of kivi: backends by manifest, and the conformance runner.

In-tree backends are the folders of `kivi/backends` that hold a backend.toml; others announce themselves by an entry point of
group `kivi.backends` whose value is the package that holds theirs. Reading manifests imports no backend.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.requirements import Requirement

from kivi.backend import Manifest, read_manifest
from kivi.errors import BackendUnavailableError, UnknownBackendError, UnsupportedError

ENTRY_POINTS = "kivi.backends"


@dataclass(frozen=True)
class Found:
    """A backend on disk: its manifest and the package that holds its driver."""

    manifest: Manifest
    package: str


@cache
def found() -> dict[str, Found]:
    """All backends by name. Raises `UnsupportedError` for a bad manifest or a name that two backends claim."""
    out: dict[str, Found] = {}
    for package, path in [*_in_tree(), *_outside()]:
        manifest = read_manifest(path.read_text("utf-8"), str(path))
        if manifest.name in out:
            raise UnsupportedError(
                f"two backends are called {manifest.name!r}: {out[manifest.name].package} and {package}; rename one in its "
                f"backend.toml, or uninstall it"
            )
        out[manifest.name] = Found(manifest, package)
    return out


def get(name: str) -> Found:
    """One backend by name. Raises `UnknownBackendError` listing the known ones."""
    try:
        return found()[name]
    except KeyError:
        raise UnknownBackendError(f"no backend is called {name!r}; installed are {', '.join(sorted(found()))}") from None


def driver(name: str) -> ModuleType:
    """The driver module of a backend. Raises `BackendUnavailableError` if it cannot be imported."""
    package = get(name).package
    try:
        return importlib.import_module(f"{package}.driver")
    except Exception as error:  # a broken vendor package can fail in any way
        raise BackendUnavailableError(
            f"backend {name!r} cannot be loaded: {type(error).__name__}: {error}; {install_hint(name)}"
        ) from error


def offline(name: str) -> ModuleType:
    """The module that compiles a backend's kernels without a device: `entries`, `emit`, `STAGES`, `TARGETS`.

    Raises `UnsupportedError` for a backend without one, `BackendUnavailableError` if a package is missing.
    """
    package = get(name).package
    if importlib.util.find_spec(f"{package}.offline") is None:
        raise UnsupportedError(f"backend {name!r} generates no kernels, so there is nothing to compile")
    missing = missing_packages(name)
    if missing:
        raise BackendUnavailableError(f"backend {name!r} cannot compile here: {'; '.join(missing)}; {install_hint(name)}")
    return importlib.import_module(f"{package}.offline")


def missing_packages(name: str) -> list[str]:
    """What a backend requires and this environment lacks, in words; nothing is imported."""
    out = []
    for package, versions in get(name).manifest.requires.items():
        wanted = Requirement(package + versions)
        try:
            have = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            out.append(f"{package} is not installed (needs {wanted})")
            continue
        if not wanted.specifier.contains(have, prereleases=True):
            out.append(f"{package} {have} is installed (needs {wanted})")
    return out


def install_hint(name: str) -> str:
    """How to make a backend available."""
    extra = get(name).manifest.extra
    return f"install it with: pip install 'kivi-kvcache[{extra}]'" if extra else "check its own installation notes"


def conformance_runner() -> Callable[..., Any]:
    """`kivi.conformance.run`."""
    return importlib.import_module("kivi.conformance").run


def _in_tree() -> list[tuple[str, Path]]:
    folder = Path(str(resources.files("kivi") / "backends"))
    return [(f"kivi.backends.{path.parent.name}", path) for path in sorted(folder.glob("*/backend.toml"))]


def _outside() -> list[tuple[str, Path]]:
    out = []
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        spec = importlib.util.find_spec(point.value)
        for place in (spec.submodule_search_locations or []) if spec else []:
            path = Path(place) / "backend.toml"
            if path.is_file():
                out.append((point.value, path))
                break
        else:
            raise UnsupportedError(f"entry point {point.name!r} of {ENTRY_POINTS} names {point.value!r}, which holds no backend.toml")
    return out
