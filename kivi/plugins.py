"""The only dynamic imports of kivi: backends by manifest, and the conformance runner.

In-tree backends are the folders of `kivi/backends` that hold a backend.toml; others announce themselves by an entry point of
group `kivi.backends` whose value is the package that holds theirs. Reading manifests imports no backend.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import InvalidName, canonicalize_name

from kivi import distributions
from kivi.backend import Backend, Manifest, read_manifest
from kivi.errors import BackendUnavailableError, UnknownBackendError, UnsupportedError

ENTRY_POINTS = "kivi.backends"
#: What to say where there is no backend at all.
NONE = "no folder of backends was found beside kivi, which must be installed unpacked: from an archive it cannot be used"


@dataclass(frozen=True)
class Found:
    """A backend on disk: its manifest and the package that holds its driver."""

    manifest: Manifest
    package: str


@dataclass(frozen=True)
class Scan:
    """All backends by name, and what claims to be one and cannot be used: a backend's or an entry point's name -> why."""

    found: dict[str, Found]
    broken: dict[str, str]


@cache
def scan() -> Scan:
    """Look for backends. A bad one is set aside with its reason: it must not take the others down."""
    out = Scan({}, {})
    places, out_of_order = _outside()
    out.broken.update(out_of_order)
    for package, path in [*_in_tree(), *places]:
        try:
            manifest = read_manifest(path.read_text("utf-8"), str(path))
            _check_requires(manifest, str(path))
        except (OSError, ValueError, UnsupportedError) as error:
            out.broken[package.rpartition(".")[2]] = str(error)
            continue
        if manifest.name in out.found:
            first = out.found.pop(manifest.name).package
            out.broken[manifest.name] = (
                f"two backends are called {manifest.name!r}: {first} and {package}; rename one in its backend.toml, or uninstall it"
            )
        elif manifest.name not in out.broken:
            out.found[manifest.name] = Found(manifest, package)
    return out


def found() -> dict[str, Found]:
    """All usable backends by name."""
    return scan().found


def broken() -> dict[str, str]:
    """Backends that cannot be used whatever the request, and why."""
    return scan().broken


def get(name: str) -> Found:
    """One backend by name. Raises `UnknownBackendError` listing the known ones, `UnsupportedError` for a broken one."""
    if name in found():
        return found()[name]
    if name in broken():
        raise UnsupportedError(f"backend {name!r} cannot be used: {broken()[name]}")
    there = f"installed are {', '.join(sorted(found()))}" if found() else NONE
    raise UnknownBackendError(f"no backend is called {name!r}; {there}")


def folder(name: str) -> Path:
    """The folder that holds a backend's manifest and driver."""
    spec = importlib.util.find_spec(get(name).package)
    places = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    return next(place for place in places if (place / "backend.toml").is_file())


def driver(name: str) -> ModuleType:
    """The driver module of a backend. Raises `BackendUnavailableError` if it cannot be imported."""
    package = get(name).package
    try:
        return importlib.import_module(f"{package}.driver")
    except (Exception, SystemExit) as error:  # a broken vendor package can fail in any way
        raise BackendUnavailableError(
            f"backend {name!r} cannot be loaded: {type(error).__name__}: {error}; {install_hint(name)}"
        ) from error


def create(driver: ModuleType, manifest: Manifest, mode: str, device: str) -> Backend:
    """The backend that a driver module makes. Raises what the driver raises, `BackendUnavailableError` if it makes something else."""
    made = driver.create(manifest, mode, device)
    if not isinstance(made, Backend):
        what = "None" if made is None else f"a {type(made).__name__}"
        raise BackendUnavailableError(f"create() of backend {manifest.name!r} returned {what}, not a kivi.backend.Backend")
    return made


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


def requirements(name: str, mode: str | None = None) -> dict[str, str]:
    """Package, or packages "a | b" -> versions that a backend requires, with those of a mode."""
    manifest = get(name).manifest
    return {**manifest.requires, **({} if mode is None else manifest.mode_requires.get(mode, {}))}  # type: ignore[call-overload]


def installed(packages: str) -> tuple[str, str] | None:
    """The first of the packages "a | b | c" that is installed, and its version; nothing is imported."""
    for package in packages.split("|"):
        version = distributions.version(package.strip())
        if version is not None:
            return package.strip(), version
    return None


def missing_packages(name: str, mode: str | None = None) -> list[str]:
    """What a backend requires, in a mode if one is named, and this environment lacks, in words; nothing is imported."""
    out = []
    for packages, versions in requirements(name, mode).items():
        found = installed(packages)
        if found is None:
            several = packages.replace(" | ", " or ")
            out.append(f"{several} is not installed (needs {several}{versions})")
            continue
        if not _range(versions).contains(found[1], prereleases=True):
            out.append(f"{found[0]} {found[1]} is installed (needs {found[0]}{versions})")
    return out


def install_command(name: str) -> str:
    """The command that installs what a backend requires; empty if the manifest names no extra."""
    extra = get(name).manifest.extra
    return f"pip install 'kivi-kvcache[{extra}]'" if extra else ""


def install_hint(name: str) -> str:
    """How to make a backend available."""
    command = install_command(name)
    return f"install it with: {command}" if command else "check its own installation notes"


def conformance_runner() -> Callable[..., Any]:
    """`kivi.conformance.run`."""
    return importlib.import_module("kivi.conformance").run


def auditor() -> Callable[..., Any]:
    """`kivi.conformance.audit`."""
    return importlib.import_module("kivi.conformance.audit").audit


def summary_update() -> Callable[..., Any]:
    """`kivi.conformance.summary.update`."""
    return importlib.import_module("kivi.conformance.summary").update


def _check_requires(manifest: Manifest, where: str) -> None:
    """Raises `UnsupportedError` for what is no package or no range of versions."""
    for table in (manifest.requires, *manifest.mode_requires.values()):
        for packages, versions in table.items():
            try:
                for package in packages.split("|"):
                    canonicalize_name(package.strip(), validate=True)
            except InvalidName as error:
                raise UnsupportedError(f"{where}: it requires {packages!r}, which names no package: {error}; use NAME or A | B") from None
            try:
                _range(versions)
            except InvalidSpecifier:
                raise UnsupportedError(
                    f"{where}: it requires {packages} in versions {versions!r}, which is no range of versions; use one like '>=1.2,<2'"
                ) from None


@cache
def _range(versions: str) -> SpecifierSet:
    return SpecifierSet(versions)


def _in_tree() -> list[tuple[str, Path]]:
    folder = Path(__file__).parent / "backends"
    return [(f"kivi.backends.{path.parent.name}", path) for path in sorted(folder.glob("*/backend.toml"))]


def _outside() -> tuple[list[tuple[str, Path]], dict[str, str]]:
    """(package, manifest) of the entry points, and name -> why of those that hold none."""
    places, bad = [], {}
    for name, value in distributions.entry_points(ENTRY_POINTS):
        try:
            spec = importlib.util.find_spec(value)
            folders = list(spec.submodule_search_locations or []) if spec else []
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the package around it is imported, and can fail in any way
            folders, bad[name] = [], f"{type(error).__name__}: {error}; "
        path = next((p for folder in folders if (p := Path(folder) / "backend.toml").is_file()), None)
        if path is not None:
            places.append((value, path))
        else:
            bad[name] = (
                f"{bad.get(name, '')}entry point {name!r} of {ENTRY_POINTS} names {value!r}, which is not a package with "
                f"a backend.toml in it; the value must be a package, not module:object, and its package data must include *.toml"
            )
    return places, bad
