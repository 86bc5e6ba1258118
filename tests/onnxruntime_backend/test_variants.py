"""A new bit width, group, mix or layout, written only in a TOML file, works with no file of the repository touched."""

from __future__ import annotations

import pytest

from tests.variants import VARIANTS, check


@pytest.mark.parametrize("name", VARIANTS)
def test_a_spec_is_all_it_takes(name, tmp_path):
    check(name, "onnxruntime", "device", tmp_path)
