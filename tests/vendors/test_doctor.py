"""`kivi doctor` on a machine with a vendor's device."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from kivi.cli import cli
from tests.vendors.stack import Vendor


@pytest.mark.parametrize(("scale", "code", "words"), [("1.0", 0, "passed, 4 cases"), ("1.001", 1, "FAILED")])
def test_doctor_fails_with_a_self_check(install, scale, code, words):
    install(Vendor("acme", attend=f"out = out * {scale}"))
    done = CliRunner().invoke(cli, ("doctor",))
    assert done.exit_code == code, done.output
    assert "self-check of acme on gpu:0 (Fake 9.0, capability 9.0), float16: " + words in done.stdout
