"""Decode attention of backend `onnxruntime` against torch eager that unpacks and attends, and against other graphs for the same history.

    python benchmarks/onnx_attention.py [--threads N] [--tokens T...] [--q-heads H...] [--rounds R] [--out FILE]

Prints JSON: medians in milliseconds of calls that take turns, and ratios within one run.

    kivi            attention of one decode step over a cache: history, open pages and floating rows, as the backend runs it
    in one graph    the same, words masked inside the graph of the history, byte by byte
    decoded         the same, every element of the history decoded before it is multiplied
    uint2           DequantizeLinear of UINT2 with the scale of each group, then the origin added, then the products; history only
    uint2 folded    the same, origins folded into the query and the weights; history only
    torch eager     unpack by shifts, dequantize, product, softmax, product, as eager implementations of KIVI do; history only

With one thread the clock is this thread's CPU time, which other processes on the machine disturb less; with more it is the wall clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import torch

import kivi
from kivi.backends.onnxruntime import emit, kernels
from kivi.backends.onnxruntime.graph import Graph, Value
from kivi.layout import named_layout, unpack

HEAD_DIM, KV_HEADS, GROUP, PAGE = 128, 8, 32, 128
UINT2_OPSET = 25  # the first version of the standard with UINT2


def rows(rng: np.random.Generator, q_heads: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v of n tokens."""
    q, k, v = (rng.standard_normal((1, heads, n, HEAD_DIM), np.float32) for heads in (q_heads, KV_HEADS, KV_HEADS))
    return q, k, v


def filled(q_heads: int, tokens: int) -> kivi.KVCache:
    """A cache of `tokens` random tokens, appended without attending."""
    cache = kivi.KVCache(
        "kivi-2bit", batch=1, q_heads=q_heads, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="float32", backend="onnxruntime"
    )
    be, rng = cache.backend, np.random.default_rng(0)
    be.attend = lambda reading, q, k, v: np.zeros_like(q)  # type: ignore[method-assign]
    try:
        for start in range(0, tokens, 2048):
            cache.attend(*rows(rng, q_heads, min(2048, tokens - start)))
    finally:
        del be.attend
    return cache


def decode(cache: kivi.KVCache, given: tuple[np.ndarray, ...], fold_rows: int, apart: bool) -> Callable[[], np.ndarray]:
    """Attention of a step on the cache, by one of the backend's ways."""
    be: Any = cache.backend
    reading, kind = cache._reading(cache._state, np.ones(1, np.int64), np.ones(1, np.int64)), type(be)

    def call() -> np.ndarray:
        be.fold_rows, be.apart = fold_rows, apart
        try:
            return be.attend(reading, *given)
        finally:
            be.fold_rows, be.apart = kind.fold_rows, kind.apart

    return call


