"""`kivi bench`: how fast a cache is on this machine, beside what else one could use, and how far from what the machine allows.

Every figure is taken in one run in which contenders take turns, so a ratio within a run means something where a time by itself may not.
docs/benchmarks.md explains the figures; `kivi.bench.result` is their form.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kivi.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from kivi.bench.plan import Plan
    from kivi.bench.result import Result

Progress = Callable[[str, int, int], None]


def run(plan: Plan, progress: Progress | None = None, keep: Callable[[Result], object] = lambda result: None) -> Result:
    """Measure all that `plan` names. progress: called with a suite's name, parts done and parts in all. keep: called with what there is
    after each part, since a long run may end early.

    Raises `InputError`, `UnsupportedError` for what cannot be measured here at all; a peer that cannot run is in `not_measured`.
    """
    from kivi.bench.plan import SUITES

    if importlib.util.find_spec("torch") is None:
        raise InputError("kivi bench compares with torch, which is not installed; run: pip install 'kivi-kvcache[bench]'")
    unknown = [suite for suite in plan.suites if suite not in SUITES]
    if unknown:
        raise InputError(f"suite {unknown[0]!r} is not one of {', '.join(SUITES)}")
    if plan.backend.device.split(":")[0] != "cpu":
        raise UnsupportedError(
            f"backend {plan.backend.name!r} runs on {plan.backend.device}; kivi bench measures on the host, and `make device-check` a GPU"
        )
    return _run(plan, progress or (lambda suite, done, total: None), keep)


def _run(plan: Plan, progress: Progress, keep: Callable[[Result], object]) -> Result:
    from kivi.bench import attention, caches, generate, machine, overhead, peak, step
    from kivi.bench.result import Result, Shape, ran

    started = time.perf_counter()
    if plan.models:
        from kivi.bench import decoders

        decoders.checked(plan)
    if "generate" in plan.suites:
        for context in plan.contexts:
            generate.checked(context, plan.new)
    if "peak" in plan.suites:
        generate.checked(plan.peak_context, generate.TURN)
    small = caches.filled(plan.specs[0], Shape(1, 1, 1, 64, 1), plan.backend, plan.dtype, 1)
    result = Result(
        created=machine.timestamp(),
        seconds=0.0,
        machine=machine.describe(list(plan.threads)),
        versions=machine.versions(),
        backend=plan.backend.name,
        mode=plan.backend.mode,
        ran=ran(small),
        specs={spec.name: spec.hash for spec in plan.specs},
        dtype=plan.dtype,
        not_measured=plan.missing,
    )

    def counted(suite: str, total: int) -> Callable[[], None]:
        done = iter(range(1, total + 1))
        progress(suite, 0, total)
        return lambda: progress(suite, next(done, total), total)

    def each(suite: str, shapes: tuple[Shape, ...], measure: Callable[[Shape, int, Plan], object], into: list) -> None:
        tick = counted(suite, len(shapes) * len(plan.threads))
        for threads in plan.threads:
            for shape in shapes:
                into.append(measure(shape, threads, plan))
                keep(result)
                tick()

    if "overhead" in plan.suites:
        for threads in plan.threads:
            result.overhead += overhead.measure(threads, plan)
    if "attention" in plan.suites:
        each("attention", plan.shapes, attention.measure, result.attention)
    if "step" in plan.suites:
        each("step", plan.steps, step.measure, result.step)
    if "generate" in plan.suites:
        from kivi.bench.decoders import names

        turns = len(names(plan)) * (1 + plan.new // generate.TURN)
        tick = counted("generate", turns * len(plan.contexts) * len(plan.threads))
        for threads in plan.threads:
            for context in plan.contexts:
                result.generate.append(generate.measure(context, threads, plan, tick))
                keep(result)
    if "peak" in plan.suites:
        from kivi.bench.decoders import names

        tick = counted("peak", len(names(plan)))
        result.peak += peak.measure(plan.threads[0], plan, tick)
    result.seconds = time.perf_counter() - started
    return result


def write_json(result: Result, folder: Path) -> Path:
    """bench.json in `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "bench.json"
    path.write_text(result.to_json(), "utf-8")
    return path


def write(result: Result, folder: Path) -> list[Path]:
    """bench.json and, where matplotlib is installed, its plots as SVG. Returns the files."""
    files = [write_json(result, folder)]
    if importlib.util.find_spec("matplotlib") is not None:
        from kivi.bench.plots import figures

        for name, figure in figures(result).items():
            files.append(folder / f"{name}.svg")
            figure.savefig(files[-1], bbox_inches="tight", metadata={"Date": None})
    return files
