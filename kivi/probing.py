"""Which backends can run here, and on what: asked once, and kept on disk for as long as the answer cannot have changed.

In this order: packages by their metadata; for accelerators, whether the machine has a driver at all; then the backend's own `probe`, in
this process if its driver is loaded anyway, else in a child (`kivi.isolated`). So a warm selection imports no vendor's package.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from kivi import isolated, machine, plugins, records
from kivi.backend import DeviceInfo, Probe
from kivi.errors import KiviError

FOLDER = "probes"
#: What kivi itself requires: a driver that needs no more is as safe to import as kivi.
OWN = frozenset({"numpy", "ml-dtypes", "msgspec", "packaging", "safetensors"})
#: Variables that choose or hide devices, whatever the backend.
ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "CUDA_PATH", "CUDA_HOME")

#: Why a backend is not available, in a word; a driver may say another one.
NOT_INSTALLED = "not installed"
WRONG_VERSION = "wrong version"
NO_DEVICE = "no device"
UNAVAILABLE = "unavailable"  # the driver says no, and not which kind of no
OLD_DRIVER = "driver too old"
BROKEN = "broken"


def probe(name: str, mode: str) -> Probe:
    """Whether a backend can run here in a mode, on which devices, and if not, why. Never raises for a broken package."""
    missing = plugins.missing_packages(name, mode)
    if missing:
        state = NOT_INSTALLED if any("is not installed" in text for text in missing) else WRONG_VERSION
        return Probe(available=False, mode=mode, reason=f"{'; '.join(missing)}; {plugins.install_hint(name)}", state=state)
    found = plugins.get(name)
    module, kinds = f"{found.package}.driver", found.manifest.modes[mode]  # type: ignore[index]
    if module in sys.modules or (found.manifest.requires and set(plugins.requirements(name, mode)) <= OWN):
        return _named(probe_here(name, mode), kinds)
    if not _may_run(kinds):
        reason = f"this machine has no driver for {' or '.join(kinds)} devices ({_looked_for(kinds)})"
        return Probe(available=False, mode=mode, reason=reason, state=NO_DEVICE)
    return _named(_kept(name, mode), kinds)


def probe_here(name: str, mode: str) -> Probe:
    """What a backend's driver says, in this process, which imports it. Never raises."""
    try:
        driver = plugins.driver(name)
    except KiviError as error:
        return Probe(available=False, mode=mode, reason=str(error), state=BROKEN)
    return isolated.probe_driver(driver, mode)


def forget(name: str = "") -> None:
    """Ask again next time, all backends or one."""
    records.forget(FOLDER, name)


def devices(found: Probe) -> tuple[DeviceInfo, ...]:
    """Data of every device that a probe saw; a probe that gives names only is taken at its word."""
    named = {info.device for info in found.found}
    return (*found.found, *(DeviceInfo(device=device) for device in found.devices if device not in named))


def facts(name: str) -> dict[str, Any]:
    """What an answer depends on: versions of packages, environment, the backend's files, drivers and devices of the machine."""
    found = plugins.get(name)
    manifest = found.manifest
    every = {package for mode in manifest.modes for package in plugins.requirements(name, mode)}
    return {
        "package": found.package,
        "python": sys.version,
        "prefix": sys.prefix,
        "versions": {packages: plugins.installed(packages) for packages in sorted(every)},
        "environment": {variable: os.environ.get(variable) for variable in (*ENVIRONMENT, *manifest.environment)},
        "sources": driver_stamp(found.package),
        "machine": machine.drivers(),
        "processor": machine.processor(),
    }


@functools.cache
def driver_stamp(package: str) -> str:
    """Changes when a file of a backend does. Looked at once a process: what it loads is loaded once, too."""
    spec = importlib.util.find_spec(package)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    return records.stamp(*folders)


@functools.cache
def source_stamp(package: str) -> str:
    """Changes when a file of a backend or of the compiler does: with the kernels, not only with the driver."""
    own = Path(__file__).parent
    return records.stamp(*(own / part for part in ("ir", "passes", "kernels", "emit"))) + driver_stamp(package)


def _kept(name: str, mode: str) -> Probe:
    """The answer on disk, or that of a child, which is asked for every mode at once and kept."""
    key, manifest = facts(name), plugins.get(name).manifest
    data = records.read(FOLDER, name, key)
    if data is not None and mode in data:
        try:
            return msgspec.convert(data[mode], Probe)
        except msgspec.ValidationError:  # of another release
            pass
    modes = [m for m, kinds in manifest.modes.items() if _may_run(kinds) and not plugins.missing_packages(name, m)]
    try:
        answers = isolated.probe(plugins.get(name).package, modes)
    except isolated.NoChild:
        return probe_here(name, mode)
    except isolated.NoAnswer as error:
        reason = f"its driver failed when it was asked in a process of its own: {error}"
        answers = {m: Probe(available=False, mode=m, reason=reason, state=BROKEN) for m in modes}
    good = all(answer.available for answer in answers.values())
    records.write(FOLDER, name, key, {m: msgspec.to_builtins(answer) for m, answer in answers.items()}, good)
    return answers[mode]


def _named(found: Probe, kinds: tuple[str, ...]) -> Probe:
    """With its state named: a driver says why it is not available, and need not say which kind of reason that is."""
    if found.available or found.state:
        return found
    return msgspec.structs.replace(found, state=UNAVAILABLE if _may_run(kinds) else NO_DEVICE)


def _may_run(kinds: tuple[str, ...]) -> bool:
    return any(machine.may_have(kind.partition(":")[0]) for kind in kinds)


def _looked_for(kinds: tuple[str, ...]) -> str:
    apis = {api for kind in kinds for api in machine.KINDS.get(kind.partition(":")[0], ())}
    return ", ".join(f"no {machine.LIBRARIES[api]}" for api in sorted(apis))
