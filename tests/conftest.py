"""Settings of all tests: hypothesis draws the same examples in every run and measures no time."""

from hypothesis import settings

settings.register_profile("kivi", deadline=None, derandomize=True, database=None)
settings.load_profile("kivi")


def pytest_collection_modifyitems(items):
    """Conformance first: its files take minutes, and a worker that began one last would leave the others idle."""
    items.sort(key=lambda item: "test_conformance" not in item.nodeid)