class History:
    """Sealed tokens of a cache as the other contenders store them: codes packed along an axis, the first one lowest."""

    def __init__(self, cache: kivi.KVCache, q: np.ndarray) -> None:
        sealed = {which: segments[0][1] for which, segments in cache.sealed(0).items()}
        tokens = sealed["value"].tokens // PAGE * PAGE
        self.tokens, self.q = tokens, q.reshape(1, KV_HEADS, -1, HEAD_DIM) * np.float32(HEAD_DIM**-0.5)
        key, value = (sealed[which].codes()[0, :, :tokens] for which in ("key", "value"))
        self.key, self.value = _packed(np.swapaxes(key, -1, -2)), _packed(value)  # [H, D, T / 4], [H, T, D / 4]
        k, v = sealed["key"], sealed["value"]
        self.key_scale, self.key_origin = (
            np.ascontiguousarray(np.swapaxes(a[0, :, : tokens // GROUP], -1, -2)) for a in (k.scale, k.origin)
        )
        self.value_scale, self.value_origin = (np.ascontiguousarray(a[0, :, :tokens]) for a in (v.scale, v.origin))

    def exact(self) -> np.ndarray:
        """The output in float64."""
        form = named_layout("bytes_lsb")
        key, value = (unpack(a, form, "value", 2, a.shape[1], a.shape[1], a.shape[2] * 4) for a in (self.key, self.value))
        k, v = (
            np.repeat(scale.astype(np.float64), GROUP, -1) * codes + np.repeat(origin.astype(np.float64), GROUP, -1)
            for codes, scale, origin in ((key, self.key_scale, self.key_origin), (value, self.value_scale, self.value_origin))
        )
        scores = self.q[0].astype(np.float64) @ k
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True) @ v


def _packed(codes: np.ndarray) -> np.ndarray:
    four = np.ascontiguousarray(codes).reshape(*codes.shape[:-1], -1, 4)
    return np.ascontiguousarray(np.bitwise_or.reduce(four << np.array([0, 2, 4, 6], np.uint8), axis=-1))


def torch_eager(h: History) -> Callable[[], np.ndarray]:
    q, key, value, ks, ko, vs, vo = (
        torch.from_numpy(a) for a in (h.q[0], h.key, h.value, h.key_scale, h.key_origin, h.value_scale, h.value_origin)
    )
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)

    def decoded(words: torch.Tensor, scale: torch.Tensor, origin: torch.Tensor) -> torch.Tensor:
        codes = ((words[..., None] >> shifts) & 3).reshape(*scale.shape, GROUP)
        return (codes * scale[..., None].float() + origin[..., None].float()).flatten(-2)

    def call() -> np.ndarray:
        weights = torch.softmax(q @ decoded(key, ks, ko), -1)
        return (weights @ decoded(value, vs, vo)).numpy()

    return call


def uint2(h: History, fold: bool) -> Callable[[], np.ndarray]:
    """The history by DequantizeLinear, which takes packed bytes as they are: a whole head at a time."""
    g = Graph("uint2", opset=UINT2_OPSET)
    heads, tokens, group = KV_HEADS, h.tokens, h.q.shape[2]
    q = g.input("q", "float32", (heads, group, HEAD_DIM))
    given: dict[str, np.ndarray] = {"q": h.q[0]}

    def side(name: str, words: np.ndarray, scale: np.ndarray, origin: np.ndarray) -> tuple[Value, Value]:
        codes = g.input(name, "uint2", (*words.shape[:2], words.shape[2] * 4))
        s, m = (g.input(f"{name}_{part}", "float16", a.shape).to("float32") for part, a in (("scale", scale), ("origin", origin)))
        given.update({name: words, f"{name}_scale": scale, f"{name}_origin": origin})
        return g.op("DequantizeLinear", codes, s, dtype="float32", axis=2, block_size=GROUP), m

    def spread(m: Value, last: int) -> Value:
        return g.op("Expand", m.unsqueeze(3), g.ints(1, 1, 1, GROUP)).reshape(0, 0, last)

    key, key_origin = side("key", h.key, h.key_scale, h.key_origin)
    value, value_origin = side("value", h.value, h.value_scale, h.value_origin)
    if fold:
        scores = q @ key + spread(q @ key_origin, tokens)
    else:
        scores = q @ (key.reshape(0, 0, -1, GROUP) + key_origin.unsqueeze(3)).reshape(0, 0, tokens)
    weights = g.op("Exp", scores - scores.reduce("Max", 2))
    if fold:
        out = weights @ value + spread(weights @ value_origin, HEAD_DIM)
    else:
        out = weights @ (value.reshape(0, 0, -1, GROUP) + value_origin.unsqueeze(3)).reshape(0, 0, HEAD_DIM)
    g.output("out", out / weights.reduce("Sum", 2), (heads, group, HEAD_DIM))
    session = onnxruntime.InferenceSession(emit.emit(g, {}), kernels.options(), providers=["CPUExecutionProvider"])
    result = np.empty((heads, group, HEAD_DIM), np.float32)

    def call() -> np.ndarray:
        binding = session.io_binding()
        for name, a in given.items():
            packed = name in ("key", "value")
            shape = (*a.shape[:2], a.shape[2] * 4) if packed else a.shape
            binding.bind_input(name, "cpu", 0, emit.TYPES["uint2"] if packed else kernels.element(a), shape, a.ctypes.data)
        binding.bind_output("out", "cpu", 0, kernels.element(result), result.shape, result.ctypes.data)
        session.run_with_iobinding(binding)
        return result

    return call


def compare(q_heads: int, tokens: int, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    cache = filled(q_heads, tokens)
    given = rows(np.random.default_rng(2), q_heads, 1)
    history = History(cache, given[0])
    calls = {
        "kivi": decode(cache, given, 16, True),
        "in one graph": decode(cache, given, 16, False),
        "decoded": decode(cache, given, 0, False),
        "torch eager": torch_eager(history),
    }
    others, missing = {"uint2": False, "uint2 folded": True}, {}
    for name, fold in others.items():
        try:
            calls[name] = uint2(history, fold)
        except Exception as error:  # a runtime without this version of the standard; the reason is part of the result
            missing[name] = f"{type(error).__name__}: {error}"
    exact = history.exact()
    errors = {name: float(np.abs(calls[name]() - exact).max()) for name in calls if name.startswith(("uint2", "torch"))}
    if max(errors.values()) > 1e-4:
        raise SystemExit(f"a contender computes something else: {errors}")
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for call in calls.values():
            call()
        for _ in range(rounds):
            for name, call in calls.items():
                start = clock()
                call()
                times[name].append((clock() - start) * 1e3)
    ms = {name: statistics.median(t) for name, t in times.items()}
    return {
        "q_heads": q_heads,
        "kv_heads": KV_HEADS,
        "tokens": tokens,
        "history_tokens": history.tokens,
        "ms": {name: round(t, 3) for name, t in ms.items()},
        "times_kivi": {name: round(t / ms["kivi"], 2) for name, t in ms.items() if name != "kivi"},
        "largest_error": errors,
        "not_measured": missing,
        "ran": f"{cache.ran.kernel} ({cache.ran.layout})",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Decode attention of backend onnxruntime against torch eager")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--q-heads", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out")
    options = parser.parse_args()
    os.environ[kernels.THREADS] = str(options.threads)
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    results = [compare(heads, tokens, options.rounds, clock) for tokens in options.tokens for heads in options.q_heads]
    versions = {"onnxruntime": onnxruntime.__version__, "torch": torch.__version__}
    text = json.dumps({"threads": options.threads, "clock": clock.__name__, "versions": versions, "results": results}, indent=1)
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
