"""Every kernel of a cache, lowered to `simt` and verified: backends leave that out."""

from __future__ import annotations

import pytest

import kivi
from kivi.backends.cupy import offline
from kivi.geometry import geometry
from kivi.ir.simt import Simt
from kivi.ir.tile import Tile
from kivi.ir.xdsl import parse
from kivi.kernels.request import lower
from kivi.passes.tile_to_simt import lower as lower_to_simt

SHAPES = [
    ({"key.bits": 2, "value.bits": 2}, (8, 2, 128, "float16")),
    ({"key.bits": 3, "value.bits": 3, "numerics": "staged", "key.metadata": "input", "value.metadata": "input"}, (2, 2, 80, "float32")),
    ({"key.bits": 4, "value.bits": 1, "packing.layout": "lanes32"}, (4, 4, 64, "bfloat16")),
    ({"key.bits": 8, "value.bits": 8, "packing.layout": "official_int32", "overflow": "saturate"}, (4, 1, 256, "float16")),
]


@pytest.mark.parametrize(("fields", "shape"), SHAPES)
def test_every_kernel_is_valid(fields, shape):
    spec, (q_heads, kv_heads, dim, dtype) = kivi.load_spec("kivi-2bit").override(fields), shape
    for request in offline.entries(spec, geometry(q_heads, kv_heads, dim, None, dtype, None, None, None)).values():
        module = lower_to_simt(lower(request).module, 128)
        assert str(parse(str(module), Tile, Simt)) == str(module)
