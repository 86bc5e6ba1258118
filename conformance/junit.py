"""A report as JUnit XML: one suite a profile. Unsupported and expected failures are skipped tests with their reason, never passes."""

from __future__ import annotations

from typing import Any

from kivi.conformance.report import CaseResult, Report


def text(report: Report) -> str:
    """The XML document. Needs junitparser (extra `report`)."""
    from junitparser import JUnitXml, TestSuite

    document = JUnitXml(f"kivi conformance: {report.backend} ({report.mode}, {report.device})")
    for profile in sorted({c.profile for c in report.cases}):
        suite = TestSuite(f"{profile}.{report.size}")
        for key, value in (("backend", report.backend), ("mode", report.mode), ("device", report.device), *report.versions.items()):
            suite.add_property(key, value)
        for case in report.cases:
            if case.profile == profile:
                suite.add_testcase(_testcase(case))
        document.add_testsuite(suite)
    return document.tostring().decode("utf-8")


def _testcase(case: CaseResult) -> Any:
    from junitparser import Error, Failure, Skipped, TestCase

    out = TestCase(case.id.split("/", 1)[1], classname=f"kivi.conformance.{case.profile}", time=case.seconds)
    kind = {"failed": Failure, "errored": Error, "unsupported": Skipped, "xfailed": Skipped}.get(case.status)
    if kind is not None:
        out.result = [kind(_printable(f"{case.status}: {case.reason}"))]
    return out


def _printable(message: str) -> str:
    """XML 1.0 has no control characters."""
    return "".join(c for c in message if c >= " " or c in "\n\t")
