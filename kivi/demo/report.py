"""The HTML report of the demo: one file, its plots inside, no script and nothing fetched."""

from __future__ import annotations

import base64
import io
import platform
from importlib import metadata
from typing import Any, Literal

import jinja2
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

import kivi
from kivi.demo import ERROR_FROM, FULL, LAYER, DemoResult
from kivi.demo.terminal import notes

# One colour a bit width, the same in all plots; grey is full precision.
COLOURS = {"8": "#2a9d8f", "4": "#1f6fb2", "3": "#8e6bbf", "2": "#d1495b", "1": "#8a5a44", FULL: "#555555"}
WIDTH = 9.0  # inches: the plots fill the page's column
STYLE = {"edgecolor": "none", "format": "svg", "bbox_inches": "tight"}


def render(result: DemoResult) -> str:
    """The report as one HTML page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kivi.demo", "."), autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["mib"] = lambda n: f"{n / 2**20:.2f} MiB"
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "numpy")}
    return environment.get_template("report.html").render(
        r=result,
        full=result.rows[0],
        notes=notes(result),
        residual=kivi.load_spec("kivi-2bit").key.residual,
        layer=LAYER,
        start=ERROR_FROM,
        head=_outlier_head(result.plots["keys"]),
        ratio={which: _spread(result.plots[which]) for which in ("keys", "values")},
        versions={"kivi": kivi.__version__, "Python": platform.python_version(), **versions},
        machine=platform.platform(),
        figures={name: _data_uri(figure) for name, figure in figures(result).items()},
    )


def figures(result: DemoResult) -> dict[str, Figure]:
    """The plots by name."""
    return {
        "bits": _by_bits(result),
        "error": _error_over_steps(result),
        "channels": _channels(result),
        "axes": _axes(result),
    }


def _by_bits(result: DemoResult) -> Figure:
    """Perplexity (left) and KL divergence from the full-precision cache (right, logarithmic) against code bits."""
    figure = Figure(figsize=(WIDTH, 3.3), layout="constrained")
    left, right = figure.subplots(1, 2)
    bits = sorted(int(b) for b in result.bits if b != FULL)
    shown = [b for b in bits if b > 1]
    full = result.bits[FULL]["perplexity"]
    for axes, name, which in ((left, "perplexity", shown), (right, "kl", bits)):
        values = [result.bits[str(b)][name] for b in which]
        axes.plot(which, values, color="#999999", lw=1.2, zorder=1)
        axes.scatter(which, values, c=[COLOURS[str(b)] for b in which], s=46, zorder=2)
        for b, value in zip(which, values, strict=True):
            label = f"{value:.2f}" if name == "perplexity" else f"{value:.2g}"
            axes.annotate(label, (b, value), (6, 6), textcoords="offset points", fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_xlim(which[0] / 1.2, which[-1] * 1.6)
        axes.xaxis.set(major_locator=FixedLocator(which), minor_locator=NullLocator(), major_formatter="{x:.0f}", label_text="bits a code")
    left.axhline(full, color=COLOURS[FULL], ls="--", lw=1.2, label=f"full precision {full:.2f}")
    left.legend(loc="upper right", frameon=False, fontsize=9)
    left.set(ylabel="perplexity", title=f"Perplexity (1 bit: {result.bits['1']['perplexity']:,.0f}, off the plot)")
    left.margins(y=0.2)
    right.set(yscale="log", ylabel="KL divergence, nats a token", title="Distance from full precision")
    right.margins(y=0.15)
    return _tidy(figure)


def _error_over_steps(result: DemoResult) -> Figure:
    """Relative error of one layer's attention output against the number of tokens."""
    figure = Figure(figsize=(WIDTH, 3.3), layout="constrained")
    axes = figure.subplots()
    residual = kivi.load_spec("kivi-2bit").key.residual
    for bits, errors in result.attention_error.items():
        tokens = np.arange(ERROR_FROM + 1, ERROR_FROM + 1 + len(errors))
        axes.plot(tokens, np.maximum(errors, 1e-8), color=COLOURS[bits], lw=1.1, label=f"{bits} bits")
    end = ERROR_FROM + len(result.attention_error["2"])
    for sealed in range(residual, end, residual):
        axes.axvline(sealed + 0.5, color="#bbbbbb", lw=0.8, ls=":", zorder=0)
    axes.axvspan(ERROR_FROM, residual, color="#f0f0f0", zorder=-1)
    note = axes.text(residual - 4, 0.5, "nothing sealed yet", transform=axes.get_xaxis_transform())
    note.set(rotation=90, ha="right", va="center", fontsize=9, color="#666666")
    axes.set(yscale="log", xlim=(ERROR_FROM, end), ylim=(1e-8, 3))
    axes.set(xlabel="tokens in the cache", ylabel="relative error", title=f"Attention output of layer {LAYER}")
    axes.legend(ncols=4, loc="lower right", frameon=True, framealpha=0.9, edgecolor="none", fontsize=9)
    return _tidy(figure)


