"""Checks of what callers hand to a cache. Each raises before anything changes and names value, rule and remedy."""

from __future__ import annotations

from typing import Any

import numpy as np

from kivi.arrays import device_of, dtype_name, kind
from kivi.errors import CapacityError, DtypeError, InputError, ShapeError
from kivi.geometry import Geometry


def inputs(q: Any, k: Any, v: Any, g: Geometry, batch: int) -> int:
    """The number of rows n of q [B, Hq, n, D], k [B, Hkv, n, D], v [B, Hkv, n, Dv]. Raises `ShapeError`, `DtypeError`."""
    named = (("q", q, g.q_heads, g.head_dim), ("k", k, g.kv_heads, g.head_dim), ("v", v, g.kv_heads, g.value_head_dim))
    library, n = kind(q, "q"), None
    for name, x, heads, dim in named:
        if kind(x, name) != library or device_of(x, name) != device_of(q, "q"):
            raise DtypeError(
                f"{name} is a {kind(x, name)} array on {device_of(x, name)} and q a {library} array on {device_of(q, 'q')}; "
                f"q, k and v must be of one library and on one device"
            )
        if dtype_name(x) != g.dtype:
            raise DtypeError(f"{name} is {dtype_name(x)}, but the cache was made for {g.dtype}; cast it, or make the cache with that dtype")
        shape = tuple(int(s) for s in x.shape)
        n = shape[2] if n is None and len(shape) == 4 else n
        if shape != (batch, heads, n, dim) or not n:
            raise ShapeError(
                f"{name} has shape {shape}, expected (batch, heads, n, dim) = ({batch}, {heads}, {n or 'n'}, {dim}) with the same "
                f"n >= 1 for q, k and v"
            )
    assert n is not None
    return n


def counts(given: Any, batch: int, n: int) -> np.ndarray:
    """Real tokens of each request, int64 [B]."""
    if given is None:
        return np.full(batch, n, np.int64)
    out = integers(given, "counts")
    if out.shape != (batch,):
        raise ShapeError(f"counts has shape {out.shape}; give one count for each of {batch} requests")
    wrong = np.flatnonzero((out < 0) | (out > n))
    if len(wrong):
        raise ShapeError(f"counts[{wrong[0]}] = {out[wrong[0]]} is outside 0..{n}, the rows of this call")
    return out


def commit_counts(given: Any, pending: np.ndarray) -> np.ndarray:
    """Pending tokens to keep, int64 [B]: an int keeps min(n, pending) of each."""
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and given > int(pending.max(initial=0))):
        return pending.copy()
    out = integers(given, "n")
    if out.ndim == 0:
        if out < 0:
            raise InputError(f"n = {int(out)} pending tokens cannot be kept; give 0 or more")
        return np.minimum(out, pending)
    if out.shape != pending.shape:
        raise ShapeError(f"n has shape {out.shape}; give an int, or one count for each of {len(pending)} requests")
    wrong = np.flatnonzero((out < 0) | (out > pending))
    if len(wrong):
        b = int(wrong[0])
        raise InputError(f"n[{b}] = {out[b]} is outside 0..{pending[b]}, the pending tokens of request {b}")
    return out


def crop_lengths(given: Any, tokens: np.ndarray) -> np.ndarray:
    """Tokens to keep, int64 [B]."""
    out = integers(given, "t")
    if out.ndim and out.shape != tokens.shape:
        raise ShapeError(f"t has shape {out.shape}; give an int, or one length for each of {len(tokens)} requests")
    out = np.broadcast_to(out, tokens.shape).copy()
    wrong = np.flatnonzero((out < 0) | (out > tokens))
    if len(wrong):
        b = int(wrong[0])
        raise InputError(f"crop to t = {out[b]} is outside 0..{tokens[b]}, the tokens of request {b}")
    return out


def indices(given: Any, batch: int) -> list[int]:
    """Request numbers, at least one."""
    out = integers(given, "idx")
    if out.ndim != 1 or not len(out):
        raise ShapeError(f"idx has shape {out.shape}; give a list of at least one request number")
    wrong = out[(out < 0) | (out >= batch)]
    if len(wrong):
        raise InputError(f"idx holds {wrong[0]}, but the cache has requests 0..{batch - 1}")
    return [int(i) for i in out]


def request(given: Any, batch: int) -> int:
    """One request number."""
    out = integers(given, "request")
    if out.ndim or not 0 <= out < batch:
        raise InputError(f"request {given!r} does not exist; the cache has requests 0..{batch - 1}")
    return int(out)


def room(after: np.ndarray, max_tokens: int | None) -> None:
    """Raise `CapacityError` if a request would exceed `max_tokens`."""
    if max_tokens is None:
        return
    full = np.flatnonzero(after > max_tokens)
    if len(full):
        b = int(full[0])
        raise CapacityError(
            f"request {b} would hold {after[b]} tokens, more than max_tokens = {max_tokens}; crop it, or make a larger cache"
        )


def integers(given: Any, name: str) -> np.ndarray:
    """Integers of any library as int64; a torch or CuPy array is copied to the host."""
    try:
        if hasattr(given, "detach"):
            given = given.detach().cpu().numpy()
        elif hasattr(given, "get") and hasattr(given, "dtype"):
            given = given.get()
        out = np.asarray(given)
        if out.dtype.kind not in "iu" and out.size:
            raise TypeError
    except Exception:  # another library may refuse in its own way
        raise DtypeError(f"{name} = {given!r} must be integers of 64 bits at most") from None
    return out.astype(np.int64)


def flag(given: Any, name: str) -> None:
    """Raise `DtypeError` unless `given` is True or False."""
    if not isinstance(given, bool | np.bool_):
        raise DtypeError(f"{name} = {given!r} must be True or False")
