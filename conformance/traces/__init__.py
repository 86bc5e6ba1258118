"""The cases, one family a file. `all_cases()` lists them, the most telling ones first.

A family is a module with `cases() -> list[Case]`. Its docstring says what it is about; to add one, write the module and name it
in `FAMILIES`.
"""

from __future__ import annotations

import importlib
from functools import cache

from kivi.conformance.case import Case

#: In order of running: small and sharp first, so that a wrong backend is stopped early.
FAMILIES = (
    "worked",
    "ties",
    "degenerate",
    "zones",
    "views",
    "overflow",
    "nonfinite",
    "refused",
    "layouts",
    "memory",
    "shapes",
    "long",
    "logits",
    "corners",
    "ragged",
    "pending",
    "edits",
    "shared",
    "limits",
    "schedule",
    "grids",
    "isolation",
    "official",
    "matrix",
    "recorded",
)


@cache
def all_cases() -> tuple[Case, ...]:
    """Every case of both sizes. Ids are unique."""
    cases = [case for family in FAMILIES for case in importlib.import_module(f"{__name__}.{family}").cases()]
    ids = [case.id for case in cases]
    assert len(ids) == len(set(ids)), sorted({i for i in ids if ids.count(i) > 1})
    return tuple(cases)
