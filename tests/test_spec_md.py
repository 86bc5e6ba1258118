"""The examples and the clause numbers of spec/SPEC.md: every example is executed, every clause that is named exists.

A fenced `json` block of the document is an example; its `check` names the function `check_...` below that runs it.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kivi
from kivi import dtypes, layout, memory, spec, storefile
from kivi.conformance import bounds, model, oracle
from tests.spec_text import CLAUSES, ROOT, TEXT

EXAMPLES = [json.loads(block) for block in re.findall(r"^```json\n(.*?)^```", TEXT, re.M | re.S)]


# -- examples ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference():
    return kivi.get_backend("reference")


@pytest.mark.parametrize("example", EXAMPLES, ids=[f"{i}-{e['check']}" for i, e in enumerate(EXAMPLES)])
def test_example(example: dict[str, Any], reference):
    CHECKS[example["check"]](example, reference)


def test_document_has_an_example_of_every_kind():
    kinds = [e["check"] for e in EXAMPLES]
    assert set(kinds) == set(CHECKS)
    assert kinds.count("quantize") >= 9


def check_hash(e, _):
    chosen = spec.load_spec(e["preset"])
    assert chosen.canonical() == e["canonical"]
    assert chosen.hash == e["hash"]


def check_quantize(e, be):
    chosen = spec.load_spec("kivi-2bit").override({"packing.layout": "bytes_lsb", **e["spec"]})
    x = array(e["x"], e["dtype"])[None, None]
    qt = be.quantize(x, chosen, e["which"])
    metadata = dtypes.np_dtype(dtypes.metadata_dtype(chosen, e["which"], e["dtype"]))
    assert qt.scale.dtype == qt.origin.dtype == metadata
    exactly(qt.scale[0, 0], e["scale"])
    exactly(qt.origin[0, 0], e["origin"])
    exactly(qt.codes()[0, 0], e["codes"])
    exactly(qt.dequantize()[0, 0], e["decoded"])


def check_lengths(e, be):
    cache = kivi.KVCache(e["preset"], batch=1, q_heads=1, kv_heads=1, head_dim=2, dtype="float32", backend=be)
    for (event, n), expected in zip(e["events"], e["lengths"], strict=True):
        if event == "append":
            x = np.ones((1, 1, n, 2), np.float32)
            cache.attend(x, x, x)
        else:
            cache.crop(n)
        assert [cache.lengths(0)[name] for name in ("tokens", "key_sealed", "value_sealed")] == expected, (event, n)


def check_softmax(e, be):
    """Logits as keys of one channel under q = 1 and scale 1; the last token arrives in a call of its own, behind sealed keys."""
    cache = kivi.KVCache("teaching", batch=1, q_heads=1, kv_heads=1, head_dim=1, dtype="float32", backend=be, scale=1.0)
    k, v = (np.float32(e[name]).reshape(1, 1, -1, 1) for name in ("logits", "values"))
    one = np.ones_like(k)
    cache.attend(one[:, :, :8], k[:, :, :8], v[:, :, :8])
    assert cache.lengths(0) == (8, 8, 0, 4, 4)
    out = cache.attend(one[:, :, 8:], k[:, :, 8:], v[:, :, 8:])
    assert out.item() == pytest.approx(e["output"], abs=e["tolerance"])
    assert e["output"] == pytest.approx(117 / 17)


def check_attend(e, be):
    q, k, v = (array(e[name], e["dtype"])[None, None] for name in "qkv")
    for order in ("attend_then_seal", "seal_then_attend"):
        chosen = spec.load_spec(e["preset"]).override({**e["override"], "order": order})
        cache = kivi.KVCache(chosen, batch=1, q_heads=1, kv_heads=1, head_dim=4, dtype=e["dtype"], backend=be, scale=e["scale"])
        for t, lengths in enumerate(e["lengths"]):
            out = cache.attend(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1])
            np.testing.assert_allclose(out[0, 0, 0], e[order][t], rtol=0, atol=e["tolerance"])
            assert [cache.lengths(0)[name] for name in ("tokens", "key_sealed", "value_sealed")] == lengths


def check_pack(e, _):
    codes = np.array(e["codes"], np.uint8)
    for name, sides in e["words"].items():
        for which, expected in sides.items():
            words = layout.pack(codes, layout.named_layout(name), which, e["bits"], len(codes))
            unsigned = words.view(f"uint{8 * words.dtype.itemsize}")
            assert unsigned.tolist() == [[int(word, 16) for word in row] for row in expected], (name, which)


def check_memory(e, _):
    chosen, shape = spec.load_spec(e["preset"]), (e["kv_heads"], e["head_dim"], e["head_dim"])
    assert memory.formula_of_length(chosen, e["dtype"], *shape, e["tokens"]) == e["formula"]
    assert memory.full_precision(e["dtype"], *shape, e["tokens"]) == e["full_precision"]


def check_bound(e, _):
    row = {name: np.array(e[name], np.float64)[None] for name in ("q", "key", "key_size", "value", "value_size")}
    value, value_size = row["value"][..., None], row["value_size"][..., None]
    history = model.History(row["q"][None], row["key"], row["key_size"], value, value_size, np.array([len(e["key"])]))
    (exact,) = oracle.attend(history, e["scale"])
    assert exact.out.item() == pytest.approx(e["output"], rel=1e-12)
    for case in e["bounds"]:
        bound = bounds.output_bound(exact, bounds.Numerics(**case["numerics"]), case["dtype"])
        assert bound.total.item() == pytest.approx(case["bound"], rel=1e-9)


def check_checksum(e, _):
    tensors = {name: array(t["values"], t["dtype"]) for name, t in e["tensors"].items()}
    assert storefile._checksum(tensors, e["metadata"]) == e["sha256"]


def array(values: Any, dtype: str) -> np.ndarray:
    """Numbers of the document in a dtype that holds them exactly."""
    wide = np.array(values, np.float64)
    out = wide.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    assert (out.astype(np.float64) == wide).all()
    return out


def exactly(got: np.ndarray, expected: list):
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64), np.array(expected, np.float64), strict=True)


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}


# -- clauses ----------------------------------------------------------------------------------------------------------


def test_clause_numbers_are_unique_and_in_order():
    numbers = [tuple(int(part) for part in clause.split(".")) for clause in CLAUSES]
    assert len(numbers) > 200
    for before, after in pairwise(numbers):
        elder = (*after[:-1], after[-1] - 1)
        assert after == (*before, 1) or before[: len(after)] == elder, f"{after} follows {before}"


def test_references_inside_the_document_exist():
    prose = re.sub(r"^```.*?^```", "", TEXT, flags=re.M | re.S)
    prose = re.sub(r"`[^`]*`", "", prose)
    named = re.findall(r"(?<![\d.])(\d{1,2}(?:\.\d){1,2})(?=[ ,;:).]|$)", prose, re.M)
    unknown = {n for n in named if n not in CLAUSES}
    assert unknown <= {"0.4", "0.5", "1.0", "2.0", "2.5", "13.5"}, unknown  # numbers of the examples, not clauses
    for section in re.findall(r"sections? (\d+)", prose):
        assert section in CLAUSES


@pytest.mark.parametrize("folder", ["kivi", "backends", "conformance", "tests", "docs"])
def test_clauses_named_in_the_repository_exist(folder):
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix not in (".py", ".toml", ".md", ".json") or any(parent.is_symlink() for parent in path.parents):
            continue
        text = path.read_text("utf-8")
        for group in re.findall(r"SPEC(?:\.md)?,? (?:sections? |clauses? )?((?:\d+(?:\.\d+)*(?:, | and | to )?)+)", text):
            for clause in re.findall(r"\d+(?:\.\d+)*", group):
                assert clause in CLAUSES, f"{path.relative_to(ROOT)} names SPEC {clause}"
