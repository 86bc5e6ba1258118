"""State stays where it is: views are honoured, stored history is not copied, and long histories, chunks and batches are read in runs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import kivi
from kivi.backends.onnxruntime import driver, kernels, planes, runs
from kivi.conformance import bounds, model, oracle
from kivi.errors import InputError

SHAPE = {"q_heads": 4, "kv_heads": 2, "head_dim": 40, "dtype": "float16"}


def within_bounds(cache, naive, out, seen):
    numerics = bounds.Numerics(accumulate="float32", exp_ulp=cache.backend.manifest.numerics.exp_ulp)
    for b, request in enumerate(seen):
        for h, exact in enumerate(oracle.attend(request, cache.geometry.scale)):
            assert (np.abs(out[b][h].astype(np.float64) - exact.out) <= bounds.output_bound(exact, numerics, "float16").total).all()


def views(x: np.ndarray) -> dict[str, np.ndarray]:
    """x in memory in other ways than row by row."""
    padded = np.full((*x.shape[:2], x.shape[2] + 3, x.shape[3] + 5), 99, x.dtype)
    padded[:, :, 1:-2, 2:-3] = x
    spread = np.full((*x.shape[:3], 2 * x.shape[3]), 99, x.dtype)
    spread[..., ::2] = x
    return {
        "transposed": np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
        "a slice of a larger array": padded[:, :, 1:-2, 2:-3],
        "every other channel": spread[..., ::2],
        "reversed": np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1],
    }


@pytest.mark.parametrize("how", views(np.zeros((1, 1, 1, 1))))
def test_views_are_honoured(how):
    """Report 35: an array is read by its strides, not by its shape."""
    rng = np.random.default_rng(35)
    q, k, v = (rng.normal(0, 1, (2, heads, 37, 40)).astype(np.float16) for heads in (4, 2, 2))
    plain, other = (kivi.KVCache("teaching", backend="onnxruntime", batch=2, **SHAPE) for _ in range(2))
    assert plain.attend(q, k, v).tobytes() == other.attend(*(views(x)[how] for x in (q, k, v))).tobytes()
    be, spec = plain.backend, plain.spec
    for which in ("key", "value"):
        a, b = (be.quantize(x, spec, which) for x in (k[:, :, :36], views(k)[how][:, :, :36]))
        assert a.words.tobytes() == b.words.tobytes()
        assert a.codes().tobytes() == other.backend.codes(b).tobytes()
        sliced = kivi.get_backend("reference").quantize(k[:, :, :36], spec, which, "hp16")  # tensors whose parts are views
        parts = {name: views(getattr(sliced, name))[how] for name in ("words", "scale", "origin")}
        strided = dataclasses.replace(sliced, **parts, backend=be)
        assert np.array_equal(strided.dequantize(), sliced.dequantize())
        assert np.array_equal(strided.repack("planes8").words, sliced.repack("planes8").words)


def test_torch_tensors_are_views():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 20, 40).to(torch.bfloat16) for heads in (4, 2, 2))
    cache = kivi.KVCache("teaching", backend="onnxruntime", batch=1, **{**SHAPE, "dtype": "bfloat16"})
    out = cache.attend(q, k, v)
    assert (type(out), out.dtype, out.shape) == (torch.Tensor, torch.bfloat16, (1, 4, 20, 40))
    native = cache.backend.adopt(k, "k")
    assert native.ctypes.data == k.data_ptr()


@pytest.mark.parametrize("layout", ["planes8", "lanes32", "official_int32"])
@pytest.mark.parametrize(("tokens", "rows"), [(3, 8), (13, 2)])
@pytest.mark.parametrize(("fold_rows", "apart"), [(16, True), (16, False), (0, False)])
def test_runs_do_not_change_what_is_attended_to(layout, tokens, rows, fold_rows, apart, monkeypatch):
    """Pages, floating rows and query rows, some at a time, and the ways to read a history: each lies within the same bounds."""
    monkeypatch.setattr(runs, "TOKENS", tokens)
    monkeypatch.setattr(driver, "ROWS", rows)
    monkeypatch.setattr(driver.OnnxBackend, "fold_rows", fold_rows)
    monkeypatch.setattr(driver.OnnxBackend, "apart", apart)
    spec = kivi.load_spec("teaching").override({"packing.layout": layout})
    cache, naive = kivi.KVCache(spec, backend="onnxruntime", batch=2, **SHAPE), model.NaiveCache(spec, 2)
    rng = np.random.default_rng(1)
    for n in (23, 1, 6, 1):
        q, k, v = (rng.normal(0.2, 1.0, (2, heads, n, 40)).astype(np.float16) for heads in (4, 2, 2))
        within_bounds(cache, naive, cache.attend(q, k, v), naive.attend(q, k, v, [n, n]))


@pytest.mark.parametrize(("head_dim", "bits", "group"), [(128, 2, 32), (64, 4, 32), (80, 2, 20), (40, 1, 40)])
@pytest.mark.parametrize(("fold_rows", "apart"), [(16, True), (16, False), (0, False)])
def test_folded_scales(head_dim, bits, group, fold_rows, apart, monkeypatch):
    """Planes of several groups of channels, with the scales of either side folded into the other factor, or not."""
    monkeypatch.setattr(driver.OnnxBackend, "fold_rows", fold_rows)
    monkeypatch.setattr(driver.OnnxBackend, "apart", apart)
    sides = {"key.bits": bits, "value.bits": bits, "value.group": group, "key.residual": 32, "value.residual": 32}
    spec, shape = kivi.load_spec("kivi-2bit").override(sides), {**SHAPE, "head_dim": head_dim}
    cache, naive = kivi.KVCache(spec, backend="onnxruntime", batch=1, **shape), model.NaiveCache(spec, 1)
    assert planes.masked_apart(cache.pool.format) == ("key", "value")
    rng = np.random.default_rng(5)
    for n in (130, 1, 3):
        q, k, v = (rng.normal(0.2, 1.0, (1, heads, n, head_dim)).astype(np.float16) for heads in (4, 2, 2))
        within_bounds(cache, naive, cache.attend(q, k, v), naive.attend(q, k, v, [n]))


def test_which_layouts_are_planes():
    def sides(layout, bits=2, group=32, head_dim=128):
        spec = kivi.load_spec("kivi-2bit").override({"packing.layout": layout, "key.bits": bits, "value.bits": bits, "value.group": group})
        cache = kivi.KVCache(spec, backend="onnxruntime", batch=1, **{**SHAPE, "head_dim": head_dim})
        return [which for which in ("key", "value") if planes.in_planes(cache.pool.format, which)]

    assert sides("planes8") == sides("hp16", group=64) == ["key", "value"]
    assert sides("planes8", group=16) == sides("planes8", bits=4) == ["key"]  # a plane of 32 or 64 channels, of two groups
    assert sides("planes8", bits=3) == sides("planes8", bits=8) == sides("lanes32") == sides("bytes_lsb") == sides("hp16.mma") == []


@pytest.mark.parametrize("order", ["attend_then_seal", "seal_then_attend"])
def test_crops_and_pages_of_several_requests(order):
    """Pages that a crop has cut, and pages of two requests in turn."""
    spec = kivi.load_spec("teaching").override({"order": order})
    cache, naive = kivi.KVCache(spec, backend="onnxruntime", batch=2, **SHAPE), model.NaiveCache(spec, 2)
    rng = np.random.default_rng(2)

    def step(*counts):
        q, k, v = (rng.normal(0.2, 1.0, (2, heads, max(counts), 40)).astype(np.float16) for heads in (4, 2, 2))
        out = cache.attend(q, k, v, counts=counts)
        seen = naive.attend(q, k, v, list(counts))
        within_bounds(cache, naive, [o[:, :count] for o, count in zip(out, counts, strict=True)], seen)

    for _ in range(9):
        step(1, 1)
    step(5, 2)
    cache.crop([6, 7])
    naive.crop([6, 7])
    for _ in range(7):
        step(1, 1)
    step(4, 9)


def test_a_step_reads_pages_where_they_lie():
    """What a run is given is the pool's own memory: no history is copied on the host."""
    cache = kivi.KVCache("teaching", backend="onnxruntime", batch=1, **SHAPE)
    rng = np.random.default_rng(3)
    cache.attend(*(rng.normal(0, 1, (1, heads, 30, 40)).astype(np.float16) for heads in (4, 2, 2)))
    state, one = cache._state, np.ones(1, np.int64)
    row = np.zeros((1, 2, 1, 40), np.float16)
    parts = runs.runs(cache._reading(state, one, one), 0, row, row)
    assert [(part.zone, part.count) for part in parts] == [("history", 24), ("page", 2), ("open", 2), ("floating", 2), ("floating", 1)]
    for part in parts:
        owners = (cache.pool.raw[0].base, state.windows.key, state.windows.value, row)
        for name, a in part.inputs.items():
            if name.startswith("slab") or name.endswith("rows"):
                assert any(np.shares_memory(a, owner) for owner in owners), name


