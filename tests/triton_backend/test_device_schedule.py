"""The schedule that a GPU takes, run by the interpreter: the very kernels of a device, on cases that visit every zone."""

from __future__ import annotations

import pytest

from kivi import conformance
from kivi.backends.triton import driver
from kivi.backends.triton.schedule import schedules

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CASES = ["attention/zones.rich", "attention/shapes.heads4-2", "attention/corners.*"]


def check(monkeypatch, cases):
    monkeypatch.setattr(driver, "schedules", lambda mode, *shape: schedules("device", *shape))
    report = conformance.run("triton", mode="interpreter", profile="attention", size="quick", cases=cases)
    assert [f"{case.id}: {case.reason}" for case in report.cases if case.status != "passed"] == []
    assert report.summary["passed"] >= 3


def test_kernels_of_a_device(monkeypatch):
    check(monkeypatch, CASES)


@pytest.mark.slow
def test_kernels_of_a_device_in_all_cases(monkeypatch):
    check(monkeypatch, ["*"])
