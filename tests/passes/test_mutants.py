"""The tests of passes, tested: deliberately wrong lowerings and rewrites, each of which a check must refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest

import kivi
from kivi.conformance import bounds, model, oracle
from kivi.ir.build import indices, kernel, pointer
from kivi.ir.xdsl import f32
from kivi.passes import (
    address,
    append,
    attention,
    fold_scale,
    join_sums,
    lanes,
    numbers,
    pages,
    quantize,
    split_kv,
    tensors,
    unpack_in_place,
)
from kivi.schedule import Schedule
from tests.ir.interpreted import REWRITES, Interpreted
from tests.ir.test_kernels import OWN, check_tensor, spec_of
from tests.ir.test_tile import execute
from tests.passes.kernels import check_join, check_product, check_split
from tests.passes.mutate import mutated

FP32 = bounds.Numerics(accumulate="float32", exp_ulp=2.0)


def products() -> None:
    """The checks of fold_scale and unpack_in_place."""
    for form, masked in (("scores", False), ("outputs", False), ("outputs", True)):
        for place in (0, 14):
            for names in (("fold_scale",), ("fold_scale", "unpack_in_place")):
                check_product(form, names, masked, place)
        check_product(form, ("fold_scale",), stray=not masked, masked=masked)


def splits() -> None:
    for low, n, shares in ((0, 12, 5), (3, 17, 2), (5, 5, 2)):
        check_split(low, n, shares)


def tensor_kernels() -> None:
    """Scales, origins, words, codes, values and repacked words, bit for bit those of the reference backend."""
    own = {name: getattr(OWN, name) for name in ("name", "word", "key", "value")}
    check_tensor(spec_of(2, own, "staged", group=4, residual=8), "key", "bfloat16", (2, 1, 12, 60))
    check_tensor(spec_of(3, "official_int32", group=4, residual=8), "value", "float16", (1, 2, 11, 10))


def flat_groups() -> None:
    """Codes 0 in groups of one large number, of which fp16 metadata hold a rounding far below; those of other groups as they are."""
    spec = spec_of(2, "hp16", group=4, residual=8).override({"key.metadata": "float16", "value.metadata": "float16"})
    x = np.random.default_rng(3).normal(0, 1, (1, 2, 8, 8)).astype(np.float32)
    x[0, 1] = 4097.9
    for which in ("key", "value"):
        ours, want = (be.quantize(x, spec, which) for be in (Interpreted(), kivi.get_backend("reference")))
        assert np.array_equal(ours.codes(), want.codes())
    cache = kivi.KVCache(spec, batch=1, q_heads=2, kv_heads=2, head_dim=8, dtype="float32", backend=Interpreted())
    for _ in range(2):
        cache.attend(x * 0, x, x)
    for which, segments in cache.sealed(0).items():
        [(first, qt)] = segments
        want = kivi.get_backend("reference").quantize(np.concatenate([x, x], 2)[:, :, : qt.tokens], spec, which)
        assert np.array_equal(qt.codes(), want.codes()), (first, which)


def rounding() -> None:
    """Every half in range goes to the even neighbour."""
    x = np.arange(0, 16, 0.25, dtype=np.float32)

    def body(x, o):
        o.store(indices(64), numbers.round_half_even(x.load(indices(64))))

    out = np.empty_like(x)
    execute(kernel("k", {"x": pointer(f32), "o": pointer(f32)}, body), "k", (1,), {"x": x, "o": out})
    assert np.array_equal(out, np.rint(x))


def caches(layout: str = "hp16") -> None:
    """A ragged stream through the kernels of a cache: outputs within their bounds, sealed codes and floating rows equal."""
    sides = {f"{side}.{name}": value for side in ("key", "value") for name, value in (("group", 4), ("residual", 8))}
    spec = kivi.CacheSpec(name="mutants").override(
        {**sides, "value.residual": 10, "key.bits": 4, "value.bits": 4, "packing.layout": layout}
    )
    shape = {"batch": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 10, "dtype": "float16"}
    schedule = Schedule(tokens=4, queries=2, rewrites=REWRITES)
    cache, naive = kivi.KVCache(spec, backend=Interpreted(schedule, pages_per_share=1), **shape), model.NaiveCache(spec, 2)
    rng = np.random.default_rng(5)
    for n, counts in ((21, [21, 15]), (3, [3, 2]), (5, [4, 5]), (1, [1, 0])):
        q, k, v = (rng.normal(0.3, 1.0, (2, heads, n, 10)).astype(np.float16) for heads in (4, 2, 2))
        out = cache.attend(q, k, v, counts=counts)
        for b, seen in enumerate(naive.attend(q, k, v, counts)):
            for h, exact in enumerate(oracle.attend(seen, cache.geometry.scale) if seen else []):
                got = out[b, h, : counts[b]].astype(np.float64)
                assert (np.abs(got - exact.out) <= bounds.output_bound(exact, FP32, "float16").total).all()
            assert not out[b, :, counts[b] :].any()
    for b in range(2):
        for which in ("key", "value"):
            for first, qt in cache.sealed(b)[which]:
                assert np.array_equal(qt.codes()[0], naive.sealed(b, which).codes[:, first : first + qt.tokens])
            assert np.array_equal(cache.residual(b)[which], naive.residual(b, which))


def shared_words() -> None:
    """The same where one word holds values of several tokens."""
    caches("lanes32")


@dataclass(frozen=True)
class Mutant:
    """A wrong pass: `old` replaced by `new` in its source, and the check that must notice."""

    what: str
    module: ModuleType
    old: str
    new: str
    check: Callable[[], None]


MUTANTS = [
    Mutant("the origins are lost", fold_scale, "result = sums + shift.reshape(", "result = sums + 0.0 * shift.reshape(", products),
    Mutant("scale and origin change places", fold_scale, "(affine.scale, affine.origin)", "(affine.origin, affine.scale)", products),
    Mutant("an unseen token's scale counts", fold_scale, "if found.mask is not None:", "if False:", products),
    Mutant("every scale moves", fold_scale, "return (self.scale.varies | self.origin.varies) <= {axis}", "return True", products),
    Mutant(
        "the sum runs over another axis", fold_scale, 'shifts.reduce("add", weight.axes.index(here))', 'shifts.reduce("add", 0)', products
    ),
    Mutant("the power of two is twice as large", unpack_in_place, "2.0**-place", "2.0 ** (1 - place)", products),
    Mutant("the field is not where it was", unpack_in_place, "(mask << place)", "(mask << (place - 1))", products),
    Mutant("the weight is not scaled", unpack_in_place, "Tile(weight.source) * 2.0**-place", "Tile(weight.source) * 1.0", products),
    Mutant("runs are rounded down", split_kv, "(high - low + (shares - 1)) // shares", "(high - low) // shares", splits),
    Mutant("runs reach past the end", split_kv, "stop = (start + run).minimum(high)", "stop = start + run", splits),
    Mutant("every run starts at 0", split_kv, "(low + place * run).minimum(high)", "(place * run).minimum(high)", splits),
    Mutant(
        "all programs write one slot",
        split_kv,
        "slot.replace_all_uses_with(place.value)",
        "slot.replace_all_uses_with(shares.value)",
        splits,
    ),
    Mutant("a term is lost", join_sums, "for other in others:", "for other in others[1:]:", check_join),
    Mutant(
        "sums along two axes are one kind", join_sums, "return self.reduction.axis.value.data, shape_of", "return 0, shape_of", check_join
    ),
    Mutant("digits change places", address, "total = total + values[digit] * stride", "total = total + values[digit]", tensor_kernels),
    Mutant("a slot is composed without its weight", address, "term = value * digit.weight", "term = value", tensor_kernels),
    Mutant("masked lanes enter a group", quantize, "usable = mask & finite", "usable = finite", tensor_kernels),
    Mutant("the third plane is shifted by one", quantize, "((codes >> 2) << slot)", "((codes >> 1) << slot)", tensor_kernels),
    Mutant("a neighbour's high bit", quantize, "(((high >> slot) & 1) << 2)", "(((high >> (slot + 1)) & 1) << 2)", tensor_kernels),
    Mutant("codes are cut, not rounded", numbers, "whole = round_half_even(clamped).to(i32)", "whole = clamped.to(i32)", tensor_kernels),
    Mutant("halves round up", numbers, "(x + 12582912.0) - 12582912.0", "(x + 0.5).to(i32).to(f32)", rounding),
    Mutant("staged steps are not rounded", numbers, "steps = rounded(steps, n.dtype)", "steps = steps * 1.0", tensor_kernels),
    Mutant("bfloat16 is cut", numbers, "(bits + ((bits >> 16) & 1) + 0x7FFF) & -65536", "bits & -65536", tensor_kernels),
    Mutant("a constant group divides by 0", numbers, "where(flat, 1.0, scale)", "where(bad, 1.0, scale)", tensor_kernels),
    Mutant("a flat group keeps its codes", numbers, "where(flat, 0, whole)", "where(origin.equals(origin), whole, 0)", flat_groups),
    Mutant("flat groups of another head", append, "return program_id(0).to(i64) * groups", "return program_id(0).to(i64) * 0", flat_groups),
    Mutant(
        "the page's tail is quantized with its neighbour's scale",
        tensors,
        "token = token + first",
        "token = token + first * 0",
        tensor_kernels,
    ),
    Mutant(
        "rows past the end are decoded",
        tensors,
        "mask = (token < tokens) & (channel < channels)",
        "mask = channel < channels",
        tensor_kernels,
    ),
    Mutant(
        "words of other rows are overwritten",
        quantize,
        "word = word | (target.load(offset, mask).to(i32) & kept)",
        "word = word | 0",
        shared_words,
    ),
    Mutant("rows are sealed one late", append, "self._shift = first - row", "self._shift = first - row + 1", caches),
    Mutant(
        "old rows are not kept",
        append,
        "start = keep.maximum(stored - (stored * given",
        "start = (keep + 1).maximum(stored - (stored * given",
        caches,
    ),
    Mutant("a window is read off by one", pages, "slot = (token % self.capacity)", "slot = ((token + 1) % self.capacity)", caches),
    Mutant("the next head's record", pages, "head.to(i64) * self.form.bytes", "(head + 1).to(i64) * self.form.bytes", caches),
    Mutant(
        "the future is seen",
        attention,
        "(token.spread(scores.shape) <= self.position",
        "(token.spread(scores.shape) <= 1 + self.position",
        caches,
    ),
    Mutant(
        "a token does not see itself",
        attention,
        "(token.spread(scores.shape) <= self.position",
        "(token.spread(scores.shape) < self.position",
        caches,
    ),
    Mutant("the running sum is not rescaled", attention, "total = total * shrink + p", "total = total + p", caches),
    Mutant("the accumulator is not rescaled", attention, "*(a * shrink + weigh(", "*(a + weigh(", caches),
    Mutant(
        "values are cut at the key boundary",
        attention,
        'is_sealed = token < self.n["value_sealed"]',
        'is_sealed = token < self.n["key_sealed"]',
        caches,
    ),
    Mutant("the softmax scale is applied twice", attention, 'mask) * g["scale"]', 'mask) * g["scale"] * g["scale"]', caches),
    Mutant(
        "query heads read the wrong KV head",
        attention,
        "self.head * group_heads + row % group_heads",
        "self.head + row % group_heads * 2",
        caches,
    ),
    Mutant("a short page runs on", attention, 'end = where(is_last, self.n["key_sealed"], following)', "end = following", caches),
    Mutant("all splits weigh the same", attention, "weight + share * _masked(total", "weight + _masked(total", caches),
    Mutant("lanes start one field late", lanes, "(words[0] >> bits * lane)", "(words[0] >> bits * (lane ^ 1))", caches),
]


@pytest.mark.parametrize("check", [products, splits, check_join, rounding, tensor_kernels, caches, shared_words], ids=lambda f: f.__name__)
def test_the_checks_pass(check):
    check()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.what)
def test_mutants_are_killed(mutant, tmp_path, monkeypatch):
    monkeypatch.setenv("KIVI_CACHE_DIR", str(tmp_path))  # what a wrong pass prints must not be found later
    with mutated(mutant.module, mutant.old, mutant.new), pytest.raises(Exception), np.errstate(all="ignore"):  # noqa: B017
        mutant.check()
