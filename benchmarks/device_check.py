"""What `make device-check` runs on a machine with a GPU: conformance of every GPU backend on the device, then the decode benchmark.

    python benchmarks/device_check.py --out DIR [--mode device|interpreter] [--size quick|full]

Writes DIR/conformance-BACKEND.json and DIR/decode.json. Rates are medians over interleaved rounds; each is also a ratio to the device's
own copy bandwidth and to torch's fp16 attention over a full-precision cache of the same length, measured in the same rounds. With
`--mode interpreter` the same code runs at toy sizes on the CPU, to rehearse it; such figures say nothing about a device, and the files
carry the mode.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import kivi
from kivi import plugins
from kivi.errors import KiviError

GPU_BACKENDS = ("triton",)
SHAPES = {
    "device": [(tokens, bits, group) for tokens in (32768, 131072) for bits in (2, 4) for group in (1, 4)],
    "interpreter": [(300, 2, 1), (300, 4, 4)],
}
HEAD_DIM, KV_HEADS, ROUNDS, REPEATS = 128, 8, 15, 10


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


def filled(spec: Any, backend: Any, tokens: int, group: int, device: str) -> Any:
    """A cache with `tokens` random tokens."""
    cache = kivi.KVCache(spec, batch=1, q_heads=KV_HEADS * group, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="float16", backend=backend)
    generator = torch.Generator(device).manual_seed(0)
    done = 0
    while done < tokens:
        n = min(4096, tokens - done)
        q, k, v = (
            torch.randn(1, h, n, HEAD_DIM, dtype=torch.float16, device=device, generator=generator)
            for h in (KV_HEADS * group, KV_HEADS, KV_HEADS)
        )
        zero = torch.zeros_like(q)
        cache.attend(zero, k, v, commit=False)  # appending is what is wanted here, not a prefill's attention
        cache.commit()
        done += n
    return cache


def decode(backend: Any, mode: str) -> list[dict[str, Any]]:
    """Rates of one attention step, without appending, for each shape."""
    device = backend.device
    size = 1 << (28 if mode == "device" else 16)
    a, b = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    out = []
    for tokens, bits, group in SHAPES[mode]:
        spec = kivi.load_spec("kivi-2bit").override({"key.bits": bits, "value.bits": bits})
        cache = filled(spec, backend, tokens, group, device)
        q = torch.randn(1, KV_HEADS * group, 1, HEAD_DIM, dtype=torch.float16, device=device)
        k = v = torch.randn(1, KV_HEADS, 1, HEAD_DIM, dtype=torch.float16, device=device)
        state = cache._state
        one = state.tokens * 0 + 1
        reading = cache._reading(state, one, one)
        full_k, full_v = (torch.randn(1, KV_HEADS, tokens, HEAD_DIM, dtype=torch.float16, device=device) for _ in range(2))
        folded = q.view(1, KV_HEADS, group, HEAD_DIM)
        calls = {
            "kivi": partial(backend.attend, reading, q, k, v),
            "sdpa_fp16": partial(torch.nn.functional.scaled_dot_product_attention, folded, full_k, full_v),
            "copy": partial(b.copy_, a),
        }
        for call in calls.values():
            call()
        rounds = ROUNDS if mode == "device" else 1
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                times[name].append(clock(call, device, REPEATS))
        seconds = {name: statistics.median(t) for name, t in times.items()}
        packed = cache.memory()["formula"]
        copy_rate = 2 * size / seconds["copy"]
        out.append(
            {
                "tokens": tokens,
                "bits": bits,
                "q_heads_per_kv_head": group,
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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mode", default="device")
    parser.add_argument("--size", default="quick")
    parser.add_argument("--case", action="append", help="only conformance cases that match this pattern")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    failed, results = 0, {}
    for name in GPU_BACKENDS:
        backend = kivi.get_backend(name, mode=chosen.mode)
        report = plugins.conformance_runner()(name, mode=chosen.mode, profile="all", size=chosen.size, cases=chosen.case)
        (chosen.out / f"conformance-{name}.json").write_text(report.to_json())
        print(name, chosen.mode, report.summary, flush=True)
        failed += not report.ok
        results[name] = decode(backend, chosen.mode)
    device = torch.cuda.get_device_name() if chosen.mode == "device" else "cpu"
    (chosen.out / "decode.json").write_text(json.dumps({"version": 1, "mode": chosen.mode, "device": device, "results": results}, indent=2))
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KiviError as error:
        sys.exit(f"device-check: {error}")
