"""`kivi audit`: backends against each other, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from kivi.cli.output import print_table, progress
from kivi.errors import InputError

SHOWN = 20  # differences printed on the terminal; the JSON holds all
FILE: click.Path = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.option("--backend", "backends", multiple=True, metavar="NAME[:MODE]", help="Two or more; the others are compared with the first.")
@click.option("--profile", default="all", show_default=True, metavar="NAME", help="quantize, attention, stream or all.")
@click.option("--size", default="quick", show_default=True, metavar="NAME", help="quick or full.")
@click.option("--case", "cases", multiple=True, metavar="PATTERN", help="Only cases whose id matches, e.g. 'quantize/*'. May be repeated.")
@click.option("--tensors", type=FILE, help="Instead of the suite's cases: a safetensors file with tensors [B, Hkv, T, D].")
@click.option("--spec", "source", default="kivi-2bit", show_default=True, help="For --tensors: a preset or a TOML file.")
@click.option("--json", "json_path", is_flag=False, flag_value="-", type=FILE, metavar="[FILE]", help="Write JSON; without FILE to stdout.")
@click.pass_context
def audit(
    ctx: click.Context,
    backends: tuple[str, ...],
    profile: str,
    size: str,
    cases: tuple[str, ...],
    tensors: Path | None,
    source: str,
    json_path: Path | None,
) -> None:
    """Feed the same to several backends and compare all that comes out with the first one's.

    Codes, scales, origins, words, floating rows and dequantized values have one right value each: exit 1 if one differs, or if a case
    broke. Outputs of attention may differ by roundings; how often they are equal, and by how much they differ at most, is shown.
    """
    from kivi.plugins import auditor
    from kivi.spec import load_spec

    chosen: dict[str, Any] = {"profile": profile, "size": size, "cases": cases or None}
    if tensors is not None:
        if cases:
            raise click.BadParameter("--case chooses cases of the suite, and --tensors takes none of them; leave one out")
        chosen |= {"tensors": _read(tensors), "spec": load_spec(source)}
    with progress() as bar:
        task = bar.add_task(" against ".join(backends), total=None)
        found = auditor()(backends, **chosen, progress=lambda done, total: bar.update(task, completed=done, total=total))
    if json_path is not None and str(json_path) == "-":
        click.echo(found.to_json())
    else:
        if json_path is not None:
            json_path.write_text(found.to_json(), "utf-8")
        _print(found)
    ctx.exit(0 if found.ok else 1)


def _read(path: Path) -> Mapping[str, Any]:
    """The tensors of a file. Raises `InputError`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise InputError(f"{path} is not a readable safetensors file: {error}") from None


def _print(found: Any) -> None:
    first = next(iter(found.backends))
    for name, compared in found.cases.items():
        rows = []
        for profile in dict.fromkeys(one.profile for one in compared):
            mine = [one for one in compared if one.profile == profile]
            outputs, equal = (sum(getattr(one, what) for one in mine) for what in ("outputs", "equal"))
            counts = [sum(one.status == status for one in mine) for status in ("same", "differs", "unsupported", "errored")]
            stored = [sum(getattr(one, what) for one in mine) for what in ("stored", "differing")]
            shares = ["", "", ""]
            if outputs:
                shares = [f"{100 * equal / outputs:.1f}%", str(max(one.ulp for one in mine)), f"{max(one.difference for one in mine):.1e}"]
            rows.append((profile, *counts, *stored, *shares))
        columns = (
            "profile",
            "same",
            "differs",
            "unsupported",
            "errored",
            "stored",
            "differing",
            "outputs equal",
            "most ULP",
            "most of largest",
        )
        click.echo(f"{name} beside {first}")
        print_table(columns, rows, right=columns[1:])
        wrong = [one for one in compared if one.status in ("differs", "errored")]
        for one in wrong[:SHOWN]:
            click.echo(f"{one.id}: {one.status}: {one.first_difference or one.reason}")
        if len(wrong) > SHOWN:
            click.echo(f"and {len(wrong) - SHOWN} more; --json FILE holds all")
    if found.left_out:
        click.echo(f"{len(found.left_out)} cases compare two runs of one backend and were left out")
