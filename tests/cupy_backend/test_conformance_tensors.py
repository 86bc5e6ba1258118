"""The CuPy backend under the thread shim passes the conformance suite, whole tensors and attention: every case of the full
size, which holds those of the quick one, none unsupported. A compiled shim is fast enough for that in every run.

A pass without a GPU is not a device's: the report says which mode ran.
"""

from __future__ import annotations

import pytest

from tests.conform import check


@pytest.mark.parametrize("profile", ["quantize", "attention"])
def test_full(profile):
    check("cupy", "shim", profile, "full")
