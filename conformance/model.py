"""The naive cache: a request is a plain list of tokens, and every operation is the sentence of the design that defines it.

No pages, no packing, no windows, and no import of kivi's cache, backend or numerics. A token holds its key and its value,
each either floating (the row as it came) or sealed (codes, with scale and origin spread to one number a channel).
`attend` returns what the float64 oracle needs; `oracle.py` turns that into outputs and bounds.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kivi.conformance import quantizer
from kivi.conformance.quantizer import Rule
from kivi.spec import CacheSpec


@dataclass(frozen=True)
class Sealed:
    """Codes, scale and origin of one token, each [Hkv, D]."""

    codes: np.ndarray
    scale: np.ndarray
    origin: np.ndarray


@dataclass
class Token:
    """One token: `key` and `value` are a row [Hkv, D] of the input dtype, or `Sealed`."""

    key: np.ndarray | Sealed
    value: np.ndarray | Sealed


@dataclass(frozen=True)
class History:
    """What one request's chunk of queries attends to, exactly, in float64.

    queries [Hq, n, D]; key and value [Hkv, T, D], and the same with |scale * code| + |origin| in place of the sum (for a
    floating element, its absolute value); visible [n]: how many tokens each query sees.
    """

    queries: np.ndarray
    key: np.ndarray
    key_size: np.ndarray
    value: np.ndarray
    value_size: np.ndarray
    visible: np.ndarray


@dataclass
class Request:
    """Tokens in order, the two frontiers, and tokens that are not committed yet."""

    tokens: list[Token] = field(default_factory=list)
    pending: list[Token] = field(default_factory=list)
    key_sealed: int = 0
    value_sealed: int = 0
    cropped: bool = False


class NaiveCache:
    """The meaning of `kivi.KVCache`, one Python list a request."""

    def __init__(self, spec: CacheSpec, batch: int) -> None:
        self.spec = spec
        self.requests = [Request() for _ in range(batch)]
        self.clamped = 0

    # -- attend ---------------------------------------------------------------------------------------------------------

    def attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, counts: Sequence[int], commit: bool = True) -> list[History | None]:
        """q [B, Hq, n, D], k and v [B, Hkv, n, D], counts [B]. None for a request with count 0."""
        return [self._attend(request, q[b], k[b], v[b], int(counts[b]), commit) for b, request in enumerate(self.requests)]

    def _attend(self, request: Request, q: np.ndarray, k: np.ndarray, v: np.ndarray, count: int, commit: bool) -> History | None:
        if count == 0:
            return None
        new = [Token(k[:, i].copy(), v[:, i].copy()) for i in range(count)]
        prefill = not request.tokens
        if self.spec.order == "seal_then_attend" and commit and not prefill:
            request.tokens += new
            self._seal(request)
            return history(q[:, :count], request.tokens)
        seen = history(q[:, :count], request.tokens + request.pending + new)
        if commit:
            request.tokens += new
            self._seal(request)
        else:
            request.pending += new
        return seen

    def _seal(self, request: Request) -> None:
        key, value = self.spec.key, self.spec.value
        while len(request.tokens) - request.key_sealed >= key.residual:
            block = request.tokens[request.key_sealed : request.key_sealed + key.residual]
            rows = np.stack([t.key for t in block], 1)  # type: ignore[misc]  # floating, [Hkv, R, D]
            grid = quantizer.quantize_key(rows, Rule.of(self.spec, "key"), key.group)
            self.clamped += grid.clamped
            scale, origin = (quantizer.spread_key(m, key.group, len(block)) for m in (grid.scale, grid.origin))
            for i, token in enumerate(block):
                token.key = Sealed(grid.codes[:, i], scale[:, i], origin[:, i])
            request.key_sealed += key.residual
        while len(request.tokens) - request.value_sealed > value.residual:
            token = request.tokens[request.value_sealed]
            assert isinstance(token.value, np.ndarray)
            grid = quantizer.quantize_value(token.value, Rule.of(self.spec, "value"), value.group)
            self.clamped += grid.clamped
            scale, origin = (quantizer.spread_value(m, value.group, token.value.shape[-1]) for m in (grid.scale, grid.origin))
            token.value = Sealed(grid.codes, scale, origin)
            request.value_sealed += 1

    # -- commit, rollback and edits of the batch ------------------------------------------------------------------------

    def commit(self, n: int | Sequence[int] | None = None) -> None:
        """Keep the first n pending tokens of each request (int, one per request, or all), drop the rest, then seal."""
        for b, request in enumerate(self.requests):
            keep = len(request.pending) if n is None else min(n if isinstance(n, int) else n[b], len(request.pending))
            request.tokens += request.pending[:keep]
            request.pending = []
            self._seal(request)

    def rollback(self) -> None:
        for request in self.requests:
            request.pending = []

    def crop(self, t: int | Sequence[int]) -> None:
        for b, request in enumerate(self.requests):
            length = t if isinstance(t, int) else t[b]
            request.cropped |= length < request.key_sealed and length > 0
            del request.tokens[length:]
            request.key_sealed = min(request.key_sealed, length)
            request.value_sealed = min(request.value_sealed, length)

    def reorder(self, index: Sequence[int]) -> None:
        self.requests = [copy.deepcopy(self.requests[i]) for i in index]

    select = reorder

    def repeat(self, n: int) -> None:
        """Each request n times, neighbours (as `repeat_interleave`)."""
        self.requests = [copy.deepcopy(r) for r in self.requests for _ in range(n)]

    def fork(self) -> NaiveCache:
        return copy.deepcopy(self)

    def reset(self) -> None:
        self.requests = [Request() for _ in self.requests]

    # -- what can be read ------------------------------------------------------------------------------------------------

    def lengths(self, b: int) -> dict[str, int]:
        r = self.requests[b]
        tokens = len(r.tokens)
        return {
            "tokens": tokens,
            "key_sealed": r.key_sealed,
            "key_residual": tokens - r.key_sealed,
            "value_sealed": r.value_sealed,
            "value_residual": tokens - r.value_sealed,
        }

    def pending(self, b: int) -> int:
        return len(self.requests[b].pending)

    def sealed(self, b: int, which: str) -> Sealed | None:
        """All sealed tokens of one side, each array [Hkv, T, D]; None when there is none."""
        rows = [getattr(t, which) for t in self.requests[b].tokens[: self.lengths(b)[f"{which}_sealed"]]]
        return Sealed(*(np.stack([getattr(r, name) for r in rows], 1) for name in ("codes", "scale", "origin"))) if rows else None

    def residual(self, b: int, which: str) -> np.ndarray | None:
        """Floating rows [Hkv, n, D]; None when there is none."""
        rows = [getattr(t, which) for t in self.requests[b].tokens[self.lengths(b)[f"{which}_sealed"] :]]
        return np.stack(rows, 1) if rows else None


def history(queries: np.ndarray, tokens: list[Token]) -> History:
    """The float64 reading of `tokens` for a chunk of queries [Hq, n, D] aligned to the end."""
    n, total = queries.shape[1], len(tokens)
    key, key_size = _exact([t.key for t in tokens])
    value, value_size = _exact([t.value for t in tokens])
    return History(queries.astype(np.float64), key, key_size, value, value_size, np.arange(total - n + 1, total + 1))


def _exact(rows: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    exact, size = [], []
    for row in rows:
        if isinstance(row, Sealed):
            codes, scale, origin = (a.astype(np.float64) for a in (row.codes, row.scale, row.origin))
            exact.append(scale * codes + origin)
            size.append(np.abs(scale * codes) + np.abs(origin))
        else:
            exact.append(row.astype(np.float64))
            size.append(np.abs(exact[-1]))
    return np.stack(exact, 1), np.stack(size, 1)
