"""The suites of `kivi bench` at toy sizes: who is measured, that figures follow from one another, and what is said of those left out.

Nothing here depends on how long anything takes.
"""

import subprocess
import sys

import numpy as np
import pytest

from kivi.bench import attention, caches, generate, kernel_clock, machine, overhead, peers, step
from kivi.bench.result import Shape, Stat
from kivi.errors import InputError

pytestmark = pytest.mark.usefixtures("toy")
SHAPE = Shape(1, 4, 2, 64, 256)


def check(stat: Stat) -> None:
    assert 0 < stat.q1 <= stat.median <= stat.q3
    assert stat.samples >= 1


def test_attention_measures_everyone_and_its_ratios_follow_from_the_medians(plan):
    given = plan()
    run = attention.measure(SHAPE, 1, given)
    times = {t.contender: t.seconds for t in run.timings}
    torches = [f"{kind} {dtype}" for dtype in peers.DTYPES for kind in ("sdpa", "matmul")]
    shared = [f"sdpa {dtype} enable_gqa" for dtype in peers.DTYPES]
    assert set(times) == {"kivi-2bit", "kivi-2bit attention", "kivi-2bit resident", *torches, *shared}
    assert given.missing == []
    for t in run.timings:
        check(t.seconds)
        assert t.copies * t.bytes >= machine.ROTATION * machine.last_level_cache() or t.contender.startswith("kivi-2bit")
        assert t.of_bandwidth == pytest.approx(t.bytes / t.seconds.median / run.read_rate)
    assert run.baseline == min((f"sdpa {dtype}" for dtype in peers.DTYPES), key=lambda name: times[name].median)
    for name, ratio in run.speedup.items():
        assert ratio == pytest.approx(times[run.baseline].median / times[name].median)
    (line,) = run.rooflines
    assert line.packed_bytes == 2 * 2 * 128 * 64 * 2 * 3 // 8  # two pages: two heads, R tokens, D channels, two sides, 3 bits an element
    # Key rows since the last seal at 256, and the R values that are always floating; the step itself is not in the cache yet.
    assert line.floating_bytes == (attention.HALF_BLOCK + 128) * 2 * 64 * 4
    assert line.of_roofline == pytest.approx(max(line.of_bandwidth, line.of_kernel))


def test_resident_attention_reads_one_page_of_each_request(plan):
    given, shape = plan(), Shape(2, 2, 1, 64, 512)
    cache = caches.filled(given.specs[0], shape, given.backend, "float32", 512 + 64)
    same, large = caches.resident(cache, shape), caches.reading(cache)
    assert same.pages.tolist() == large.pages.tolist() == [4, 4]
    for b in range(2):
        assert len(set(same.table[b, :4, 0].tolist())) == 1
        assert len(set(large.table[b, :4, 0].tolist())) == 4
        assert same.table[b, :4, 1].tolist() == large.table[b, :4, 1].tolist()
    assert same.table[0, 0, 0] != same.table[1, 0, 0]


def test_random_contents_are_those_of_a_cache_that_attended(plan):
    """Filling without attention leaves out nothing but attention."""
    given = plan()
    cache = caches.filled(given.specs[0], SHAPE, given.backend, "float32", 300)
    q, k, v = caches.rows(SHAPE, 300, "float32")
    other = caches.filled(given.specs[0], SHAPE, given.backend, "float32", 0)
    other.attend(q, k, v)
    assert cache.lengths(0) == other.lengths(0)
    for which in ("key", "value"):
        assert np.array_equal(cache.sealed(0)[which][0][1].codes(), other.sealed(0)[which][0][1].codes())
        assert np.array_equal(cache.residual(0)[which], other.residual(0)[which])
    assert cache.backend.attend.__name__ == "attend"  # the backend's own again


@pytest.mark.parametrize("cached", [1 << 12, 1 << 19, 1 << 30])
def test_a_period_of_steps_meets_every_phase_once(plan, monkeypatch, cached):
    monkeypatch.setattr(machine, "last_level_cache", lambda: cached)
    given = plan()
    stepper = next(step.own(given.specs[0], Shape(1, 2, 2, 64, 256), given))
    count = len(stepper.copies)
    assert (count == 1) == (cached == 1 << 12)
    phases = []
    for i in range(step.PERIOD):
        call = stepper.copies[i % count]
        phases.append(call.func.__self__.lengths(0)["tokens"] % step.PERIOD)
        call()
    assert sorted(phases) == list(range(step.PERIOD))


def test_step_reports_missing_peers(plan):
    given = plan()
    run = step.measure(SHAPE, 1, given)
    assert [t.contender for t in run.timings] == ["kivi-2bit", "kivi-2bit append", "DynamicCache"]
    for t in run.timings:
        check(t.step)
        assert t.step.samples == step.PERIOD
        assert t.slowest >= t.mean > 0
    mean = {t.contender: t.mean for t in run.timings}
    assert run.speedup == {"kivi-2bit": pytest.approx(mean["DynamicCache"] / mean["kivi-2bit"])}
    reasons = {n.contender: n.reason for n in given.missing}
    assert set(reasons) == {"QuantizedCache quanto 2-bit", "QuantizedCache hqq 2-bit"}
    assert "no_such.quanto is not installed" in reasons["QuantizedCache quanto 2-bit"]
    assert "kivi-kvcache[bench]" in reasons["QuantizedCache hqq 2-bit"]


def test_a_peer_that_fails_is_a_reason(plan, monkeypatch):
    def broken():
        raise OSError("its library does not load")

    monkeypatch.setattr(peers, "caches", lambda config: {"DynamicCache": broken})
    given = plan()
    assert list(step.others(SHAPE, given)) == []
    assert [(n.suite, n.contender, n.reason) for n in given.missing] == [("step", "DynamicCache", "OSError: its library does not load")]


