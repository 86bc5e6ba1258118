"""Bug reports from users of GPU kernels, on the generated ones."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch

import kivi
from kivi import plugins
from kivi.backends.triton import driver
from kivi.errors import BackendError, DeviceError
from kivi.ir.interp.memory import AccessError
from kivi.ir.tile import Tile
from kivi.ir.xdsl import parse
from tests.ir.test_tile import execute

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

REFERENCE = kivi.get_backend("reference")
VERSIONS = {"torch": torch.__version__, "triton": "none"}


@pytest.fixture(scope="module")
def triton():
    return kivi.get_backend("triton", mode="interpreter")


@pytest.mark.parametrize("bad", [[np.nan, 1, 2, 3], [np.nan, np.inf, 2, 3], [np.nan] * 4, [-np.inf, 1, 2, 3]], ids=str)
def test_a_bad_group_is_poisoned_and_no_other(triton, bad):
    """Field report 8: the policy is the spec's, whatever a maximum makes of NaN."""
    spec = kivi.load_spec("teaching").override({"nonfinite": "propagate", "value.group": 4, "key.group": 4})
    x = np.arange(32, dtype=np.float32).reshape(1, 2, 4, 4)
    x[0, 1, 2] = bad
    got, want = (be.quantize(x, spec, "value") for be in (triton, REFERENCE))
    for name in ("scale", "origin", "words"):
        assert getattr(got, name).tobytes() == getattr(want.repack(got.layout) if name == "words" else want, name).tobytes()
    assert np.isnan(got.origin).sum() == 1
    assert np.isnan(got.dequantize()[0, 1, 2]).all()


@pytest.mark.parametrize(("bits", "top"), [(2, 1.548828125), (4, 1.5859375), (2, 148.0), (4, 1073.0), (8, 2112.0)])
def test_ties_are_divided(triton, bits, top):
    """Field reports 9 and 11: engineered midpoints, where a reciprocal or an approximate division takes the other neighbour.

    That the GPU divides with rounding is read off its code: tests/triton_backend/test_offline.py.
    """
    steps = 2**bits - 1
    ties = (np.arange(steps, dtype=np.float64) + 0.5) * (np.float64(top) / steps)
    near = np.concatenate([np.nextafter(ties.astype(np.float32), np.float32(way)) for way in (0, np.inf)] + [ties.astype(np.float32)])
    x = np.zeros((1, 1, len(near), 4), np.float32)
    x[0, 0, :, 1], x[0, 0, :, 2], x[0, 0, :, 3] = near, top, near[::-1]
    spec = kivi.load_spec("teaching").override({"value.bits": bits, "value.group": 4, "key.group": 4, "value.metadata": "float32"})
    got, want = (be.quantize(x, spec, "value") for be in (triton, REFERENCE))
    assert np.array_equal(got.codes(), want.codes())
    assert len(np.unique(got.codes())) == steps + 1


class TestTwoDevices:
    """Field report 41: a kernel is launched on the device of its tensors, whatever the current one is."""

    def backend(self, device):
        return driver.TritonBackend(plugins.get("triton").manifest, "device", device, VERSIONS)

    def test_tensors_of_another_device_are_refused(self):
        for x in (torch.zeros(1, 1, 8, 8), np.zeros((1, 1, 8, 8), np.float32)):
            with pytest.raises(DeviceError, match=r"on (the )?cpu, but backend 'triton' runs on cuda:1"):
                self.backend("cuda:1").adopt(x, "x")

    @pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
    def test_launches_are_under_the_device_of_the_backend(self, device, monkeypatch):
        seen: list[str] = []

        @contextmanager
        def guard(which):
            seen.append(f"enter {which}")
            yield
            seen.append(f"leave {which}")

        class Kernel:
            def __getitem__(self, programs):
                return lambda *given, **options: seen.append("launch")

        class Loaded:
            launch = Kernel()
            generated = type("Generated", (), {"launch": {"threads": 64, "fusion": 0}})

        monkeypatch.setattr(torch.cuda, "device", guard)
        self.backend(device).launch(Loaded, (1,), [1, 2])
        assert seen == [f"enter {device}", "launch", f"leave {device}"]


def test_two_programs_with_one_word_are_found():
    """Field report 47: an interpreter runs programs one after another and hides a race, so the interpreter of the dialect looks for it."""
    text = """
    func.func @pack(%w: !tile.ptr<i32>) {
      %i = tile.program_id 0
      %two = arith.constant 2 : i32
      %word = arith.divui %i, %two : i32
      %old = tile.load %w[%word] : !tile.ptr<i32>, i32 -> i32
      %new = arith.addi %old, %i : i32
      tile.store %new, %w[%word] : i32, !tile.ptr<i32>, i32
      func.return
    }"""
    with pytest.raises(AccessError, match="programs 0 and 1 write one byte of 'w'"):
        execute(parse(text, Tile), "pack", (4,), {"w": np.zeros(2, np.int32)})


def test_a_compiler_that_fails_is_heard(triton, monkeypatch):
    """Its words and the path of the source are in the error, and the cache is as it was."""
    cache = kivi.KVCache("teaching", batch=1, q_heads=1, kv_heads=1, head_dim=8, dtype="float32", backend=triton)

    def broken(self, loaded, programs, arguments):
        raise RuntimeError("ptxas fatal: Unresolved extern function; command: ptxas -v kernel.ptx")

    monkeypatch.setattr(driver.TritonBackend, "launch", broken)
    with pytest.raises(BackendError, match=r"kernel 'tail' .* 'triton' \(mode interpreter, cpu\).*ptxas fatal.*ptxas -v.*source is .*\.py"):
        cache.attend(*(np.zeros((1, 1, 3, 8), np.float32) for _ in range(3)))
    assert cache.lengths(0).tokens == 0
