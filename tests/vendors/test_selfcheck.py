"""The self-check of a device before it is first used: a wrong one is found, passed over and remembered; a right one is checked once."""

from __future__ import annotations

import json
import logging
import os
import sys

import pytest

import kivi
from kivi import isolated, jit, probing, ranks, records, selection, selfcheck
from kivi.conformance import select_cases
from kivi.dtypes import FLOATS
from kivi.errors import UnsupportedError
from kivi.geometry import geometry
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


SPEC = kivi.load_spec("kivi-2bit")
GEOMETRY = geometry(32, 8, 128, None, "float16", None, None, None)  # of kivi.select without a shape


@pytest.fixture
def measure(monkeypatch):
    """`measure(acme=1e-3, ...)`: a record of these seconds, as `kivi tune` writes it; a backend without any was not measured."""

    def write(**seconds):
        with monkeypatch.context() as context:
            context.setenv("KIVI_SELF_CHECK", "0")
            able, _ = selection.ready(SPEC, GEOMETRY, "auto")
        entries = [
            ranks.Measured(c.backend, c.mode, c.device.device, seconds[c.backend], 7, ranks.identity(c))
            for c in able
            if c.backend in seconds
        ]
        assert len(entries) == len(seconds)
        ranks.write(SPEC, ranks.bucket(GEOMETRY, selection.TOKENS, 1), selection.TOKENS, entries)

    return write


def test_the_fastest_one_fails_and_every_selection_says_so(install, measure, checks, caplog):
    """It leads by what was measured, not by its priority; the second selection knows of the failure before it ranks."""
    install(Vendor("acme", priority=-5, attend=WRONG))
    measure(acme=1e-3, reference=2e-3)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"strict: .* better backend .*acme .*its self-check failed") as caught:
            kivi.select("kivi-2bit", strict=True)
        assert [r.name for r in caught.value.rejected] == ["acme"]
    with caplog.at_level(logging.WARNING, "kivi"):
        chosen = [kivi.select("kivi-2bit") for _ in range(2)]
    assert [c.backend.name for c in chosen] == ["reference"] * 2
    assert chosen[0].reason == chosen[1].reason
    [warning] = [r.getMessage() for r in caplog.records]  # once for two selections
    assert "'acme' (mode device) was passed over for 'reference' on cpu: its self-check failed" in warning
    assert checks == ["gpu:0"]


def test_a_failure_that_would_not_have_led_is_no_fallback(install, measure, caplog):
    """It has the higher priority, and was slower."""
    install(Vendor("acme", attend=WRONG))
    measure(acme=2e-3, reference=1e-3)
    assert kivi.select("kivi-2bit", strict=True).source == "measured"
    with pytest.raises(UnsupportedError, match="its self-check failed"):
        kivi.select("kivi-2bit", backend="acme")
    with caplog.at_level(logging.WARNING, "kivi"):
        chosen = kivi.select("kivi-2bit", strict=True)
    assert (chosen.backend.name, [r.state for r in chosen.rejected]) == ("reference", ["failed self-check"])
    assert not caplog.records


def test_the_others_are_ranked_as_if_what_failed_were_not_there(install, measure):
    """It was never measured, so nothing can be compared with it; the others were."""
    install(Vendor("acme", priority=9, attend=WRONG), Vendor("bolt", priority=5, self_check=False))
    measure(bolt=2e-3, reference=1e-3)
    for _ in range(2):
        chosen = kivi.select("kivi-2bit")
        assert (chosen.backend.name, chosen.source) == ("reference", "measured")
        assert {r.name: r.state for r in chosen.rejected} == {"acme": "failed self-check", "bolt": "ranked behind"}


@pytest.mark.parametrize("data", [{}, {"ok": 1}, [], "x", None])
def test_a_record_of_something_else_is_none(install, checks, data):
    install(Vendor("acme"))
    assert kivi.select("kivi-2bit").backend.name == "acme"
    [path] = (jit.cache_folder() / selfcheck.FOLDER).glob("acme-*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "data": data}))
    assert kivi.select("kivi-2bit").backend.name == "acme"
    assert len(checks) == 2
    assert json.loads(path.read_text())["data"]["ok"] is True


def test_a_start_that_fails_in_a_folder_that_cannot_be_written(install, monkeypatch):
    """The probe's record can be read and not deleted."""
    install(Vendor("acme", create="raise RuntimeError('device is busy')", self_check=False))
    assert kivi.backends()
    assert list((jit.cache_folder() / probing.FOLDER).glob("acme-*.json"))

    def refuse(self, missing_ok=False):
        raise PermissionError(30, "Read-only file system", os.fspath(self))

    monkeypatch.setattr(records.Path, "unlink", refuse)
    monkeypatch.setattr(records.os, "replace", lambda source, target: refuse(target))
    asked, probe = [], isolated.probe
    monkeypatch.setattr(isolated, "probe", lambda package, modes: asked.append(package) or probe(package, modes))
    assert kivi.select("kivi-2bit").rejected[0].state == "broken"
    monkeypatch.delitem(sys.modules, "acme.driver")  # as another process would
    assert kivi.select("kivi-2bit").rejected[0].state == "broken"
    assert asked == ["acme"]  # the second time, since the first one could not be started
