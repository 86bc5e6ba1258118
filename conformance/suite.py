"""Running the suite: choose cases, run each one against the subject, and say how it went.

A case ends in one of these, and only `passed` is passed:

    passed        agrees with everything expected
    failed        disagrees, or passes although xfails.toml says that it fails
    unsupported   the backend declares that it cannot serve this spec or shape
    xfailed       fails as xfails.toml of the backend says, with its reason
    errored       raised something else
"""

from __future__ import annotations

import fnmatch
import time
import tomllib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

import kivi
from kivi import plugins
from kivi.conformance import provenance
from kivi.conformance.case import Case
from kivi.conformance.check import check
from kivi.conformance.compare import Mismatch, Tally
from kivi.conformance.report import CaseResult, Report
from kivi.conformance.subject import Subject
from kivi.conformance.traces import all_cases
from kivi.errors import InputError, NotImplementedYetError, UnsupportedError

Progress = Callable[[int, int, CaseResult], None]


@dataclass(frozen=True)
class Xfail:
    """One entry of a backend's xfails.toml: a pattern of case ids, why they fail, and optionally in which mode only."""

    case: str
    reason: str
    mode: str | None = None

    def covers(self, id: str, mode: str) -> bool:
        return self.mode in (None, mode) and fnmatch.fnmatchcase(id, self.case)


@cache
def profiles() -> dict[str, Any]:
    """`profiles.toml`: the profiles, the sizes and their budgets."""
    return tomllib.loads((resources.files("kivi.conformance") / "profiles.toml").read_text("utf-8"))


def select_cases(profile: str = "all", size: str = "quick", cases: Sequence[str] | None = None) -> list[Case]:
    """The cases of a profile and size, or those of it whose id matches one of the patterns `cases`.

    Raises `InputError` for an unknown profile or size, or patterns that match nothing.
    """
    for what, value in (("profile", profile), ("size", size)):
        if value not in profiles()[what]:
            raise InputError(f"{what} = {value!r}; the suite has {', '.join(profiles()[what])}")
    chosen = [c for c in all_cases() if profile in ("all", c.profile) and size in ("full", c.size)]
    if cases is None:
        return chosen
    matching = [c for c in chosen if any(fnmatch.fnmatchcase(c.id, pattern) for pattern in cases)]
    if not matching:
        raise InputError(f"no case of profile {profile!r}, size {size!r} matches {', '.join(cases)}; ids look like {chosen[0].id!r}")
    return matching


def run(
    backend: Any,
    *,
    mode: str | None = None,
    device: str | None = None,
    profile: str = "all",
    size: str = "quick",
    progress: Progress | None = None,
    stop_on_failure: bool = False,
    subject: Subject | None = None,
    cases: Sequence[str] | None = None,
    xfails: Sequence[Xfail] | None = None,
) -> Report:
    """Run the suite on a backend (a name or a `Backend`), or on `subject` in its place.

    progress         called after each case with (done, total, result)
    stop_on_failure  end after the first case that failed or errored
    cases            patterns of ids, to run a part
    xfails           expected failures; by default those of the backend's xfails.toml

    Raises `UnknownBackendError`, `BackendUnavailableError`, `InputError`. What a case raises is its result.
    """
    if subject is None:
        subject = Subject(kivi.get_backend(backend, mode=mode, device=device) if isinstance(backend, str) else backend)
    chosen = select_cases(profile, size, cases)
    expected = expected_failures(subject.name) if xfails is None else list(xfails)
    results: list[CaseResult] = []
    for one in chosen:
        results.append(_judged(run_case(one, subject), expected, subject.backend.mode))
        if progress is not None:
            progress(len(results), len(chosen), results[-1])
        if stop_on_failure and results[-1].status in ("failed", "errored"):
            break
    stale = [
        x.case
        for x in expected
        if not any(x.covers(c.id, subject.backend.mode) for c in all_cases()) and x.mode in (None, subject.backend.mode)
    ]
    specs = {one.spec.hash: one.spec.to_dict() for one in chosen[: len(results)]}
    return Report(
        **provenance.of(subject),
        profile=profile,
        size=size,
        spec=specs,
        cases=results,
        kernels=subject.backend.kernels(),
        stale_xfails=stale,
        complete=len(results) == len(chosen),
    )


def run_case(one: Case, subject: Subject) -> CaseResult:
    """One case against a subject."""
    tally, started = Tally(), time.perf_counter()
    try:
        check(one, subject, tally)
        status, reason = "passed", ""
    except Mismatch as error:
        status, reason = "failed", str(error)
    except (UnsupportedError, NotImplementedYetError) as error:
        status, reason = "unsupported", str(error)
    except Exception as error:  # whatever a backend under test does must not end the suite
        frame = traceback.extract_tb(error.__traceback__)[-1]
        status, reason = "errored", f"{type(error).__name__}: {error} ({frame.filename.rsplit('/', 2)[-1]}:{frame.lineno})"
    return CaseResult(
        id=one.id,
        profile=one.profile,
        size=one.size,
        status=status,
        reason=reason,
        about=one.about,
        reports=list(one.reports),
        spec=one.spec.hash,
        bound_use=tally.bound_use if tally.elements else None,
        pipeline_use=tally.pipeline_use if tally.elements else None,
        bound_excess=tally.excess or None,
        ulp={"max": tally.ulp_max, "mean": tally.ulp_mean, "elements": tally.elements} if tally.elements else None,
        exact_elements=tally.bits,
        seconds=round(time.perf_counter() - started, 6),
        ran=tally.ran or {"backend": subject.name, "mode": subject.backend.mode, "device": subject.backend.device},
    )


def expected_failures(name: str) -> list[Xfail]:
    """The entries of a backend's xfails.toml, `[[xfail]]` tables of case, reason and optional mode. None without the file.

    Raises `InputError` for an entry without a reason.
    """
    if name not in plugins.found():
        return []
    path = resources.files(plugins.get(name).package) / "xfails.toml"
    if not path.is_file():
        return []
    out = []
    for entry in tomllib.loads(path.read_text("utf-8")).get("xfail", []):
        if not entry.get("reason") or not entry.get("case") or set(entry) - {"case", "reason", "mode"}:
            raise InputError(f"xfails.toml of backend {name!r}: {entry} needs `case` and a `reason`, and may have `mode`")
        out.append(Xfail(**entry))
    return out


def _judged(result: CaseResult, expected: list[Xfail], mode: str) -> CaseResult:
    """The result in the light of the expected failures."""
    entry = next((x for x in expected if x.covers(result.id, mode)), None)
    if entry is None:
        return result
    if result.status in ("failed", "errored"):
        return replace(result, status="xfailed", reason=f"{entry.reason} [{result.reason}]")
    if result.status == "passed":
        return replace(
            result, status="failed", reason=f"passes, but xfails.toml expects it to fail ({entry.reason}): remove the entry {entry.case!r}"
        )
    return result
