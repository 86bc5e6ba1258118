"""Models that `kivi compile` writes run with ONNX Runtime alone, say what they are, and give the numbers of the official packer."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import kivi
from kivi.backends.onnxruntime import runs
from kivi.cli import cli
from kivi.conformance import bounds, model, oracle
from kivi.conformance.inputs import golden
from tests.spec_text import CLAUSES

STAGED = """kivi_spec = 1
numerics = "staged"
[key]
metadata = "input"
[value]
metadata = "input"
[packing]
layout = "official_int32"
"""

#: A process without kivi: runs a model on the arrays of a file, writes what comes out to another.
ALONE = """
import sys
sys.modules["kivi"] = None
import numpy as np
import onnxruntime
model, given, out = sys.argv[1:]
session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
arrays = np.load(given)
names = [o.name for o in session.get_outputs()]
results = dict(zip(names, session.run(names, {i.name: arrays[i.name] for i in session.get_inputs()})))
np.savez(out, **results)
loaded = sorted(m for m in sys.modules if m.split(".")[0] in ("kivi", "xdsl", "torch"))
print(loaded, session.get_modelmeta().custom_metadata_map["kivi.spec_hash"])
"""


def written(tmp_path, entry, *options):
    path = tmp_path / f"{entry}.onnx"
    arguments = ["compile", "--backend", "onnxruntime", "--entry", entry, "--emit", "onnx", "--out", str(path), *options]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    return path


def alone(tmp_path, path, **arrays):
    """(what the model makes of the arrays in a process without kivi, the hash it carries)."""
    given, out = tmp_path / "given.npz", tmp_path / "out.npz"
    np.savez(given, **arrays)
    command = [sys.executable, "-W", "error", "-c", ALONE, str(path), str(given), str(out)]
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    modules, carried = done.stdout.split()
    assert modules == "['kivi']"  # the name that is blocked
    return dict(np.load(out)), carried


@pytest.mark.parametrize("which", ["key", "value"])
def test_a_model_alone_packs_as_the_official_implementation_does(which, tmp_path):
    spec = tmp_path / "staged.toml"
    spec.write_text(STAGED)
    data, case = golden("official_quant"), f"normal.B1H2T128D128G32.{which[0]}"
    x = data[f"{case}.input"]
    path = written(tmp_path, f"{which}.encode", "--spec", str(spec), "--head-dim", str(x.shape[3]))
    got, carried = alone(tmp_path, path, x=x.reshape(-1, *x.shape[2:]))
    assert carried == kivi.load_spec(spec).hash
    code, scale, origin = (data[f"{case}.b2.{name}"] for name in ("code", "scale", "mn"))
    whole = data[f"{case}.b2.degenerate_group"] == 0
    assert whole.all()
    assert np.array_equal(got["words"].view(np.int32).reshape(code.shape), code)
    for name, official in (("scale", scale), ("origin", origin)):
        ours = got[name].reshape(*x.shape[:2], *got[name].shape[1:])
        assert np.array_equal(np.swapaxes(ours, -1, -2) if which == "key" else ours, official)  # which takes keys transposed
    assert got["clamped"].tolist() == [0]


def test_models_alone_attend(tmp_path):
    """Two models, one after the other on the bytes of a cache: within the bound of the float64 oracle."""
    shape = ("--head-dim", "40", "--q-heads", "4", "--kv-heads", "2", "--spec", "teaching", "--dtype", "float32")
    cache = kivi.KVCache("teaching", backend="onnxruntime", batch=1, q_heads=4, kv_heads=2, head_dim=40, dtype="float32")
    naive, rng = model.NaiveCache(cache.spec, 1), np.random.default_rng(0)
    k, v = (rng.normal(0.2, 1.0, (1, 2, 22, 40)).astype(np.float32) for _ in range(2))
    q = rng.normal(0, 1, (1, 4, 22, 40)).astype(np.float32)
    cache.attend(q, k, v)
    naive.attend(q, k, v, [22])
    given = (q[:, :, :1], np.zeros((1, 2, 1, 40), np.float32), np.zeros((1, 2, 1, 40), np.float32))
    reading = cache._reading(cache._state, np.zeros(1, np.int64), np.ones(1, np.int64))
    run = runs.runs(reading, 0, given[1], given[2])[0]
    assert (run.zone, run.first) == ("history", 0)
    carry = {
        "top": np.full((2, 2, 1), -np.inf, np.float32),
        "total": np.zeros((2, 2, 1), np.float32),
        "part": np.zeros((2, 2, 40), np.float32),
    }
    inputs = {**run.inputs, **carry, "q": given[0].reshape(2, 2, 40), "scale": np.float32(cache.geometry.scale)}
    found, _ = alone(tmp_path, written(tmp_path, "cache.history", *shape), **inputs)
    found, _ = alone(tmp_path, written(tmp_path, "cache.output", *shape), total=found["total_out"], part=found["part_out"])
    (seen,) = naive.attend(*given, [1], commit=False)
    seen = model.History(
        seen.queries, *(getattr(seen, n)[:, : run.count] for n in ("key", "key_size", "value", "value_size")), np.array([run.count])
    )
    numerics = bounds.Numerics(accumulate="float32", exp_ulp=2.0)
    for h, exact in enumerate(oracle.attend(seen, cache.geometry.scale)):
        out = found["out"].reshape(4, 1, 40)[h].astype(np.float64)
        assert (np.abs(out - exact.out) <= bounds.output_bound(exact, numerics, "float32").total).all()


def test_a_model_says_what_it_is(tmp_path):
    made = onnx.load(written(tmp_path, "cache.history", "--spec", "kivi-4bit"))
    properties = {p.key: p.value for p in made.metadata_props}
    spec = kivi.load_spec("kivi-4bit")
    assert properties["kivi.spec_hash"] == spec.hash
    assert properties["kivi.spec"] == spec.name
    assert properties["kivi.layout"] == "planes8"
    assert properties["kivi.entry"] == "cache.history"
    for clause in properties["kivi.clauses"].replace(" to ", ", ").split(", "):
        assert clause in CLAUSES


def test_stages():
    def invoke(*arguments):
        return CliRunner().invoke(cli, ["compile", "--backend", "onnxruntime", *arguments])

    listed = invoke("--json")
    assert listed.exit_code == 0
    assert '"cache.history"' in listed.output
    assert "kv.quantize" in invoke("--entry", "key.encode", "--emit", "kv").output
    source = invoke("--entry", "value.decode", "--emit", "source").output
    assert 'opset_import: ["" : 21]' in source
    assert "BitShift" in source
    for arguments, word in ((("--emit", "ptx"), "onnx"), (("--emit", "onnx"), "--out"), (("--target", "sm_90"), "onnx")):
        refused = invoke("--entry", "key.encode", *arguments)
        assert refused.exit_code == 2
        assert word in refused.output + str(refused.stderr)
