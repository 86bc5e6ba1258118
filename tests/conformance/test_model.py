"""The naive model against what is known without it: the official implementation, the design's tables, hand-made layouts."""

from __future__ import annotations

import ast
from importlib import resources

import numpy as np
import pytest

from kivi.conformance import packer, quantizer
from kivi.conformance.bounds import output_bound
from kivi.conformance.case import Attend, Geometry, Stream, decode, spec_of
from kivi.conformance.expect import expectation
from kivi.conformance.floats import bits_of
from kivi.conformance.inputs import VIEWS, golden, golden_index, make, view
from kivi.conformance.model import NaiveCache
from kivi.conformance.quantizer import Rule
from kivi.conformance.traces.official import OFFICIAL, positive_zero, unpacked


@pytest.mark.parametrize("entry", golden_index("official_quant")["cases"], ids=lambda e: e["key"])
def test_staged_codes_equal_the_official_packer(entry):
    data, key, group = golden("official_quant"), entry["key"], entry["G"]
    x, which = data[key.rsplit(".", 1)[0] + ".input"], {"k": "key", "v": "value"}[entry["tensor"]]
    grid = (quantizer.quantize_key if which == "key" else quantizer.quantize_value)(
        x, Rule(entry["bits"], "input", "staged", "propagate", "saturate"), group
    )
    turn = (lambda a: np.swapaxes(a, -1, -2)) if which == "key" else (lambda a: a)
    whole = data[f"{key}.degenerate_group"] == 0
    assert whole.sum() > 0
    assert (bits_of(turn(grid.scale)) == bits_of(data[f"{key}.scale"]))[whole].all()
    assert (bits_of(turn(grid.origin)) == bits_of(positive_zero(data[f"{key}.mn"])))[whole].all()
    assert (turn(grid.codes) == unpacked(data[f"{key}.code"], entry["bits"]))[np.repeat(whole, group, -1)].all()


@pytest.mark.parametrize("entry", golden_index("official_stream")["cases"], ids=lambda e: e["key"])
def test_lengths_and_outputs_of_the_official_classes(entry):
    """Lengths exactly; outputs within the bound of the official pipeline's own roundings, of which they use less than half."""
    spec = spec_of(
        {
            "numerics": "staged",
            **{f"{w}.{f}": entry[k] for w in ("key", "value") for f, k in (("bits", "bits"), ("group", "G"), ("residual", "R"))},
        }
    )
    geometry = Geometry(1, entry["nh"], entry["nh_kv"], entry["D"])
    events = (Attend(entry["prefill"]), *decode(entry["decode_steps"]))
    stream = Stream(id="official", about="", spec=spec, geometry=geometry, inputs=make("official", key=entry["key"]), events=events)
    out = golden("official_stream")[f"{entry['key']}.out"].reshape(-1, entry["nh"], entry["D"]).transpose(1, 0, 2)
    at, worst = 0, 0.0
    for step, row in zip(expectation(stream), entry["states"], strict=True):
        found = step.lengths[0]
        assert [found[k] for k in ("tokens", "key_sealed", "key_residual", "value_sealed", "value_residual")] == row
        n = step.counts[0]
        for h, exact in enumerate(step.outputs[0]):
            worst = max(
                worst,
                float((np.abs(out[h, at : at + n].astype(np.float64) - exact.out) / output_bound(exact, OFFICIAL, "float16").total).max()),
            )
        at += n
    assert 0.1 < worst < 0.5


def test_frontiers_without_crops():
    """Ks = R floor(T / R), Vs = max(0, T - R), whatever the chunks."""
    spec, rng = spec_of({"value.residual": 20}), np.random.default_rng(1)
    for _ in range(20):
        model, tokens = NaiveCache(spec, 1), 0
        while tokens < 60:
            n = int(rng.integers(1, 25))
            x = rng.standard_normal((1, 1, n, 8)).astype(np.float32)
            model.attend(x, x, x, [n])
            tokens += n
            assert model.lengths(0) == {
                "tokens": tokens,
                "key_sealed": tokens // 16 * 16,
                "key_residual": tokens % 16,
                "value_sealed": max(0, tokens - 20),
                "value_residual": min(tokens, 20),
            }


@pytest.mark.parametrize(
    ("layout", "which", "bits", "word", "places"),
    [
        ("official_int32", "key", 2, [(75, 2)], (10,)),
        ("official_int32", "value", 2, [(37, 4)], (22,)),
        ("official_int32", "key", 3, [(75, 3), (75, 5)], (10, 5)),
        ("lanes32", "key", 2, [(1, 133)], (22,)),
        ("lanes32", "value", 2, [(2, 75)], (10,)),
        ("hp16", "key", 2, [(37, 11)], (8,)),
        ("hp16.mma", "value", 2, [(1, 115)], (8,)),
        ("planes8", "value", 4, [(37, 11)], (4,)),
    ],
)
def test_the_packer_puts_codes_where_the_spec_says(layout, which, bits, word, places):
    """Token 37, channel 75 in a page of 128 x 128 (SPEC 8.6.3)."""
    codes = np.zeros((128, 128), np.uint8)
    codes[37, 75] = 2**bits - 1
    words = packer.pack(codes, layout, which, bits, 128)
    expected = np.zeros_like(words)
    masks = (3, 1) if bits == 3 else (2**bits - 1,)
    for at, place, mask in zip(word, places, masks, strict=True):
        expected[at] = mask << place
    assert (words == expected).all()


@pytest.mark.parametrize("kind", VIEWS)
def test_views_hold_the_same_numbers_elsewhere(kind):
    x = np.arange(48, dtype=np.float32).reshape(1, 2, 3, 8)
    there = view(x, kind)
    assert (there == x).all()
    assert there.base is not x
    assert not np.shares_memory(there, x)
    if kind not in ("readonly",):
        assert not there.flags.c_contiguous or kind == "offset"


@pytest.mark.parametrize("module", ["model", "quantizer", "packer", "oracle", "bounds", "floats", "expect", "inputs"])
def test_what_is_expected_shares_no_code_with_what_is_tested(module):
    """The model and its helpers import nothing of kivi but the spec's type."""
    tree = ast.parse((resources.files("kivi.conformance") / f"{module}.py").read_text("utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    of_kivi = {name for name in imported if name and name.split(".")[0] == "kivi"}
    assert {name for name in of_kivi if not name.startswith("kivi.conformance")} <= {"kivi.spec"}
