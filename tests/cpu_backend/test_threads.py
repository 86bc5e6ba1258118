"""Threads: results do not depend on their number, their number follows torch, and a fork has helpers of its own."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

import kivi
from kivi.backends.cpu import threads
from kivi.errors import InputError


def outputs(count: int, monkeypatch) -> bytes:
    monkeypatch.setenv("KIVI_CPU_THREADS", str(count))
    monkeypatch.setattr(threads, "WORTH", 0.0)
    rng = np.random.default_rng(5)
    cache = kivi.KVCache("kivi-2bit", batch=2, q_heads=4, kv_heads=2, head_dim=64, backend="cpu")
    out = [cache.attend(*(rng.standard_normal((2, h, n, 64)).astype(np.float16) for h in (4, 2, 2))) for n in (300, 1, 2)]
    return b"".join(o.tobytes() for o in out)


def test_results_do_not_depend_on_threads(monkeypatch):
    assert outputs(1, monkeypatch) == outputs(3, monkeypatch)


def test_as_many_as_torch_uses(monkeypatch):
    monkeypatch.delenv("KIVI_CPU_THREADS", raising=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert threads.count() == 1
        torch.set_num_threads(2)
        assert threads.count() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("value", ["0", "-1", "two"])
def test_a_bad_number_is_refused(value, monkeypatch):
    monkeypatch.setenv("KIVI_CPU_THREADS", value)
    with pytest.raises(InputError, match="KIVI_CPU_THREADS"):
        threads.count()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_fork_works(monkeypatch):
    """Field reports of hanging workers: threads of the parent do not exist in the child."""
    expected = outputs(2, monkeypatch)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, b"same" if outputs(2, monkeypatch) == expected else b"different")
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    assert os.read(read, 16) == b"same"


@pytest.mark.parametrize(("name", "value"), [("KIVI_CPU_TARGET", "avx9"), ("KIVI_CPU_THREADS", "abc")])
def test_a_bad_setting_is_said(name, value, monkeypatch, caplog):
    """`auto` goes on with another backend, with a warning; strict does not."""
    monkeypatch.delenv("KIVI_BACKEND")
    monkeypatch.setenv(name, value)
    with caplog.at_level("WARNING", "kivi"):
        chosen = kivi.select("kivi-2bit")
    assert chosen.backend.name != "cpu"
    assert [r.state for r in chosen.rejected if r.name == "cpu"] == ["bad setting"]
    assert f"{name} = {value!r}" in caplog.text
    with pytest.raises(kivi.errors.UnsupportedError, match=f"strict: .*{name} = {value!r}"):
        kivi.select("kivi-2bit", strict=True)
