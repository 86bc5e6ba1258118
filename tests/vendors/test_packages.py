"""Vendor packages that are broken in the ways in which they break: selection takes the next backend, says why, and survives."""

from __future__ import annotations

import logging
import re
import time

import pytest

import kivi
from kivi import distributions, isolated, records
from kivi.backend import Probe
from kivi.errors import BackendUnavailableError, UnsupportedError
from tests.vendors.stack import Vendor, distribution

HANGS = "import time; time.sleep(600)"
CRASHES = "import os; os.abort()"
#: What is wrong -> the stack, the state, and words of the reason.
BROKEN = {
    "missing": (Vendor("acme", version=None, extra="triton"), "not installed", ["acme_vendor is not installed (needs acme_vendor>=2.0)"]),
    "old": (Vendor("acme", version="1.4"), "wrong version", ["acme_vendor 1.4 is installed (needs acme_vendor>=2.0)"]),
    "library": (
        Vendor("acme", vendor="raise ImportError('libacme.so.2: cannot open shared object file')"),
        "broken",
        ["ImportError", "libacme.so.2: cannot open shared object file"],
    ),
    "symbol": (Vendor("acme", vendor_import="from acme_vendor import launch_v2"), "broken", ["cannot import name 'launch_v2'"]),
    "abi": (
        Vendor("acme", vendor="raise SystemError('module compiled against ABI version 0x2000009 but this version is 0x1000009')"),
        "broken",
        ["SystemError", "compiled against ABI version"],
    ),
    "crash": (Vendor("acme", vendor=CRASHES), "broken", ["its process ended with signal SIGABRT"]),
    "exit": (Vendor("acme", vendor="import sys; sys.exit('no licence')"), "broken", ["exit code 1", "no licence"]),
    "hang": (Vendor("acme", vendor=HANGS), "broken", ["did not answer within 3 seconds"]),
    "none": (Vendor("acme", probe="return None"), "broken", ["probe() returned None, not a kivi.backend.Probe"]),
    "field": (
        Vendor("acme", probe="return Probe(available=True, mode=mode, devices=('gpu:0',), versions={'acme': 1})"),
        "broken",
        ["probe() returned a kivi.backend.Probe with a field of the wrong type: Expected `str`, got `int`"],
    ),
    "raises": (Vendor("acme", probe="raise OSError('no permission for /dev/acme0')"), "broken", ["OSError: no permission for /dev/acme0"]),
}


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(isolated, "PROBE_SECONDS", 3.0)


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_package_is_a_reason(fault, install, impatient, caplog):
    """Report 37 among them: a version out of range is found when a backend is selected, and both versions are named."""
    vendor, state, words = BROKEN[fault]
    install(vendor)
    with caplog.at_level(logging.INFO, "kivi"):
        chosen = kivi.select("kivi-2bit")
    assert chosen.backend.name == "reference"
    [rejected] = chosen.rejected
    assert (rejected.name, rejected.state) == ("acme", state)
    for word in words:
        assert word in rejected.reason
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    if state == "not installed":  # it never was a choice here
        assert not warnings
        assert rejected.fix == "pip install 'kivi-kvcache[triton]'"
    else:
        [warning] = warnings
        assert "backend 'acme' (mode device) was passed over for 'reference' on cpu" in warning
        assert words[0] in warning
        with pytest.raises(UnsupportedError, match=r"strict: .* better backend") as caught:
            kivi.select("kivi-2bit", strict=True)
        assert words[0] in str(caught.value)
    [info] = [i for i in kivi.backends() if i.name == "acme"]
    assert (info.available, info.state) == (False, state)


@pytest.mark.parametrize("fault", ["missing", "old", "library", "symbol", "none", "field"])
def test_an_explicit_choice_of_it_raises(fault, install):
    vendor, _, words = BROKEN[fault]
    install(vendor)
    for choose in (
        lambda: kivi.get_backend("acme"),
        lambda: kivi.KVCache("kivi-2bit", batch=1, q_heads=1, kv_heads=1, head_dim=64, backend="acme"),
    ):
        with pytest.raises(BackendUnavailableError, match="backend 'acme' cannot run here") as caught:
            choose()
        assert words[-1] in str(caught.value)
    with pytest.raises(UnsupportedError, match="no backend can serve") as caught:
        kivi.select("kivi-2bit", backend="acme")
    assert words[-1] in str(caught.value)
    states = {r.name: r.state for r in caught.value.rejected}
    assert states["reference"] == "not asked for"


def test_a_package_that_prints_is_understood_all_the_same(install, capfd):
    install(Vendor("acme", vendor="import os, sys; print('{\"ok\": 1}'); print('hello', file=sys.stderr)", self_check=False))
    assert kivi.backends()[0].name == "acme"
    assert "hello" not in capfd.readouterr().err
    assert kivi.select("kivi-2bit").backend.name == "acme"


