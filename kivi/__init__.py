"""kivi: KIVI-quantized KV caches on any hardware (arXiv:2402.02750).

Keys are quantized per channel, values per token, 2 bits by default, with a floating-point window of recent tokens and no
calibration. See README.md for a first example and spec/SPEC.md for the definition of every number.

Names are imported on first use, so that `import kivi` loads nothing but this file.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "CacheSpec": "kivi.spec",
    "load_spec": "kivi.spec",
    "presets": "kivi.spec",
    "schema": "kivi.spec",
    "Layout": "kivi.layout",
    "layouts": "kivi.layout",
    "QuantizedTensor": "kivi.quantized",
    "KVCache": "kivi.cache",
    "Backend": "kivi.backend",
    "BackendInfo": "kivi.selection",
    "Selection": "kivi.selection",
    "get_backend": "kivi.selection",
    "select": "kivi.selection",
    "KiviError": "kivi.errors",
}

__all__ = ["__version__", "backends", "errors", "integrations", *_HOME]

if TYPE_CHECKING:
    from kivi import errors as errors
    from kivi import integrations as integrations
    from kivi.backend import Backend as Backend
    from kivi.cache import KVCache as KVCache
    from kivi.errors import KiviError as KiviError
    from kivi.layout import Layout as Layout
    from kivi.layout import layouts as layouts
    from kivi.quantized import QuantizedTensor as QuantizedTensor
    from kivi.selection import BackendInfo as BackendInfo
    from kivi.selection import Selection as Selection
    from kivi.selection import get_backend as get_backend
    from kivi.selection import select as select
    from kivi.spec import CacheSpec as CacheSpec
    from kivi.spec import load_spec as load_spec
    from kivi.spec import presets as presets
    from kivi.spec import schema as schema


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    if name in ("backends", "errors", "integrations"):  # kivi.backends is a package that can be called: kivi.backends()
        return importlib.import_module(f"kivi.{name}")
    raise AttributeError(f"module 'kivi' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
