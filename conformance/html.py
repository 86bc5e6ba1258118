"""A report as one HTML page: verdict, what ran where, plots of bound use and ULP error, every case. Nothing is loaded from outside."""

from __future__ import annotations

import base64
import io
from importlib import resources
from typing import Any

from kivi.conformance.report import STATUSES, Report

COLOURS = {"passed": "#2e7d52", "failed": "#b3261e", "unsupported": "#8a8f98", "xfailed": "#b7791f", "errored": "#7b1fa2"}
PROFILES = {"quantize": "#3b6ea5", "attention": "#d07a2d", "stream": "#4d9078"}


def text(report: Report) -> str:
    """The page. Needs jinja2 and matplotlib (extra `report`)."""
    import jinja2

    source = (resources.files("kivi.conformance") / "report.html.j2").read_text("utf-8")
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined).from_string(
        source
    )
    return template.render(report=report, families=families(report), statuses=STATUSES, colours=COLOURS, plots=plots(report))


def families(report: Report) -> list[dict[str, Any]]:
    """Cases by family, worst status first inside the table's rows: name, counts by status, largest use of a bound."""
    out: dict[str, dict[str, Any]] = {}
    for case in report.cases:
        profile, rest = case.id.split("/", 1)
        entry = out.setdefault(
            f"{profile}/{rest.split('.')[0]}", {"cases": [], "counts": dict.fromkeys(STATUSES, 0), "use": 0.0, "elements": 0}
        )
        entry["cases"].append(case)
        entry["counts"][case.status] += 1
        entry["use"] = max(entry["use"], case.bound_use or 0.0)
        entry["elements"] += case.exact_elements
    return [{"name": name, **entry} for name, entry in out.items()]


def plots(report: Report) -> list[dict[str, str]]:
    """SVG pictures as data URIs, with a title and a sentence each; none without matplotlib's backend Agg."""
    used = [c for c in report.cases if c.bound_use is not None and c.status == "passed"]
    pictures = [("Cases by status", "Unsupported and expected failures are not passed.", _status_plot(report))]
    if used:
        about = (
            "Largest |error| / bound of each case; 1 is the limit. Dashed: with the rounding of the output, which alone may use a bound up."
        )
        pictures.append(("Use of the bound", about, _use_plot(used)))
        pictures.append(
            (
                "Error of outputs",
                "Largest error of each case in units of the last place of the output's dtype; 0.5 is correct rounding.",
                _ulp_plot(used),
            )
        )
    return [{"title": title, "about": about, "uri": uri} for title, about, uri in pictures]


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    return figure, axes


def _uri(figure: Any) -> str:
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(out.getvalue()).decode()


def _status_plot(report: Report) -> str:
    names = [p for p in PROFILES if any(c.profile == p for c in report.cases)]
    figure, axes = _figure(7, 0.7 + 0.45 * len(names))
    left = [0] * len(names)
    for status in STATUSES:
        counts = [sum(c.profile == p and c.status == status for c in report.cases) for p in names]
        if any(counts):
            axes.barh(names, counts, left=left, color=COLOURS[status], label=status, height=0.6)
            left = [a + b for a, b in zip(left, counts, strict=True)]
    for y, total in enumerate(left):
        axes.text(total, y, f" {total}", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("cases", fontsize=9)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.02, 1.0))
    return _uri(figure)


def _use_plot(used: list[Any]) -> str:
    figure, axes = _figure(7, 2.8)
    for profile, colour in PROFILES.items():
        of_profile = [c for c in used if c.profile == profile]
        share = [(i + 1) / len(of_profile) for i in range(len(of_profile))]
        if of_profile:
            axes.plot(share, sorted(c.pipeline_use for c in of_profile), color=colour, lw=2, label=f"{profile} ({len(of_profile)})")
            axes.plot(share, sorted(c.bound_use for c in of_profile), color=colour, lw=1, ls="--")
    axes.axhline(1.0, color="#b3261e", lw=1, ls="--")
    axes.set_ylim(0, 1.08)
    axes.set_xlabel("share of cases", fontsize=9)
    axes.set_ylabel("|error| / bound", fontsize=9)
    axes.legend(frameon=False, fontsize=9)
    return _uri(figure)


def _ulp_plot(used: list[Any]) -> str:
    figure, axes = _figure(7, 2.8)
    groups = [[c.ulp["max"] for c in used if c.profile == p] for p in PROFILES]
    named = [(p, g) for p, g in zip(PROFILES, groups, strict=True) if g]
    top = max(max(g) for _, g in named)
    edges = [top * i / 40 for i in range(41)] if top > 0 else [0, 1]
    axes.hist([g for _, g in named], bins=edges, stacked=True, color=[PROFILES[p] for p, _ in named], label=[p for p, _ in named])
    axes.set_xlabel("largest error, ULP", fontsize=9)
    axes.set_ylabel("cases", fontsize=9)
    axes.legend(frameon=False, fontsize=9)
    return _uri(figure)
