"""Backends beside each other: agreement, the place of a first difference, and what is no verdict."""

from __future__ import annotations

import json
import re

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

import kivi
from kivi.cli import cli
from kivi.conformance import Subject, select_cases
from kivi.conformance.audit import Observed, audit, compared, distance, share
from kivi.errors import InputError, UnsupportedError

CASES = ("quantize/ties.*key", "stream/worked*", "attention/worked*")


class OneBitOff(Subject):
    """The last bit of its scales of keys is another."""

    def quantize(self, x, spec, which, layout=None):
        qt = super().quantize(x, spec, which, layout)
        if which == "key":
            qt.scale.view(f"uint{8 * qt.scale.dtype.itemsize}")[...] ^= 1
        return qt


def test_backends_agree():
    found = audit(["reference", "cpu", "onnxruntime"], cases=CASES)
    assert found.ok
    assert list(found.cases) == ["cpu", "onnxruntime"]
    expected = [c.id for c in select_cases("all", "quick", CASES)]
    for compared_ in found.cases.values():
        assert sorted([one.id for one in compared_] + found.left_out) == sorted(expected)
        assert {one.status for one in compared_} == {"same"}
        assert all(one.stored > 0 and one.differing == 0 for one in compared_)
        assert sum(one.outputs for one in compared_) > 0
        assert 0 < max(one.difference for one in compared_) < 1e-5
    data = json.loads(found.to_json())
    assert data["ok"]
    assert data["backends"]["cpu"]["kernels"]
    assert data["backends"]["reference"]["numerics"]["accumulate"] == "float64"


def test_a_difference_is_named():
    found = audit(["reference", OneBitOff(kivi.get_backend("cpu"))], profile="quantize", cases=["quantize/ties.*key"])
    assert not found.ok
    [compared_] = found.cases.values()
    assert {one.status for one in compared_} == {"differs"}
    assert all(one.first_difference.startswith("scale at [0, 0, 0, 0]: ") for one in compared_)
    assert all(0 < one.differing < one.stored for one in compared_)


def test_what_breaks_and_what_is_not_served():
    class Broken(Subject):
        def quantize(self, *arguments, **options):
            raise UnsupportedError("no keys here") if arguments[2] == "key" else RuntimeError("no values here")

    found = audit(["reference", Broken(kivi.get_backend("cpu"))], profile="quantize", cases=["quantize/ties.middle.b2.float32.*"])
    statuses = {one.id.rpartition(".")[2]: (one.status, one.reason) for one in found.cases["cpu:device"]}
    assert statuses == {
        "key": ("unsupported", "this one: UnsupportedError: no keys here"),
        "value": ("errored", "this one: RuntimeError: no values here"),
    }
    assert not found.ok


def test_shapes_dtypes_and_numbers_of_arrays():
    [case] = select_cases("quantize", "quick", ["quantize/ties.middle.b2.float32.key"])
    one = Observed("codes", np.zeros((2, 3), np.uint8), stored=True)
    for other in (np.zeros((3, 2), np.uint8), np.zeros((2, 3), np.int8)):
        found = compared(case, [one], [Observed("codes", other, stored=True)])
        assert (found.status, found.differing) == ("differs", 6)
        assert "codes is uint8(2, 3), codes is" in found.first_difference
    assert compared(case, [one, one], [one]).first_difference == "2 arrays came out of the one, 1 of the other"
    nan = np.array([np.nan, 1.0], np.float32)
    assert compared(case, [Observed("x", nan, True)], [Observed("x", -nan * [1, -1], True)]).status == "differs"  # float64
    assert compared(case, [Observed("x", nan, True)], [Observed("x", np.copysign(nan, [-1, 1]).astype(np.float32), True)]).status == "same"


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_distance(dtype):
    x = np.array([0.0, 1.0, -1.0, np.nan, np.inf], dtype)
    assert distance(x, x) == 0
    assert distance(x[:1], -x[:1]) == 0
    bits = x.view(f"uint{8 * x.dtype.itemsize}")
    assert distance(x[1:3], (bits[1:3] + 3).view(dtype)) == 3
    smallest = np.array([1], bits.dtype).view(dtype)
    assert distance(smallest, -smallest) == 2


def test_share():
    assert share(np.array([4.0, 1.0, np.inf]), np.array([4.0, 2.0, 3.0])) == 0.25
    assert share(np.zeros(2), np.ones(2)) == 1.0
    assert share(np.zeros(2), np.zeros(2)) == 0.0


