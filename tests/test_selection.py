"""Selection: an explicit choice holds or raises, reasons are data, and a bad manifest is named."""

from __future__ import annotations

import importlib.metadata

import pytest

import kivi
from kivi import distributions, plugins, selection
from kivi.backend import Probe, read_manifest
from kivi.errors import BackendUnavailableError, UnknownBackendError, UnsupportedError
from tests.test_cache import make

MANIFEST = dict(plugins._in_tree())["kivi.backends.reference"].read_text()


@pytest.fixture(autouse=True)
def nothing_is_named(monkeypatch):
    monkeypatch.delenv("KIVI_BACKEND")


@pytest.fixture
def extra(monkeypatch):
    """Add backends whose manifests are the reference's with some words replaced."""

    def add(**changes: tuple[str, str]):
        found = dict(plugins.found())
        for name, (old, new) in changes.items():
            assert old in MANIFEST
            text = MANIFEST.replace('name = "reference"', f'name = "{name}"').replace(old, new)
            found[name] = plugins.Found(read_manifest(text, name), "kivi.backends.reference")
        monkeypatch.setattr(plugins, "found", lambda: found)

    return add


def reasons_of(chosen) -> dict[str, str]:
    """Rejected backend -> reason, the last one if several modes were rejected."""
    return {r.name: r.reason for r in chosen.rejected}


def test_backends_lists_every_mode():
    [info] = [i for i in kivi.backends() if i.name == "reference"]
    assert (info.available, info.mode, info.devices, info.reason) == (True, "device", ("cpu",), "")


def test_select_says_why(extra):
    extra(
        fast=("priority = 0", "priority = 99"),
        narrow=("bits = [1, 2, 3, 4, 8]", "bits = [4]"),
        absent=("ml-dtypes = ", "no-such-package = "),
        old=('numpy = ">=1.26"', 'numpy = ">=99"'),
    )
    chosen = kivi.select("kivi-2bit", head_dim=96)
    assert chosen.backend.name == "fast"
    assert "highest priority (99)" in chosen.reason
    reasons = reasons_of(kivi.select("kivi-2bit", mode="device"))
    assert reasons["reference"] == "priority 0 is lower than 99 of 'fast'"
    assert "no-such-package is not installed" in reasons["absent"]
    assert "key.bits = 2" in reasons["narrow"]
    with pytest.raises(BackendUnavailableError, match="no-such-package is not installed"):
        kivi.get_backend("absent")
    with pytest.raises(BackendUnavailableError, match=rf"numpy {importlib.metadata.version('numpy')} is installed \(needs numpy>=99\)"):
        kivi.get_backend("old")
    assert not next(i for i in kivi.backends() if i.name == "old").available


def test_no_backend_lists_all_reasons(extra):
    extra(
        narrow=("head_dim_multiple", "head_dim_multiple") if "head_dim_multiple" in MANIFEST else ("bits = [1, 2, 3, 4, 8]", "bits = [4]")
    )
    with pytest.raises(UnsupportedError) as caught:
        kivi.select("kivi-2bit", head_dim=4096)
    assert "reference" in str(caught.value)
    assert "head_dim = 4096" in str(caught.value)
    assert "key.bits = 2" in str(caught.value)


def test_the_environment_is_read_at_call_time(extra, monkeypatch):
    extra(fast=("priority = 0", "priority = 99"))
    monkeypatch.setenv("KIVI_BACKEND", "reference")
    chosen = kivi.select("kivi-2bit")
    assert (chosen.backend.name, chosen.reason) == ("reference", "KIVI_BACKEND = 'reference'")
    assert make(backend="fast").backend.name == "fast"  # an argument is nearer than the environment
    monkeypatch.setenv("KIVI_BACKEND", "typo")
    with pytest.raises(UnknownBackendError, match="typo"):
        kivi.select("kivi-2bit")


def test_an_explicit_choice_is_never_replaced(extra):
    extra(narrow=("bits = [1, 2, 3, 4, 8]", "bits = [4]"))
    with pytest.raises(UnsupportedError, match=r"narrow.*key\.bits = 2.*4"):
        make(backend="narrow")
    with pytest.raises(UnsupportedError, match="no mode 'shim'"):
        kivi.get_backend("reference", mode="shim")
    with pytest.raises(BackendUnavailableError, match="cuda:3"):
        kivi.get_backend("reference", device="cuda:3")
    backend = kivi.get_backend("reference")
    with pytest.raises(UnsupportedError, match="leave them out"):
        make(backend=backend, mode="interpreter")


