"""Decoding with a whole model: tokens a second of `generate()` at a context, contenders in turn.

Every contender reads the same text and then writes `new` tokens in turns of TURN. With new = R there is one seal of keys within. The time
is that of the whole call, its set-up shared by the tokens of a turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kivi.bench import decoders, machine
from kivi.bench.plan import Plan
from kivi.bench.result import Generated, GenerateRun, Stat
from kivi.errors import InputError

TURN = 32  # tokens
WARM = 2  # tokens that are not timed: what is compiled once is no part of a step
LIMIT = 8192  # of the model's context
KEPT = 32  # the quantized caches of transformers take a first chunk of a multiple of their group


def checked(context: int, new: int) -> None:
    """Raises `InputError` for lengths that not every contender can hold."""
    if context < 2 * KEPT or context % KEPT:
        raise InputError(f"context = {context}: take a multiple of {KEPT} from {2 * KEPT} on, which is what quanto can quantize")
    if new < TURN or new % TURN:
        raise InputError(f"new = {new}: contenders take turns of {TURN} tokens; take a multiple of it")
    if context + 1 + WARM + new > LIMIT:
        raise InputError(f"context = {context} and new = {new}: the model holds {LIMIT} tokens in all")


def clock_for(threads: int) -> tuple[str, Callable[[], float]]:
    """With one thread the CPU time of the process, since llama.cpp has threads of its own."""
    return ("process_time", time.process_time) if threads == 1 else ("perf_counter", time.perf_counter)


def measure(context: int, threads: int, plan: Plan, tick: Callable[[], None] = lambda: None) -> GenerateRun:
    """All contenders at one context."""
    from kivi.demo import model as weights

    checked(context, plan.new)
    model, tokenizer = weights.load(plan.dtype)
    ids, (name_of_clock, clock) = decoders.prompt(tokenizer, context), clock_for(threads)
    ready: list[decoders.Decoder] = []
    prefill: dict[str, float] = {}
    times: dict[str, list[float]] = {}
    with machine.using(threads):
        for name, make in decoders.contenders(plan, model, ids, context + 1 + WARM + plan.new, threads).items():
            own = name in {spec.name for spec in plan.specs}
            reason = decoders.why_left_out(name, plan)
            if reason:
                plan.note("generate", name, f"context {context}", reason)
                continue
            try:
                decoder = make()
                decoder.take_turn()
                start = clock()
                decoder.prefill(plan.prefill_chunk)
                prefill[name] = clock() - start
                decoder.decode(WARM)
            except Exception as error:
                if own:
                    raise
                plan.note("generate", name, f"context {context}", f"{type(error).__name__}: {error}")
                continue
            ready.append(decoder)
            times[name] = []
            tick()
        for _ in range(plan.new // TURN):
            for decoder in ready:
                decoder.take_turn()
                start = clock()
                decoder.decode(TURN)
                times[decoder.name].append((clock() - start) / TURN)
                tick()
    rate = {name: len(t) / sum(t) for name, t in times.items()}
    timings = [Generated(d.name, d.weights, prefill[d.name], rate[d.name], Stat.of(times[d.name]), d.cache_bytes(), d.ran()) for d in ready]
    own_names = [spec.name for spec in plan.specs if spec.name in rate]
    speedup = {name: {peer: rate[name] / r for peer, r in rate.items() if peer not in own_names} for name in own_names}
    return GenerateRun("SmolLM2-135M-Instruct", context, plan.new, plan.prefill_chunk, threads, name_of_clock, timings, speedup)
