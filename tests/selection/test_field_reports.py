"""Field reports that every backend answers in the conformance suite: the cases are there, and each backend's tests run them all."""

from __future__ import annotations

import pytest

from kivi.conformance import select_cases
from kivi.conformance.inputs import VIEWS

QUICK = select_cases("all", "quick")


@pytest.mark.parametrize("view", VIEWS)
def test_strides_count_on_every_side(view):
    """Report 35: scale views built from shapes instead of strides. Both sides of whole tensors, and q, k and v of a stream with two
    requests, are fed as views of each kind."""
    answering = [case for case in QUICK if 35 in case.reports and getattr(case, "view", None) == view]
    assert {case.which for case in answering} == {"key", "value"}
    streams = [
        case for case in QUICK if 35 in case.reports and any(getattr(event, "view", "") == view for event in getattr(case, "events", ()))
    ]
    assert any(case.geometry.batch > 1 for case in streams)


def test_views_are_what_they_are_called():
    assert {"transposed", "strided", "padded"} <= set(VIEWS)


def test_unequal_bits_are_fed():
    """Report 42: key and value bits differ, either way round, in streams that seal both sides."""
    pairs = {(case.spec.key.bits, case.spec.value.bits) for case in QUICK if hasattr(case, "events")}
    assert any(key > value for key, value in pairs)
    assert any(key < value for key, value in pairs)
    assert len({pair for pair in pairs if pair[0] != pair[1]}) >= 6