def _channels(result: DemoResult) -> Figure:
    """Magnitudes of keys and values of one head, and the largest magnitude of each channel."""
    head = _outlier_head(result.plots["keys"])
    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    grid = figure.subplots(2, 2, height_ratios=(2.2, 1), sharex=True, sharey="row")
    limit = float(np.quantile(result.plots["keys"][head], 0.999))
    for column, (which, colour) in enumerate((("keys", "#1f6fb2"), ("values", "#d1495b"))):
        x = result.plots[which][head]
        above, below = grid[:, column]
        image = above.imshow(x, aspect="auto", cmap="magma", vmin=0, vmax=limit, interpolation="nearest", rasterized=True)
        above.set_title(f"|{which}|, KV head {head}")
        below.bar(np.arange(x.shape[1]), x.max(0), color=colour, width=0.85)
        below.set_xlabel("channel")
    grid[0, 0].set_ylabel("token")
    grid[1, 0].set_ylabel("largest")
    figure.colorbar(image, ax=grid[0, :], shrink=0.9, pad=0.01)
    return _tidy(figure, grid="none")


def _axes(result: DemoResult) -> Figure:
    """What each axis costs at 2 bits; the axis that KIVI takes is in colour."""
    figure = Figure(figsize=(WIDTH, 2.1), layout="constrained")
    axes = figure.subplots()
    names = ["keys per channel", "keys per token", "values per token", "values per channel"]
    taken = {"keys per channel": "#1f6fb2", "values per token": "#d1495b"}
    values = [result.axis_error[name] for name in names]
    bars = axes.barh(names, values, color=[taken.get(name, "#cccccc") for name in names], height=0.7)
    axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=4, fontsize=9)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel="relative error of the attention output, 2 bits, groups of 32", xlim=(0, max(values) * 1.1))
    return _tidy(figure, grid="x")


def _outlier_head(keys: np.ndarray) -> int:
    """The KV head whose channels differ most: largest ratio of a channel's mean magnitude to the median one. keys [H, T, D]."""
    mean = keys.mean(1)
    return int((mean.max(1) / np.median(mean, 1)).argmax())


def _spread(x: np.ndarray) -> float:
    """Largest over median mean magnitude of a channel, averaged over heads. x [H, T, D]."""
    mean = x.mean(1)
    return float((mean.max(1) / np.median(mean, 1)).mean())


def _tidy(figure: Figure, grid: Literal["x", "y", "none"] = "y") -> Figure:
    for axes in figure.axes:
        axes.tick_params(labelsize=9)
        axes.title.set_fontsize(10.5)
        axes.xaxis.label.set_fontsize(9.5)
        axes.yaxis.label.set_fontsize(9.5)
        if grid != "none":
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis=grid, color="#eeeeee", zorder=-2)
            axes.set_axisbelow(True)
    return figure


def _data_uri(figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=160, metadata={"Date": None}, **STYLE)
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
