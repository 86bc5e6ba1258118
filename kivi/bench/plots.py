"""Plots of a result."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from kivi.bench.result import AttentionRun, GenerateRun, Result, StepRun

COLOURS = ("#d1495b", "#1f6fb2", "#8e6bbf", "#2a9d8f")  # of kivi's contenders
GREYS = ("#222222", "#666666", "#999999", "#bbbbbb")  # of the others
SHOWN = ("sdpa float32", "sdpa bfloat16", "sdpa float16", "matmul bfloat16")


def figures(result: Result) -> dict[str, Figure]:
    """The plots by name, those for which the result holds something."""
    out = {}
    panels: dict[str, list[AttentionRun]] = {}
    for run in result.attention:
        s = run.shape
        panels.setdefault(f"D={s.head_dim} Hq/Hkv={s.q_heads // s.kv_heads} B={s.batch}, {run.threads} thread(s)", []).append(run)
    names = list(result.specs)
    if panels:
        out["attention"] = _attention(panels, names)
        out["roofline"] = _roofline(panels, names)
    if result.step:
        out["step"] = _step(result.step, names)
    if result.generate:
        out["generate"] = _generate(result.generate, names)
    if result.peak:
        out["peak"] = _bars("peak resident memory, MiB", [(p.contender, p.peak / 2**20) for p in result.peak], names)
    return out


def _grid(count: int) -> tuple[Figure, list[Any]]:
    columns = min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(4.2 * columns, 3.3 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for spare in axes[count:]:
        spare.set_visible(False)
    return figure, axes[:count]


def _attention(panels: dict[str, list[AttentionRun]], names: list[str]) -> Figure:
    """Median time of a decode step against tokens; the band is between the quartiles."""
    figure, all_axes = _grid(len(panels))
    lines = [*zip(names, COLOURS), *zip(SHOWN, GREYS)]
    for (title, runs), axes in zip(panels.items(), all_axes):
        for name, colour in lines:
            points = sorted((r.shape.tokens, t.seconds) for r in runs for t in r.timings if t.contender == name)
            if points:
                x = [tokens for tokens, _ in points]
                axes.plot(x, [s.median * 1e3 for _, s in points], color=colour, marker="o", ms=3, lw=1.4, label=name)
                axes.fill_between(x, [s.q1 * 1e3 for _, s in points], [s.q3 * 1e3 for _, s in points], color=colour, alpha=0.2, lw=0)
        axes.set(yscale="log", ylabel="ms", title=title)
        _tokens(axes, [run.shape.tokens for run in runs])
    _legend(figure, all_axes)
    return figure


def _roofline(panels: dict[str, list[AttentionRun]], names: list[str]) -> Figure:
    """Packed bytes a second of the attention, of its arithmetic alone (dotted), and what the machine reads (black)."""
    figure, all_axes = _grid(len(panels))
    for (title, runs), axes in zip(panels.items(), all_axes):
        ordered = sorted(runs, key=lambda r: r.shape.tokens)
        x = [r.shape.tokens for r in ordered]
        axes.plot(x, [r.read_rate / 1e9 for r in ordered], color="#222222", marker=".", lw=1.4, label="read bandwidth")
        for name, colour in zip(names, COLOURS):
            found = [next(line for line in r.rooflines if line.contender == name) for r in ordered]
            reached = [f.of_bandwidth * r.read_rate / 1e9 for f, r in zip(found, ordered)]
            axes.plot(x, reached, color=colour, marker="o", ms=3, lw=1.4, label=name)
            axes.plot(
                x, [f.packed_bytes / f.by_kernel / 1e9 for f in found], color=colour, marker=".", ls=":", lw=1.4, label=f"{name}, resident"
            )
        axes.set(ylim=(0, None), ylabel="packed GB/s", title=title)
        _tokens(axes, x)
    _legend(figure, all_axes)
    return figure


def _tokens(axes: Any, tokens: list[int]) -> None:
    """A logarithmic axis with the lengths that were measured."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in tokens], minor=False)
    axes.set_xlabel("tokens")
    _tidy(axes)


def _legend(figure: Figure, all_axes: list[Any]) -> None:
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4 if len(all_axes) > 1 else 2, frameon=False, fontsize=7)


def _step(runs: list[StepRun], names: list[str]) -> Figure:
    figure, all_axes = _grid(len(runs))
    for run, axes in zip(runs, all_axes):
        _bar(
            axes, [(t.contender, t.mean * 1e3) for t in run.timings], names, f"{run.shape}, {run.threads} thread(s)", "ms a step, amortized"
        )
        axes.set_xscale("log")
    return figure


def _generate(runs: list[GenerateRun], names: list[str]) -> Figure:
    figure, all_axes = _grid(len(runs))
    for run, axes in zip(runs, all_axes):
        bars = [(f"{t.contender} ({t.weights})", t.tokens_per_second) for t in run.timings]
        _bar(axes, bars, names, f"{run.model}, context {run.context}, {run.threads} thread(s)", "tokens a second")
    return figure


def _bars(label: str, bars: list[tuple[str, float]], names: list[str]) -> Figure:
    figure, axes = _grid(1)
    _bar(axes[0], bars, names, "", label)
    return figure


def _bar(axes: Any, bars: list[tuple[str, float]], names: list[str], title: str, label: str) -> None:
    colours = [next((c for n, c in zip(names, COLOURS) if name.split(" ")[0] == n), "#bbbbbb") for name, _ in bars]
    drawn = axes.barh([name for name, _ in bars], [value for _, value in bars], color=colours, height=0.7)
    axes.bar_label(drawn, [f"{value:.3g}" for _, value in bars], padding=3, fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel=label, title=title)
    _tidy(axes)


def _tidy(axes: Any) -> None:
    axes.tick_params(labelsize=7)
    axes.title.set_fontsize(8.5)
    axes.xaxis.label.set_fontsize(8)
    axes.yaxis.label.set_fontsize(8)
    axes.spines[["top", "right"]].set_visible(False)
