"""`make device-check`, rehearsed without a GPU: every backend goes through the conformance runner and the decode benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODES = {"triton": "interpreter", "cupy": "shim", "numba_cuda": "simulator"}
CASE = "attention/zones.steps"  # one stands for all, which other tests run


def run(out: Path, backend: str, *options: str) -> tuple[int, str, dict]:
    """Exit status, what was printed, and what `decode.json` says of a backend, as the Makefile runs it."""
    command = [sys.executable, "benchmarks/device_check.py", "--out", str(out), "--backend", backend, "--case", CASE, *options]
    environment = os.environ | {"PYTHONPATH": ".", "CUDA_VISIBLE_DEVICES": ""}  # whatever this machine has
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (out / "decode.json").is_file(), done.stderr
    return done.returncode, done.stdout, json.loads((out / "decode.json").read_text())["results"][backend]


@pytest.mark.parametrize("backend", ["cupy", *(pytest.param(b, marks=pytest.mark.slow) for b in ("triton", "numba_cuda"))])
def test_rehearsal(backend, tmp_path):
    status, printed, found = run(tmp_path, backend, "--rehearse")
    assert status == 0, printed
    report = json.loads((tmp_path / f"conformance-{backend}.json").read_text())
    assert [(case["id"], case["status"]) for case in report["cases"]] == [(CASE, "passed")]
    assert report["mode"] == found["mode"] == MODES[backend]
    assert [(s["tokens"], s["bits"], s["q_heads_per_kv_head"]) for s in found["shapes"]] == [(300, 2, 1), (300, 4, 4)]
    for shape in found["shapes"]:
        assert {"kivi", "sdpa_fp16", "copy", "step"} <= shape["seconds"].keys()
        assert all(seconds > 0 for seconds in shape["seconds"].values())


def test_a_backend_without_a_device_fails_and_says_why(tmp_path):
    status, printed, found = run(tmp_path, "numba_cuda")
    assert status == 1
    assert "numba_cuda" in found["unavailable"]
    assert found["unavailable"] in printed
