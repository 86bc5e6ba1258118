"""The Triton backend under Triton's interpreter passes the conformance suite, whole tensors and attention: every case, none unsupported.

A pass without a GPU is not a device's: the report says which mode ran.
"""

from __future__ import annotations

import pytest

from tests.conform import check

# NumPy warns where a number overflows on purpose; Triton's interpreter does not silence it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("profile", ["quantize", "attention"])
def test_quick(profile):
    check("triton", "interpreter", profile, "quick")


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["quantize", "attention"])
def test_full(profile):
    check("triton", "interpreter", profile, "full")