def test_own_tensors(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {"k": rng.standard_normal((1, 2, 70, 64)).astype(np.float16), "v": rng.standard_normal((1, 1, 5, 64)).astype(np.float32)}
    save_file(tensors, tmp_path / "own.safetensors")
    arguments = [
        "audit",
        "--backend",
        "reference",
        "--backend",
        "cpu",
        "--tensors",
        str(tmp_path / "own.safetensors"),
        "--spec",
        "kivi-4bit",
    ]
    done = CliRunner().invoke(cli, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    assert [(one["id"], one["status"]) for one in json.loads(done.stdout)["cases"]["cpu"]] == [
        ("k.key", "same"),  # 64 of its tokens
        ("k.value", "same"),
        ("v.value", "same"),
    ]
    printed = CliRunner().invoke(cli, arguments)
    assert "cpu beside reference" in printed.output
    save_file({"x": np.zeros((2, 3), np.float32)}, tmp_path / "flat.safetensors")
    (tmp_path / "no.safetensors").write_text("no")
    for file, words in (("flat.safetensors", "tensor 'x' is float32 (2, 3)"), ("no.safetensors", "not a readable safetensors file")):
        done = CliRunner().invoke(cli, [*arguments[:5], "--tensors", str(tmp_path / file)])
        assert done.exit_code == 2
        assert words in done.output + str(done.stderr)


def test_the_command(monkeypatch):
    one = ["--backend", "reference", "--backend", "cpu:device", "--case", "stream/worked.*"]
    done = CliRunner().invoke(cli, ["audit", *one])
    assert done.exit_code == 0, done.output
    assert re.search(r"stream +\d+ +0 +0 +0", done.output)
    assert "2 cases compare two runs" in done.output
    for arguments, words in (
        (["--backend", "cpu"], "two backends or more, each named once, and got cpu"),
        (["--backend", "cpu", "--backend", "cpu"], "two backends or more"),
        (["--backend", "cpu", "--backend", "cpu:device"], "each named once"),
        (["--backend", "cpu", "--backend", "nope"], "nope"),
        ([*one, "--tensors", __file__], "leave one out"),
        ([*one[:4], "--case", "nothing/*"], "nothing/*"),
    ):
        done = CliRunner().invoke(cli, ["audit", *arguments])
        assert done.exit_code == 2
        assert words in done.output + str(done.stderr)


def test_a_difference_is_the_exit_code(monkeypatch):
    import kivi.conformance.audit as module

    monkeypatch.setattr(module, "_subject", lambda name: (OneBitOff if name == "cpu" else Subject)(kivi.get_backend(name)))
    done = CliRunner().invoke(cli, ["audit", "--backend", "reference", "--backend", "cpu", "--case", "quantize/ties.middle.b2.float32.key"])
    assert done.exit_code == 1
    assert "quantize/ties.middle.b2.float32.key: differs: scale at [0, 0, 0, 0]" in done.output


def test_one_backend_under_two_names_is_refused():
    with pytest.raises(InputError, match="two backends or more"):
        audit([kivi.get_backend("cpu"), kivi.get_backend("cpu")])


@pytest.mark.parametrize("wrong", [np.nan, np.inf, "shape"])
def test_outputs_that_no_rounding_makes(wrong):
    class Wrong(Subject):
        """Its caches' outputs have an element that is not finite, or another shape."""

        def cache(self, spec, **geometry):
            cache = super().cache(spec, **geometry)
            attend = cache.attend

            def broken(*arrays, **options):
                out = attend(*arrays, **options)
                if wrong == "shape":
                    return out[..., :1]
                out[..., 0] = wrong
                return out

            cache.attend = broken
            return cache

    found = audit(["reference", Wrong(kivi.get_backend("cpu"))], cases=["attention/zones.steps"])
    [[one]] = found.cases.values()
    assert (one.status, found.ok) == ("differs", False)
    assert "output of event 0" in one.first_difference


def test_nothing_compared_is_not_good():
    found = audit(["reference", "cpu"], cases=["quantize/overflow.origin.reject*"])
    assert found.cases["cpu"]
    assert sum(one.stored + one.outputs for one in found.cases["cpu"]) == 0
    assert not found.ok


def test_an_error_is_not_hidden_by_what_is_not_served():
    [case] = select_cases("quantize", "quick", ["quantize/ties.middle.b2.float32.key"])
    found = compared(case, UnsupportedError("not here"), RuntimeError("broken"))
    assert (found.status, found.reason) == ("errored", "this one: RuntimeError: broken")
