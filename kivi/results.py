"""What conformance said last of each backend and mode: the summaries that ship with kivi, and those of runs on this machine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from kivi import jit

PROFILES = ("quantize", "attention", "stream")


@dataclass(frozen=True)
class Result:
    """The last whole run of each profile of a backend in a mode. `here`: on this machine, not where the release was made."""

    backend: str
    mode: str
    profiles: dict[str, dict[str, Any]]
    here: bool

    def __str__(self) -> str:
        """In short: "full: 964 passed", "quick: 500 passed, 2 failed"; profiles apart where their sizes differ."""
        if not self.profiles:
            return "not run"
        sizes = {entry["size"] for entry in self.profiles.values()}
        if len(sizes) == 1 and set(self.profiles) == set(PROFILES):
            return f"{sizes.pop()}: {_counts(list(self.profiles.values()))}"
        return "; ".join(f"{name} {entry['size']}: {_counts([entry])}" for name, entry in sorted(self.profiles.items()))


def shipped_folder() -> Path:
    """Summaries that ship with kivi."""
    return Path(str(resources.files("kivi") / "conformance" / "results"))


def local_folder() -> Path:
    """Summaries of this machine's runs."""
    return jit.cache_folder() / "conformance"


def shipped() -> dict[tuple[str, str], Result]:
    """(backend, mode) -> what the release says."""
    return _read(shipped_folder(), here=False)


def last() -> dict[tuple[str, str], Result]:
    """(backend, mode) -> the last result: this machine's where there is one."""
    return {**shipped(), **_read(local_folder(), here=True)}


def _read(folder: Path, here: bool) -> dict[tuple[str, str], Result]:
    out = {}
    for path in sorted(folder.glob("*.json")):
        try:
            data = json.loads(path.read_text("utf-8"))
            out[data["backend"], data["mode"]] = Result(data["backend"], data["mode"], data["profiles"], here)
        except (OSError, ValueError, KeyError, TypeError):  # a damaged one says nothing
            continue
    return out


def _counts(entries: list[dict[str, Any]]) -> str:
    totals = {status: sum(entry[status] for entry in entries) for status in ("passed", "failed", "errored", "xfailed", "unsupported")}
    return ", ".join(f"{count} {status}" for status, count in totals.items() if count or status == "passed")
