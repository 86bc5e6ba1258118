"""kivi inside other libraries. Each integration is a module of the same name, imported on first use."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "transformers":
        return importlib.import_module("kivi.integrations.transformers")
    raise AttributeError(f"module 'kivi.integrations' has no attribute {name!r}")
