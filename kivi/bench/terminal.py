"""A result on the terminal: what ran where, then a table a suite."""

from __future__ import annotations

import click

from kivi.bench.result import AttentionRun, GenerateRun, OverheadRun, Peak, Result, StepRun
from kivi.cli.output import print_table, size


def show(result: Result) -> None:
    """Print a result to stdout."""
    m, ran = result.machine, result.ran
    click.echo(f"{m.processor}: {m.cpus} processors, last-level cache {size(m.last_level_cache)}, load {m.load:.2f}")
    rates = ", ".join(f"{rate / 1e9:.1f} GB/s with {n} thread{'s' * (n != '1')}" for n, rate in m.read_rate.items())
    click.echo(f"reads {rates}")
    click.echo(f"backend {result.backend} ({result.mode}): {ran['kernel']}, layout {ran['layout']}, {result.dtype}")
    for attention in result.attention:
        _attention(attention)
    for step in result.step:
        _step(step)
    if result.overhead:
        _overhead(result.overhead)
    for generate in result.generate:
        _generate(generate)
    if result.peak:
        _peak(result.peak)
    if result.not_measured:
        click.echo("\nnot measured")
        print_table(("suite", "contender", "where", "reason"), ((n.suite, n.contender, n.where, n.reason) for n in result.not_measured))
    click.echo(f"{result.seconds:.0f} s")


def _attention(run: AttentionRun) -> None:
    click.echo(f"\nattention, {run.shape}, {run.threads} thread(s), {run.clock}; baseline: {run.baseline or 'none'}")
    base = next((t.seconds.median for t in run.timings if t.contender == run.baseline), None)
    lines = {f"{line.contender} attention": line.of_roofline for line in run.rooflines}
    print_table(
        ("contender", "median ms", "quartiles", "times faster", "GB/s", "of bandwidth", "of roofline"),
        (
            (
                t.contender,
                f"{t.seconds.median * 1e3:.3f}",
                f"{t.seconds.q1 * 1e3:.3f}-{t.seconds.q3 * 1e3:.3f}",
                f"{base / t.seconds.median:.2f}" if base else "-",
                f"{t.bytes / t.seconds.median / 1e9:.2f}",
                f"{t.of_bandwidth:.0%}",
                f"{lines[t.contender]:.0%}" if t.contender in lines else "-",
            )
            for t in run.timings
        ),
        right=("median ms", "quartiles", "times faster", "GB/s", "of bandwidth", "of roofline"),
    )


def _step(run: StepRun) -> None:
    click.echo(f"\nstep, amortized over a period, {run.shape}, {run.threads} thread(s), {run.clock}")
    base = next((t.mean for t in run.timings if t.contender == "DynamicCache"), None)
    print_table(
        ("contender", "mean ms", "median ms", "slowest ms", "times faster", "of bandwidth"),
        (
            (
                t.contender,
                f"{t.mean * 1e3:.3f}",
                f"{t.step.median * 1e3:.3f}",
                f"{t.slowest * 1e3:.3f}",
                f"{base / t.mean:.2f}" if base else "-",
                f"{t.of_bandwidth:.0%}",
            )
            for t in run.timings
        ),
        right=("mean ms", "median ms", "slowest ms", "times faster", "of bandwidth"),
    )


def _overhead(runs: list[OverheadRun]) -> None:
    click.echo(f"\noverhead of a step, {runs[0].shape}, microseconds; kernels: {runs[0].boundary}")
    print_table(
        ("contender", "arrays", "threads", "step", "kernels", "host", "quartiles"),
        (
            (
                r.contender,
                r.arrays,
                r.threads,
                f"{r.step.median * 1e6:.1f}",
                f"{r.kernels.median * 1e6:.1f}",
                f"{r.overhead.median * 1e6:.1f}",
                f"{r.overhead.q1 * 1e6:.1f}-{r.overhead.q3 * 1e6:.1f}",
            )
            for r in runs
        ),
        right=("threads", "step", "kernels", "host", "quartiles"),
    )


def _generate(run: GenerateRun) -> None:
    click.echo(f"\ngenerate, {run.model}, context {run.context}, {run.new} new tokens, {run.threads} thread(s), {run.clock}")
    mine = next(iter(run.speedup), None)
    ratios = run.speedup.get(mine, {}) if mine else {}
    print_table(
        ("contender", "weights", "tokens/s", "ms a token", "quartiles", "prefill s", "cache", f"{mine} is faster"),
        (
            (
                t.contender,
                t.weights,
                f"{t.tokens_per_second:.2f}",
                f"{t.token.median * 1e3:.1f}",
                f"{t.token.q1 * 1e3:.1f}-{t.token.q3 * 1e3:.1f}",
                f"{t.prefill:.1f}",
                "-" if t.cache_bytes is None else size(t.cache_bytes),
                f"{ratios[t.contender]:.2f} times" if t.contender in ratios else "-",
            )
            for t in run.timings
        ),
        right=("tokens/s", "ms a token", "quartiles", "prefill s", "cache", f"{mine} is faster"),
    )


def _peak(peaks: list[Peak]) -> None:
    click.echo(
        f"\npeak resident memory of generate, context {peaks[0].context}, {peaks[0].new} new tokens, prefill in {peaks[0].prefill_chunk}"
    )
    print_table(
        ("contender", "weights", "peak", "model loaded", "cache"),
        (
            (
                p.contender,
                p.weights,
                f"{p.peak / 2**20:,.0f} MiB",
                f"{p.loaded / 2**20:,.0f} MiB",
                "-" if p.cache_bytes is None else size(p.cache_bytes),
            )
            for p in peaks
        ),
        right=("peak", "model loaded", "cache"),
    )
