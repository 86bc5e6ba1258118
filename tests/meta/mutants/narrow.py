"""Narrow faults: an output a thousandth too large, a code off by one, only under one condition. Each condition is one mutant.

They show what the quick size does not reach: a condition that no case meets lets its mutant live.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kivi.backends.reference import attention, quantize
from tests.meta.mutants import mutant
from tests.meta.steps import Attention, Steps

HEADS = (1, 2, 4, 8)


def attention_conditions() -> dict[str, Callable[..., Any]]:
    """Name -> condition on (reading, request, q, k, v)."""
    out: dict[str, Callable[..., Any]] = {
        "second_request": lambda r, b, q, k, v: b == 1,
        "chunk_of_3": lambda r, b, q, k, v: q.shape[2] == 3,
        "chunk_beyond_residual": lambda r, b, q, k, v: q.shape[2] > r.pool.format.tokens,
        "prefill": lambda r, b, q, k, v: r.stored[b] == 0,
        "nothing_sealed": lambda r, b, q, k, v: r.stored[b] > 0 and r.key_sealed[b] == 0,
        "no_floating_keys": lambda r, b, q, k, v: r.stored[b] == r.key_sealed[b] > 0,
        "no_sealed_values": lambda r, b, q, k, v: r.key_sealed[b] > 0 and r.value_sealed[b] == 0,
        "all_values_sealed": lambda r, b, q, k, v: r.value_sealed[b] == r.stored[b] > 0,
        "fourth_page": lambda r, b, q, k, v: r.pages[b] > 2 and r.stored[b] + r.chunk[b] > 3 * r.pool.format.tokens,
        "idle_neighbour": lambda r, b, q, k, v: (r.counts == 0).any(),
        "shorter_than_neighbour": lambda r, b, q, k, v: (r.counts > r.counts[b]).any(),
        "cut_page": lambda r, b, q, k, v: r.pages[b] > 0 and r.key_sealed[b] % r.pool.format.tokens != 0,
        "other_value_dim": lambda r, b, q, k, v: v.shape[3] != k.shape[3],
        "short_value_group": lambda r, b, q, k, v: v.shape[3] % r.pool.format.spec.value.group != 0,
        "wide_value_window": lambda r, b, q, k, v: r.pool.format.spec.value.residual > r.pool.format.tokens,
        "given_scale": lambda r, b, q, k, v: abs(r.scale * q.shape[3] ** 0.5 - 1) > 1e-6,
        "staged": lambda r, b, q, k, v: r.pool.format.spec.numerics == "staged",
        "seal_then_attend": lambda r, b, q, k, v: r.pool.format.spec.order == "seal_then_attend" and (r.chunk[b] < r.counts[b]),
        "groups_differ": lambda r, b, q, k, v: r.pool.format.spec.value.group != r.pool.format.spec.key.group,
        "bits_differ": lambda r, b, q, k, v: r.pool.format.spec.value.bits != r.pool.format.spec.key.bits,
        "large_residual": lambda r, b, q, k, v: r.pool.format.tokens >= 32,
    }
    for name in ("float16", "bfloat16", "float32"):
        out[f"dtype_{name}"] = lambda r, b, q, k, v, name=name: q.dtype.name == name
        out[f"metadata_{name}"] = lambda r, b, q, k, v, name=name: r.pool.format.key_metadata == name
    for dim in (64, 80, 96, 112, 128, 256):
        out[f"dim_{dim}"] = lambda r, b, q, k, v, dim=dim: q.shape[3] == dim
    for ratio in HEADS:
        out[f"ratio_{ratio}"] = lambda r, b, q, k, v, ratio=ratio: q.shape[1] == ratio * k.shape[1]
    for bits in (1, 2, 3, 4, 8):
        out[f"key_bits_{bits}"] = lambda r, b, q, k, v, bits=bits: r.pool.format.spec.key.bits == bits and r.key_sealed[b] > 0
        out[f"value_bits_{bits}"] = lambda r, b, q, k, v, bits=bits: r.pool.format.spec.value.bits == bits and r.value_sealed[b] > 0
    for name in ("official_int32", "lanes32", "hp16", "hp16.mma", "planes8", "bytes_lsb"):
        out[f"layout_{name}"] = lambda r, b, q, k, v, name=name: r.pool.format.layout.name == name
    return out


def quantize_conditions() -> dict[str, Callable[..., Any]]:
    """Name -> condition on (groups [..., G], rule), true or a mask [...]."""
    out: dict[str, Callable[..., Any]] = {
        "negative_group": lambda x, rule: (x < 0).all(-1),
        "mixed_signs": lambda x, rule: (x < 0).any(-1) & (x > 0).any(-1),
        "large_numbers": lambda x, rule: np.abs(x.astype(np.float32)).max(-1) > 1000,
        "tiny_numbers": lambda x, rule: np.abs(x.astype(np.float32)).max(-1) < 1e-4,
        "short_group": lambda x, rule: x.shape[-1] < rule.group,
        "many_groups": lambda x, rule: np.arange(x.shape[-2]) >= 100 if x.ndim > 1 and x.shape[-2] > 100 else False,
        "saturate": lambda x, rule: rule.overflow == "saturate",
        "propagate": lambda x, rule: rule.nonfinite == "propagate",
    }
    for which in ("key", "value"):
        for name in ("float16", "bfloat16", "float32"):
            out[f"{which}_{name}"] = lambda x, rule, which=which, name=name: rule.which == which and x.dtype.name == name
            out[f"{which}_{name}_staged"] = lambda x, rule, which=which, name=name: (
                rule.which == which and x.dtype.name == name and rule.numerics == "staged"
            )
            out[f"{which}_metadata_{name}"] = lambda x, rule, which=which, name=name: (
                rule.which == which and rule.metadata == name and rule.numerics == "portable"
            )
        for bits in (1, 2, 3, 4, 8):
            out[f"{which}_bits_{bits}"] = lambda x, rule, which=which, bits=bits: rule.which == which and rule.bits == bits
        for group in (8, 16, 32):
            out[f"{which}_group_{group}"] = lambda x, rule, which=which, group=group: rule.which == which and rule.group == group
    return out


class Louder(Attention):
    """Outputs a thousandth too large where a condition holds."""

    def __init__(self, condition: Callable[..., Any]) -> None:
        self.condition = condition

    def __call__(self, reading, q, k, v):
        self.arrays = reading, q, k, v
        return super().__call__(reading, q, k, v)

    def request(self, q, keys, values, scale):
        reading, *arrays = self.arrays
        out = super().request(q, keys, values, scale)
        return out * 1.001 if self.condition(reading, self.b, *arrays) else out


class OffByOne(Steps):
    """The last code of a group off by one where a condition holds."""

    def __init__(self, condition: Callable[..., Any]) -> None:
        self.condition = condition

    def __call__(self, x, rule):
        codes, scale, origin, clamped = super().__call__(x, rule)
        with np.errstate(invalid="ignore"):
            there = np.broadcast_to(self.condition(x, rule), scale.shape)
        codes[..., -1] = np.where(there, codes[..., -1] ^ 1, codes[..., -1])
        return codes, scale, origin, clamped


def _place(module: Any, attribute: str, make: Any, name: str, doc: str) -> None:
    def place(patch):
        patch.setattr(module, attribute, make())

    place.__name__, place.__doc__ = name, doc
    mutant(place)


for _name, _condition in attention_conditions().items():
    _place(attention, "attend", lambda c=_condition: Louder(c), f"louder_{_name}", f"Outputs are 1.001 times too large only for: {_name}.")
for _name, _condition in quantize_conditions().items():
    _place(
        quantize,
        "quantize_groups",
        lambda c=_condition: OffByOne(c),
        f"off_by_one_{_name}",
        f"The last code of a group is off by one only for: {_name}.",
    )
