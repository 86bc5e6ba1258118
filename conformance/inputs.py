"""Where a stream's tokens come from: seeded generators, each aimed at one kind of fault, and recorded traces.

A generator makes q [B, Hq, L, D], k [B, Hkv, L, D], v [B, Hkv, L, Dv] in float32 for all L tokens of a case at once; the suite
casts them to the cache's dtype and hands them out in order. Zero-mean noise of one size hides most faults, so even the plain
generator has channel offsets, channel scales and sizes that differ by head and request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]
Shape = tuple[int, ...]
Rng = np.random.Generator


@dataclass(frozen=True)
class Inputs:
    """A generator's name, its seed and its options."""

    kind: str = "rich"
    seed: int = 0
    options: tuple[tuple[str, Any], ...] = ()

    def make(self, rows: int, q_heads: int, kv_heads: int, length: int, head_dim: int, value_dim: int) -> Arrays:
        """q, k, v in float32 for `rows` requests."""
        shapes = (rows, q_heads, length, head_dim), (rows, kv_heads, length, head_dim), (rows, kv_heads, length, value_dim)
        arrays = KINDS[self.kind](np.random.default_rng([self.seed, 2402]), *shapes, **dict(self.options))
        return tuple(np.ascontiguousarray(a, np.float32) for a in arrays)  # type: ignore[return-value]


def make(kind: str, seed: int = 0, **options: Any) -> Inputs:
    return Inputs(kind, seed, tuple(sorted(options.items())))


def given(q: Any, k: Any, v: Any) -> Inputs:
    """Rows written out, [L][D] each, for one request and one head."""
    return make("given", q=_rows(q), k=_rows(k), v=_rows(v))


def _rows(x: Any) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(number) for number in row) for row in x)


def _given(rng: Rng, q_shape: Shape, k_shape: Shape, v_shape: Shape, **rows: Any) -> Arrays:
    return tuple(np.array(rows[name])[None, None] for name in "qkv")  # type: ignore[return-value]


def _rich(rng: Rng, q_shape: Shape, k_shape: Shape, v_shape: Shape) -> Arrays:
    """Channel outliers and offsets in the keys, token sizes in the values, all different by head and request."""
    b, h, _, d = k_shape
    k = rng.standard_normal(k_shape) * np.exp(rng.normal(0, 0.7, (b, h, 1, d))) + rng.normal(0, 1.5, (b, h, 1, d))
    v = rng.standard_normal(v_shape) * np.exp(rng.normal(0, 0.7, (*v_shape[:3], 1))) + rng.normal(0, 0.7, (*v_shape[:2], 1, v_shape[3]))
    return rng.standard_normal(q_shape), k, v


def _shifted(rng: Rng, q_shape: Shape, k_shape: Shape, v_shape: Shape, low: float = 5.0, high: float = 6.0) -> Arrays:
    """Everything far from zero on one side: a zero that slips into a minimum shows."""
    return 0.2 * rng.standard_normal(q_shape), rng.uniform(low, high, k_shape), rng.uniform(low, high, v_shape)


def _uniform(rng: Rng, q_shape: Shape, k_shape: Shape, v_shape: Shape) -> Arrays:
    """Keys of zero: every visible token has the same weight, so each one dropped, doubled or misplaced shows.

    Values are constant over the channels of a head and unlike those of any other token, so quantizing them is exact.
    """
    b, h, tokens, _ = v_shape
    size = rng.permutation(b * h * tokens).reshape(b, h, tokens, 1) % 2048 / 8.0
    return rng.standard_normal(q_shape), np.zeros(k_shape), np.broadcast_to(size, v_shape)


def _needle(rng: Rng, q_shape: Shape, k_shape: Shape, v_shape: Shape, logit: float = 14.0, stride: int = 7) -> Arrays:
    """Query i wants token stride * i mod (i + 1): its weight is near one, in every zone, so its value must come out."""
    tokens, d = k_shape[2], k_shape[3]
    t = np.arange(tokens)
    k = 0.02 * rng.standard_normal(k_shape)
    k[:, :, t, t % d] += 4.0
    q = np.zeros(q_shape)
    q[:, :, t, (stride * t) % (t + 1) % d] = logit * d**0.5 / 4.0
    return q, k, 3.0 * rng.standard_normal(v_shape) + 1.0


def _large(rng: Rng, q_shape: Shape, k_shape: Shape, v_shape: Shape, logit: float = 900.0) -> Arrays:
    """Logits near +900 for even requests and -900 for odd ones: exp of them overflows, or vanishes, in every format."""
    d = k_shape[3]
    sign = np.where(np.arange(q_shape[0]) % 2, -1.0, 1.0)[:, None, None, None]
    q = np.full(q_shape, 8.0)
    k = sign * logit / (8.0 * d**0.5) * np.ones(k_shape) + 0.01 * rng.standard_normal(k_shape)
    return q, k, rng.standard_normal(v_shape) + 0.5


