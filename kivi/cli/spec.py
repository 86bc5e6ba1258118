"""`kivi spec list | show | validate | schema`: the specs that ship with kivi, and yours."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from kivi.cli.output import json_option, print_json, print_table
from kivi.errors import SpecError


@click.group()
def spec() -> None:
    """Read and check cache specs."""


@spec.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List the presets; `kivi spec show` prints one whole."""
    from kivi.spec import load_spec, presets

    specs = [load_spec(name) for name in presets()]
    if as_json:
        print_json([{"name": s.name, "hash": s.hash, "spec": s.to_dict()} for s in specs])
        return
    print_table(
        ("preset", "numerics", "key: bits/G/R", "value: bits/G/R", "layout"),
        (
            (
                s.name,
                s.numerics,
                f"{s.key.bits}/{s.key.group}/{s.key.residual} {s.key.metadata}",
                f"{s.value.bits}/{s.value.group}/{s.value.residual} {s.value.metadata}",
                s.to_dict()["packing"]["layout"],
            )
            for s in specs
        ),
    )


@spec.command()
@click.argument("source")
@json_option
def show(source: str, as_json: bool) -> None:
    """Print SOURCE, a preset or a TOML file, with all defaults written out."""
    from kivi.spec import load_spec

    loaded = load_spec(source)
    if as_json:
        print_json({"name": loaded.name, "hash": loaded.hash, "spec": loaded.to_dict()})
        return
    click.echo(f"# hash {loaded.hash}")
    click.echo("\n".join(toml_lines(loaded.to_dict())))


@spec.command()
@click.argument("sources", nargs=-1, required=True)
@json_option
@click.pass_context
def validate(ctx: click.Context, sources: tuple[str, ...], as_json: bool) -> None:
    """Check each of SOURCES, presets or TOML files; exit 1 if one is not a valid spec."""
    from kivi.spec import load_spec, presets

    for source in sources:
        if source not in presets() and not Path(source).is_file():
            raise click.BadParameter(f"{source!r} is neither a preset ({', '.join(presets())}) nor a file")
    results: list[dict[str, Any]] = []
    for source in sources:
        try:
            loaded = load_spec(source)
        except SpecError as error:
            results.append({"source": source, "valid": False, "error": {"type": type(error).__name__, "message": str(error)}})
        else:
            results.append({"source": source, "valid": True, "name": loaded.name, "hash": loaded.hash})
    valid = all(r["valid"] for r in results)
    if as_json:
        print_json({"valid": valid, "specs": results})
    else:
        print_table(
            ("source", "valid", ""),
            (
                (r["source"], Text("yes", "green"), f"{r['name']}, hash {r['hash'][:12]}")
                if r["valid"]
                else (r["source"], Text("no", "red"), r["error"]["message"])
                for r in results
            ),
        )
    ctx.exit(0 if valid else 1)


@spec.command()
@click.option("--json", "as_json", is_flag=True, help="Accepted for symmetry: the schema is JSON.")
def schema(as_json: bool) -> None:
    """Print the JSON schema of a spec file, the text of spec/kivi-spec.schema.json."""
    from kivi.spec import schema as schema_of_specs

    print_json(schema_of_specs())


def toml_lines(fields: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a TOML text for nested tables of strings, numbers and booleans, which is all that a spec holds."""
    yield from _table(fields, "")


def _table(fields: Mapping[str, Any], path: str) -> Iterator[str]:
    for key, value in fields.items():
        if not isinstance(value, Mapping):
            yield f"{_key(key)} = {json.dumps(value)}"  # a JSON scalar is a TOML scalar
    for key, value in fields.items():
        if isinstance(value, Mapping):
            yield ""
            yield f"[{path}{_key(key)}]"
            yield from _table(value, f"{path}{_key(key)}.")


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() else json.dumps(key)
