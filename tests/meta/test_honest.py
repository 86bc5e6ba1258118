"""The bounds are legal: every allowed way to compute passes with the roundoffs that it declares, and uses a fair share of the bound."""

from __future__ import annotations

import pytest

from kivi.conformance import run
from tests.meta import honest
from tests.meta.mutants import every
from tests.meta.mutants.quantize import install
from tests.meta.steps import Steps

SINGLE = ["dequantize_first", "folded_scale", "online", "every_token"]


@pytest.mark.parametrize("name", list(honest.HONEST))
def test_honest_attention_passes(name, monkeypatch):
    report = run("reference", profile="attention", subject=honest.install(monkeypatch, name))
    assert report.failures() == []
    assert report.summary["passed"] == len(report.cases)
    assert report.bound["largest_use"] <= 1.0


@pytest.mark.parametrize("name", SINGLE)
def test_single_precision_uses_the_bound(name, monkeypatch):
    """A bound a thousand times too wide would pass everything: fp32 pipelines come within a factor of 50."""
    report = run("reference", profile="attention", subject=honest.install(monkeypatch, name))
    assert 0.02 < report.bound["largest_pipeline_use"] <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", SINGLE)
def test_honest_streams_pass(name, monkeypatch):
    assert run("reference", profile="stream", subject=honest.install(monkeypatch, name)).failures() == []


def test_the_steps_that_mutants_override_are_honest(monkeypatch):
    """The quantizer and the attention that mutants change in one place are right where they change nothing."""
    install(monkeypatch, Steps())
    subject = honest.install(monkeypatch, "steps")
    report = run("reference", profile="quantize", subject=subject)
    assert report.failures() == []
    assert report.summary["passed"] == len(report.cases)


@pytest.mark.parametrize(
    "name",
    [
        "slightly_too_large",
        "first_token_dropped",
        "half_keys",
        "half_scores",
        "half_probabilities",
        "softmax_per_part",
        "masked_token_attended",
    ],
)
def test_faults_show_through_single_precision_bounds(name, monkeypatch):
    """With roundoffs of fp32 declared, the bound still tells these faults from rounding."""
    every()[name](monkeypatch)
    report = run(
        "reference", profile="attention", subject=honest.subject(accumulate="float32"), cases=["attention/zones.*", "attention/logits.*"]
    )
    assert report.bound["largest_excess"] > 1.0
