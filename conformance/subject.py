"""What is under test: a backend and the cache class that runs on it.

The suite reaches both only through a `Subject`, so a test can put a deliberately wrong backend, or a cache with a wrong
schedule, in their place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kivi
from kivi.spec import CacheSpec


class Subject:
    """A backend under test. Subclass it, or pass `cache_class`, to test another cache."""

    def __init__(self, backend: Any, cache_class: Any = None) -> None:
        self.backend = backend
        self.cache_class = cache_class or kivi.KVCache

    @property
    def name(self) -> str:
        return self.backend.name

    def quantize(self, x: Any, spec: CacheSpec, which: str, layout: str | None = None) -> Any:
        """A `QuantizedTensor`."""
        return self.backend.quantize(x, spec, which, layout=layout)

    def cache(self, spec: CacheSpec, **geometry: Any) -> Any:
        """A fresh cache; keywords as of `kivi.KVCache`."""
        return self.cache_class(spec, backend=self.backend, **geometry)

    def load(self, path: str | Path, spec: CacheSpec) -> Any:
        """A cache from a file that `save` wrote."""
        return self.cache_class.load(path, spec=spec, backend=self.backend)
