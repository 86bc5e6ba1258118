"""What rewrites promise: the same results, bit for bit or within the bound that each states, on kernels of all forms they meet."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kivi.passes.fold_scale import fold_scale
from kivi.passes.rewrites import rewrite
from kivi.passes.split_kv import RewriteError
from kivi.passes.unpack_in_place import unpack_in_place
from kivi.schedule import Schedule
from tests.ir import test_attention as attention
from tests.passes.kernels import check_join, check_product, check_split, product_kernel, sums_kernel, total_kernel

FORMS = [("scores", False), ("outputs", False), ("outputs", True)]


@pytest.mark.parametrize(("form", "masked"), FORMS)
def test_fold_scale(form, masked):
    assert fold_scale(product_kernel(form, masked).module) == 1
    plain, folded = (check_product(form, names, masked) for names in ((), ("fold_scale",)))
    assert not np.array_equal(plain, folded)  # it was another computation


@pytest.mark.parametrize("form", ["scores", "outputs"])
def test_a_scale_for_every_code_stays(form):
    assert fold_scale(product_kernel(form, stray=True).module) == 0
    assert np.array_equal(check_product(form, (), stray=True), check_product(form, ("fold_scale",), stray=True))


@pytest.mark.parametrize(("form", "masked"), FORMS)
@pytest.mark.parametrize(("bits", "place"), [(1, 31), (2, 2), (2, 14), (2, 30), (4, 4), (4, 28), (8, 8), (8, 24)])
def test_unpack_in_place_changes_no_bit(form, masked, bits, place):
    made = rewrite(product_kernel(form, masked, place, 2**bits - 1), ["fold_scale"])
    assert unpack_in_place(made.module) == 1
    shifted = check_product(form, ("fold_scale",), masked, place, 2**bits - 1)
    assert np.array_equal(shifted, check_product(form, ("fold_scale", "unpack_in_place"), masked, place, 2**bits - 1))


def test_a_field_at_bit_0_has_no_shift_to_lose():
    made = rewrite(product_kernel("scores"), ["fold_scale"])
    assert unpack_in_place(made.module) == 0


@pytest.mark.parametrize(("low", "n"), [(0, 12), (3, 17), (0, 1), (5, 5), (0, 0)])
@pytest.mark.parametrize("shares", [1, 2, 5, 20])
def test_split_kv(low, n, shares):
    check_split(low, n, shares)


def test_join_sums():
    check_join()


def test_what_cannot_be_split():
    with pytest.raises(RewriteError, match="0 loops"):
        rewrite(sums_kernel(), ["split_kv"])
    with pytest.raises(RewriteError, match="no grid axis 1"):
        rewrite(total_kernel(0), ["split_kv", "split_kv"])


def test_an_unknown_rewrite_is_named():
    with pytest.raises(RewriteError, match=r"'fuse'.*fold_scale"):
        rewrite(sums_kernel(), ["fuse"])


SUBSETS = [names for n in range(4) for names in itertools.combinations(("fold_scale", "unpack_in_place", "join_sums"), n)]


@pytest.mark.parametrize("chosen", SUBSETS, ids="+".join)
def test_attention_after_any_rewrites(chosen):
    """Every subset, split or not, stays within the bound of the pipeline that the manifest declares."""
    cache, naive = attention.caches({"packing.layout": "hp16", "nonfinite": "propagate"}, q_heads=4, kv_heads=2)
    attention.fill(cache, naive, [54], 54)
    attention.check(cache, naive, 2, Schedule(tokens=8, queries=2), pages_per_share=1, rewrites=chosen)
