"""A backend that fails in the middle of a step: the error is kivi's and says where, the cache is as it was, and can be moved."""

from __future__ import annotations

import numpy as np
import pytest

import kivi
from kivi.errors import BackendError, CapacityError, DeviceLostError, StateError
from tests.vendors.stack import Vendor

SHAPE = {"batch": 2, "q_heads": 2, "kv_heads": 1, "head_dim": 64, "dtype": "float32"}
SPEC = kivi.load_spec("kivi-2bit").override({"key.residual": 16, "value.residual": 16, "key.group": 8, "value.group": 8})
OOM_TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB"
LOST_TEXT = "CUDA error: an illegal memory access was encountered"


class OutOfMemoryError(RuntimeError):
    """Named as torch's and CuPy's."""


def rows(rng, n):
    return [rng.standard_normal((2, heads, n, 64), np.float32) for heads in (2, 1, 1)]


def contents(cache):
    """All that is stored, as bytes, whatever the backend."""
    out = []
    for b in range(cache.batch):
        out.append(cache.lengths(b))
        for which, segments in cache.sealed(b).items():
            for first, qt in segments:
                parts = (qt.repack("official_int32").words, qt.scale, qt.origin)
                out.append((which, first, *(np.asarray(a).tobytes() for a in parts)))
        out += [np.asarray(a).tobytes() for a in cache.residual(b).values()]
    return out


@pytest.fixture
def cache(install):
    install(Vendor("acme", self_check=False))
    made = kivi.KVCache(SPEC, backend="acme", **SHAPE)
    rng = np.random.default_rng(0)
    made.attend(*rows(rng, 40))
    made.attend(*rows(rng, 1))
    return made


