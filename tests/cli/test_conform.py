"""`kivi conform`: exit codes, the report's files, and a wrong backend that must not pass. (What the suite checks: tests/meta.)"""

import json
import xml.etree.ElementTree as ElementTree
from functools import partial

import pytest
from click.testing import CliRunner

import kivi
from kivi.cli import cli
from kivi.conformance import Subject, run, select_cases

PART = ("--backend", "reference", "--case", "quantize/layouts*")


def invoke(*args: str):
    return CliRunner().invoke(cli, ("conform", *args))


@pytest.fixture
def wrong_backend(monkeypatch):
    """The runner gets a subject whose scales are one unit of the last place too large."""

    class Wrong(Subject):
        def quantize(self, x, spec, which, layout=None):
            qt = super().quantize(x, spec, which, layout)
            bits = qt.scale.view("uint16" if qt.scale.itemsize == 2 else "uint32")
            bits += 1
            return qt

    monkeypatch.setattr("kivi.plugins.conformance_runner", lambda: partial(run, subject=Wrong(kivi.get_backend("reference"))))


def test_a_part_of_the_suite_passes():
    result = invoke(*PART)
    assert result.exit_code == 0, result.stdout
    assert "backend reference (device, cpu) conforms: profile all, size quick" in result.stdout
    count = len(select_cases(cases=["quantize/layouts*"]))
    assert count > 0
    assert [line.split() for line in result.stdout.splitlines() if line.split()[:1] == ["all"]] == [["all", str(count), "0", "0", "0", "0"]]


def test_json_on_stdout_is_the_report():
    report = json.loads(invoke(*PART, "--json").stdout)
    assert (report["version"], report["backend"], report["mode"], report["ok"]) == (1, "reference", "device", True)
    assert set(report["summary"]) == {"passed", "failed", "unsupported", "xfailed", "errored"}
    assert report["summary"]["passed"] == len(report["cases"]) == sum(report["summary"].values())
    assert {case["spec"] for case in report["cases"]} == set(report["spec"])


def test_files(tmp_path):
    paths = {kind: tmp_path / f"out.{kind}" for kind in ("json", "xml", "html")}
    result = invoke(*PART, "--json", str(paths["json"]), "--junit", str(paths["xml"]), "--html", str(paths["html"]))
    assert result.exit_code == 0, result.stderr
    assert "conforms" in result.stdout
    report = json.loads(paths["json"].read_text())
    ids = {case["id"] for case in report["cases"]}
    assert {case.id for case in select_cases(cases=["quantize/layouts*"])} == ids
    suites = ElementTree.parse(paths["xml"]).getroot()
    assert len(list(suites.iter("testcase"))) == len(ids)
    assert not list(suites.iter("failure"))
    page = paths["html"].read_text()
    assert "reference" in page
    assert "<html" in page


@pytest.mark.usefixtures("wrong_backend")
def test_a_wrong_backend_exits_1(tmp_path):
    result = invoke(*PART, "--junit", str(tmp_path / "out.xml"))
    assert result.exit_code == 1
    assert "does not conform" in result.stdout
    assert "scale" in result.stdout
    assert list(ElementTree.parse(tmp_path / "out.xml").getroot().iter("failure"))
    report = json.loads(invoke(*PART, "--json").stdout)
    assert report["ok"] is False
    assert report["summary"]["failed"] > 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--profile", "nosuch"), "quantize"),
        (("--size", "huge"), "quick"),
        (("--case", "no/such/case"), "no/such/case"),
        (("--device", "cuda:7"), "cuda:7"),
        (("--junit", "report.txt"), ".xml"),
        (("--html", "report.txt"), ".html"),
        (("--json", "no/such/folder/out.json"), "no/such/folder"),
    ],
)
def test_impossible_requests_are_refused_before_the_run(args, says):
    result = invoke("--backend", "reference", *args)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stdout == "" or "--json" in args
