"""Importing kivi is cheap: it loads no framework, no compiler and no GPU package. (How long it takes: benchmarks/import_time.py.)"""

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "xdsl", "cupy", "numba", "llvmlite", "triton", "onnx", "onnxruntime", "transformers", "matplotlib", "jinja2", "pyopencl"}


def modules_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `statement`; warnings are errors there."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("statement", ["import kivi", "import kivi; kivi.load_spec('kivi-2bit')", "import kivi.cli"])
def test_loads_nothing_heavy(statement):
    loaded = modules_after(statement)
    assert "kivi" in loaded
    assert loaded & HEAVY == set()


def test_the_check_sees_a_heavy_module():
    assert modules_after("import matplotlib") & HEAVY == {"matplotlib"}


def test_the_command_line_starts_without_numpy_where_it_needs_none():
    code = "from kivi.cli import cli; cli.get_command(None, 'conform'); import kivi.cli, sys; assert 'kivi.cli.memory' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
