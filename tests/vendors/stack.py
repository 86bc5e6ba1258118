"""Fake vendor stacks: real packages on disk, announced by real entry points, whose devices, versions and faults a test chooses.

A vendor's package (`<name>_vendor`) has a version that importlib.metadata finds, and code that may misbehave when imported. A backend's
package (`<name>`) has a manifest and a driver that imports the vendor's, and computes with the reference backend on devices "gpu:0", ...
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from pathlib import Path

CAPABILITIES = """
[capabilities]
bits = [1, 2, 3, 4, 8]
dtypes = ["float16", "bfloat16", "float32"]
metadata = ["float16", "bfloat16", "float32"]
numerics = ["portable", "staged"]
order = ["attend_then_seal", "seal_then_attend"]
nonfinite = ["reject", "propagate"]
overflow = ["reject", "saturate"]
native_layout = "lanes32"

[numerics]
accumulate = "float64"
exp_ulp = 1.0
"""

DRIVER = '''
"""Driver of the fake backend {name}."""

{vendor_import}

import os
from kivi.backend import DeviceInfo, Probe
from kivi.backends.reference.driver import ReferenceBackend

DEVICES = [DeviceInfo(**facts) for facts in {devices}]


def probe(mode, device):
    {probe}
    usable = tuple(d.device for d in DEVICES if not d.reason)
    return Probe(available=bool(usable), mode=mode, devices=usable, versions={{"{name}_vendor": "{version}"}}, found=tuple(DEVICES),
                 reason="" if usable else "; ".join(d.reason for d in DEVICES), state="" if usable else "unfit device")


def create(manifest, mode, device):
    {create}
    return Fake(manifest, mode, device, {{"{name}_vendor": "{version}"}})


class OutOfMemoryError(RuntimeError):
    """Named as torch's and CuPy's."""


class Fake(ReferenceBackend):
    fault = None  # what the next attend, append or read raises

    @property
    def kernel(self):
        return "{name} kernel"

    def adopt(self, x, what):
        return super().adopt(x, what)

    def attend(self, reading, q, k, v):
        if self.fault is not None:
            raise self.fault
        out = super().attend(reading, q, k, v)
        {attend}
        return out

    def append(self, pool, step, k, v):
        done = super().append(pool, step, k, v)
        if getattr(self, "fault_after_append", None) is not None:
            raise self.fault_after_append
        return done

    def to_host(self, a):
        if getattr(self, "unreadable", None) is not None:
            raise self.unreadable
        return super().to_host(a)
'''


def gpu(number: int, capability: str, reason: str = "", driver: str = "13.0") -> dict[str, str]:
    """Facts of a fake device."""
    name = f"Fake {capability}"
    return {"device": f"gpu:{number}", "name": name, "api": "cuda", "capability": capability, "driver": driver, "reason": reason}


@dataclass
class Vendor:
    """A backend and its vendor's package. Code is text of the driver: statements for `probe`, `create` and after `attend`."""

    name: str
    priority: int = 5
    devices: list[dict[str, str]] = field(default_factory=lambda: [gpu(0, "9.0")])
    version: str | None = "2.1"  # installed; None: not installed
    needs: str = ">=2.0"
    vendor: str = ""  # the text of the vendor's package
    vendor_import: str = ""  # how the driver imports it; default: import {name}_vendor
    rules: str = ""
    bits: str = "[1, 2, 3, 4, 8]"
    extra: str = ""
    self_check: bool = True
    probe: str = ""
    create: str = ""
    attend: str = ""

    def write(self, folder: Path) -> None:
        """The packages, as pip would leave them."""
        package = folder / self.name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "backend.toml").write_text(self.manifest())
        importing = self.vendor_import or f"import {self.name}_vendor"
        driver = DRIVER.format(
            name=self.name,
            vendor_import=importing,
            devices=self.devices,
            version=self.version,
            probe=self.probe or "pass",
            create=self.create or "pass",
            attend=self.attend or "pass",
        )
        (package / "driver.py").write_text(driver)
        entry = f"[kivi.backends]\n{self.name} = {self.name}\n"
        distribution(folder, f"{self.name}_backend", "1.0", {"entry_points.txt": entry})
        if self.version is not None:
            (folder / f"{self.name}_vendor.py").write_text(textwrap.dedent(self.vendor))
            distribution(folder, f"{self.name}_vendor", self.version, {})

    def manifest(self) -> str:
        extra = f'extra = "{self.extra}"\n' if self.extra else ""
        head = (
            f'kivi_backend = 1\nname = "{self.name}"\nsummary = "a fake"\npriority = {self.priority}\n{extra}'
            f'requires = {{ {self.name}_vendor = "{self.needs}" }}\nself_check = {str(self.self_check).lower()}\n'
            f'[modes]\ndevice = ["gpu"]\n'
        )
        return head + CAPABILITIES.replace("[1, 2, 3, 4, 8]", self.bits) + self.rules


def distribution(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Metadata of an installed distribution."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for file, text in files.items():
        (info / file).write_text(text)


def rule(capabilities: list[str], newer: bool = False, dtypes: tuple[str, ...] = (), reason: str = "the kernels need it") -> str:
    """A `[[requires_device]]` table."""
    listed = ", ".join(f'"{c}"' for c in capabilities)
    which = ", ".join(f'"{d}"' for d in dtypes)
    return (
        f'\n[[requires_device]]\napi = "cuda"\ncapabilities = [{listed}]\nnewer = {str(newer).lower()}\ndtypes = [{which}]\n'
        f'reason = "{reason}"\n'
    )