FAULTS = {
    "launch": (RuntimeError("CUDA error: invalid configuration argument"), BackendError, "failed in attend"),
    "memory": (OutOfMemoryError(OOM_TEXT), CapacityError, "has no memory for attend"),
    "host memory": (MemoryError("cannot allocate 2 GiB"), CapacityError, "has no memory for attend"),
    "lost": (RuntimeError(LOST_TEXT), DeviceLostError, "lost its device in attend"),
    "bus": (RuntimeError("GPU 0 has fallen off the bus"), DeviceLostError, "lost its device in attend"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("when", ["fault", "fault_after_append"])
def test_the_cache_is_as_it_was_and_moves(cache, fault, when):
    error, kind, words = FAULTS[fault]
    before, rng = contents(cache), np.random.default_rng(1)
    given = rows(rng, 20)  # seals pages on both sides
    setattr(cache.backend, when, error)
    with pytest.raises(kind) as caught:
        cache.attend(*given)
    message = str(caught.value)
    assert type(caught.value) is kind
    assert caught.value.__cause__ is error
    for word in ("backend 'acme' (mode device, gpu:0)", words, str(error), "the cache is as it was"):
        assert word in message
    assert contents(cache) == before
    cache.to("reference")
    assert contents(cache) == before
    fresh = kivi.KVCache(SPEC, backend="reference", **SHAPE)
    again = np.random.default_rng(0)
    fresh.attend(*rows(again, 40))
    fresh.attend(*rows(again, 1))
    np.testing.assert_array_equal(cache.attend(*given), fresh.attend(*given))


def test_it_goes_on_where_it_was_when_the_fault_is_over(cache):
    given = rows(np.random.default_rng(1), 1)
    cache.backend.fault = OutOfMemoryError(OOM_TEXT)
    with pytest.raises(StateError):  # a `CapacityError` is one: the state does not allow the call
        cache.attend(*given)
    cache.backend.fault = None
    assert cache.attend(*given).shape == (2, 2, 1, 64)
    assert cache.lengths(0).tokens == 42


def test_memory_that_cannot_be_read_any_more(cache, tmp_path):
    before = contents(cache)
    cache.backend.unreadable = RuntimeError(LOST_TEXT)
    for move in (lambda: cache.to("reference"), lambda: cache.save(tmp_path / "cache.safetensors")):
        with pytest.raises(DeviceLostError, match="cannot be read any more: go on in a new process, from a file") as caught:
            move()
        assert "backend 'acme' (mode device, gpu:0) lost its device" in str(caught.value)
    assert not (tmp_path / "cache.safetensors").exists()
    assert cache.backend.name == "acme"
    cache.backend.unreadable = None
    assert contents(cache) == before


def test_the_target_of_a_move_is_named_when_it_is_the_one_that_fails(cache, install):
    before = contents(cache)
    install(Vendor("other", self_check=False))
    target = kivi.get_backend("other")

    def full(shape, dtype):
        raise OutOfMemoryError(OOM_TEXT)

    target.zeros = full
    with pytest.raises(CapacityError, match=r"backend 'other' \(mode device, gpu:0\) has no memory for the move"):
        cache.to(target)
    assert (cache.backend.name, contents(cache)) == ("acme", before)


def test_an_error_of_a_generated_kernel_names_it():
    """What a launcher raises comes wrapped with the kernel's name and source; its kind is seen through the wrapping."""
    backend = kivi.get_backend("cpu")
    cache = kivi.KVCache(SPEC, backend=backend, **SHAPE)
    cache.attend(*rows(np.random.default_rng(0), 40))
    before, faults = contents(cache), (OutOfMemoryError(OOM_TEXT), RuntimeError(LOST_TEXT), RuntimeError("bad argument"))
    for error, kind in zip(faults, (CapacityError, DeviceLostError, BackendError)):

        def launch(loaded, programs, arguments, error=error):
            raise error

        backend.launch = launch
        with pytest.raises(kind, match=r"kernel '[a-z_]+' failed on backend 'cpu'") as caught:
            cache.attend(*rows(np.random.default_rng(1), 3))
        del backend.launch
        assert type(caught.value) is kind
        assert "its source is" in str(caught.value)
        assert contents(cache) == before


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of Triton's interpreter, where a number overflows on purpose
def test_a_device_that_is_lost_between_captured_steps():
    """Their flags are read later, and it shows then; the error is kivi's whatever the cache is asked."""
    torch = pytest.importorskip("torch")
    backend = kivi.get_backend("triton", mode="interpreter")
    cache = kivi.KVCache(SPEC, backend=backend, **SHAPE)
    q, k, v = (torch.from_numpy(a) for a in rows(np.random.default_rng(0), 1))
    step = cache.capture(q, k, v)
    for _ in range(3):
        step()
    read = backend.to_host

    def lost(a):
        raise RuntimeError(LOST_TEXT)

    backend.to_host = lost
    for _ in range(2):
        with pytest.raises(DeviceLostError, match=r"backend 'triton' \(mode interpreter, cpu\) lost its device in captured steps"):
            cache.lengths(0)
    backend.to_host = read
    assert cache.lengths(0).tokens == 3


def test_ran_says_what_served_which_lengths(cache):
    served = cache.ran.served
    assert [(b.tokens, b.group, b.head_dim, b.batch) for b in served] == [(128, 2, 64, 2)]
    assert set(served.values()) == {("acme", "device", "gpu:0", "acme kernel", "lanes32")}
    rng = np.random.default_rng(2)
    cache.attend(*rows(rng, 100))
    cache.to("reference")
    cache.attend(*rows(rng, 200))
    assert {b.tokens: s.backend for b, s in cache.ran.served.items()} == {128: "acme", 256: "reference", 512: "reference"}
    twin = cache.fork()
    cache.crop(10)
    cache.select([0])
    cache.attend(*(a[:1] for a in rows(rng, 1)))
    assert {(b.tokens, b.batch): s.backend for b, s in cache.ran.served.items()} == {
        (128, 2): "acme", (256, 2): "reference", (512, 2): "reference", (128, 1): "reference",
    }  # fmt: skip
    assert len(twin.ran.served) == 3
    assert cache.ran["mode"] == "device"


def test_a_loaded_cache_was_served_by_nobody_yet(cache, tmp_path):
    cache.save(tmp_path / "cache.safetensors")
    loaded = kivi.KVCache.load(tmp_path / "cache.safetensors", backend="reference")
    assert loaded.ran.served == {}
    loaded.attend(*rows(np.random.default_rng(3), 1))
    assert [s.backend for s in loaded.ran.served.values()] == ["reference"]
