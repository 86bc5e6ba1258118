"""Summaries of conformance runs, and the support matrix that is made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kivi import plugins, results
from kivi.cli import cli
from kivi.conformance import run, select_cases, summary
from kivi.errors import InputError
from kivi.support import matrix

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def report():
    return run("reference", profile="quantize", size="quick")


def test_a_whole_run_is_summed_up(report, tmp_path):
    path = summary.update(tmp_path / "new", report, "2026-01-31")
    assert path.name == "reference.device.json"
    data = json.loads(path.read_text())
    [(profile, entry)] = data["profiles"].items()
    counts = {status: entry[status] for status in ("passed", "failed", "unsupported", "xfailed", "errored")}
    assert counts == report.summary
    assert counts["passed"] == len(select_cases("quantize", "quick"))
    assert (profile, entry["size"], entry["date"], entry["device"]) == ("quantize", "quick", "2026-01-31", "cpu")
    assert entry["versions"]["kivi"]
    assert path.stat().st_size < 2000
    data["profiles"]["stream"] = entry
    path.write_text(json.dumps(data))
    summary.update(tmp_path / "new", report, "2026-02-01")  # one profile is renewed, the other stays
    assert {name: e["date"] for name, e in summary.read(path)["profiles"].items()} == {"quantize": "2026-02-01", "stream": "2026-01-31"}


def test_a_part_is_not(tmp_path):
    part = run("reference", profile="quantize", size="quick", cases=["quantize/ties.middle.*"])
    with pytest.raises(InputError, match=r"a summary takes whole runs: this one has \d+ of the \d+ cases"):
        summary.update(tmp_path, part)
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(InputError, match="not a conformance summary"):
        summary.read(path)
    assert list(tmp_path.glob("reference*")) == []


def test_the_shipped_summaries_are_of_backends_that_there_are():
    found = results.shipped()
    assert ("reference", "device") in found
    for (name, mode), result in found.items():
        assert mode in plugins.get(name).manifest.modes
        assert set(result.profiles) <= set(results.PROFILES)
        assert (results.shipped_folder() / f"{name}.{mode}.json").is_file()
        for entry in result.profiles.values():
            assert entry["passed"] > 0
            assert entry["failed"] == entry["errored"] == 0, f"{name} in mode {mode} does not conform: it may not ship like that"


def test_the_page_is_what_the_command_prints():
    page = (ROOT / "docs" / "support.md").read_text()
    assert page == matrix(), "renew it: kivi backends --matrix > docs/support.md"


def test_the_matrix_tells_a_mode_that_was_not_run(monkeypatch):
    monkeypatch.setattr(results, "shipped", dict)
    lines = matrix().splitlines()
    assert sum("| not run |" in line for line in lines) == sum(len(f.manifest.modes) for f in plugins.found().values()) * 3
    monkeypatch.undo()
    assert any(line.startswith("| reference | device | quantize |") and "not run" not in line for line in matrix().splitlines())


def test_a_run_whose_summary_cannot_be_kept(tmp_path, monkeypatch):
    """The result stands; a cache folder that cannot be written costs only the note of it."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KIVI_CACHE_DIR", str(tmp_path / "file" / "below"))
    result = CliRunner().invoke(cli, ("conform", "--backend", "reference", "--profile", "attention"))
    assert result.exit_code == 0, result.output
    assert "conforms" in result.output
