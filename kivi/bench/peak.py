"""Peak resident memory of generating with one cache, a process a contender.

    python -m kivi.bench.peak --contender NAME --specs SPEC,... --backend NAME ...

runs one and prints a JSON object; `measure` runs all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

from kivi.bench import machine
from kivi.bench.plan import Plan
from kivi.bench.result import Peak


def measure(threads: int, plan: Plan, tick: Callable[[], None] = lambda: None) -> list[Peak]:
    """Every contender at `plan.peak_context`, one after another."""
    from kivi.bench import decoders, generate

    generate.checked(plan.peak_context, generate.TURN)
    out = []
    for name in decoders.names(plan):
        reason, found = decoders.why_left_out(name, plan), None
        if not reason:
            found, reason = _process(name, threads, plan)
        if found is None:
            plan.note("peak", name, f"context {plan.peak_context}", reason)
        else:
            out.append(found)
        tick()
    return out


def _process(name: str, threads: int, plan: Plan) -> tuple[Peak | None, str]:
    """What a contender's process found, or why it found nothing."""
    given: dict[str, str | int] = {"contender": name, "backend": plan.backend.name, "mode": plan.backend.mode, "dtype": plan.dtype}
    given |= {"context": plan.peak_context, "chunk": plan.prefill_chunk, "threads": threads}
    command = [sys.executable, "-m", "kivi.bench.peak", *(word for key, value in given.items() for word in (f"--{key}", str(value)))]
    specs = json.dumps([spec.to_dict() for spec in plan.specs])
    done = subprocess.run([*command, "--specs", specs], capture_output=True, text=True, check=False, env=_environment(threads))
    if done.returncode:
        return None, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return Peak(**json.loads(done.stdout.strip().splitlines()[-1])), ""


def _environment(threads: int) -> dict[str, str]:
    return {**os.environ, machine.THREADS: str(threads), "OMP_NUM_THREADS": str(threads)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Peak resident memory of generating with one cache.")
    for name in ("contender", "specs", "backend", "mode", "dtype"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("context", "chunk", "threads"):
        parser.add_argument(f"--{name}", required=True, type=int)
    given = parser.parse_args(arguments)

    from transformers import AutoTokenizer

    import kivi
    from kivi.bench import decoders, generate
    from kivi.demo import model as weights
    from kivi.spec import from_dict

    specs = tuple(from_dict(fields) for fields in json.loads(given.specs))
    plan = Plan(specs, kivi.get_backend(given.backend, mode=given.mode), dtype=given.dtype)
    room = given.context + 1 + generate.TURN
    make: Callable[[], decoders.Decoder]
    with machine.using(given.threads):
        if given.contender in decoders.LLAMA:  # which has weights of its own
            tokenizer = AutoTokenizer.from_pretrained(weights.prepare(), local_files_only=True)
            ids = decoders.prompt(tokenizer, given.context)
            make = partial(decoders.Llama, given.contender, ids, room + decoders.SPARE, given.threads)
        else:
            model, tokenizer = weights.load(given.dtype)
            ids = decoders.prompt(tokenizer, given.context)
            make = decoders.contenders(plan, model, ids, room, given.threads)[given.contender]
        loaded, _ = machine.resident()
        decoder = make()
        decoder.take_turn()
        decoder.prefill(given.chunk)
        decoder.decode(generate.TURN)
    found = {"contender": given.contender, "weights": decoder.weights, "context": given.context, "new": generate.TURN}
    found |= {"prefill_chunk": given.chunk, "threads": given.threads, "loaded": loaded, "peak": machine.resident()[1]}
    sys.stdout.write(json.dumps({**found, "cache_bytes": decoder.cache_bytes()}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
