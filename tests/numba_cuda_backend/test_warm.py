"""A warm process runs cached kernels under the simulator without the compiler, and without Numba."""

from __future__ import annotations

from tests.simt.warm import check


def test_a_warm_process_imports_no_compiler(tmp_path):
    check("numba_cuda", "simulator", tmp_path)
