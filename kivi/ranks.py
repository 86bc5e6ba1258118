"""Measured speed: which backend was fastest at a shape, on this machine, with these versions.

`kivi tune` measures all backends that can serve a shape in one interleaved run and keeps their medians as one record, by spec and shape
bucket. Selection ranks by a record only where every candidate is in it, with the device, driver, versions and sources that it has now; a
figure of another shape, another run or another driver is never compared with one of this.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from kivi import machine, plugins, probing, records
from kivi.backend import DeviceInfo
from kivi.geometry import Geometry
from kivi.spec import CacheSpec

FOLDER = "ranks"
SMALLEST = 128  # tokens: below that, all are one bucket


@dataclass(frozen=True)
class Bucket:
    """Shapes that share a ranking. Tokens and batch are rounded up to a power of two; the rest counts exactly.

    tokens, batch   of the largest shape of the bucket
    group           query heads a KV head
    """

    tokens: int
    group: int
    head_dim: int
    value_head_dim: int
    batch: int
    dtype: str

    def __str__(self) -> str:
        low = 0 if self.tokens == SMALLEST else self.tokens // 2 + 1
        dims = f"D {self.head_dim}" if self.head_dim == self.value_head_dim else f"D {self.head_dim}/{self.value_head_dim}"
        return f"tokens {low}-{self.tokens}, Hq/Hkv {self.group}, {dims}, batch {self.batch}, {self.dtype}"


@dataclass(frozen=True)
class Measured:
    """A backend's share of one run: median `seconds` of a decode step over `rounds`, on `device`; `identity` says for what it holds."""

    backend: str
    mode: str
    device: str
    seconds: float
    rounds: int
    identity: dict[str, Any]


@dataclass(frozen=True)
class Record:
    """One run of `kivi tune` on spec `spec`, by name, at `tokens` tokens of shapes `shape`; fastest first."""

    when: float
    spec: str
    shape: str
    tokens: int
    measured: tuple[Measured, ...]


@dataclass(frozen=True)
class Contender:
    """A backend that can serve a request, on the device that it would take."""

    backend: str
    mode: str
    priority: int
    device: DeviceInfo
    versions: dict[str, str]


def bucket(g: Geometry, tokens: int, batch: int) -> Bucket:
    """The bucket of a shape."""
    return Bucket(_power(max(tokens, SMALLEST)), g.q_heads // g.kv_heads, g.head_dim, g.value_head_dim, _power(max(batch, 1)), g.dtype)


def buckets(g: Geometry, first: int, last: int, batch: int) -> list[Bucket]:
    """The buckets of all lengths from `first` to `last`."""
    out = [bucket(g, first, batch)]
    while out[-1].tokens < last:
        out.append(bucket(g, out[-1].tokens + 1, batch))
    return out


def identity(contender: Contender) -> dict[str, Any]:
    """All that a figure depends on besides the shape. Two devices of one model are alike."""
    device = msgspec.to_builtins(contender.device)
    del device["device"], device["reason"]
    host = {} if contender.device.api else {"threads": _threads(), "KIVI_CPU_THREADS": os.environ.get("KIVI_CPU_THREADS")}
    return {
        "device": device,
        "machine": machine.drivers(),
        "processor": machine.processor(),
        "versions": {package: str(version) for package, version in contender.versions.items()},
        "sources": probing.source_stamp(plugins.get(contender.backend).package),
        **host,
    }


def read(spec: CacheSpec, where: Bucket) -> Record | None:
    """The last run of `kivi tune` for a spec and a bucket, if there was one."""
    data = records.read(FOLDER, spec.hash[:12], _key(spec, where))
    return None if data is None else convert(data)


def write(spec: CacheSpec, where: Bucket, tokens: int, measured: Sequence[Measured]) -> Record:
    """Keep a run, in place of the one before."""
    ranked = tuple(sorted(measured, key=lambda m: m.seconds))
    out = Record(time.time(), spec.name, str(where), tokens, ranked)
    records.write(FOLDER, spec.hash[:12], _key(spec, where), asdict(out))
    return out


def latest() -> Record | None:
    """The last run of `kivi tune`, whatever it measured."""
    found = [convert(data) for data in records.all_of(FOLDER)]
    return max((record for record in found if record is not None), key=lambda record: record.when, default=None)


def convert(data: Any) -> Record | None:
    """A record from plain data; None if it is of another release, or holds what is no time."""
    try:
        record = msgspec.convert(data, Record)
    except msgspec.ValidationError:
        return None
    return record if all(0 < m.seconds < math.inf for m in record.measured) else None


def rates(spec: CacheSpec, where: Bucket, contenders: Sequence[Contender]) -> dict[tuple[str, str], float]:
    """(backend, mode) -> seconds of a decode step, for those whose figures of this bucket still hold."""
    record = read(spec, where)
    if record is None:
        return {}
    figures = {(m.backend, m.mode): m for m in record.measured}
    out = {}
    for c in contenders:
        found = figures.get((c.backend, c.mode))
        if found is not None and found.identity == identity(c):
            out[c.backend, c.mode] = found.seconds
    return out


def order(spec: CacheSpec, where: Bucket, contenders: Sequence[Contender]) -> tuple[list[Contender], str]:
    """Contenders, best first, and what decided: "measured" or "priority"."""
    declared = sorted(contenders, key=lambda c: (-c.priority, c.backend))
    if len(contenders) < 2:
        return declared, "priority"
    seconds = rates(spec, where, contenders)
    if len(seconds) < len(contenders):
        return declared, "priority"
    return sorted(declared, key=lambda c: seconds[c.backend, c.mode]), "measured"


def _key(spec: CacheSpec, where: Bucket) -> dict[str, Any]:
    return {"spec": spec.hash, "bucket": asdict(where)}


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _threads() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1
