"""`kivi backends`."""

import json

from click.testing import CliRunner

from kivi.cli import cli


def test_the_reference_backend_is_listed():
    result = CliRunner().invoke(cli, ("backends", "--json"))
    assert result.exit_code == 0
    one = next(info for info in json.loads(result.stdout) if info["name"] == "reference")
    assert one == {"name": "reference", "available": True, "mode": "device", "devices": ["cpu"], "reason": ""}
    table = CliRunner().invoke(cli, ("backends",)).stdout
    assert [line.split() for line in table.splitlines() if "reference" in line] == [["reference", "yes", "device", "cpu"]]
