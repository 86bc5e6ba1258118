"""What `kivi bench` found, as data: the types behind bench.json. Times are seconds, sizes bytes, rates bytes a second.

`read` is how a file comes back; it checks every field, so a file that it takes is a valid result.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from kivi.errors import InputError

FORMAT = 1


RAN = ("backend", "mode", "device", "kernel", "layout", "versions")


def ran(cache: Any) -> dict[str, Any]:
    """`cache.ran` of a `kivi.KVCache` as plain data."""
    return {name: getattr(cache.ran, name) for name in RAN}


class Stat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Median and quartiles of samples."""

    median: float
    q1: float
    q3: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Stat:
        if len(samples) < 2:
            return cls(samples[0], samples[0], samples[0], 1)
        q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, q1, q3, len(samples))


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer's attention at a decode step."""

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    tokens: int

    def __str__(self) -> str:
        return f"T={self.tokens} D={self.head_dim} Hq/Hkv={self.q_heads}/{self.kv_heads} B={self.batch}"


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One contender. `bytes` is the history that a step must read, packed or not; `copies` how many of it take turns."""

    contender: str
    seconds: Stat
    bytes: int
    copies: int
    of_bandwidth: float


class Roofline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attention over packed pages against what limits it. `by_bandwidth` is the time in which this machine reads the packed bytes,
    `by_kernel` the time of the same work on one page that stays in the first cache; `of_roofline` is the larger of them over the time."""

    contender: str
    packed_bytes: int
    floating_bytes: int
    by_bandwidth: float
    by_kernel: float
    of_bandwidth: float
    of_kernel: float
    of_roofline: float


class AttentionRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attention alone, all contenders in one interleaved run. `speedup`: the baseline's median over a kivi contender's."""

    shape: Shape
    threads: int
    clock: str
    read_rate: float
    baseline: str | None
    timings: list[Timing]
    speedup: dict[str, float]
    rooflines: list[Roofline]


class StepTiming(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Steps of one period, R of them, each phase between two seals once. `mean` is the amortized step, `slowest` the one with the most
    to seal. `of_bandwidth`: stored bytes over `mean`, against the read rate."""

    contender: str
    mean: float
    step: Stat
    slowest: float
    bytes: int
    copies: int
    of_bandwidth: float


class StepRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Append, attention and seals of one layer. `speedup`: DynamicCache's amortized step over a kivi contender's."""

    shape: Shape
    threads: int
    clock: str
    read_rate: float
    timings: list[StepTiming]
    speedup: dict[str, float]


class OverheadRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One `attend` call minus its kernels, over R steps with their seals. `boundary`: what counts as a kernel's time."""

    contender: str
    shape: Shape
    threads: int
    clock: str
    arrays: Literal["numpy", "torch"]
    boundary: str
    step: Stat
    kernels: Stat
    overhead: Stat


class Generated(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model with one cache. `tokens_per_second` is over all new tokens, seals within; `token` the spread over rounds."""

    contender: str
    weights: str
    prefill: float
    tokens_per_second: float
    token: Stat
    cache_bytes: int | None
    ran: dict[str, Any] | None


class GenerateRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`generate()` of a whole model. `speedup`: kivi contender -> peer -> its tokens a second over the peer's."""

    model: str
    context: int
    new: int
    prefill_chunk: int
    threads: int
    clock: str
    timings: list[Generated]
    speedup: dict[str, dict[str, float]]


class Peak(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Resident memory of a process that does nothing but generate with one cache; `loaded` is after the model was loaded."""

    contender: str
    weights: str
    context: int
    new: int
    prefill_chunk: int
    threads: int
    loaded: int
    peak: int
    cache_bytes: int | None


class NotMeasured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A contender that should have run, and why it did not."""

    suite: str
    contender: str
    where: str
    reason: str


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where it ran. `read_rate`: threads -> bytes a second that a loop reads which does nothing else."""

    processor: str
    architecture: str
    cpus: int
    last_level_cache: int
    memory: int
    system: str
    load: float
    read_rate: dict[str, float]


class Result(msgspec.Struct, forbid_unknown_fields=True):
    """A whole run."""

    created: str
    seconds: float
    machine: Machine
    versions: dict[str, str]
    backend: str
    mode: str
    ran: dict[str, Any]
    specs: dict[str, str]
    dtype: str
    attention: list[AttentionRun] = []
    step: list[StepRun] = []
    overhead: list[OverheadRun] = []
    generate: list[GenerateRun] = []
    peak: list[Peak] = []
    not_measured: list[NotMeasured] = []
    kivi_bench: Literal[1] = 1

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        out: dict[str, Any] = msgspec.to_builtins(self)
        return out

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode() + "\n"


def read(path: Path | str) -> Result:
    """The result of a bench.json. Raises `InputError` if it is none."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Result)
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(f"{path} is not a result of `kivi bench` (format {FORMAT}): {error}; write a new one with --out") from error
