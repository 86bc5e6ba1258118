"""What compilers made, in the cache folder under a hash of all that decided it. Files are renamed into place, so no lock is needed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from kivi import jit


def cached(suffix: str, decides: object, build: Callable[[Path], None]) -> Path:
    """The file for `decides`, whose repr names text, options and tools; `build` writes it to the path it is given if there is none."""
    digest = hashlib.sha256(repr(decides).encode()).hexdigest()[:32]
    path = jit.cache_folder() / "cupy" / f"{digest}{suffix}"
    return path if path.is_file() else jit.put(path, build)
