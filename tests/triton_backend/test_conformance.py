"""The Triton backend under Triton's interpreter passes the conformance suite: every case, none unsupported.

An interpreter's pass is not a device's: the report says which mode ran.
"""

from __future__ import annotations

import pytest

from kivi import conformance

# NumPy warns where a number overflows on purpose; Triton's interpreter does not silence it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def check(profile, size):
    report = conformance.run("triton", mode="interpreter", profile=profile, size=size)
    assert [f"{case.id}: {case.status}: {case.reason}" for case in report.cases if case.status != "passed"] == []
    assert (report.backend, report.mode) == ("triton", "interpreter")
    assert report.summary["passed"] == len(conformance.select_cases(profile, size))


@pytest.mark.parametrize("profile", ["quantize", "attention", "stream"])
def test_quick(profile):
    check(profile, "quick")


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["quantize", "attention", "stream"])
def test_full(profile):
    check(profile, "full")
