"""Moving a cache: a snapshot of its state in host memory, written to and read from a safetensors file (SPEC 10).

A snapshot holds NumPy arrays only, and each page once however many requests share it. The file carries the spec, the geometry
and a checksum, so a damaged or foreign file is refused before anything is built. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kivi.backend import Backend, Windows
from kivi.errors import KiviError, SaveFileError
from kivi.geometry import Geometry
from kivi.geometry import geometry as checked_geometry
from kivi.layout import Layout, arrangement
from kivi.pool import PageFormat
from kivi.savecheck import check
from kivi.spec import CacheSpec, from_dict

if TYPE_CHECKING:
    from kivi.cache import KVCache

FORMAT = "1"


@dataclass(frozen=True)
class Snapshot:
    """The state of a cache as host arrays, by the tensor names of SPEC 10, with the layout of its words."""

    tensors: dict[str, np.ndarray]
    layout: Layout


def snapshot(cache: KVCache) -> Snapshot:
    """The committed state of a cache without pending tokens."""
    state, pool, host = cache._state, cache.pool, cache.backend.to_host
    rows = [(b, page, first) for b in range(cache.batch) for page, first, _ in state.rows(b)]
    pages = sorted({page for _, page, _ in rows})
    number = {page: i for i, page in enumerate(pages)}
    tensors = {
        "tokens": state.tokens,
        "key_sealed": state.key_sealed,
        "value_sealed": state.value_sealed,
        "table": np.array([(b, number[page], first) for b, page, first in rows], np.int64).reshape(-1, 3),
    }
    for name, field in pool.format.fields.items():
        stack = [host(pool.view(page, name)) for page in pages]
        tensors[name] = np.stack(stack) if stack else _empty(name, pool.format)
        assert tensors[name].shape[2:] == field.shape
    for b in range(cache.batch):
        for which, window, sealed in (("key", state.windows.key, state.key_sealed), ("value", state.windows.value, state.value_sealed)):
            slots = np.arange(sealed[b], state.tokens[b]) % window.shape[2]
            tensors[f"residual.{which}.{b}"] = host(window[b][:, slots])
    return Snapshot({name: np.ascontiguousarray(a) for name, a in tensors.items()}, pool.format.layout)


def restore(snap: Snapshot, spec: CacheSpec, g: Geometry, backend: Backend) -> KVCache:
    """A cache on `backend` with the state of a snapshot; words are repacked if the backend's layout is another."""
    from kivi.cache import KVCache

    t = snap.tensors
    cache = KVCache(spec, batch=len(t["tokens"]), backend=backend, **asdict(g))
    form, pool = cache.pool.format, cache.pool
    lent = pool.lend(len(t["key.words"]))
    for which in ("key", "value"):
        words = t[f"{which}.words"]
        if snap.layout != form.layout:
            here = form.key if which == "key" else form.value
            words = here.pack(arrangement(snap.layout, which, here.bits, here.tokens, here.channels).unpack(words))  # type: ignore[arg-type]
        for part, values in (("words", words), ("scale", t[f"{which}.scale"]), ("origin", t[f"{which}.origin"])):
            for page, value in zip(lent, values):
                pool.view(page, f"{which}.{part}")[...] = backend.from_host(value)
    state, batch = cache._state, cache.batch
    pages = np.bincount(t["table"][:, 0], minlength=batch).astype(np.int64)
    table = np.zeros((batch, max(4, int(pages.max(initial=0))), 2), np.int64)
    for b in range(batch):
        mine = t["table"][t["table"][:, 0] == b]
        table[b, : len(mine)] = [(lent[page], first) for _, page, first in mine.tolist()] if len(mine) else table[b, :0]
    for page, users in zip(lent, np.bincount(t["table"][:, 1], minlength=len(lent))):
        for _ in range(int(users) - 1):
            pool.retain(page)
    windows = state.windows
    for which, window, sealed in (("key", windows.key, t["key_sealed"]), ("value", windows.value, t["value_sealed"])):
        needed = int((t["tokens"] - sealed).max())
        if needed > window.shape[2]:
            window = backend.zeros((*window.shape[:2], needed, window.shape[3]), g.dtype)
        for b in range(batch):
            slots = np.arange(sealed[b], t["tokens"][b]) % window.shape[2]
            window[b][:, slots] = backend.from_host(t[f"residual.{which}.{b}"])
        windows = Windows(window, windows.value) if which == "key" else Windows(windows.key, window)
    cache._state = type(state)(t["tokens"], np.zeros_like(t["tokens"]), t["key_sealed"], t["value_sealed"], pages, table, windows)
    return cache


