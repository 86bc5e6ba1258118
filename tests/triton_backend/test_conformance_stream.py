"""The Triton backend under Triton's interpreter passes the conformance suite, streams of events: every case, none unsupported.

An interpreter's pass is not a device's: the report says which mode ran.
"""

from __future__ import annotations

import pytest

from tests.triton_backend.conform import check

# NumPy warns where a number overflows on purpose; Triton's interpreter does not silence it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_quick():
    check("stream", "quick")


@pytest.mark.slow
def test_full():
    check("stream", "full")
