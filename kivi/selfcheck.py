"""The self-check: a few conformance cases on the very device that is about to be used, before it is first used.

The whole suite decides whether a backend is right; this asks whether it is right here, with this device, driver and compiler. It runs in a
process of its own, since a wrong kernel may leave a device unusable for the process that launched it. The result is kept on disk by device,
driver, versions and sources.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from kivi import isolated, machine, plugins, probing, records
from kivi.backend import DeviceInfo

FOLDER = "selfchecks"
#: dtype -> cases of the quick size: ties of the quantizer on both sides, attention across all zones, a stream that seals pages.
CASES = {
    "float16": (
        "quantize/ties.middle.b2.float16.key",
        "quantize/ties.middle.b2.float16.value",
        "attention/zones.uniform-half",
        "stream/pending.drop-after-seal",
    ),
    "bfloat16": ("quantize/ties.sharp.b2.bfloat16.bfloat16.key", "attention/zones.needle-bf16", "stream/edits.reload-bf16"),
    "float32": (
        "quantize/ties.middle.b2.float32.key",
        "quantize/ties.middle.b2.float32.value",
        "attention/zones.needle",
        "stream/schedule.jump",
    ),
}


@dataclass(frozen=True)
class Checked:
    """A self-check: `ok`, or `reason`. `when` in seconds since 1970, `seconds` that it took; `cases` that ran."""

    ok: bool
    reason: str
    when: float
    seconds: float
    cases: int


def check(name: str, mode: str, device: DeviceInfo, versions: dict[str, str], dtype: str) -> Checked:
    """The result for a backend on a device, from disk or made now."""
    return known(name, mode, device, versions, dtype) or _run(name, mode, device, versions, dtype)


def known(name: str, mode: str, device: DeviceInfo, versions: dict[str, str], dtype: str) -> Checked | None:
    """The result on disk, if there is one."""
    data = records.read(FOLDER, name, _key(name, mode, device, versions, dtype))
    try:
        return None if data is None else msgspec.convert(data, Checked)
    except msgspec.ValidationError:  # of another release
        return None


def forget(name: str = "") -> None:
    """Check again before the next use, all backends or one."""
    records.forget(FOLDER, name)


def _run(name: str, mode: str, device: DeviceInfo, versions: dict[str, str], dtype: str) -> Checked:
    started, reason, cases = time.time(), "", CASES[dtype]
    results: list[dict[str, str]] = []
    try:
        results = isolated.check(plugins.get(name).package, mode, device.device, cases)
        wrong = [f"{r['id']} {r['status']}: {r['reason']}" for r in results if r["status"] not in ("passed", "unsupported")]
        if wrong:
            reason = f"{len(wrong)} of {len(results)} cases: {wrong[0]}"
        elif not any(r["status"] == "passed" for r in results):
            reason = f"it supports none of {len(results)} cases, so nothing was checked"
    except isolated.NoAnswer as error:
        reason = str(error)
    out = Checked(not reason, reason, started, round(time.time() - started, 3), len(results))
    records.write(FOLDER, name, _key(name, mode, device, versions, dtype), asdict(out), out.ok)
    return out


def _key(name: str, mode: str, device: DeviceInfo, versions: dict[str, str], dtype: str) -> dict[str, Any]:
    return {
        "package": plugins.get(name).package,
        "mode": mode,
        "device": msgspec.to_builtins(device),
        "machine": machine.drivers(),
        "processor": machine.processor(),
        "versions": {package: str(version) for package, version in versions.items()},
        "sources": probing.source_stamp(plugins.get(name).package),
        "cases": CASES[dtype],
    }
