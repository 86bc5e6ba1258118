"""`kivi backends`: which backends are installed, which of them can run here, and what would make the others run."""

from __future__ import annotations

from typing import Any

import click
from rich.text import Text

from kivi.cli.output import json_option, print_json, print_table


@click.command()
@click.option("--refresh", is_flag=True, help="Ask every package again instead of using what is known of it.")
@click.option("--matrix", is_flag=True, help="Print the support matrix as Markdown instead: the same on every machine (docs/support.md).")
@json_option
def backends(refresh: bool, matrix: bool, as_json: bool) -> None:
    """List the backends, and whether each can run here.

    A backend that cannot run says why, and what would make it available. Conformance is the last result on this machine, or that of the
    release; the rate is that of the last `kivi tune`.
    """
    import kivi
    from kivi import distributions, probing, selfcheck

    if matrix:
        from kivi.support import matrix as text

        click.echo(text(), nl=False)
        return
    if refresh:
        distributions.forget(kept=True)
        probing.forget()
        selfcheck.forget()
    rows, shape = facts(kivi.backends())
    if as_json:
        print_json(rows)
        return
    print_table(
        ("backend", "state", "mode", "devices", "conformance", "ms a step", "reason"),
        (
            (
                row["name"],
                Text(row["state"], "green" if row["available"] else "red"),
                row["mode"],
                ", ".join(row["devices"]),
                conformance_words(row["conformance"]),
                "" if row["seconds"] is None else f"{row['seconds'] * 1e3:.3g}",
                advice(row["reason"], row["fix"]),
            )
            for row in rows
        ),
        right=("ms a step",),
    )
    if shape:
        click.echo(f"rates: {shape}")


def facts(infos: list[Any]) -> tuple[list[dict[str, Any]], str]:
    """What is known of every backend and mode as plain data, and the shape of the rates; no rates, no shape."""
    import msgspec

    from kivi import ranks, results

    last, measured = results.last(), ranks.latest()
    rates = {(m.backend, m.mode): m.seconds for m in measured.measured} if measured else {}
    rows = []
    for info in infos:
        result = last.get((info.name, info.mode))
        rows.append(
            {
                "name": info.name,
                "available": info.available,
                "mode": info.mode,
                "devices": list(info.devices),
                "reason": info.reason,
                "state": info.state,
                "fix": info.fix,
                "summary": info.summary,
                "priority": info.priority,
                "found": msgspec.to_builtins(info.found),
                "conformance": {"text": str(result), "here": result.here, "profiles": result.profiles} if result else None,
                "seconds": rates.get((info.name, info.mode)),
            }
        )
    shape = f"{measured.spec}, {measured.tokens} tokens, {measured.shape}" if measured else ""
    return rows, shape


def conformance_words(result: dict[str, Any] | None) -> str:
    """A result in a few words: what passed, and where."""
    if result is None:
        return "not run"
    return result["text"] if result["here"] else f"{result['text']} (release)"


def advice(reason: str, fix: str) -> str:
    """A reason with what would change it, unless it says so already."""
    if not fix or fix in reason:
        return reason
    return f"{reason}; {'run: ' if fix.startswith(('pip ', 'kivi ')) else ''}{fix}"
