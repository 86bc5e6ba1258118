"""Settings of all tests: hypothesis draws the same examples in every run and measures no time."""

from hypothesis import settings

settings.register_profile("kivi", deadline=None, derandomize=True, database=None)
settings.load_profile("kivi")