def test_the_reason_holds_until_something_changes(install, tmp_path):
    """A bad answer is kept, so that the next process does not wait for it; another version of the package is asked anew."""
    counter = tmp_path / "asked"
    code = f"open({str(counter)!r}, 'a').write('x')\nraise ImportError('libacme.so.2')"
    install(Vendor("acme", vendor=code))
    for _ in range(3):
        assert "libacme" in kivi.select("kivi-2bit").rejected[0].reason
    assert counter.read_text() == "x"
    for pattern in ("acme_vendor.py", "acme_vendor-2.1.dist-info"):
        [path] = tmp_path.glob(f"site*/{pattern}")
        path.write_text("") if path.is_file() else path.rename(path.with_name("acme_vendor-2.2.dist-info"))
    [metadata] = tmp_path.glob("site*/acme_vendor-2.2.dist-info/METADATA")
    metadata.write_text(metadata.read_text().replace("2.1", "2.2"))
    distributions.forget()
    assert kivi.select("kivi-2bit").backend.name == "acme"


def test_a_bad_answer_does_not_hold_for_ever(install, monkeypatch):
    install(Vendor("acme", probe="raise OSError('busy')"))
    assert "busy" in kivi.select("kivi-2bit").rejected[0].reason
    later = Probe(available=False, mode="device", reason="asked again")
    monkeypatch.setattr(isolated, "probe", lambda package, modes: {"device": later})
    assert "busy" in kivi.select("kivi-2bit").rejected[0].reason
    now = time.time()
    monkeypatch.setattr(records.time, "time", lambda: now + records.BAD_FOR + 1)
    assert kivi.select("kivi-2bit").rejected[0].reason == "asked again"


def test_a_package_that_exits_ends_no_process(install):
    install(BROKEN["exit"][0])
    with pytest.raises(BackendUnavailableError, match="SystemExit: no licence"):
        kivi.get_backend("acme")


@pytest.mark.parametrize("failure", ["1 / 0", "raise SystemExit('bye')", "raise BaseException('bye')"])
def test_a_package_around_a_backend_may_fail_in_any_way(install, tmp_path, monkeypatch, failure):
    """To look for a package in another one imports that one."""
    site = tmp_path / "outer"
    (site / "outer").mkdir(parents=True)
    (site / "outer" / "__init__.py").write_text(failure)
    distribution(site, "outer", "1.0", {"entry_points.txt": "[kivi.backends]\nacme = outer.inner\n"})
    monkeypatch.syspath_prepend(str(site))
    install()
    chosen = kivi.select("kivi-2bit")
    [rejected] = chosen.rejected
    assert (chosen.backend.name, rejected.name, rejected.state) == ("reference", "acme", "unusable")
    assert ("ZeroDivisionError" if "0" in failure else "bye") in rejected.reason
    assert "'outer.inner', which is not a package with a backend.toml" in rejected.reason


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        ('acme_vendor = "banana"', "requires acme_vendor in versions 'banana', which is no range of versions"),
        ('"acme vendor" = ">=2"', "requires 'acme vendor', which names no package"),
        ('"acme_vendor>=2" = ""', "requires 'acme_vendor>=2', which names no package"),
        ('"acme | " = ">=2"', "requires 'acme | ', which names no package"),
    ],
)
def test_a_manifest_that_requires_what_cannot_be(install, tmp_path, needs, words):
    vendor = Vendor("acme")
    manifest = vendor.manifest().replace('acme_vendor = ">=2.0"', needs)
    assert needs in manifest
    vendor.manifest = lambda: manifest
    install(vendor)
    [rejected] = kivi.select("kivi-2bit").rejected
    assert (rejected.name, rejected.state) == ("acme", "unusable")
    assert words in rejected.reason
    assert "acme/backend.toml: it requires" in rejected.reason
    with pytest.raises(UnsupportedError, match=r"backend 'acme' cannot be used: .*acme/backend\.toml"):
        kivi.get_backend("acme")


@pytest.mark.parametrize(("made", "what", "self_check"), [("None", "None", False), ("3", "a int", False), ("None", "None", True)])
def test_a_driver_that_makes_no_backend(install, made, what, self_check):
    words = rf"create\(\) of backend 'acme' returned {what}, not a kivi\.backend\.Backend"
    install(Vendor("acme", create=f"return {made}", self_check=self_check))
    chosen = kivi.select("kivi-2bit")
    [rejected] = chosen.rejected
    assert (chosen.backend.name, rejected.state) == ("reference", "failed self-check" if self_check else "broken")
    assert re.search(words, rejected.reason)
    with pytest.raises(BackendUnavailableError, match=words):
        kivi.get_backend("acme")


def test_a_driver_that_says_no_is_taken_at_its_word(install, caplog):
    """Nothing is said of devices: the driver did not."""
    install(Vendor("acme", probe="return Probe(available=False, mode=mode, reason='the licence has expired')"))
    [rejected] = kivi.select("kivi-2bit").rejected
    assert (rejected.state, rejected.reason, rejected.fix) == ("unavailable", "the licence has expired", "")
    assert not [r for r in caplog.records if r.levelno == logging.WARNING]
    [info] = [i for i in kivi.backends() if i.name == "acme"]
    assert (info.state, info.reason, info.fix) == ("unavailable", "the licence has expired", "")


def test_an_answer_that_something_was_printed_into(install):
    code = "import json; real = json.dumps; json.dumps = lambda *a, **k: 'noise' + real(*a, **k)"
    install(Vendor("acme", vendor=code))
    [rejected] = kivi.select("kivi-2bit").rejected
    assert rejected.state == "broken"
    assert "its answer cannot be read: 'noise{" in rejected.reason
