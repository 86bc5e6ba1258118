"""Summaries of reports: small JSON files, one for each backend and mode, that say which profiles passed, when and with what.

A summary holds the last whole run of each profile. `kivi conform --summary FOLDER` writes one; those in `conformance/results` ship with
kivi, and docs/support.md is made from them.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from kivi.conformance.report import STATUSES, Report
from kivi.errors import InputError

VERSION = 1


def update(folder: Path, report: Report, date: str | None = None) -> Path:
    """Put a report's profiles into `<backend>.<mode>.json` of a folder, in place of what it said of them. `date`: by default today's.

    Raises `InputError` for a report that does not hold every case of its profile and size.
    """
    from kivi.conformance.suite import select_cases

    whole = [case.id for case in select_cases(report.profile, report.size)]
    if not report.complete or [case.id for case in report.cases] != whole:
        raise InputError(f"a summary takes whole runs: this one has {len(report.cases)} of the {len(whole)} cases of its profile and size")
    path = folder / f"{report.backend}.{report.mode}.json"
    profiles = read(path)["profiles"] if path.is_file() else {}
    for name in dict.fromkeys(case.profile for case in report.cases):
        profiles[name] = _entry(report, name, date or time.strftime("%Y-%m-%d", time.gmtime()))
    folder.mkdir(parents=True, exist_ok=True)
    data = {"version": VERSION, "backend": report.backend, "mode": report.mode, "profiles": dict(sorted(profiles.items()))}
    path.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    return path


def read(path: Path) -> dict[str, Any]:
    """A summary. Raises `InputError` for a file that is none."""
    try:
        data = json.loads(path.read_text("utf-8"))
        if data["version"] == VERSION and isinstance(data["profiles"], dict):
            return data
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise InputError(f"{path} is not a conformance summary of version {VERSION}; delete it, and write it with kivi conform --summary")


def _entry(report: Report, profile: str, date: str) -> dict[str, Any]:
    counted = Counter(case.status for case in report.cases if case.profile == profile)
    return {
        "size": report.size,
        "date": date,
        **{status: counted[status] for status in STATUSES},
        "device": report.device,
        "platform": dict(report.platform),
        "versions": dict(report.versions),
        "suite": report.sources["conformance"],
    }
