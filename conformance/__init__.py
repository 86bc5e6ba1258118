"""The conformance suite: decides whether a backend may be used.

    report = kivi.conformance.run("reference", size="quick")
    report.ok, report.summary, report.to_json()

Every case is replayed against a backend and against a naive model written from the design's text. Codes, scales, origins, words
and floating rows must agree bit for bit; attention must lie within a bound derived from the roundoffs that the backend declares.
How to port a backend: PORTING.md.
"""

from __future__ import annotations

from kivi.conformance.report import CaseResult, Report
from kivi.conformance.subject import Subject
from kivi.conformance.suite import run, select_cases

__all__ = ["CaseResult", "Report", "Subject", "run", "select_cases"]
