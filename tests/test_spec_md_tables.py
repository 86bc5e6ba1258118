"""The tables of spec/SPEC.md against the code: fields, defaults, frontiers, bounds, layouts, pages, save files."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any, get_args

import numpy as np
import pytest

import kivi
from kivi import backend, dtypes, layout, spec
from kivi.conformance import bounds, floats
from kivi.conformance import packer as naive_packer
from kivi.pool import PageFormat
from tests.spec_text import ROOT, TEXT, code, codes, rows


@pytest.fixture(scope="module")
def reference():
    return kivi.get_backend("reference")


# -- section 1 ------------------------------------------------------------------------------------------------


def test_fields_table_has_every_field_with_its_default():
    table = {code(cells[0]): json.loads(code(cells[2])) for cells in rows("field | type")}
    assert tuple(table) == spec.field_paths()
    for path, stated in table.items():
        actual: Any = spec.CacheSpec().to_dict()
        for part in path.split("."):
            actual = actual[part]
        assert (actual, type(actual)) == (stated, type(stated)), path


FREE_TEXT = ("name", "packing.layout", "layers")  # their rules are 1.3.4 and 1.3.5, below


@pytest.mark.parametrize("cells", [r for r in rows("field | type") if code(r[0]) not in FREE_TEXT], ids=lambda cells: cells[0])
def test_stated_values_are_the_allowed_ones(cells):
    """A choice field takes the values of the table, served or not, and no other; a range ends where the table says."""
    path, allowed = code(cells[0]), allowed_values(code(cells[0]))
    if limits := re.fullmatch(r"integer, (\d+) to (\d+)", allowed):
        low, high = int(limits[1]), int(limits[2])
        good, bad = [low, high], [low - 1, high + 1]
    elif allowed.startswith("float"):
        good, bad = [0.5, 1], [0, 1.5, -0.5]
    else:
        good = [json.loads(value) for value in allowed.split(", ")]
        bad = [0, 7, "no such thing"]
    for value in good:
        assert verdict(path, value) in (None, kivi.errors.NotImplementedYetError), (path, value)
    for value in bad:
        assert verdict(path, value) is kivi.errors.SpecError, (path, value)


def allowed_values(path: str) -> str:
    """The cell of the fields table; "as `other`" is looked up there."""
    cell = next(cells[1] for cells in rows("field | type") if code(cells[0]) == path)
    return allowed_values(code(cell)) if cell.startswith("as `") else cell


def verdict(path: str, value: Any) -> type | None:
    """The error that one changed field causes; sizes are chosen so that the rules of 1.3 between fields hold."""
    changes: dict[str, Any] = {path: value}
    if path == "key.group":
        changes["key.residual"] = changes["value.residual"] = max(2, value)
    if path == "key.residual":
        changes.update({"key.group": 2, "value.residual": max(2, min(value, 65536))})
    if path == "value.residual":
        changes.update({"key.group": 2, "key.residual": 2})
    try:
        spec.CacheSpec().override(changes)
    except kivi.errors.SpecError as error:
        return type(error)
    return None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key.residual": 48}, "key.residual = 48 is not a multiple of key.group = 32"),  # 1.3.1
        ({"value.residual": 96}, "value.residual = 96 is less than key.residual = 128"),  # 1.3.2
        ({"numerics": "staged", "key.metadata": "int8"}, "key.metadata = 'int8'"),  # 1.3.3
        ({"packing.layout": "zigzag"}, "'zigzag' is not a known layout"),  # 1.3.4
        ({"packing.layout": {"name": "x", "key": "t* c*", "value": "c:slot c* t*"}}, "the first digits select among"),
        ({"layers.3-1": "full"}, "3-1"),  # 1.3.5
        ({"layers.0": "no such preset"}, "neither 'full' nor a preset"),
        ({"kivi_spec": 2}, "kivi_spec"),  # 1.1.2
    ],
)
def test_rules_between_fields(changes, words):
    with pytest.raises(kivi.errors.SpecError, match=re.escape(words)):
        spec.CacheSpec().override(changes)


def test_not_served_table_is_what_the_code_refuses():
    table = {tuple(codes(cells[0])): cells[1] for cells in rows("field | values not served")}
    assert sorted(path for paths in table for path in paths) == sorted(spec.IMPLEMENTED)
    for paths, cell in table.items():
        values = [json.loads(v) for v in cell.split(", ")] if cell.startswith('"') else NOT_SERVED[paths]
        for path in paths:
            served = spec.IMPLEMENTED[path]
            refused = [value for value in values if value not in served]
            assert refused, path
            for value in refused:
                assert verdict(path, value) is kivi.errors.NotImplementedYetError, (path, value)
            if (allowed := allowed_values(path)).startswith('"'):
                assert {json.loads(v) for v in allowed.split(", ")} == {*served, *refused}, path


# "any but ...": what to try.
NOT_SERVED = {("sink_tokens",): [1, 4], ("key.shrink", "value.shrink"): [0.5], ("layers",): [{"0": "full"}, {"1-3": "kivi-4bit"}]}


# -- sections 3 to 6 ------------------------------------------------------------------------------------------


def test_largest_scales():
    for name, value in rows("metadata | largest scale"):
        for bits in (1, 2, 3, 4, 8):
            stated = eval(value.strip("`").replace("^", "**"), {"b": bits})  # arithmetic of our own document
            assert dtypes.largest_scale(name, bits) == stated
            assert np.isfinite(np.float32(stated) * np.float32(2**bits - 1))


def test_frontier_table(reference):
    table = [[int(cell) for cell in cells] for cells in rows("T | Ks | Vs")]
    assert [row[0] for row in table] == list(range(10))
    cache = kivi.KVCache("teaching", batch=1, q_heads=1, kv_heads=1, head_dim=2, dtype="float32", backend=reference)
    x = np.ones((1, 1, 1, 2), np.float32)
    for tokens, key_sealed, value_sealed, key_floating, value_floating in table:
        if tokens:
            cache.attend(x, x, x)
        assert cache.lengths(0) == (tokens, key_sealed, key_floating, value_sealed, value_floating)


@pytest.mark.parametrize("order", ["attend_then_seal", "seal_then_attend"])
def test_rows_read_floating(order, reference, monkeypatch):
    """6.4: what a call reads floating is in the `Reading` that the backend gets, what is kept in the lengths."""
    seen: list[tuple[int, int]] = []
    plain = type(reference).attend

    def spy(self, reading, q, k, v):
        rows_after = int(reading.stored[0] + reading.chunk[0])
        seen.append((rows_after - int(reading.key_sealed[0]), rows_after - int(reading.value_sealed[0])))
        return plain(self, reading, q, k, v)

    monkeypatch.setattr(type(reference), "attend", spy)
    chosen = spec.load_spec("teaching").override({"order": order})
    cache = kivi.KVCache(chosen, batch=1, q_heads=1, kv_heads=1, head_dim=2, dtype="float32", backend=reference)
    x = np.ones((1, 1, 1, 2), np.float32)
    checked = {int(cells[0]): cells[1:] for cells in rows("T after")}
    first = 0 if order == "attend_then_seal" else 2
    for tokens in range(1, 10):
        cache.attend(x, x, x)
        if tokens in checked:
            key, value = ([int(n) for n in cell.split("/")] for cell in checked[tokens][first : first + 2])
            kept = cache.lengths(0)
            assert (key, value) == ([seen[-1][0], kept.key_residual], [seen[-1][1], kept.value_residual]), tokens
    assert set(checked) == {3, 4, 5, 8, 9}


# -- sections 7 to 11 -----------------------------------------------------------------------------------------


def test_counts_of_the_bound():
    assert {code(cells[1]): int(cells[2]) for cells in rows("symbol | count")} == floats.constants()["count"]


def test_declared_arithmetic():
    """7.2.1 against the manifest's fields and against the bounds that read them."""
    stated = {}
    for cells in rows("key | meaning | default"):
        for key, default in zip(codes(cells[0]), cells[2].split(", "), strict=True):
            stated[key] = None if default == "none" else json.loads(default)
    for fields in (backend.Numerics(), bounds.Numerics()):
        assert {key: getattr(fields, key) for key in stated} == stated
    assert set(stated) == set(backend.Numerics.__struct_fields__) == set(bounds.Numerics.__dataclass_fields__)


