"""The report of a run: data first. JSON here; JUnit XML and HTML are made from it in `junit.py` and `html.py`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VERSION = 1
STATUSES = ("passed", "failed", "unsupported", "xfailed", "errored")


@dataclass(frozen=True)
class CaseResult:
    """How one case went.

    bound_use       largest |error| / bound of its outputs, None where it has none; bound_excess: the same where it failed
    pipeline_use    the same without the rounding of the output to its dtype, which alone may use an fp16 bound up
    ulp             max and mean error of outputs in units of the last place of the output's dtype
    exact_elements  how many stored or dequantized elements were compared bit for bit
    """

    id: str
    profile: str
    size: str
    status: str
    reason: str
    about: str
    reports: list[int]
    spec: str
    bound_use: float | None
    pipeline_use: float | None
    bound_excess: float | None
    ulp: dict[str, float] | None
    exact_elements: int
    seconds: float
    ran: dict[str, Any]


@dataclass(frozen=True)
class Report:
    """A run of the suite. `spec` maps the hashes that cases name to whole specs, `kernels` the names of generated kernels to the hashes of
    their IR. `complete`: no case was left out by stopping early."""

    backend: str
    mode: str
    device: str
    numerics: dict[str, Any]
    versions: dict[str, str]
    platform: dict[str, str]
    sources: dict[str, str]
    profile: str
    size: str
    spec: dict[str, Any]
    cases: list[CaseResult]
    kernels: dict[str, list[str]] = field(default_factory=dict)
    stale_xfails: list[str] = field(default_factory=list)
    complete: bool = True

    @property
    def summary(self) -> dict[str, int]:
        """Cases by status; every status is named."""
        counted = Counter(c.status for c in self.cases)
        return {status: counted[status] for status in STATUSES}

    @property
    def ok(self) -> bool:
        """Nothing failed or errored, and something passed. Unsupported cases are not passed: they are counted apart."""
        s = self.summary
        return s["failed"] == 0 and s["errored"] == 0 and s["passed"] > 0

    @property
    def bound(self) -> dict[str, Any]:
        """Largest use of a bound by cases that passed, whole and without output rounding; largest excess of one that failed."""
        used = [c for c in self.cases if c.status == "passed" and c.bound_use is not None]
        most = max(used, key=lambda c: c.bound_use or 0.0, default=None)
        over = [c.bound_excess for c in self.cases if c.bound_excess]
        return {
            "largest_use": most.bound_use if most else None,
            "case": most.id if most else None,
            "largest_pipeline_use": max((c.pipeline_use or 0.0 for c in used), default=None),
            "largest_excess": max(over, default=None),
        }

    def failures(self) -> list[CaseResult]:
        """Cases that failed or errored."""
        return [c for c in self.cases if c.status in ("failed", "errored")]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as it is written."""
        return {
            "version": VERSION,
            "backend": self.backend,
            "mode": self.mode,
            "device": self.device,
            "profile": self.profile,
            "size": self.size,
            "ok": self.ok,
            "complete": self.complete,
            "summary": self.summary,
            "bound": self.bound,
            "numerics": self.numerics,
            "versions": self.versions,
            "platform": self.platform,
            "sources": self.sources,
            "kernels": self.kernels,
            "stale_xfails": self.stale_xfails,
            "spec": self.spec,
            "cases": [asdict(c) for c in self.cases],
        }

    def to_json(self) -> str:
        """JSON text of `to_dict`, with strict numbers."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def save(self, path: str | Path) -> None:
        """Write JSON, JUnit XML or HTML, as the suffix says: .json, .xml, .html. Raises `InputError` for another one."""
        from kivi.conformance import html, junit
        from kivi.errors import InputError

        path = Path(path)
        writers: dict[str, Callable[[Any], str]] = {".json": Report.to_json, ".xml": junit.text, ".html": html.text}
        if path.suffix not in writers:
            raise InputError(f"a report is written as {', '.join(writers)}, not as {path.name!r}")
        path.write_text(writers[path.suffix](self), "utf-8")

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Report:
        """The report that `to_dict` described."""
        names = set(cls.__dataclass_fields__)
        fields = {k: v for k, v in data.items() if k in names}
        return cls(**{**fields, "cases": [CaseResult(**c) for c in data["cases"]]})
