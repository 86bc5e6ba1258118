"""What a save file must satisfy beyond its checksum, so that a foreign or faulty writer cannot bring a broken state (SPEC 10.4).

The checks use nothing but the file's tensors, spec and geometry, and run before anything is built.
"""

from __future__ import annotations

import numpy as np

from kivi.dtypes import metadata_dtype
from kivi.errors import SaveFileError
from kivi.geometry import Geometry
from kivi.layout import Layout
from kivi.pool import PageFormat
from kivi.spec import CacheSpec


def check(tensors: dict[str, np.ndarray], layout: Layout, spec: CacheSpec, g: Geometry) -> None:
    """Raise `SaveFileError` for a tensor that is missing, unknown or of the wrong shape or dtype, for counts that break SPEC
    4.1, and for a block table that breaks SPEC 9.2 or 9.3."""
    metadata = [metadata_dtype(spec, which, g.dtype) for which in ("key", "value")]
    form = PageFormat(spec, layout, g.kv_heads, g.head_dim, g.value_head_dim, *metadata)
    batch = _first(tensors, "tokens")
    if not batch:
        raise SaveFileError("it holds no request, and a cache has at least one")
    for name in ("tokens", "key_sealed", "value_sealed"):
        _expect(tensors, name, "int64", (batch,))
    tokens, key, value = (tensors[name] for name in ("tokens", "key_sealed", "value_sealed"))
    valid = (value >= 0) & (value <= key) & (key <= tokens)
    valid &= (tokens - key < spec.key.residual) & (tokens - value <= spec.value.residual)
    for b in np.flatnonzero(~valid)[:1]:
        raise SaveFileError(
            f"request {b} has tokens, key_sealed, value_sealed = {tokens[b]}, {key[b]}, {value[b]}, which no cache of this spec reaches"
        )
    pages = _first(tensors, "key.words")
    if (g.max_tokens is not None and (tokens > g.max_tokens).any()) or (g.max_pages is not None and pages > g.max_pages):
        raise SaveFileError(
            f"it holds up to {tokens.max(initial=0)} tokens in {pages} pages, beyond its own max_tokens = {g.max_tokens} or "
            f"max_pages = {g.max_pages}"
        )
    for name, field in form.fields.items():
        _expect(tensors, name, field.dtype, (pages, g.kv_heads, *field.shape))
    for b in range(batch):
        _expect(tensors, f"residual.key.{b}", g.dtype, (g.kv_heads, int(tokens[b] - key[b]), g.head_dim))
        _expect(tensors, f"residual.value.{b}", g.dtype, (g.kv_heads, int(tokens[b] - value[b]), g.value_head_dim))
    for which in ("key", "value"):
        scale = tensors[f"{which}.scale"].astype(np.float32)
        if not (np.isfinite(scale) & (scale >= 0)).all():
            raise SaveFileError(f"tensor '{which}.scale' holds a number that is not a scale: negative, NaN or Inf")
        rows = [tensors[f"{which}.origin"], *(tensors[f"residual.{which}.{b}"] for b in range(batch))]
        if spec.nonfinite == "reject" and not all(np.isfinite(a.astype(np.float32)).all() for a in rows):
            raise SaveFileError(f"{which} origins or floating rows hold NaN or Inf, which nonfinite = 'reject' excludes")
    _expect(tensors, "table", "int64", (_first(tensors, "table"), 3))
    known = {"tokens", "key_sealed", "value_sealed", "table", *form.fields}
    known |= {f"residual.{which}.{b}" for which in ("key", "value") for b in range(batch)}
    if unknown := sorted(set(tensors) - known):
        raise SaveFileError(f"tensor {unknown[0]!r} is not part of the format")
    _check_table(tensors["table"], key, value, pages, form.tokens)


def _check_table(table: np.ndarray, key: np.ndarray, value: np.ndarray, pages: int, room: int) -> None:
    rows: dict[int, list[tuple[int, int]]] = {b: [] for b in range(len(key))}
    for request, page, first in table.tolist():
        if request not in rows or not 0 <= page < pages:
            raise SaveFileError(f"table row {[request, page, first]} names a request or page that the file does not hold")
        rows[request].append((page, first))
    users = np.bincount(table[:, 1], minlength=pages)
    if (users == 0).any():
        raise SaveFileError(f"page {int(np.argmin(users))} belongs to no request")
    for b, mine in rows.items():
        firsts = [first for _, first in mine]
        ends = [*firsts[1:], int(key[b])][: len(firsts)]
        lengths = [end - first for first, end in zip(firsts, ends, strict=True)]
        covered = firsts[:1] == [0] if key[b] else not firsts
        if not covered or any(not 0 < n <= room for n in lengths):
            raise SaveFileError(f"the pages of request {b} start at {firsts} and do not cover its {key[b]} sealed tokens, {room} a page")
        for (page, _), end in zip(mine, ends, strict=True):
            if end > value[b] and users[page] > 1:
                raise SaveFileError(f"page {page} of request {b} still waits for values, yet several requests share it")


def _first(tensors: dict[str, np.ndarray], name: str) -> int:
    """The length of a tensor's first axis."""
    if name not in tensors or not tensors[name].ndim:
        raise SaveFileError(f"tensor {name!r} is missing or has no axes")
    return len(tensors[name])


def _expect(tensors: dict[str, np.ndarray], name: str, dtype: str, shape: tuple[int, ...]) -> None:
    if name not in tensors:
        raise SaveFileError(f"tensor {name!r} is missing")
    found = tensors[name]
    if (str(found.dtype), found.shape) != (dtype, shape):
        raise SaveFileError(f"tensor {name!r} is {found.dtype} {found.shape}; spec and geometry ask for {dtype} {shape}")