def test_named_layouts_are_the_files():
    table = {code(cells[0]): [cells[1], code(cells[2]), code(cells[3])] for cells in rows("name | word | key")}
    assert sorted(table) == list(layout.layouts())
    for name, digits in table.items():
        data = tomllib.loads((ROOT / "spec" / "layouts" / f"{name}.toml").read_text("utf-8"))
        assert digits == [data["word"], data["key"], data["value"]]


@pytest.mark.parametrize("cells", rows("layout | side | bits"), ids=lambda cells: "-".join(cells[:3]))
def test_bit_positions(cells):
    """8.6.3, by kivi's packer and by the naive one."""
    name, which, bits = code(cells[0]), cells[1], int(cells[2])
    codes = np.zeros((128, 128), np.uint8)
    codes[37, 75] = 2**bits - 1
    words = layout.pack(codes, layout.named_layout(name), which, bits, 128)  # type: ignore[arg-type]
    unsigned = words.view(f"uint{8 * words.dtype.itemsize}")
    assert list(unsigned.shape) == [int(n) for n in cells[3].split(" x ")]
    expected = np.zeros(unsigned.shape, np.int64)
    for place, span in zip(re.findall(r"\[(\d+), (\d+)\]", cells[4]), cells[5].split(", "), strict=True):
        first, _, last = span.partition("-")
        expected[int(place[0]), int(place[1])] = sum(1 << bit for bit in range(int(first), int(last or first) + 1))
    np.testing.assert_array_equal(unsigned.astype(np.int64), expected)
    np.testing.assert_array_equal(naive_packer.pack(codes, name, which, bits, 128).astype(np.int64), expected)


