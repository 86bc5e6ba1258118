"""Decode attention of backend `cpu` against torch's scaled_dot_product_attention over full-precision caches, in interleaved rounds.

    python benchmarks/cpu_attention.py [--threads N] [--tokens T...] [--bits B...] [--q-heads H...] [--rounds R] [--out FILE]

Prints JSON: medians in milliseconds, ratios within one run, and beside them

    packed_gb_s     packed bytes of the history read a second
    read_gb_s       what a loop that only reads gets, with the same threads, in the same rounds
    resident        the time of the same work on one page that stays in the first cache: the share of it that memory does not cost

With one thread the clock is this thread's CPU time, which other processes on the machine disturb less; with more it is the wall clock.
`kivi` is a whole `cache.attend` of one token among the others, `step` the same step after step, `host` what that takes beyond its kernels.
Heads that share a KV head are folded into the query length for torch, which is its fastest way (`enable_gqa` is timed too).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import kivi
from kivi.backends.cpu.recording import Recording

HEAD_DIM, KV_HEADS = 128, 8
READ_BYTES = 1 << 28


def filled(bits: int, q_heads: int, tokens: int) -> kivi.KVCache:
    """A cache of `tokens` random tokens; they are appended without attending, which would take a time that grows with their square."""
    spec = kivi.load_spec("kivi-2bit").override({"key.bits": bits, "value.bits": bits})
    cache = kivi.KVCache(spec, batch=1, q_heads=q_heads, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="float32", backend="cpu")
    be, rng = cache.backend, np.random.default_rng(0)
    attend = be.attend
    be.attend = lambda reading, q, k, v: np.zeros_like(q)  # type: ignore[method-assign]
    try:
        for start in range(0, tokens, 2048):
            cache.attend(*rows(rng, q_heads, min(2048, tokens - start)))
    finally:
        be.attend = attend  # type: ignore[method-assign]
    return cache


def rows(rng: np.random.Generator, q_heads: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v of n tokens."""
    q, k, v = (rng.standard_normal((1, heads, n, HEAD_DIM), np.float32) for heads in (q_heads, KV_HEADS, KV_HEADS))
    return q, k, v


def resident(cache: kivi.KVCache, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Callable[[], Any]:
    """The attention of one step with every page of the table the first one."""
    one = np.ones(1, np.int64)
    be: Any = cache.backend
    reading = cache._reading(cache._state, one, one)
    counts, closed = be.counts(reading)
    table = be.table(reading).copy()
    table[:, :, 0] = table[:, :1, 0]
    shares = be.shares_of(cache.pool.format, q, closed)
    return lambda: be.attention(cache.pool, reading.windows, table, counts, shares, reading.scale, q, k, v)


def reader() -> Callable[[], Any]:
    """A kernel that reads READ_BYTES and adds them up."""
    from kivi.backends.cpu import compile as compiler
    from kivi.backends.cpu.kernels import Launch, printed
    from kivi.ir.tile import PtrType
    from kivi.ir.vector_build import constant, kernel, loop, program_id
    from kivi.ir.xdsl import i32, i64
    from kivi.passes.tensors import Kernel

    block, lanes, unroll = 1 << 18, 16, 8  # elements of a program

    def body(x: Any, o: Any) -> None:
        first = program_id(0).to(i64) * block
        start = [constant(0, i32, lanes) for _ in range(unroll)]
        sums = loop(0, block, start, lambda i, *s: [a + x.load(first + i + j * lanes, lanes) for j, a in enumerate(s)], step=lanes * unroll)
        total = sums[0]
        for part in sums[1:]:
            total = total + part
        o.store(program_id(0).to(i64), total.reduce("add"))

    launch = Launch(printed(Kernel("read", kernel("read", {"x": PtrType(i32), "o": PtrType(i32)}, body), [], [])), compiler.host())
    x, o = np.ones(READ_BYTES // 4, np.int32), np.zeros(READ_BYTES // 4 // block, np.int32)
    return lambda: launch((len(o),), [x, o])


def torch_attention(q_heads: int, tokens: int) -> dict[str, Callable[[], Any]]:
    """SDPA by dtype and by how shared heads are handed over."""
    out: dict[str, Callable[[], Any]] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        k, v = (torch.randn(1, KV_HEADS, tokens, HEAD_DIM).to(dtype) for _ in range(2))
        name, group = str(dtype).removeprefix("torch."), q_heads // KV_HEADS
        q = torch.randn(1, KV_HEADS, group, HEAD_DIM).to(dtype)
        out[f"sdpa {name}"] = partial(F.scaled_dot_product_attention, q, k, v)
        if group > 1:
            flat = q.reshape(1, q_heads, 1, HEAD_DIM)
            out[f"sdpa {name} enable_gqa"] = partial(F.scaled_dot_product_attention, flat, k, v, enable_gqa=True)
    return out


class Kernels:
    """Seconds that the kernels of one cache's decode steps took."""

    def __init__(self, cache: kivi.KVCache, clock: Callable[[], float]) -> None:
        self.cache, self.clock, self.seconds = cache, clock, 0.0

    def __enter__(self) -> Kernels:
        self.run = Recording._run

        def timed(*arguments: Any) -> None:
            start = self.clock()
            self.run(*arguments)
            self.seconds += self.clock() - start

        Recording._run = timed  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *error: object) -> None:
        Recording._run = self.run  # type: ignore[method-assign]


def medians(calls: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float], kernels: Kernels) -> dict[str, float]:
    """Milliseconds of each call, all of them in turn in every round, twice, of which the second counts: after another kind of work the
    processor takes about a millisecond to reach its clock. "kernels": what the kernels of "kivi" take of it."""
    times: dict[str, list[float]] = {name: [] for name in (*calls, "kernels")}
    with kernels:
        for _ in range(rounds):
            for name, call in calls.items():
                call()
                kernels.seconds, start = 0.0, clock()
                call()
                times[name].append((clock() - start) * 1e3)
                if name == "kivi":
                    times["kernels"].append(kernels.seconds * 1e3)
    return {name: statistics.median(t) for name, t in times.items()}


