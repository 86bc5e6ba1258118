"""The CuPy backend under the thread shim passes the conformance suite, whole tensors and attention: every case, none unsupported.

A pass without a GPU is not a device's: the report says which mode ran.
"""

from __future__ import annotations

import pytest

from tests.conform import check


@pytest.mark.parametrize("profile", ["quantize", "attention"])
def test_quick(profile):
    check("cupy", "shim", profile, "quick")


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["quantize", "attention"])
def test_full(profile):
    check("cupy", "shim", profile, "full")
