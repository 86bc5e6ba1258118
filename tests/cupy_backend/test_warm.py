"""A warm process runs cached kernels under the shim without the compiler, and without CuPy."""

from __future__ import annotations

from tests.simt.warm import check


def test_a_warm_process_imports_no_compiler(tmp_path):
    check("cupy", "shim", tmp_path)