def step_times(cache: kivi.KVCache, q_heads: int, clock: Callable[[], float], kernels: Kernels) -> dict[str, float]:
    """Medians of a step and of what it takes beyond its kernels, over as many steps as seal one block of keys."""
    rng, total, host = np.random.default_rng(1), [], []
    steps = [rows(rng, q_heads, 1) for _ in range(cache.spec.key.residual)]
    with kernels:
        for given in steps:
            kernels.seconds, start = 0.0, clock()
            cache.attend(*given)
            spent = clock() - start
            total.append(spent * 1e3)
            host.append((spent - kernels.seconds) * 1e3)
    return {"step": statistics.median(total), "mean step": statistics.mean(total), "host": statistics.median(host)}


def compare(bits: int, q_heads: int, tokens: int, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    cache = filled(bits, q_heads, tokens)
    given = rows(np.random.default_rng(2), q_heads, 1)
    kernels = Kernels(cache, clock)
    calls = {
        "kivi": lambda: cache.attend(*given),
        "resident": resident(cache, *given),
        "read": reader(),
        **torch_attention(q_heads, tokens),
    }
    with torch.inference_mode():
        ms = medians(calls, rounds, clock, kernels)
    packed = int(cache._state.pages.sum()) * cache.pool.format.page_bytes
    rate, bandwidth = packed / ms["kivi"] / 1e6, READ_BYTES / ms["read"] / 1e6
    return {
        "bits": bits,
        "q_heads": q_heads,
        "kv_heads": KV_HEADS,
        "tokens": tokens,
        "ms": {name: round(t, 4) for name, t in {**ms, **step_times(cache, q_heads, clock, kernels)}.items()},
        "times_sdpa": {name: round(t / ms["kivi"], 2) for name, t in ms.items() if name.startswith("sdpa")},
        "packed_gb_s": round(rate, 2),
        "read_gb_s": round(bandwidth, 2),
        "of_bandwidth": round(rate / bandwidth, 3),
        "of_resident_rate": round(ms["resident"] / ms["kivi"], 3),
        "ran": cache.ran.kernel,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 32768])
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--q-heads", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)  # which is what the backend uses too
    clock = time.thread_time if given.threads == 1 else time.perf_counter
    results = [
        compare(bits, heads, tokens, given.rounds, clock) for tokens in given.tokens for bits in given.bits for heads in given.q_heads
    ]
    text = json.dumps({"threads": given.threads, "clock": clock.__name__, "torch": torch.__version__, "results": results}, indent=1)
    if given.out:
        with open(given.out, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
