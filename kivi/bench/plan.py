"""What a run measures: suites, specs, shapes, threads. `quick` takes about two minutes on two cores; `full` is the whole grid."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kivi.backend import Backend
from kivi.bench.result import NotMeasured, Shape
from kivi.spec import CacheSpec

SUITES = ("attention", "step", "overhead", "generate", "peak")
KV_HEADS = 8
OVERHEAD = Shape(1, KV_HEADS, KV_HEADS, 128, 256)
TOKENS = (1024, 4096, 8192, 32768, 131072)


@dataclass(frozen=True)
class Plan:
    """What one run measures.

    shapes, steps   of suites attention and step
    contexts        tokens before the first new one, suite generate
    models          contenders of generate and peak; all if empty
    budget          seconds of rounds a shape, suite attention
    missing         collects what could not be measured, and is the only thing here that a run changes
    """

    specs: tuple[CacheSpec, ...]
    backend: Backend
    suites: tuple[str, ...] = ("attention", "step", "overhead", "generate")
    dtype: str = "float32"
    threads: tuple[int, ...] = (1,)
    shapes: tuple[Shape, ...] = ()
    steps: tuple[Shape, ...] = ()
    overhead: Shape = OVERHEAD
    contexts: tuple[int, ...] = (512,)
    peak_context: int = 8064
    new: int = 128
    prefill_chunk: int = 512
    budget: float = 2.0
    models: tuple[str, ...] = ()
    missing: list[NotMeasured] = field(default_factory=list)

    def note(self, suite: str, contender: str, where: object, reason: str) -> None:
        """Say that a contender was not measured, and why."""
        self.missing.append(NotMeasured(suite, contender, str(where), reason))


def grid(tokens: tuple[int, ...], head_dims: tuple[int, ...], groups: tuple[int, ...], batches: tuple[int, ...]) -> tuple[Shape, ...]:
    """All shapes of these; a group is the query heads of a KV head."""
    return tuple(Shape(b, KV_HEADS * g, KV_HEADS, d, t) for b in batches for d in head_dims for g in groups for t in tokens)


def quick(specs: tuple[CacheSpec, ...], backend: Backend) -> Plan:
    """The default."""
    shapes = grid((1024, 4096, 32768), (128,), (1, 4), (1,))
    return Plan(specs, backend, shapes=shapes, steps=grid((4096,), (128,), (1,), (1,)))


def full(specs: tuple[CacheSpec, ...], backend: Backend) -> Plan:
    """Everything."""
    return replace(
        quick(specs, backend),
        suites=SUITES,
        shapes=grid(TOKENS, (64, 128), (1, 4, 8), (1, 8)),
        steps=grid((1024, 4096, 32768), (128,), (1, 4), (1,)),
        contexts=(1024, 4032),
        budget=4.0,
    )
