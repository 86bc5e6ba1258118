"""The backends that ship with kivi, one folder each; conformance/PORTING.md tells how to add one.

The package can be called: `kivi.backends()` lists what is installed (see `kivi.selection.backends`).
"""

from __future__ import annotations

import sys
from types import ModuleType

from kivi.selection import BackendInfo, backends


class _Listing(ModuleType):
    def __call__(self) -> list[BackendInfo]:
        return backends()


sys.modules[__name__].__class__ = _Listing
