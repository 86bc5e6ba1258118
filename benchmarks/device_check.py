"""What `make device-check` runs on a machine with a GPU: conformance of every GPU backend on the device, then the decode benchmark.

    python benchmarks/device_check.py --out DIR [--rehearse] [--size quick|full] [--backend NAME]... [--case PATTERN]...

Writes DIR/conformance-BACKEND.json and DIR/decode.json. Rates are medians over interleaved rounds; each is also a ratio to the device's
own copy bandwidth and to torch's fp16 attention over a full-precision cache of the same length, measured in the same rounds. `step` is a
whole decode step with its append and seals, `captured` the same step replayed (`KVCache.capture`). A backend that cannot run on the machine
is named with the reason, and the check fails. With `--rehearse` the same code runs at toy sizes on the CPU, in each backend's mode
without a GPU; such figures say nothing about a device, and the files carry the mode.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import kivi
from kivi import plugins
from kivi.errors import KiviError

#: Backend -> the mode in which it is rehearsed.
GPU_BACKENDS = {"triton": "interpreter", "cupy": "shim", "numba_cuda": "simulator"}
ROUNDS, REPEATS = 15, 10


@dataclass(frozen=True)
class Shape:
    """Of a cache of one request: tokens, bits of keys and values, query heads that share a KV head, and the model's heads."""

    tokens: int
    bits: int
    group: int
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group


SHAPES = {
    "device": [Shape(tokens, bits, group) for tokens in (32768, 131072) for bits in (2, 4) for group in (1, 4)],
    "rehearsal": [Shape(300, 2, 1, kv_heads=1, head_dim=32), Shape(300, 4, 4, kv_heads=1, head_dim=32)],
}


def clock(call: Any, device: str, repeats: int) -> float:
    """Seconds of one call, by device events where there is a device."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000 / repeats


def randoms(*heads: int, shape: Shape, tokens: int, device: str, generator: Any = None) -> list[Any]:
    """A random tensor [1, h, tokens, D] in half precision for each h."""
    return [torch.randn(1, h, tokens, shape.head_dim, dtype=torch.float16, device=device, generator=generator) for h in heads]


def filled(spec: Any, backend: Any, shape: Shape, device: str) -> Any:
    """A cache with as many random tokens as the shape says."""
    heads = {"q_heads": shape.q_heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    cache = kivi.KVCache(spec, batch=1, **heads, dtype="float16", backend=backend)
    generator = torch.Generator(device).manual_seed(0)
    done = 0
    while done < shape.tokens:
        n = min(4096, shape.tokens - done)
        q, k, v = randoms(shape.q_heads, shape.kv_heads, shape.kv_heads, shape=shape, tokens=n, device=device, generator=generator)
        zero = torch.zeros_like(q)
        cache.attend(zero, k, v, commit=False)  # appending is what is wanted here, not a prefill's attention
        cache.commit()
        done += n
    return cache


def decode(backend: Any) -> list[dict[str, Any]]:
    """Rates of one attention step without appending, and times of whole steps, for each shape."""
    on_device = backend.mode == "device"
    device = backend.device if on_device else "cpu"
    size = 1 << (28 if on_device else 16)
    a, b = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    out = []
    for shape in SHAPES["device" if on_device else "rehearsal"]:
        spec = kivi.load_spec("kivi-2bit").override({"key.bits": shape.bits, "value.bits": shape.bits})
        cache = filled(spec, backend, shape, device)
        q, k, v = randoms(shape.q_heads, shape.kv_heads, shape.kv_heads, shape=shape, tokens=1, device=device)
        state = cache._state
        one = state.tokens * 0 + 1
        reading, native = cache._reading(state, one, one), [backend.adopt(x, "q, k or v") for x in (q, k, v)]
        full_k, full_v = randoms(shape.kv_heads, shape.kv_heads, shape=shape, tokens=shape.tokens, device=device)
        folded = q.view(1, shape.kv_heads, shape.group, shape.head_dim)
        calls = {
            "kivi": partial(backend.attend, reading, *native),
            "sdpa_fp16": partial(torch.nn.functional.scaled_dot_product_attention, folded, full_k, full_v),
            "copy": partial(b.copy_, a),
            "step": partial(cache.fork().attend, q, k, v),
        }
        if backend.can_capture:
            calls["captured"] = cache.fork().capture(q, k, v)
        for call in calls.values():
            call()
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS if on_device else 1):
            for name, call in calls.items():
                times[name].append(clock(call, device, REPEATS))
        seconds = {name: statistics.median(t) for name, t in times.items()}
        packed = cache.memory()["formula"]
        copy_rate = 2 * size / seconds["copy"]
        out.append(
            {
                "tokens": shape.tokens,
                "bits": shape.bits,
                "q_heads_per_kv_head": shape.group,
                "kv_heads": shape.kv_heads,
                "head_dim": shape.head_dim,
                "seconds": seconds,
                "packed_bytes": packed,
                "GB_per_s": packed / seconds["kivi"] / 1e9,
                "copy_GB_per_s": copy_rate / 1e9,
                "share_of_copy_bandwidth": packed / seconds["kivi"] / copy_rate,
                "times_faster_than_sdpa_fp16": seconds["sdpa_fp16"] / seconds["kivi"],
            }
        )
        print(json.dumps(out[-1]), flush=True)
    return out


def check(name: str, mode: str, chosen: argparse.Namespace) -> tuple[bool, Any]:
    """(conforms, rates) of one backend; its report goes to a file."""
    try:
        backend = kivi.get_backend(name, mode=mode)
    except KiviError as error:
        print(f"{name}: {error}", flush=True)
        return False, {"unavailable": str(error)}
    report = plugins.conformance_runner()(name, mode=mode, profile="all", size=chosen.size, cases=chosen.case)
    (chosen.out / f"conformance-{name}.json").write_text(report.to_json())
    print(name, mode, report.summary, flush=True)
    return report.ok, {"mode": mode, "shapes": decode(backend)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, at toy sizes")
    parser.add_argument("--size", default="quick")
    parser.add_argument("--backend", action="append", choices=GPU_BACKENDS, help="only this one")
    parser.add_argument("--case", action="append", help="only conformance cases that match this pattern")
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    device = "cpu" if chosen.rehearse else torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    good, results = True, {}
    for name in chosen.backend or GPU_BACKENDS:
        conforms, results[name] = check(name, GPU_BACKENDS[name] if chosen.rehearse else "device", chosen)
        good = good and conforms
        text = json.dumps({"version": 3, "device": device, "results": results}, indent=2)
        (chosen.out / "decode.json").write_text(text)
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KiviError as error:
        sys.exit(f"device-check: {error}")
