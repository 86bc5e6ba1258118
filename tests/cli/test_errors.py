"""Exit codes and the form of errors, the same for every command."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

import kivi
from kivi.cli import COMMANDS, cli

SPEC_COMMANDS = ("list", "show", "validate", "schema")


def invoke(*args: str):
    return CliRunner().invoke(cli, args)


def test_version():
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"kivi {kivi.__version__}\n")


@pytest.mark.parametrize("command", [(c,) for c in COMMANDS] + [("spec", c) for c in SPEC_COMMANDS])
def test_every_command_has_help_and_json(command):
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    assert command == ("spec",) or "--json" in result.stdout


def test_help_lists_every_command():
    listed = invoke("--help").stdout.partition("Commands:")[2]
    assert [line.split()[0] for line in listed.splitlines() if line.startswith("  ") and line[2] != " "] == list(COMMANDS)


@pytest.mark.parametrize(
    ("args", "kind", "says"),
    [
        (("nonsense",), "UsageError", "No such command 'nonsense'"),
        (("memory", "--tokens", "0", "--head-dim", "8"), "UsageError", "0 is not in the range"),
        (("memory", "--tokens", "8"), "UsageError", "head-dim"),
        (("spec", "show", "no-such-spec"), "SpecError", "kivi-2bit"),
        (("memory", "--preset", "no-such-spec", "--tokens", "8", "--head-dim", "8"), "SpecError", "no-such-spec"),
        (("memory", "--backend", "nosuch", "--tokens", "8", "--head-dim", "8"), "UnknownBackendError", "reference"),
        (("memory", "--tokens", "8", "--head-dim", "100000"), "UnsupportedError", "head_dim = 100000"),
        (("conform", "--backend", "nosuch"), "UnknownBackendError", "reference"),
        (("conform", "--backend", "reference", "--mode", "simulator"), "UnsupportedError", "simulator"),
    ],
)
def test_wrong_usage_and_impossible_requests(args, kind, says):
    """Exit 2; the message on stderr, and with --json an object on stdout."""
    plain = invoke(*args)
    assert plain.exit_code == 2
    assert plain.stdout == ""
    assert says in plain.stderr
    assert "Traceback" not in plain.stderr

    as_json = invoke(*args, "--json")
    assert as_json.exit_code == 2
    error = json.loads(as_json.stdout)["error"]
    assert error["type"] == kind
    assert says in error["message"]


def test_an_error_of_kivi_is_one_line():
    assert invoke("spec", "show", "no-such-spec").stderr.count("\n") == 1


def test_a_defect_keeps_its_traceback(monkeypatch):
    def broken():
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("kivi.spec.presets", broken)
    assert isinstance(invoke("spec", "list").exception, ZeroDivisionError)


def test_a_closed_pipe_is_not_a_defect():
    command = [sys.executable, "-m", "kivi.cli", "spec", "schema"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        stderr = process.stderr.read()
    assert stderr == b""


def test_the_installed_script_and_the_module_run():
    for command in (["-m", "kivi.cli"], ["-c", "from kivi.cli import main; main()"]):
        done = subprocess.run([sys.executable, *command, "--version"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, f"kivi {kivi.__version__}\n")
