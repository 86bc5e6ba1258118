"""What the conformance tests of all backends ask."""

from __future__ import annotations

from kivi import conformance


def check(backend: str, mode: str, profile: str, size: str, every: int = 1) -> None:
    """Every case of a profile, or every so many of them, passes; none is unsupported."""
    chosen = [case.id for case in conformance.select_cases(profile, size)][::every]
    report = conformance.run(backend, mode=mode, profile=profile, size=size, cases=chosen)
    assert [f"{case.id}: {case.status}: {case.reason}" for case in report.cases if case.status != "passed"] == []
    assert (report.backend, report.mode) == (backend, mode)
    assert [case.id for case in report.cases] == chosen
    assert report.kernels
    assert all(len(one) == 64 for hashes in report.kernels.values() for one in hashes)