def write(path: str | Path, snap: Snapshot, spec: CacheSpec, g: Geometry) -> None:
    """Write atomically: a reader sees the old file or the whole new one. Raises `SaveFileError`."""
    from safetensors.numpy import save

    header = {
        "kivi_save": FORMAT,
        "spec": json.dumps(spec.to_dict(), sort_keys=True),
        "spec_hash": spec.hash,
        "geometry": json.dumps({**asdict(g), "layout": _layout_dict(snap.layout)}, sort_keys=True),
    }
    header["sha256"] = _checksum(snap.tensors, header)
    path = _path(path)
    beside = path.parent / f".{path.name[:100]}.{uuid.uuid4().hex}.part"  # a name of its own, whoever else saves
    try:
        try:
            beside.write_bytes(save(snap.tensors, header))
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise SaveFileError(f"{path} cannot be written: {error}") from error


def read(path: str | Path, expected: CacheSpec | None) -> tuple[Snapshot, CacheSpec, Geometry]:
    """A checked snapshot with its spec and geometry. Raises `SaveFileError`."""
    from safetensors import SafetensorError, safe_open

    path = _path(path)
    try:
        with safe_open(path, framework="np") as file:
            header = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise SaveFileError(f"{path} is not a readable safetensors file: {error}; save the cache again") from None
    if header.get("kivi_save") != FORMAT:
        raise SaveFileError(f"{path} has kivi_save = {header.get('kivi_save')!r}; this release reads version {FORMAT}")
    if header.pop("sha256", None) != _checksum(tensors, header):
        raise SaveFileError(f"{path} is damaged: its contents do not match its checksum; save the cache again")
    try:
        spec, g, layout = _read_header(header)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, KiviError) as error:
        raise SaveFileError(f"{path} has an unreadable header: {type(error).__name__}: {error}") from None
    if expected is not None and expected.hash != spec.hash:
        raise SaveFileError(
            f"{path} holds a cache of spec {spec.name!r} ({spec.hash[:12]}), not of {expected.name!r} ({expected.hash[:12]}); "
            f"load it with its own spec, or leave spec out"
        )
    try:
        check(tensors, layout, spec, g)
    except KiviError as error:
        raise SaveFileError(f"{path} does not hold a cache: {error}; save the cache again") from None
    return Snapshot(tensors, layout), spec, g


def _read_header(header: dict[str, str]) -> tuple[CacheSpec, Geometry, Layout]:
    """What the metadata of a file says; raises whatever a bad one provokes."""
    if set(header) != {"kivi_save", "spec", "spec_hash", "geometry"}:
        raise ValueError(f"its keys are {', '.join(sorted(header))}")
    spec = from_dict(json.loads(header["spec"]))
    fields = json.loads(header["geometry"])
    layout = msgspec.convert(fields.pop("layout"), Layout)
    if fields["scale"] is None:
        raise ValueError("scale is not a number")
    if spec.hash != header["spec_hash"]:
        raise ValueError(f"its spec has the hash {spec.hash[:12]}, not the stated {header['spec_hash'][:12]}")
    return spec, checked_geometry(**fields), layout


def _path(given: Any) -> Path:
    """A path that names a file. Raises `SaveFileError`."""
    if not isinstance(given, str | os.PathLike) or not Path(given).name:
        raise SaveFileError(f"{given!r} does not name a file; give its path as a str or a Path")
    return Path(given)


def _empty(name: str, form: PageFormat) -> np.ndarray:
    from kivi.dtypes import np_dtype

    field = form.fields[name]
    return np.zeros((0, form.kv_heads, *field.shape), np_dtype(field.dtype))


def _layout_dict(layout: Layout) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in ("name", "word", "key", "value")}


def _checksum(tensors: dict[str, np.ndarray], header: dict[str, str]) -> str:
    """SHA-256 over the header's items and the tensors, both in name order."""
    digest = hashlib.sha256()
    for key, value in sorted(header.items()):
        digest.update(f"{key}={value}\n".encode())
    for name, a in sorted(tensors.items()):
        digest.update(f"{name} {a.dtype} {a.shape}\n".encode())
        digest.update(np.ascontiguousarray(a).tobytes())
    return digest.hexdigest()
