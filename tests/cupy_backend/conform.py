"""What both conformance tests of this folder ask. They are two files so that two processes can share them."""

from __future__ import annotations

from kivi import conformance


def check(profile: str, size: str) -> None:
    """Every case of a profile passes under the shim; none is unsupported."""
    report = conformance.run("cupy", mode="shim", profile=profile, size=size)
    assert [f"{case.id}: {case.status}: {case.reason}" for case in report.cases if case.status != "passed"] == []
    assert (report.backend, report.mode) == ("cupy", "shim")
    assert report.summary["passed"] == len(conformance.select_cases(profile, size))
