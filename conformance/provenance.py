"""What a report says of where it was made: backend, device, versions, and hashes of the sources that ran."""

from __future__ import annotations

import hashlib
import platform
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import kivi
from kivi import plugins
from kivi.conformance.subject import Subject


def of(subject: Subject) -> dict[str, Any]:
    """The fields of a `Report` that do not depend on cases."""
    be = subject.backend
    return {
        "backend": subject.name,
        "mode": be.mode,
        "device": be.device,
        "numerics": {k: getattr(be.manifest.numerics, k) for k in be.manifest.numerics.__struct_fields__},
        "versions": {
            "kivi": kivi.__version__,
            "python": platform.python_version(),
            "numpy": metadata.version("numpy"),
            "ml_dtypes": metadata.version("ml_dtypes"),
            **be.versions,
        },
        "platform": {"system": platform.system(), "machine": platform.machine(), "processor": _processor()},
        "sources": sources(subject.name),
    }


def sources(backend: str) -> dict[str, str]:
    """SHA-256 of the sources of kivi, of the suite and of the backend."""
    folders = {"kivi": str(resources.files("kivi")), "conformance": str(resources.files("kivi.conformance"))}
    if backend in plugins.found():
        folders["backend"] = str(resources.files(plugins.get(backend).package))
    return {
        name: folder_hash(Path(path), ("*.py",) if name == "kivi" else ("*.py", "*.toml", "*.safetensors"))
        for name, path in folders.items()
    }


def folder_hash(folder: Path, patterns: tuple[str, ...]) -> str:
    """One hash of all matching files: names and contents, in order of name. The links inside `kivi` have their own."""
    digest = hashlib.sha256()
    linked = {"backends", "conformance", "_spec"} if folder.name == "kivi" else set()
    for path in sorted(p for pattern in patterns for p in folder.rglob(pattern)):
        name = path.relative_to(folder)
        if name.parts[0] not in linked and "__pycache__" not in name.parts:
            digest.update(name.as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _processor() -> str:
    """The processor's name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