def test_page_record():
    """9.1: order, alignment and shape of the six fields."""
    chosen = spec.load_spec("kivi-2bit")
    form = PageFormat(chosen, layout.named_layout("official_int32"), 2, 80, 48, "float16", "float16")
    named = [name for cells in rows("field | shape | dtype") for name in codes(cells[0])]
    assert list(form.fields) == named
    assert form.fields["key.scale"].shape == (4, 80)
    assert form.fields["value.origin"].shape == (128, 2)
    end = 0
    for field in form.fields.values():
        assert field.offset == -(-end // 16) * 16
        end = field.offset + field.bytes


def test_pages_after_a_crop(reference):
    """9.2: the first tokens and lengths that the example states."""
    cache = kivi.KVCache("teaching", batch=1, q_heads=1, kv_heads=1, head_dim=2, dtype="float32", backend=reference)
    for n, crop in ((10, 7), (3, None), (1, None)):
        x = np.ones((1, 1, n, 2), np.float32)
        cache.attend(x, x, x)
        if crop is not None:
            cache.crop(crop)
    assert re.search(r"first tokens 0, 4 and 7, holding 4, 3 and 4\s+tokens", TEXT)
    assert [(first, end - first) for _, first, end in cache._state.rows(0)] == [(0, 4), (4, 3), (7, 4)]


def test_padding_kinds_and_sum(reference):
    cache = kivi.KVCache("kivi-2bit", batch=2, q_heads=1, kv_heads=1, head_dim=80, backend=reference)
    x = np.random.default_rng(0).normal(size=(2, 1, 200, 80)).astype(np.float16)
    cache.attend(x, x, x, counts=[200, 131])
    report = cache.memory()
    named = [kind for cells in rows("kind | bytes") for kind in codes(cells[0])]
    assert sorted(report["padding"]) == sorted(named)
    assert report["measured"] == report["formula"] + sum(report["padding"].values()) == cache.nbytes
    per_token = 80 * (2 / 8 + 2 * 2 / 32)
    assert report["formula"] == 2 * 128 * per_token + (72 + 3) * per_token + (72 + 3 + 128 + 128) * 80 * 2


def test_saved_file_has_the_stated_contents(reference, tmp_path):
    from safetensors import safe_open

    chosen = spec.load_spec("teaching").override({"key.metadata": "bfloat16", "value.metadata": "float16"})
    cache = kivi.KVCache(chosen, batch=2, q_heads=2, kv_heads=1, head_dim=6, value_head_dim=5, dtype="float32", backend=reference)
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(2, h, 9, d)).astype(np.float32) for h, d in ((2, 6), (1, 6), (1, 5)))
    cache.attend(q, k, v, counts=[9, 6])
    cache.save(tmp_path / "cache.safetensors")
    with safe_open(tmp_path / "cache.safetensors", framework="np") as file:
        header, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
    assert sorted(header) == sorted(code(cells[0]) for cells in rows("key | value", "### 10.2"))
    sentence = TEXT[TEXT.index("\n10.2.1 ") : TEXT.index("### 10.3")]
    assert set(json.loads(header["geometry"])) == set(codes(sentence)) - {"geometry", "tokens"}
    assert sorted(json.loads(header["geometry"])["layout"]) == ["key", "name", "value", "word"]
    assert spec.from_dict(json.loads(header["spec"])).hash == header["spec_hash"] == chosen.hash
    names = [code(cells[0]) for cells in rows("name | dtype | shape | contents")]
    expected = {n.replace("<b>", str(b)) for n in names for b in range(2)}
    assert set(tensors) == expected
    form = layout.arrangement(layout.named_layout("bytes_lsb"), "key", 2, 4, 6)
    assert {name: (str(a.dtype), a.shape) for name, a in tensors.items()} == {
        "tokens": ("int64", (2,)),
        "key_sealed": ("int64", (2,)),
        "value_sealed": ("int64", (2,)),
        "table": ("int64", (3, 3)),
        "key.words": ("uint8", (3, 1, *form.shape)),
        "key.scale": ("bfloat16", (3, 1, 2, 6)),
        "key.origin": ("bfloat16", (3, 1, 2, 6)),
        "value.words": ("uint8", (3, 1, 4, 2)),
        "value.scale": ("float16", (3, 1, 4, 3)),
        "value.origin": ("float16", (3, 1, 4, 3)),
        "residual.key.0": ("float32", (1, 1, 6)),
        "residual.key.1": ("float32", (1, 2, 6)),
        "residual.value.0": ("float32", (1, 4, 5)),
        "residual.value.1": ("float32", (1, 4, 5)),
    }
    assert tensors["table"][:, [0, 2]].tolist() == [[0, 0], [0, 4], [1, 0]]
    np.testing.assert_array_equal(tensors["residual.key.0"], k[0][:, 8:])
    np.testing.assert_array_equal(tensors["residual.value.1"], v[1][:, 2:6])


def test_modes():
    assert [code(cells[0]) for cells in rows("mode | meaning")] == list(get_args(backend.Mode))


@pytest.mark.parametrize("metadata", ["float32", "bfloat16"])
@pytest.mark.parametrize(("share", "over"), [(0.70, False), (0.80, True)])
def test_reject_raises_where_saturate_clamps(metadata, share, over, reference):
    """3.7: at 2 bits the limit of a scale lies at a range of 3/4 of FLT_MAX; below it both policies store the same."""
    x = np.array([[[[0.0, share * np.finfo(np.float32).max]]]], np.float32)
    chosen = spec.load_spec("kivi-2bit").override({"value.group": 2, "value.metadata": metadata})
    clamped = reference.quantize(x, chosen.override({"overflow": "saturate"}), "value")
    assert np.isfinite(clamped.dequantize()).all()
    assert (float(clamped.scale[0, 0, 0, 0]) == dtypes.largest_scale(metadata, 2)) == over
    if over:
        with pytest.raises(kivi.errors.MetadataOverflowError):
            reference.quantize(x, chosen, "value")
    else:
        np.testing.assert_array_equal(reference.quantize(x, chosen, "value").scale, clamped.scale)
