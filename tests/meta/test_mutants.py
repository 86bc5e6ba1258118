"""The suite tested: every deliberately wrong backend must fail a case of the quick size."""

from __future__ import annotations

import pytest

from kivi.conformance import run
from tests.meta.mutants import every, killed_by
from tests.meta.mutants.narrow import attention_conditions, quantize_conditions

NARROW = {f"louder_{n}" for n in attention_conditions()} | {f"off_by_one_{n}" for n in quantize_conditions()}

#: Faults that the suite is required to catch, in words, and the mutants that have them.
REQUIRED = {
    "softmax per part": ["softmax_per_part", "parts_merged_without_maximum"],
    "key boundary used for value": ["key_boundary_for_values", "probabilities_cut_at_key_boundary"],
    "seal before scores": ["seal_before_scores"],
    "seal by the length of this call": ["seal_by_length_of_call"],
    "key grouped per token": ["key_per_token"],
    "value grouped per channel": ["value_per_channel"],
    "integer zero point": ["integer_zero_point"],
    "truncation": ["truncation"],
    "ties away": ["ties_away"],
    "reciprocal multiply": ["reciprocal"],
    "epsilon for the constant group": ["epsilon", "epsilon_in_range"],
    "groups across heads or requests": ["key_across_heads", "value_across_heads", "across_requests"],
    "padding lanes in min/max": ["padding_lanes", "power_of_two_lanes"],
    "reversed lane order": ["reversed_lanes"],
    "sign-extending shift": ["sign_extension"],
    "2^b instead of 2^b - 1": ["power_of_two_levels"],
    "missing 1/sqrt(D)": ["no_softmax_scale"],
    "GQA heads interleaved": ["heads_interleaved"],
    "value evicts two": ["value_evicts_two"],
    "key seals at R + 1": ["key_seals_late"],
    "stale state after reset": ["stale_after_reset"],
    "reorder forgets the residual": ["reorder_forgets_the_residual"],
    "masked token attended": ["masked_token_attended"],
    "bf16 truncated": ["bf16_metadata_truncated", "truncated_bf16_output"],
    "fused multiply-add in dequantize": ["fused_dequantize"],
    "output times 1 + 1e-3": ["slightly_too_large"],
    "one token of a uniform trace dropped": ["first_token_dropped", "page_edge_dropped"],
    "tokens beyond a block dropped": ["tokens_beyond_128_dropped", "tokens_beyond_256_dropped", "sealed_tokens_beyond_256_dropped"],
    "page table that ends early": ["ninth_page_reads_the_eighth", "wide_table_loses_a_row"],
    "shared pages overwritten": ["reset_zeroes_pages", "crop_zeroes_cut_rows", "crop_zeroes_dropped_pages"],
    "pages lost": ["reset_keeps_pages", "crop_keeps_pages", "failed_step_keeps_pages"],
    "settings lost by copies": ["fork_loses_scale", "load_loses_scale", "fork_loses_max_tokens", "load_loses_max_tokens"],
    "pending tokens forgotten": ["max_tokens_ignores_pending", "failed_commit_drops_pending"],
    "saturation not counted": ["clamped_is_zero"],
    "internal memory handed out": ["floating_rows_are_views", "sealed_scales_are_views"],
    "the caller's memory overwritten": ["overwrites_queries", "overwrites_keys", "overwrites_values", "overwrites_counts"],
    "layout misreported": ["layout_misreported", "named_layout_ignored"],
}


def stopped(name: str, patch: pytest.MonkeyPatch) -> None:
    killer = killed_by(every()[name], patch)
    assert killer is not None, f"{name} passes the quick size: {every()[name].__doc__}"
    assert killer.status == "failed", f"{name} broke instead of giving a wrong result: {killer.reason}"


@pytest.mark.parametrize("name", sorted(set(every()) - NARROW))
def test_mutant_fails(name, monkeypatch):
    stopped(name, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NARROW))
def test_narrow_mutant_fails(name, monkeypatch):
    """A fault that shows under a single condition: some case of the quick size meets that condition."""
    stopped(name, monkeypatch)


def test_required_faults_have_mutants():
    assert [name for names in REQUIRED.values() for name in names if name not in every()] == []


def test_bounds_separate_honest_from_wrong(monkeypatch):
    """The honest backend stays below every bound; faults of a thousandth and less lie above one."""
    honest = run("reference", profile="attention").bound
    assert honest["largest_use"] <= 1.0
    excesses = {}
    for name in (
        "slightly_too_large",
        "single_precision",
        "half_keys",
        "half_scores",
        "half_probabilities",
        "truncated_half_output",
        "truncated_bf16_output",
    ):
        with monkeypatch.context() as patch:
            report = run("reference", profile="attention", subject=every()[name](patch), cases=["attention/zones.*", "attention/logits.*"])
        excesses[name] = report.bound["largest_excess"]
    assert all(excess > 1.0 for excess in excesses.values()), excesses
    assert min(excesses.values()) > 1.5, excesses  # one truncation is at most twice a rounding
