"""Several devices of different capability: each is judged by itself, by exact data, and a request goes to one that can serve it."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest

import kivi
from kivi.backend import DeviceInfo, DeviceRule
from kivi.backends.cupy import arrays
from kivi.capability import breach
from kivi.errors import UnsupportedError
from tests.vendors.stack import Vendor, gpu, rule

SHAPE = {"batch": 1, "q_heads": 2, "kv_heads": 1, "head_dim": 64}
BF16 = rule(["8.0", "8.6", "8.9", "9.0", "10.0"], newer=True, dtypes=("bfloat16",), reason="bfloat16 arithmetic came with 8.0")
ALL = rule(["7.5", "8.0", "8.6", "8.9", "9.0", "10.0"], newer=True)


def test_two_devices_of_one_process_get_different_backends(install):
    devices = [gpu(0, "7.5"), gpu(1, "9.0")]
    install(
        Vendor("new", 9, devices, rules=rule(["9.0", "10.0"], newer=True, reason="it needs asynchronous copies"), self_check=False),
        Vendor("old", 5, devices, rules=ALL, self_check=False),
    )
    first, second = (kivi.KVCache("kivi-2bit", device=f"gpu:{i}", **SHAPE) for i in range(2))
    assert (first.ran.backend, first.ran.device) == ("old", "gpu:0")
    assert (second.ran.backend, second.ran.device) == ("new", "gpu:1")
    chosen = kivi.select("kivi-2bit", device="gpu:0")
    reason = {r.name: r.reason for r in chosen.rejected}["new"]
    assert reason == "gpu:0 (Fake 7.5, capability 7.5) does not fit: it needs capability 9.0, 10.0 or newer: it needs asynchronous copies"


def test_a_request_goes_to_the_device_that_can_serve_it(install):
    install(Vendor("acme", devices=[gpu(0, "7.5"), gpu(1, "8.6")], rules=ALL + BF16, self_check=False))
    chosen = {dtype: kivi.select("kivi-2bit", device="gpu", dtype=dtype) for dtype in ("float16", "bfloat16")}
    assert {dtype: c.backend.device for dtype, c in chosen.items()} == {"float16": "gpu:0", "bfloat16": "gpu:1"}
    assert "on gpu:1 (gpu:0 (Fake 7.5, capability 7.5) does not fit: bfloat16 needs capability 8.0" in chosen["bfloat16"].reason
    assert chosen["bfloat16"].device.capability == "8.6"


def test_bfloat16_on_a_device_without_it_is_refused_before_anything_compiles(install, caplog):
    install(Vendor("acme", devices=[gpu(0, "7.5")], rules=BF16, self_check=False))
    with caplog.at_level(logging.WARNING, "kivi"):
        chosen = kivi.select("kivi-2bit", dtype="bfloat16")
    assert chosen.backend.name == "reference"
    [rejected] = chosen.rejected
    assert rejected.state == "unfit device"
    assert "bfloat16 needs capability 8.0, 8.6, 8.9, 9.0, 10.0 or newer: bfloat16 arithmetic came with 8.0" in rejected.reason
    [warning] = [r.getMessage() for r in caplog.records]
    assert "'acme' (mode device) was passed over for 'reference' on cpu: gpu:0 (Fake 7.5, capability 7.5) does not fit" in warning
    with pytest.raises(UnsupportedError, match=r"backend 'acme' cannot serve this cache: gpu:0 .* does not fit: bfloat16"):
        kivi.KVCache("kivi-2bit", backend="acme", dtype="bfloat16", **SHAPE)
    with pytest.raises(UnsupportedError, match="does not fit: bfloat16"):
        kivi.select("kivi-2bit", device="gpu:0", dtype="bfloat16")
    backend = kivi.get_backend("acme")
    with pytest.raises(UnsupportedError, match="does not fit: bfloat16"):
        kivi.KVCache("kivi-2bit", backend=backend, dtype="bfloat16", **SHAPE)


EXACT = DeviceRule(api="cuda", capabilities=("10.0",), reason="kernels for sm_100a run nowhere else")
NEWER = DeviceRule(api="cuda", capabilities=("8.0", "9.0", "10.0"), newer=True, reason="r")
FP8 = DeviceRule(api="cuda", capabilities=("8.9", "9.0"), newer=True, dtypes=("float8_e4m3",), reason="fp8 conversions came with 8.9")
WIDE = DeviceRule(api="cuda", capabilities=("9.0",), head_dim_above=128, reason="shared memory")


@pytest.mark.parametrize(
    ("capability", "given", "dtypes", "head_dim", "fits"),
    [
        ("8.6", FP8, {"float16", "float8_e4m3"}, 64, False),
        ("8.9", FP8, {"float16", "float8_e4m3"}, 64, True),
        ("12.0", FP8, {"float16", "float8_e4m3"}, 64, True),
        ("8.6", FP8, {"float16"}, 64, True),
        ("10.0", EXACT, {"float16"}, 64, True),
        ("10.3", EXACT, {"float16"}, 64, False),
        ("12.0", EXACT, {"float16"}, 64, False),
        ("13.0", EXACT, {"float16"}, 64, False),
        ("13.0", NEWER, {"float16"}, 64, True),
        ("10.3", NEWER, {"float16"}, 64, True),
        ("8.6", NEWER, {"float16"}, 64, False),  # between two that are named, and not named
        ("9.10", DeviceRule(api="cuda", capabilities=("9.9",), newer=True, reason="r"), {"float16"}, 64, True),  # versions, not decimals
        ("8.0", WIDE, {"float16"}, 128, True),
        ("8.0", WIDE, {"float16"}, 256, False),
        ("9.0", WIDE, {"float16"}, 256, True),
        ("", NEWER, {"float16"}, 64, False),  # a device that does not say
    ],
)
def test_capabilities_are_compared_exactly(capability, given, dtypes, head_dim, fits):
    """Report 43."""
    device = DeviceInfo(device="cuda:0", name="Fake", api="cuda", capability=capability)
    reason = breach(device, (given,), dtypes, head_dim)
    assert (reason == "") == fits
    if not fits:
        assert f"capability {capability}" in reason or not capability
        assert given.reason in reason
        assert given.capabilities[0] in reason


def test_a_rule_is_about_devices_of_its_own_kind():
    amd = DeviceInfo(device="cuda:0", api="hip", capability="gfx942")
    assert breach(amd, (NEWER,), {"float16"}, 64) == ""
    listed = DeviceRule(api="hip", capabilities=("gfx942",), newer=True, reason="r")
    assert breach(amd, (listed,), {"float16"}, 64) == ""
    other = DeviceInfo(device="cuda:0", api="hip", capability="gfx1100")  # architectures have no order
    assert "needs capability gfx942" in breach(other, (listed,), {"float16"}, 64)


def test_a_device_that_its_compiler_does_not_know(install):
    reason = "NVRTC 12.4 does not know gpu:0 (Fake 13.0, sm_130), it has sm_50 to sm_90; install another nvidia-cuda-nvrtc"
    install(Vendor("acme", devices=[gpu(0, "13.0", reason), gpu(1, "9.0")], self_check=False))
    chosen = kivi.select("kivi-2bit")
    assert (chosen.backend.name, chosen.backend.device) == ("acme", "gpu:1")
    assert reason in chosen.reason
    with pytest.raises(UnsupportedError, match=r"NVRTC 12\.4 does not know gpu:0"):
        kivi.select("kivi-2bit", device="gpu:0")


def test_a_driver_that_is_too_old(install, caplog):
    probe = "return Probe(available=False, mode=mode, reason='the driver serves CUDA 12.2, cupy needs CUDA 13.0', state='driver too old')"
    install(Vendor("acme", probe=probe))
    with caplog.at_level(logging.WARNING, "kivi"):
        chosen = kivi.select("kivi-2bit")
    [rejected] = chosen.rejected
    assert (rejected.state, rejected.fix) == ("driver too old", "needs a newer driver, or packages for the one that is there")
    assert "serves CUDA 12.2, cupy needs CUDA 13.0" in rejected.reason
    assert "serves CUDA 12.2" in caplog.text


def fake_cupy(monkeypatch, devices=(), driver=13010, archs=(75, 80, 86, 90, 100), error=""):
    """The module cupy of a machine with these devices: (name, major, minor) each."""

    class CUDARuntimeError(RuntimeError):
        pass

    def count():
        if error:
            raise CUDARuntimeError(error)
        return len(devices)

    def properties(i):
        name, major, minor = devices[i]
        return {"name": name.encode(), "major": major, "minor": minor, "totalGlobalMem": 1 << 34}

    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=count,
        getDeviceProperties=properties,
        driverGetVersion=lambda: driver,
        runtimeGetVersion=lambda: 13000,
    )
    nvrtc = SimpleNamespace(getSupportedArchs=lambda: archs, getVersion=lambda: (12, 4))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(__version__="14.2.0", cuda=SimpleNamespace(runtime=runtime, nvrtc=nvrtc)))


def test_cupy_describes_every_device_and_what_its_compiler_knows(monkeypatch):
    fake_cupy(monkeypatch, [("H200", 9, 0), ("Next", 13, 0)])
    found = arrays.devices("device", {}, nvrtc=True)
    assert (found.available, found.devices) == (True, ("cuda:0",))
    assert found.found[0] == DeviceInfo(device="cuda:0", name="H200", api="cuda", capability="9.0", driver="13.1", memory=1 << 34)
    assert "NVRTC 12.4 does not know cuda:1 (Next, sm_130), it has sm_75 to sm_100" in found.found[1].reason
    assert arrays.devices("device", {}).devices == ("cuda:0", "cuda:1")  # compiled by another compiler
    fake_cupy(monkeypatch, [("Next", 13, 0)])
    found = arrays.devices("device", {}, nvrtc=True)
    assert (found.available, found.state) == (False, "unfit device")


def test_cupy_says_that_a_driver_is_too_old(monkeypatch):
    text = "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version"
    fake_cupy(monkeypatch, driver=12020, error=text)
    found = arrays.devices("device", {})
    assert (found.available, found.state) == (False, "driver too old")
    assert "the NVIDIA driver serves CUDA 12.2, cupy 14.2.0 needs CUDA 13.0" in found.reason
    fake_cupy(monkeypatch, driver=0, error=text)  # no driver at all says the same
    assert arrays.devices("device", {}).state == ""
    fake_cupy(monkeypatch)
    assert "sees no CUDA device" in arrays.devices("device", {}).reason


def fake_torch(monkeypatch, *devices, hip=None):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: devices[i])
    monkeypatch.setattr(torch.version, "hip", hip)


def nvidia(major, minor):
    return SimpleNamespace(name=f"Fake {major}.{minor}", major=major, minor=minor, total_memory=1 << 34)


def amd(architecture):
    return SimpleNamespace(name="Fake", major=9, minor=4, total_memory=1 << 34, gcnArchName=f"{architecture}:sramecc+:xnack-")


def test_triton_on_devices_of_several_kinds(monkeypatch):
    """The shipped manifest and driver, on devices that torch only pretends to have."""
    from kivi.backends.triton import driver  # loaded, so it is asked in this process

    monkeypatch.setenv("KIVI_SELF_CHECK", "0")
    request = {"spec": "kivi-2bit", "device": "cuda", "dtype": "bfloat16"}
    fake_torch(monkeypatch, nvidia(7, 5), nvidia(9, 0))
    assert [d.capability for d in driver.probe("device", "auto").found] == ["7.5", "9.0"]
    chosen = kivi.select(**request, backend="triton")
    assert chosen.backend.device == "cuda:1"
    assert "cuda:0 (Fake 7.5, capability 7.5) does not fit" in chosen.reason
    with pytest.raises(UnsupportedError, match=r"cuda:0 .*does not fit: it needs capability 8.0"):
        kivi.KVCache("kivi-2bit", backend="triton", mode="device", device="cuda:0", **SHAPE)
    for devices, fits in (((nvidia(13, 0),), True), ((nvidia(8, 8),), False)):
        fake_torch(monkeypatch, *devices)
        if fits:
            assert kivi.select(**request, backend="triton").backend.device == "cuda:0"
        else:
            with pytest.raises(UnsupportedError, match=r"capability 8\.8"):
                kivi.select(**request, backend="triton")
    fake_torch(monkeypatch, amd("gfx1100"), amd("gfx942"), hip="7.0")
    assert kivi.select(**request, backend="triton").backend.device == "cuda:1"
