"""`kivi conform`: run the conformance suite on a backend, and write its report."""

from __future__ import annotations

import gc
import importlib.util
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from kivi.cli.output import print_table, progress

SHOWN = 20  # failures printed on the terminal; the reports hold all
COLOURS = {"passed": "green", "failed": "red", "errored": "red", "unsupported": "yellow", "xfailed": "yellow"}
STDOUT = Path("-")
FILE: click.Path = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.option("--backend", required=True, help="The backend to check; see `kivi backends`.")
@click.option("--mode", help="Its mode: device, interpreter, simulator, shim.  [default: its first one that can run]")
@click.option("--device", help="Its device.  [default: its first one]")
@click.option("--profile", default="all", show_default=True, metavar="NAME", help="quantize, attention, stream or all.")
@click.option("--size", default="quick", show_default=True, metavar="NAME", help="quick or full.")
@click.option("--case", "cases", multiple=True, metavar="PATTERN", help="Only cases whose id matches, e.g. 'quantize/*'. May be repeated.")
@click.option("--json", "json_path", is_flag=False, flag_value="-", type=FILE, metavar="[FILE]", help="Write JSON; without FILE to stdout.")
@click.option("--junit", "junit_path", type=FILE, metavar="FILE", help="Write JUnit XML (.xml).")
@click.option("--html", "html_path", type=FILE, metavar="FILE", help="Write a page with plots (.html).")
@click.option(
    "--summary", "summary_path", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER", help="Renew the summary there."
)
@click.pass_context
def conform(
    ctx: click.Context,
    backend: str,
    mode: str | None,
    device: str | None,
    profile: str,
    size: str,
    cases: tuple[str, ...],
    json_path: Path | None,
    junit_path: Path | None,
    html_path: Path | None,
    summary_path: Path | None,
) -> None:
    """Run the conformance suite on a backend.

    Exit 1 if a case failed or errored, or if none passed. Whole runs are also summed up for `kivi backends`.
    """
    from kivi import jit, results
    from kivi.plugins import conformance_runner, summary_update

    _writable("--json", json_path)
    _writable("--junit", junit_path, ".xml", ("junitparser",))
    _writable("--html", html_path, ".html", ("jinja2", "matplotlib"))
    if summary_path and cases:
        raise click.BadParameter("--summary takes whole profiles; leave --case out")
    run = conformance_runner()
    gc.set_threshold(100_000, 50, 50)  # lowering makes many small objects that live briefly; looking for cycles among them costs an eighth
    with progress() as bar:
        task = bar.add_task(f"{backend}, {profile}, {size}", total=None)
        report = run(
            backend,
            mode=mode,
            device=device,
            profile=profile,
            size=size,
            cases=cases or None,
            progress=lambda done, total, result: bar.update(task, completed=done, total=total),
        )
    for path in (junit_path, html_path):
        if path:
            report.save(path)
    folders = [summary_path] if summary_path else []
    if not cases:
        folders.append(jit.writable(results.local_folder()))
    for folder in folders:
        summary_update()(folder, report)
    if json_path == STDOUT:
        click.echo(report.to_json())
    else:
        if json_path:
            json_path.write_text(report.to_json(), "utf-8")
        _print(report)
    ctx.exit(0 if report.ok else 1)


def _writable(option: str, path: Path | None, suffix: str = "", packages: tuple[str, ...] = ()) -> None:
    """Refuse before the run what would fail after it. Raises `click.BadParameter`."""
    if path is None or path == STDOUT:
        return
    if suffix and path.suffix != suffix:
        raise click.BadParameter(f"{option} {path}: the file's name must end in {suffix}")
    if not path.resolve().parent.is_dir():
        raise click.BadParameter(f"{option} {path}: there is no folder {path.parent}; make it first")
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise click.BadParameter(f"{option} needs {', '.join(missing)}; run: pip install 'kivi-kvcache[report]'")


def _print(report: Any) -> None:
    """The report in short: cases by profile and status, what failed and why, how much of the bounds was used."""
    profiles = dict.fromkeys(case.profile for case in report.cases)
    rows = [
        [name, *(sum(c.profile == name and c.status == status for c in report.cases) for status in report.summary)] for name in profiles
    ]
    total = [Text(str(count), COLOURS[status] if count else "") for status, count in report.summary.items()]
    print_table(("profile", *report.summary), [*rows, ["all", *total]], right=report.summary)
    failures = report.failures()
    if failures:
        print_table(("case", "status", "reason"), ((c.id, Text(c.status, "red"), c.reason) for c in failures[:SHOWN]))
        if len(failures) > SHOWN:
            click.echo(f"and {len(failures) - SHOWN} more; --json FILE lists all")
    for pattern in report.stale_xfails:
        click.echo(f"xfails.toml names {pattern!r}, which matches no case: remove the entry")
    if report.bound["largest_use"] is not None:
        click.echo(f"largest use of a bound: {report.bound['largest_use']:.3f} of 1, in {report.bound['case']}")
    word = "conforms" if report.ok else "does not conform"
    click.echo(f"backend {report.backend} ({report.mode}, {report.device}) {word}: profile {report.profile}, size {report.size}")
