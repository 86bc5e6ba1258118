"""`kivi backends`."""

import json

from click.testing import CliRunner

from kivi.cli import cli


def test_the_reference_backend_is_listed():
    result = CliRunner().invoke(cli, ("backends", "--json"))
    assert result.exit_code == 0
    one = next(info for info in json.loads(result.stdout) if info["name"] == "reference")
    assert {name: one[name] for name in ("name", "available", "mode", "devices", "reason", "state", "fix")} == {
        "name": "reference",
        "available": True,
        "mode": "device",
        "devices": ["cpu"],
        "reason": "",
        "state": "available",
        "fix": "",
    }
    table = CliRunner().invoke(cli, ("backends",)).stdout
    [line] = [line.split() for line in table.splitlines() if line.split()[:1] == ["reference"]]
    assert line[:4] == ["reference", "available", "device", "cpu"]