def test_without_memory_for_the_peers_there_is_no_baseline(plan, monkeypatch):
    monkeypatch.setattr(machine, "available_memory", lambda: 1000)
    given = plan()
    run = attention.measure(SHAPE, 1, given)
    assert (run.baseline, run.speedup) == (None, {})
    assert {n.contender for n in given.missing} == {f"torch {dtype}" for dtype in peers.DTYPES}
    assert all("GiB" in n.reason for n in given.missing)


def test_overhead_is_the_step_minus_its_kernels(plan):
    """Of a backend whose kernels pass none of the known boundaries this would report nothing: the hook must follow the backend."""
    given = plan(overhead=Shape(1, 2, 2, 64, 256))
    runs = list(overhead.measure(1, given))
    assert given.missing == []
    assert [r.arrays for r in runs] == ["numpy", "torch"]
    for r in runs:
        assert r.boundary
        for stat in (r.step, r.kernels, r.overhead):
            check(stat)
            assert stat.samples == 128
        assert r.kernels.median < r.step.median


def test_a_backend_without_kernels_has_no_overhead(plan):
    given = plan("reference", overhead=Shape(1, 2, 2, 64, 256))
    assert list(overhead.measure(1, given)) == []
    assert "generates no kernels" in given.missing[0].reason


def test_the_kernel_clock_leaves_nothing_behind(plan):
    backend = plan().backend
    launch = type(backend).launch
    threads = sys.modules["kivi.backends.cpu.threads"]
    before = threads.run
    with kernel_clock.kernel_clock(backend, lambda: 0.0):
        assert threads.run is not before
    assert threads.run is before
    assert type(backend).launch is launch


@pytest.mark.parametrize("boundary", ["threads.run", "launch"])
def test_the_kernel_clock_counts_launches(plan, monkeypatch, boundary):
    """With a clock that ticks once a look, each call that passes a boundary lasts one tick."""
    import itertools

    wanted = [path for path in kernel_clock.BOUNDARIES if boundary == ".".join(path)]
    monkeypatch.setattr(kernel_clock, "BOUNDARIES", wanted)
    given, ticks = plan(), itertools.count()
    cache = caches.filled(given.specs[0], SHAPE, given.backend, "float32", 256)
    q, k, v = caches.rows(SHAPE, 1, "float32")
    before = type(given.backend).launch
    with kernel_clock.kernel_clock(given.backend, lambda: float(next(ticks))) as kernels:
        given.backend.attend(caches.reading(cache), q.numpy(), k.numpy(), v.numpy())
    assert kernels.boundary == boundary
    assert kernels.seconds[0] >= 1
    assert type(given.backend).launch is before


def test_generate_measures_a_model_with_every_cache(plan, monkeypatch):
    import torch

    from kivi.bench import decoders
    from kivi.demo import model as weights
    from tests.transformers.tiny import FAMILIES, model_of

    monkeypatch.setattr(weights, "load", lambda dtype: (model_of(FAMILIES["llama"]()), None))
    monkeypatch.setattr(decoders, "prompt", lambda tokenizer, context: torch.arange(context + 1)[None] % 50)
    given = plan(new=32)
    run = generate.measure(64, 1, given)
    assert [t.contender for t in run.timings] == ["kivi-2bit", "DynamicCache"]
    for t in run.timings:
        check(t.token)
        assert t.cache_bytes > 0
        assert t.tokens_per_second > 0
    assert run.timings[0].ran["backend"] == "cpu"
    assert run.timings[1].ran is None
    rate = {t.contender: t.tokens_per_second for t in run.timings}
    assert run.speedup == {"kivi-2bit": {"DynamicCache": pytest.approx(rate["kivi-2bit"] / rate["DynamicCache"])}}
    assert {n.contender for n in given.missing} == {peers.quantized_name("quanto"), peers.quantized_name("hqq"), *decoders.LLAMA}

    some = plan(new=32, models=("DynamicCache",))
    assert [t.contender for t in generate.measure(64, 1, some).timings] == ["DynamicCache"]
    assert {n.reason for n in some.missing} == {"it was not asked for"}


@pytest.mark.parametrize(("context", "new"), [(100, 32), (32, 32), (64, 33), (8192, 32)])
def test_generate_refuses_what_not_everyone_can_do(context, new):
    with pytest.raises(InputError, match=r"^(context|new) = "):
        generate.checked(context, new)


def test_threads_are_set_and_set_back(monkeypatch):
    import os

    import torch

    monkeypatch.setattr(machine, "processors", lambda: 2)
    monkeypatch.delenv(machine.THREADS, raising=False)
    before = torch.get_num_threads()
    with machine.using(2):
        assert (torch.get_num_threads(), os.environ[machine.THREADS]) == (2, "2")
    assert torch.get_num_threads() == before
    assert machine.THREADS not in os.environ
    with pytest.raises(InputError, match="threads = 3"), machine.using(3):
        pass


def test_the_peak_is_that_of_the_process_itself():
    """A child of a large process does not count what its parent holds."""
    ballast = np.ones(200 << 20, np.uint8)
    code = "import kivi.bench.machine as m, sys; now, most = m.resident(); x = bytearray(64 << 20); print(now, most, m.resident()[1])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    now, most, later = map(int, done.stdout.split())
    assert now <= most < 200 << 20 <= ballast.nbytes
    assert later >= now + (64 << 20)


def test_the_last_level_cache_is_read_from_the_system(monkeypatch):
    monkeypatch.undo()
    assert (1 << 18) <= machine.last_level_cache() <= (1 << 34)
    assert machine.copies(machine.last_level_cache()) == machine.ROTATION
