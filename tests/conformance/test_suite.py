"""The suite as its users see it: the reference passes, statuses mean what they say, reports hold what they promise."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from itertools import combinations

import msgspec
import numpy as np
import pytest

import kivi
from kivi.backends.reference.driver import ReferenceBackend
from kivi.conformance import Report, Subject, run, select_cases
from kivi.conformance.case import Special, Stream
from kivi.conformance.compare import Mismatch, Tally, same, within
from kivi.conformance.pairs import covering
from kivi.conformance.suite import Xfail, profiles, run_case
from kivi.conformance.traces import all_cases
from kivi.conformance.traces.matrix import AXES
from kivi.errors import InputError

#: Field reports that the suite answers.
REPORTS = {1, 2, 3, 4, 7, 8, 9, 11, 12, 15, 17, 18, 19, 20, 21, 23, 24, 26, 27, 28, 30, 32, 35, 39, 47}


@pytest.fixture(scope="module")
def quick() -> Report:
    return run("reference", profile="all", size="quick")


def test_reference_passes_the_quick_size(quick):
    assert quick.failures() == []
    assert quick.summary == {"passed": len(quick.cases), "failed": 0, "unsupported": 0, "xfailed": 0, "errored": 0}
    assert quick.ok
    assert quick.complete
    assert quick.stale_xfails == []


@pytest.mark.slow
def test_reference_passes_the_full_size():
    report = run("reference", profile="all", size="full")
    assert report.failures() == []
    assert report.summary["passed"] == len(report.cases) == len(all_cases())
    assert {c.id for c in report.cases if ".final" not in c.id and c.id.startswith("stream/official")} >= {
        "stream/official.flash.gqa.b2.n70",
        "stream/official.plain.mha.b4.n5",
    }


def test_bounds_are_used_but_never_exceeded(quick):
    """The reference computes in float64 and rounds once: half an ulp, which is nearly all that its bound leaves."""
    assert 0.9 < quick.bound["largest_use"] <= 1.0
    assert quick.bound["largest_pipeline_use"] <= 1.0
    assert max(c.ulp["max"] for c in quick.cases if c.ulp) <= 0.5 + 2**-16  # NumPy takes float64 to bf16 through fp32


def test_field_reports_are_answered(quick):
    answered = {number for case in quick.cases for number in case.reports}
    assert answered >= REPORTS


def test_every_case_compares_something(quick):
    silent = [c.id for c in quick.cases if not c.exact_elements and not c.ulp]
    allowed = (
        "stream/worked.",
        "stream/memory.",
        "stream/refused.",
        "stream/schedule.error",
        "quantize/nonfinite.reject",
        "quantize/overflow.",
        "quantize/refused.",
    )
    assert [i for i in silent if not i.startswith(allowed)] == []


@pytest.mark.parametrize("size", ["quick", "full"])
def test_sizes_stay_within_their_budget(size):
    spent: Counter[str] = Counter()
    for case in select_cases(size=size):
        spent[case.profile] += case.instances
    assert spent
    assert max(spent.values()) <= profiles()["size"][size]["budget"], spent


def test_streams_are_small():
    """What an interpreter can run: at most three KV heads, four requests, few pages."""
    for case in all_cases():
        if isinstance(case, Stream):
            assert case.geometry.kv_heads <= 3, case.id
            assert case.rows <= 4, case.id
            assert case.length <= (300 if "/long." in case.id else 180), case.id


def test_matrix_covers_all_pairs():
    rows = covering(AXES, 2)
    for a, b in combinations(AXES, 2):
        assert {(row[a], row[b]) for row in rows} == {(x, y) for x in AXES[a] for y in AXES[b]}
    assert len(rows) < 45


def test_covering_obeys_what_is_allowed():
    rows = covering({"a": (1, 2, 3), "b": (1, 2, 3)}, 2, lambda r: r.get("a", 0) + r.get("b", 0) < 6)
    assert {(r["a"], r["b"]) for r in rows} == {(a, b) for a in (1, 2, 3) for b in (1, 2, 3)} - {(3, 3)}


def test_profiles_and_patterns_select():
    assert {c.profile for c in select_cases("quantize")} == {"quantize"}
    assert {c.id for c in select_cases(size="quick")} < {c.id for c in select_cases(size="full")}
    assert [c.id for c in select_cases(cases=["stream/worked.kept"])] == ["stream/worked.kept"]
    for wrong in ({"profile": "speed"}, {"size": "huge"}, {"cases": ["nothing/*"]}):
        with pytest.raises(InputError):
            select_cases(**wrong)


# -- statuses -------------------------------------------------------------------------------------------------------------


def narrowed() -> Subject:
    """The reference backend, serving 2 and 4 bits only."""
    honest = kivi.get_backend("reference")
    manifest = msgspec.structs.replace(honest.manifest, capabilities=msgspec.structs.replace(honest.manifest.capabilities, bits=(2, 4)))
    return Subject(ReferenceBackend(manifest, honest.mode, honest.device, honest.versions))


def test_unsupported_is_not_passed():
    report = run("reference", subject=narrowed(), cases=["stream/matrix.float32.8x3.*", "stream/matrix.float32.2x2.*"])
    by_bits = {c.id.split(".")[2]: c.status for c in report.cases}
    assert by_bits == {"8x3": "unsupported", "2x2": "passed"}
    assert report.summary["passed"] < len(report.cases)
    assert all("8" in c.reason or "3" in c.reason for c in report.cases if c.status == "unsupported")


def test_a_backend_that_breaks_is_errored():
    class Broken(Subject):
        def quantize(self, x, spec, which, layout=None):
            raise RuntimeError("kernel launch failed")

    report = run("reference", subject=Broken(kivi.get_backend("reference")), cases=["quantize/views.padded.key"])
    assert [(c.status, "kernel launch failed" in c.reason) for c in report.cases] == [("errored", True)]
    assert not report.ok


def test_stopping_at_the_first_failure_is_said():
    class Broken(Subject):
        def quantize(self, x, spec, which, layout=None):
            raise RuntimeError

    report = run("reference", subject=Broken(kivi.get_backend("reference")), profile="quantize", stop_on_failure=True)
    assert (len(report.cases), report.complete) == (1, False)


def test_expected_failures():
    """xfailed with the reason; an unexpected pass is a failure; an entry that matches nothing is stale."""

    class Wrong(Subject):
        def quantize(self, x, spec, which, layout=None):
            return super().quantize(np.asarray(x) * np.asarray(x.dtype.type(2)), spec, which, layout)

    subject = Wrong(kivi.get_backend("reference"))
    entries = [
        Xfail("quantize/views.padded.*", "doubles its input"),
        Xfail("quantize/gone.*", "no such case"),
        Xfail("stream/worked.kept", "not true"),
    ]
    report = run(
        "reference", subject=subject, cases=["quantize/views.padded.*", "quantize/views.offset.key", "stream/worked.kept"], xfails=entries
    )
    found = {c.id: c for c in report.cases}
    assert found["quantize/views.padded.key"].status == "xfailed"
    assert "doubles its input" in found["quantize/views.padded.key"].reason
    assert found["quantize/views.offset.key"].status == "failed"
    assert found["stream/worked.kept"].status == "failed"
    assert "remove the entry" in found["stream/worked.kept"].reason
    assert report.stale_xfails == ["quantize/gone.*"]
    assert not report.ok


def test_expected_failures_of_another_mode_do_not_count():
    report = run("reference", cases=["stream/worked.kept"], xfails=[Xfail("stream/worked.kept", "slow", mode="interpreter")])
    assert report.summary["passed"] == 1


def test_a_mismatch_is_failed_and_says_where():
    def disagree(subject, tally):
        raise Mismatch("token 3 differs")

    result = run_case(Special(id="stream/x.y", profile="stream", about="", run=disagree), Subject(kivi.get_backend("reference")))
    assert (result.status, result.reason) == ("failed", "token 3 differs")


# -- comparing ------------------------------------------------------------------------------------------------------------


def test_same_tells_zeros_apart_and_nan_from_nan():
    same("x", np.array([np.nan, 0.0]), np.array([np.nan, 0.0]))
    with pytest.raises(Mismatch, match=r"1 of 2 elements, first at index \(1,\)"):
        same("x", np.array([1.0, -0.0], np.float32), np.array([1.0, 0.0], np.float32))
    with pytest.raises(Mismatch, match="dtype float64, expected float32"):
        same("x", np.zeros(2), np.zeros(2, np.float32))
    with pytest.raises(Mismatch, match="shape"):
        same("x", np.zeros(2), np.zeros(3))


def test_within_fails_for_nan_and_infinity():
    from kivi.conformance.bounds import Bound

    exact, bound = np.array([1.0, np.nan]), Bound(np.array([0.1, 0.1]), np.array([0.0, 0.0]))
    tally = Tally()
    within("x", np.array([1.05, np.nan]), exact, bound, "float32", tally)
    assert tally.bound_use == pytest.approx(0.5)
    for wrong in ([np.nan, np.nan], [1.0, 1.0], [np.inf, np.nan], [1.2, np.nan]):
        with pytest.raises(Mismatch):
            within("x", np.array(wrong), exact, bound, "float32", Tally())


# -- reports --------------------------------------------------------------------------------------------------------------


def test_json_report(quick, tmp_path):
    quick.save(tmp_path / "out.json")
    data = json.loads((tmp_path / "out.json").read_text())
    assert {"version", "backend", "mode", "device", "spec", "summary", "cases", "versions", "sources"} <= set(data)
    assert (data["version"], data["backend"], data["mode"], data["ok"]) == (1, "reference", "device", True)
    assert set(data["summary"]) == {"passed", "failed", "unsupported", "xfailed", "errored"}
    assert all(len(h) == 64 for h in data["sources"].values())
    assert data["kernels"] == {}  # the reference has none that are generated
    assert {c["spec"] for c in data["cases"]} <= set(data["spec"])
    assert kivi.load_spec("teaching").hash in data["spec"]
    assert all(c["ran"]["mode"] == "device" for c in data["cases"])
    assert Report.from_dict(data) == quick


def test_junit_report(quick, tmp_path):
    quick.save(tmp_path / "out.xml")
    root = ElementTree.parse(tmp_path / "out.xml").getroot()
    assert sum(len(suite.findall("testcase")) for suite in root.iter("testsuite")) == len(quick.cases)
    assert list(root.iter("failure")) == []


def test_junit_skips_what_did_not_pass():
    from kivi.conformance import junit

    report = run("reference", subject=narrowed(), cases=["stream/matrix.float32.8x3.*"])
    root = ElementTree.fromstring(junit.text(report))
    assert len(list(root.iter("skipped"))) == len(report.cases) > 0


def test_html_report(quick, tmp_path):
    quick.save(tmp_path / "out.html")
    page = (tmp_path / "out.html").read_text()
    assert "conforms" in page
    assert page.count("data:image/svg+xml;base64,") == 3
    assert "http://" not in page
    assert "https://" not in page
    assert all(c.id.split("/", 1)[1] in page for c in quick.cases)


def test_other_suffixes_are_refused(quick, tmp_path):
    with pytest.raises(InputError, match=r"out\.pdf"):
        quick.save(tmp_path / "out.pdf")


def test_progress_is_told():
    seen = []
    run("reference", cases=["stream/worked.*"], progress=lambda done, total, result: seen.append((done, total, result.status)))
    assert [s[0] for s in seen] == list(range(1, len(seen) + 1))
    assert {s[1] for s in seen} == {len(seen)}