def test_a_probe_that_breaks_is_a_reason(monkeypatch):
    from kivi.backends.reference import driver

    def broken(mode, device):
        raise OSError("libnothing.so.1: cannot open shared object file")

    monkeypatch.setattr(driver, "probe", broken)
    [info] = [i for i in kivi.backends() if i.name == "reference"]
    assert not info.available
    assert "libnothing" in info.reason
    assert "libnothing" in reasons_of(kivi.select("kivi-2bit", device="cpu"))["reference"]
    alone = {"reference": plugins.get("reference")}
    monkeypatch.setattr(plugins, "found", lambda: alone)
    with pytest.raises(UnsupportedError, match="libnothing"):
        kivi.select("kivi-2bit", device="cpu")


def test_a_driver_that_cannot_be_imported(monkeypatch):
    found = {"reference": plugins.Found(plugins.get("reference").manifest, "kivi.backends.nowhere")}
    monkeypatch.setattr(plugins, "found", lambda: found)
    with pytest.raises(BackendUnavailableError, match="cannot be loaded: ModuleNotFoundError"):
        plugins.driver("reference")
    assert all("ModuleNotFoundError" in info.reason for info in kivi.backends())


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("kivi_backend = 1", "kivi_backend = 2", "kivi_backend"),
        ("bits = [1, 2, 3, 4, 8]", "", "bits"),
        ("priority = 0", "priority = 0\ncolour = 3", "colour"),
        ("dtypes = [", 'dtypes = ["float64", ', "float64"),
        ("[modes]", "[modes", "manifest"),
    ],
)
def test_a_bad_manifest_is_named(old, new, word):
    assert old in MANIFEST
    with pytest.raises(UnsupportedError, match=word) as caught:
        read_manifest(MANIFEST.replace(old, new, 1), "some/backend.toml")
    assert "some/backend.toml" in str(caught.value)


def test_two_backends_of_one_name_are_refused(monkeypatch):
    plugins.scan.cache_clear()
    try:
        monkeypatch.setattr(plugins, "_outside", lambda: ([p for p in plugins._in_tree() if "reference" in p[0]], {}))
        with pytest.raises(UnsupportedError, match="two backends are called 'reference'"):
            plugins.get("reference")
        assert plugins.get("triton").manifest.name == "triton"
        [info] = [i for i in kivi.backends() if i.name == "reference"]
        assert not info.available
        assert "rename one" in info.reason
        assert "two backends are called" in reasons_of(kivi.select("kivi-2bit", device="cpu"))["reference"]
    finally:
        plugins.scan.cache_clear()


def test_a_bad_outside_package_does_not_take_the_others_down(monkeypatch):
    points = [("a", "json"), ("b", "no.such"), ("c", "x:Y")]
    plugins.scan.cache_clear()
    try:
        monkeypatch.setattr(distributions, "entry_points", lambda group: points)
        assert kivi.get_backend("reference").name == "reference"
        reasons = {i.name: i.reason for i in kivi.backends()}
        for name in "abc":
            assert "not a package with a backend.toml" in reasons[name]
        with pytest.raises(UnsupportedError, match="entry point 'a'"):
            kivi.get_backend("a")
        assert {"a", "b", "c"} <= {r.name for r in kivi.select("kivi-2bit").rejected}
    finally:
        plugins.scan.cache_clear()


def test_a_probe_of_the_wrong_type_is_a_reason(monkeypatch):
    from kivi.backends.reference import driver

    monkeypatch.setattr(driver, "probe", lambda mode, device: 1)
    assert "not a kivi.backend.Probe" in next(i for i in kivi.backends() if i.name == "reference").reason


def test_selection_module_reexports():
    assert kivi.select is selection.select
    assert kivi.get_backend is selection.get_backend


def test_a_mode_that_stands_in_is_said_once_and_refused_under_strict(monkeypatch, caplog):
    """A simulator never takes a device's place in silence."""
    monkeypatch.setattr(selection, "_loaded", _only("simulator"))
    selection._say_mode.cache_clear()
    for _ in range(2):
        assert kivi.get_backend("numba_cuda").mode == "simulator"
    said = [r.message for r in caplog.records if "runs in mode 'simulator'" in r.message]
    assert len(said) == 1
    assert "no such device" in said[0]
    assert kivi.get_backend("numba_cuda", mode="simulator").mode == "simulator"
    monkeypatch.setenv("KIVI_STRICT", "1")
    with pytest.raises(BackendUnavailableError, match="mode 'simulator' can, if it is asked for"):
        kivi.get_backend("numba_cuda")


def _only(mode):
    """Probes of a machine where every other mode cannot run."""
    real = selection._loaded

    def loaded(name, candidate):
        if candidate == mode:
            return real(name, candidate)
        return Probe(available=False, mode=candidate, reason="no such device")

    return loaded
