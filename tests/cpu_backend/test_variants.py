"""A new bit width, group, mix or layout, written only in a TOML file, works with no file of the repository touched."""

from __future__ import annotations

import numpy as np
import pytest

import kivi
from kivi.conformance import bounds, model, oracle

VARIANTS = {
    "bits 3, group 16": "[key]\nbits = 3\ngroup = 16\nresidual = 32\n[value]\nbits = 3\ngroup = 16\nresidual = 32\n",
    "bits 1, group 64": "[key]\nbits = 1\ngroup = 64\nresidual = 64\n[value]\nbits = 1\ngroup = 64\nresidual = 64\n",
    "4-bit keys, 2-bit values": "[key]\nbits = 4\ngroup = 16\nresidual = 32\n[value]\nbits = 2\ngroup = 16\nresidual = 40\n",
    "an index-bit permutation": (
        "[key]\ngroup = 16\nresidual = 32\n[value]\ngroup = 16\nresidual = 32\n"
        '[packing.layout]\nname = "mine"\nword = "uint16"\n'
        'key = "c0 c4 c1 t0 c2 t2 t1 c3 c* t*"\nvalue = "c2 c0 c1 c3 t1 t0 c* t*"\n'
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_spec_is_all_it_takes(name, tmp_path):
    path = tmp_path / "variant.toml"
    path.write_text("kivi_spec = 1\n" + VARIANTS[name])
    spec = kivi.load_spec(path)
    shape = {"batch": 1, "q_heads": 4, "kv_heads": 2, "head_dim": 40, "dtype": "float16"}
    cache = kivi.KVCache(spec, backend="cpu", **shape)
    naive = model.NaiveCache(spec, 1)
    rng = np.random.default_rng(0)
    numerics = bounds.Numerics(accumulate="float32", exp_ulp=cache.backend.manifest.numerics.exp_ulp)
    for n in (spec.key.residual * 2 + 5, 1, 3):
        q, k, v = (rng.normal(0.2, 1.0, (1, heads, n, 40)).astype(np.float16) for heads in (4, 2, 2))
        out = cache.attend(q, k, v)
        (seen,) = naive.attend(q, k, v, [n])
        for h, exact in enumerate(oracle.attend(seen, cache.geometry.scale)):
            assert (np.abs(out[0, h].astype(np.float64) - exact.out) <= bounds.output_bound(exact, numerics, "float16").total).all()
    for which in ("key", "value"):
        [(first, qt)] = cache.sealed(0)[which]
        assert first == 0
        assert np.array_equal(qt.codes()[0], naive.sealed(0, which).codes)
        expected = naive.sealed(0, which)
        group, axis = (spec.key.group, 1) if which == "key" else (spec.value.group, 2)
        for ours, theirs in ((qt.scale, expected.scale), (qt.origin, expected.origin)):
            spread = np.take(np.repeat(ours[0], group, axis=axis), range(expected.codes.shape[axis]), axis=axis)
            assert np.array_equal(spread, theirs)
    named = spec.packing.layout
    assert cache.ran.layout == ("lanes32" if named == "auto" else named.name)
