"""What this machine has, told without importing a vendor's package: drivers of accelerators, by the files that they leave.

Two uses. A machine without any driver needs no vendor package asked; and what a package answered stays true while these facts do.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

#: API -> files that a kernel driver leaves; their text, or their time, tells one driver from another.
FILES: Mapping[str, tuple[str, ...]] = {
    "cuda": ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl", "/dev/nvmap"),
    "hip": ("/dev/kfd", "/sys/module/amdgpu/version"),
}
#: API -> device nodes, one an accelerator.
NODES: Mapping[str, str] = {"cuda": "nvidia[0-9]*", "hip": "dri/renderD*"}
#: API -> the driver's library in user space, for systems that hide the files above.
LIBRARIES: Mapping[str, str] = {"cuda": "libcuda.so.1", "hip": "libamdhip64.so"}
#: What backends call the devices of these APIs: torch calls those of both "cuda".
KINDS: Mapping[str, tuple[str, ...]] = {"cuda": ("cuda", "hip"), "hip": ("hip",), "rocm": ("hip",)}


def drivers() -> dict[str, list[str]]:
    """API ("cuda", "hip") -> facts that change when its driver or its devices do. Empty: no driver. Elsewhere than on Linux the files are
    not known, and the only entry is "unknown"."""
    if not sys.platform.startswith("linux"):
        return {"unknown": [platform.platform()]}
    out = {}
    for api, files in FILES.items():
        facts = [fact for path in map(Path, files) if (fact := _fact(path))]
        if not facts and _has_library(LIBRARIES[api]):
            facts = [LIBRARIES[api]]
        if facts:
            out[api] = facts + sorted(path.name for path in Path("/dev").glob(NODES[api]))
    return out


def may_have(kind: str) -> bool:
    """Whether devices that backends call `kind` ("cuda", "cpu", ...) can exist here. True for kinds that this module does not know."""
    found = drivers()
    return kind not in KINDS or "unknown" in found or any(api in found for api in KINDS[kind])


@cache
def processor() -> str:
    """The processor's name where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:  # of many cores they are many, and the first one tells
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()  # may start a process


def _fact(path: Path) -> str:
    """A file in few words: its first line if it is a text of /proc or /sys, else that it is there and since when; empty without it."""
    try:
        if path.parts[1] in ("proc", "sys"):
            return f"{path}: {path.read_text('utf-8').splitlines()[0]}"
        return f"{path}: {path.stat().st_mtime_ns}"
    except (OSError, IndexError, UnicodeDecodeError):
        return ""


@cache
def _has_library(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