def test_a_history_that_grew_is_read_in_few_runs(monkeypatch):
    """Slabs lie in one region, so pages of many slabs are one run; and memory of a page is zeroed when it is lent again."""
    cache = kivi.KVCache("teaching", backend="onnxruntime", batch=1, **SHAPE)
    rng = np.random.default_rng(4)
    for _ in range(40):
        cache.attend(*(rng.normal(0, 1, (1, heads, 1, 40)).astype(np.float16) for heads in (4, 2, 2)))
    monkeypatch.setattr(runs, "TOKENS", 32)
    assert len(cache.pool.raw) == 1
    one, row = np.ones(1, np.int64), np.zeros((1, 2, 1, 40), np.float16)
    parts = runs.runs(cache._reading(cache._state, one, one), 0, row, row)
    assert [part.count for part in parts if part.zone == "history"] == [32, 4]


def test_a_bad_number_of_threads_is_refused(monkeypatch):
    monkeypatch.setenv(kernels.THREADS, "two")
    with pytest.raises(InputError, match="KIVI_ORT_THREADS = 'two'"):
        kernels.options()


def test_arrays_that_are_not_contiguous_do_not_reach_the_runtime():
    """A binding knows an address and a shape: an array with strides would be read wrong, so it is refused."""
    cache = kivi.KVCache("teaching", backend="onnxruntime", batch=1, **SHAPE)
    cache.attend(*(np.zeros((1, heads, 3, 40), np.float16) for heads in (4, 2, 2)))
    session = next(s for s in cache.backend.library._loaded.values() if s.name == "cache.output")
    total, part = np.ones((2, 6, 1), np.float32), np.ones((2, 6, 80), np.float32)[..., ::2]
    with pytest.raises(ValueError, match="part: a binding"):
        session({"total": total, "part": part}, {"out": np.empty((2, 6, 40), np.float16)})
