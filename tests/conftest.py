"""Settings of all tests: hypothesis draws the same examples in every run and measures no time; a test that names no backend means the
reference."""

import gc
import os

from hypothesis import settings

os.environ["KIVI_BACKEND"] = "reference"

# Lowering makes many small objects that live briefly; looking for cycles among them every 700 costs an eighth of the time.
gc.set_threshold(100_000, 50, 50)

settings.register_profile("kivi", deadline=None, derandomize=True, database=None)
settings.load_profile("kivi")


def pytest_collection_modifyitems(items):
    """Conformance first: its files take minutes, and a worker that began one last would leave the others idle."""
    items.sort(key=lambda item: "test_conformance" not in item.nodeid)
