"""Several threads: each its own cache, of one process's kernels, or forks of one cache."""

from __future__ import annotations

import gc
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import kivi
from kivi.kernels import library
from kivi.kernels.library import Library
from kivi.kernels.request import decoding
from kivi.layout import named_layout

SHAPE = {"batch": 1, "q_heads": 1, "kv_heads": 1, "head_dim": 2, "dtype": "float32"}


@pytest.fixture
def impatient():
    """Threads change places after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_kernels_are_lowered_one_at_a_time(impatient, tmp_path, monkeypatch):
    """The builders of the IR change a class of their library while they are open."""
    monkeypatch.setenv("KIVI_CACHE_DIR", str(tmp_path))
    specs = [kivi.load_spec("kivi-2bit").override({"value.bits": bits, "value.group": group}) for bits in (1, 2, 4, 8) for group in (8, 16)]
    requests = [decoding(spec, "value", named_layout("hp16"), 32, "float16", "float32") for spec in specs]

    def texts(pool_size: int) -> list[str]:
        library = Library(f"threads{pool_size}", {}, lambda kernel, request: printed(kernel), lambda generated, source: None)
        with ThreadPoolExecutor(pool_size) as pool:
            return [loaded.generated.source for loaded in pool.map(library.get, requests)]

    assert texts(8) == texts(1)


def printed(kernel):
    return kivi.jit.Generated(kernel.name, str(kernel.module), {}, [], "")


def rows(fork: int, step: int) -> list[np.ndarray]:
    rng = np.random.default_rng([fork, step])
    return [rng.standard_normal((1, 1, 4, 2)).astype(np.float32) for _ in range(3)]


def stored(cache, fork: int) -> list[bytes]:
    for step in range(40):
        cache.attend(*rows(fork, step))
    sealed = cache.sealed(0)
    return [part.tobytes() for side in ("key", "value") for _, qt in sealed[side] for part in (qt.codes(), np.asarray(qt.scale))]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_forks_in_threads_are_independent(backend, impatient):
    """They share a pool of pages (SPEC 4.7.3)."""
    expected = [stored(kivi.KVCache("teaching", backend=backend, **SHAPE), fork) for fork in range(4)]
    for _ in range(8):
        root = kivi.KVCache("teaching", backend=backend, **SHAPE)
        forks = [root.fork() for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(stored, forks, range(4))) == expected


def test_collecting_a_fork_while_pages_are_lent(monkeypatch):
    """The collector may run anywhere, also where the pool is locked, and a fork that it finds gives its pages back."""

    class Holder:
        pass

    root = kivi.KVCache("teaching", backend="reference", **SHAPE)
    x = np.ones((1, 1, 40, 2), np.float32)
    root.attend(x, x, x)
    pool, grow, holder = root.pool, root.pool._grow, Holder()
    holder.cache, holder.itself = root.fork(), holder  # a cycle, so that only the collector finds it
    held = sum(pool.refs)

    def growing(missing: int) -> None:
        gc.collect()
        grow(missing)

    monkeypatch.setattr(pool, "_grow", growing)
    gc.disable()
    try:
        del holder
        [page] = ThreadPoolExecutor(1).submit(pool.lend, 1).result(timeout=60)
    finally:
        gc.enable()
    assert pool.refs[page] == 1
    assert sum(pool.refs) - 1 < held


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_of_the_process_while_another_thread_lowers():
    held, release = threading.Event(), threading.Event()

    def lower() -> None:
        with library._ONE_AT_A_TIME:
            held.set()
            release.wait(60)

    thread = threading.Thread(target=lower)
    thread.start()
    assert held.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(0 if library._ONE_AT_A_TIME.acquire(timeout=10) else 1)
    release.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