def _contrast(rng: Rng, q_shape: Shape, k_shape: Shape, v_shape: Shape, factor: float = 1000.0) -> Arrays:
    """The last request's keys and values are `factor` times the others': a group or a row that strays shows at once."""
    q, k, v = _rich(rng, q_shape, k_shape, v_shape)
    k[-1] *= factor
    v[-1] *= factor
    q[-1] /= factor
    return q, k, v


def _steps(rng: Rng, q_shape: Shape, k_shape: Shape, v_shape: Shape) -> Arrays:
    """Values whose size grows by token and by channel group, keys that drift: neighbours differ in scale and origin."""
    b, h, tokens, d = k_shape
    t = np.arange(tokens)[:, None]
    k = rng.uniform(-1, 1, k_shape) * (1.0 + t % 5) + 0.25 * t
    v = rng.uniform(-1, 1, v_shape) * 2.0 ** (t % 7 - 3) * 2.0 ** (np.arange(v_shape[3]) // 8 % 5 - 2)
    return 0.05 * rng.standard_normal(q_shape), k, v


def _recorded(rng: Rng, q_shape: Shape, k_shape: Shape, v_shape: Shape, layer: int = 0, head: int = 0) -> Arrays:
    """Keys, values and queries of SmolLM2-135M-Instruct after RoPE, one KV head with its query heads (golden/README.md).

    Queries were recorded for the last positions only; earlier ones take them in turn.
    """
    data = golden("smollm2")
    kv, q = data["kv"][layer], data["q"][layer].astype(np.float32)
    tokens, heads = k_shape[2], q_shape[1] // k_shape[1]
    take = (np.arange(tokens) - tokens) % q.shape[1]
    q = q[head * heads : head * heads + q_shape[1], take][None]
    k, v = (kv[i, head : head + k_shape[1], kv.shape[2] - tokens :][None].astype(np.float32) for i in (0, 1))
    return np.broadcast_to(q, q_shape), np.broadcast_to(k, k_shape), np.broadcast_to(v, v_shape)


def _official(rng: Rng, q_shape: Shape, k_shape: Shape, v_shape: Shape, key: str = "") -> Arrays:
    """Inputs of a trajectory of the official classes (golden/README.md)."""
    data = golden("official_stream")
    tokens = q_shape[2]
    return tuple(data[f"{key}.{name}"][:, :, :tokens].astype(np.float32) for name in "qkv")  # type: ignore[return-value]


KINDS: dict[str, Callable[..., Arrays]] = {
    "given": _given,
    "rich": _rich,
    "shifted": _shifted,
    "uniform": _uniform,
    "needle": _needle,
    "large": _large,
    "contrast": _contrast,
    "steps": _steps,
    "recorded": _recorded,
    "official": _official,
}


@cache
def golden(name: str) -> dict[str, np.ndarray]:
    """The arrays of `golden/<name>.safetensors`."""
    from safetensors.numpy import load

    arrays = load((resources.files("kivi.conformance") / "golden" / f"{name}.safetensors").read_bytes())
    return {key: frozen(array) for key, array in arrays.items()}


def frozen(x: np.ndarray) -> np.ndarray:
    """`x`, read-only: what the suite keeps must survive a subject that writes into its inputs."""
    x.flags.writeable = False
    return x


@cache
def golden_index(name: str) -> dict[str, Any]:
    """`golden/<name>.json`: source, licence and the list of cases."""
    import json

    return json.loads((resources.files("kivi.conformance") / "golden" / f"{name}.json").read_text("utf-8"))


# -- how arrays lie in memory ---------------------------------------------------------------------------------------------


def view(x: np.ndarray, kind: str) -> np.ndarray:
    """A copy of the numbers in another memory arrangement; what lies between them is 1e4, so reading past a stride shows.

    plain, transposed (token and head axes exchanged in memory), strided (every second channel), padded (rows longer than D),
    offset (starts inside a larger buffer), reversed (negative token stride), readonly.
    """
    if kind == "plain":
        return x.copy(order="C")
    if kind == "readonly":
        out = x.copy(order="C")
        out.flags.writeable = False
        return out
    if kind == "transposed":
        return x.transpose(0, 2, 1, 3).copy(order="C").transpose(0, 2, 1, 3)
    if kind == "reversed":
        return x[:, :, ::-1].copy(order="C")[:, :, ::-1]
    b, h, n, d = x.shape
    sizes, index = {
        "strided": ((b, h, n, 2 * d), np.s_[..., ::2]),
        "padded": ((b, h, n, d + 8), np.s_[..., :d]),
        "offset": ((b + 1, h + 1, n + 3, d), np.s_[1:, 1:, 2:-1]),
    }[kind]
    wide = np.full(sizes, 1e4).astype(x.dtype)
    wide[index] = x
    return wide[index]


VIEWS = ("transposed", "strided", "padded", "offset", "reversed", "readonly")
