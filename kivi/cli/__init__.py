"""The command line: `kivi COMMAND`, one command a file.

A command's module is imported when the command is named, so `kivi --version` loads neither NumPy nor a backend. Exit codes:
0 good; 1 the check failed; 2 wrong usage, or a request that kivi cannot serve. An error of kivi's own tree is one line on
stderr, and with `--json` also an object `{"error": {"type", "message"}}` on stdout; anything else is a defect and keeps its
traceback.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from kivi.errors import KiviError

COMMANDS = ("backends", "select", "tune", "doctor", "spec", "memory", "compile", "conform", "audit", "new-backend", "bench", "demo")


class Commands(click.Group):
    """A group that imports a command when it is asked for, and turns errors into exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        match cmd_name:
            case "backends":
                from kivi.cli.backends import backends as command
            case "select":
                from kivi.cli.select import select as command
            case "tune":
                from kivi.cli.tune import tune as command
            case "doctor":
                from kivi.cli.doctor import doctor as command
            case "spec":
                from kivi.cli.spec import spec as command
            case "memory":
                from kivi.cli.memory import memory as command
            case "compile":
                from kivi.cli.compile import compile_ as command
            case "conform":
                from kivi.cli.conform import conform as command
            case "audit":
                from kivi.cli.audit import audit as command
            case "new-backend":
                from kivi.cli.new_backend import new_backend as command
            case "bench":
                from kivi.cli.bench import bench as command
            case "demo":
                from kivi.cli.demo import demo as command
            case _:
                return None
        return command

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> NoReturn:
        arguments = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False
        try:
            code = super().main(arguments, *rest, **extra)
        except click.Abort:
            sys.exit(130)
        except click.ClickException as error:
            sys.exit(_report(error, arguments, error.exit_code))
        except KiviError as error:
            sys.exit(_report(error, arguments, 2))
        sys.exit(code if isinstance(code, int) else 0)


def _report(error: Exception, arguments: list[str], code: int) -> int:
    """Prints the error in the form that the arguments ask for; returns the exit code."""
    if isinstance(error, click.ClickException):
        kind, message = "UsageError" if isinstance(error, click.UsageError) else type(error).__name__, error.format_message()
        error.show()
    else:
        kind, message = type(error).__name__, str(error)
        click.echo(f"kivi: {kind}: {' '.join(message.split())}", err=True)
    if any(a == "--json" or a.startswith("--json=") for a in arguments):
        click.echo(json.dumps({"error": {"type": kind, "message": message}}))
    return code


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="kivi-kvcache", prog_name="kivi", message="%(prog)s %(version)s")
def cli() -> None:
    """A quantized KV cache from one declarative spec, on every backend that passes the conformance suite."""


def main() -> NoReturn:
    """Entry point of the console script `kivi`."""
    cli.main()
