"""What a cache remembers: counts, block table and windows, as one frozen value that a step replaces whole (SPEC 4.1, 9.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kivi.backend import Windows


class Lengths(NamedTuple):
    """Token counts of one request; `lengths["tokens"]` reads as `lengths.tokens`. Pending tokens are not counted."""

    tokens: int
    key_sealed: int
    key_residual: int
    value_sealed: int
    value_residual: int

    def __getitem__(self, key: Any) -> Any:
        return getattr(self, key) if isinstance(key, str) else tuple.__getitem__(self, key)

    def keys(self) -> tuple[str, ...]:
        return self._fields


@dataclass(frozen=True)
class State:
    """Everything that changes. int64 arrays [B]; `table` [B, M, 2] holds (page, first token), `pages` rows of it are valid."""

    tokens: np.ndarray
    pending: np.ndarray
    key_sealed: np.ndarray
    value_sealed: np.ndarray
    pages: np.ndarray
    table: np.ndarray
    windows: Windows
    clamped: int = 0

    @property
    def stored(self) -> np.ndarray:
        """Tokens whose rows the cache holds, pending ones included."""
        return self.tokens + self.pending

    def rows(self, b: int) -> list[tuple[int, int, int]]:
        """(page, first token, end) of request b's pages."""
        table = self.table[b, : self.pages[b]].tolist()
        ends = [first for _, first in table[1:]] + [int(self.key_sealed[b])]
        return [(page, first, end) for (page, first), end in zip(table, ends)]

    def open_pages(self, b: int) -> set[int]:
        """Pages of request b that still wait for values: never shared."""
        return {page for page, _, end in self.rows(b) if end > self.value_sealed[b]}
