"""The self-check of a device before it is first used: a wrong one is found, passed over and remembered; a right one is checked once."""

from __future__ import annotations

import logging

import pytest

import kivi
from kivi import isolated, selfcheck
from kivi.conformance import select_cases
from kivi.dtypes import FLOATS
from kivi.errors import UnsupportedError
from tests.vendors.stack import Vendor, gpu

#: A device whose sums are a little off: one part in a thousand of the outputs.
WRONG = "out = out * 1.001"
WRONG_ON_0 = "out = out * (1.001 if self.device == 'gpu:0' else 1.0)"


@pytest.fixture
def checks(monkeypatch):
    """Devices that a self-check ran on, in order."""
    ran, check = [], isolated.check
    monkeypatch.setattr(isolated, "check", lambda package, mode, device, cases: ran.append(device) or check(package, mode, device, cases))
    return ran


def test_a_right_device_is_checked_once(install, checks):
    install(Vendor("acme"))
    for _ in range(2):
        assert kivi.select("kivi-2bit").backend.name == "acme"
    assert checks == ["gpu:0"]
    assert kivi.select("kivi-2bit", dtype="bfloat16").backend.name == "acme"  # other arithmetic, other cases
    assert checks == ["gpu:0", "gpu:0"]


def test_a_wrong_backend_is_passed_over(install, checks, caplog):
    install(Vendor("acme", attend=WRONG))
    with caplog.at_level(logging.WARNING, "kivi"):
        chosen = kivi.select("kivi-2bit")
        kivi.select("kivi-2bit")
    assert chosen.backend.name == "reference"
    [rejected] = chosen.rejected
    assert (rejected.name, rejected.state) == ("acme", "failed self-check")
    assert "its self-check failed on gpu:0 (Fake 9.0, capability 9.0)" in rejected.reason
    assert "attention/zones.uniform-half failed" in rejected.reason
    assert "kivi conform --backend acme" in rejected.fix
    assert checks == ["gpu:0"]
    [warning] = [r.getMessage() for r in caplog.records]  # once for two selections
    assert "'acme' (mode device) was passed over for 'reference' on cpu: its self-check failed" in warning
    for strict in ({"strict": True}, {"backend": "acme"}):
        with pytest.raises(UnsupportedError, match="its self-check failed on gpu:0"):
            kivi.select("kivi-2bit", **strict)


def test_only_the_wrong_device_is_passed_over(install):
    install(Vendor("acme", devices=[gpu(0, "9.0"), gpu(1, "9.0")], attend=WRONG_ON_0))
    for _ in range(2):
        chosen = kivi.select("kivi-2bit")
        assert (chosen.backend.name, chosen.backend.device) == ("acme", "gpu:1")
    assert "its self-check failed on gpu:0" in chosen.reason


def test_a_device_that_dies_in_the_check_takes_no_process_along(install):
    install(Vendor("acme", attend="os.abort()"))
    chosen = kivi.select("kivi-2bit")
    assert chosen.backend.name == "reference"
    assert "its process ended with signal SIGABRT" in chosen.rejected[0].reason


def test_the_check_can_be_left_out(install, checks, monkeypatch):
    install(Vendor("acme", attend=WRONG))
    monkeypatch.setenv("KIVI_SELF_CHECK", "0")
    assert kivi.select("kivi-2bit").backend.name == "acme"
    assert not checks


def test_a_new_driver_is_a_new_device(install, checks, monkeypatch):
    from kivi import machine

    install(Vendor("acme"))
    kivi.select("kivi-2bit")
    monkeypatch.setattr(machine, "drivers", lambda: {"cuda": ["NVRM version: 999"]})
    kivi.select("kivi-2bit")
    assert checks == ["gpu:0", "gpu:0"]


def test_it_cannot_be_started_after_all(install, caplog):
    """What could run when it was probed is gone: the next one serves, and the next selection asks again."""
    install(Vendor("acme", create="raise RuntimeError('device is busy')", self_check=False))
    with caplog.at_level(logging.WARNING, "kivi"):
        chosen = kivi.select("kivi-2bit")
    assert chosen.backend.name == "reference"
    assert "it cannot be started on gpu:0 (Fake 9.0, capability 9.0): RuntimeError: device is busy" in chosen.rejected[0].reason
    assert "device is busy" in caplog.text


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_cases_exist_and_are_few(dtype):
    cases = select_cases("all", "quick", selfcheck.CASES[dtype])
    assert {case.id for case in cases} == set(selfcheck.CASES[dtype])
    assert {case.profile for case in cases} == {"quantize", "attention", "stream"}
    assert sum(case.instances for case in cases) <= 40
    assert {getattr(case, "dtype", None) or case.geometry.dtype for case in cases} == {dtype}
