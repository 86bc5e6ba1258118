"""What kivi is compared with: torch's attention over full-precision histories, and the caches of transformers.

A package that is missing or fails is a reason, not an error: it is reported as not measured.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kivi.bench import machine
from kivi.bench.plan import Plan
from kivi.bench.result import Shape
from kivi.bench.timing import Call

DTYPES = ("float32", "bfloat16", "float16")
SHARE = 0.6  # of the memory that is free, which one contender may take
BITS, GROUP, RESIDUAL = 2, 32, 128  # of the quantized caches
#: Cache -> the options that place its groups as KIVI's; hqq has no axis for keys per channel.
QUANTIZED = {
    "quanto": {"axis_key": -1, "axis_value": 0, "q_group_size": GROUP, "residual_length": RESIDUAL},
    "hqq": {"axis_key": 1, "axis_value": 1, "q_group_size": GROUP, "residual_length": RESIDUAL},
}
MODULES = {"quanto": "optimum.quanto", "hqq": "hqq", "transformers": "transformers", "llama.cpp": "xllamacpp"}
DISTRIBUTIONS = {"optimum.quanto": "optimum-quanto"}


def why_missing(peer: str) -> str:
    """Why a peer cannot run here; empty if its package is installed."""
    module = MODULES[peer]
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        found = False
    return "" if found else f"{DISTRIBUTIONS.get(module, module)} is not installed; run: pip install 'kivi-kvcache[bench]'"


def why_too_large(wanted: int) -> str:
    """Why a contender that takes so many bytes is left out; empty if it is not."""
    free = machine.available_memory()
    if wanted <= SHARE * free:
        return ""
    return f"it needs {wanted / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free, of which one contender may take {SHARE:.0%}"


def attention(shape: Shape, tokens: int, plan: Plan) -> Iterator[Call]:
    """torch's attention of one decode step over `tokens` tokens, by dtype.

    `sdpa`: scaled_dot_product_attention with the query heads of a KV head as rows of one query, its fastest way; `sdpa enable_gqa`:
    with its own option for shared heads; `matmul`: two matrix products with a softmax between them, as transformers' eager attention.
    """
    group = shape.q_heads // shape.kv_heads
    for name in DTYPES:
        dtype = getattr(torch, name)
        size = 2 * shape.batch * shape.kv_heads * tokens * shape.head_dim * dtype.itemsize
        count = machine.copies(size)
        reason = why_too_large(size * count)
        if reason:
            plan.note("attention", f"torch {name}", shape, reason)
            continue
        held = [_history(shape, tokens, dtype) for _ in range(count)]
        q = torch.randn(shape.batch, shape.kv_heads, group, shape.head_dim).to(dtype)
        yield Call(f"sdpa {name}", partial(_sdpa, q, held), size, count)
        yield Call(f"matmul {name}", partial(_matmul, q, held), size, count)
        if group > 1:
            flat = q.reshape(shape.batch, shape.q_heads, 1, shape.head_dim)
            yield Call(f"sdpa {name} enable_gqa", partial(_sdpa, flat, held, enable_gqa=True), size, count)


def _history(shape: Shape, tokens: int, dtype: Any) -> tuple[Any, Any]:
    size = (shape.batch, shape.kv_heads, min(tokens, 2048), shape.head_dim)
    times = -(-tokens // 2048)
    k, v = (torch.randn(size).to(dtype).repeat(1, 1, times, 1)[:, :, :tokens].contiguous() for _ in range(2))
    return k, v


def _sdpa(q: Any, held: list[tuple[Any, Any]], i: int, **options: Any) -> Any:
    return F.scaled_dot_product_attention(q, *held[i % len(held)], **options)


def _matmul(q: Any, held: list[tuple[Any, Any]], i: int) -> Any:
    k, v = held[i % len(held)]
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v


def caches(config: Any) -> dict[str, Callable[[], Any]]:
    """Contender -> how to make the cache of transformers that it is, for a model's configuration."""
    from transformers import DynamicCache, QuantizedCache

    made: dict[str, Callable[[], Any]] = {"DynamicCache": lambda: DynamicCache(config=config)}
    for name, options in QUANTIZED.items():
        made[quantized_name(name)] = partial(QuantizedCache, name, config, nbits=BITS, **options)
    return made


def quantized_name(package: str) -> str:
    """The contender that a package of quantized caches is."""
    return f"QuantizedCache {package} {BITS}-bit"


def package_of(contender: str) -> str:
    """The peer, a key of MODULES, that a contender needs."""
    return next((name for name in QUANTIZED if contender == quantized_name(name)), "llama.cpp" if "llama" in contender else "transformers")
