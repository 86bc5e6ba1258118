"""Impossible requests: an error of kivi's own tree that names the value, and a state that is as it was."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from kivi.conformance.case import Attend, Case, Geometry, Refused, Select, Special, spec_of
from kivi.conformance.check import refused
from kivi.conformance.compare import Mismatch, Tally, same
from kivi.conformance.subject import Subject
from kivi.conformance.traces.build import Streams, Tensors
from kivi.conformance.traces.grids import tensor


def rows(n: int, seed: int, dtype: str = "float32", dim: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((1, 1, n, dim)).astype(dtype)


def cache_of(subject: Subject, **more: Any) -> Any:
    return subject.cache(spec_of({}), batch=1, q_heads=1, kv_heads=1, head_dim=64, dtype="float32", **more)


def capacity(subject: Subject, tally: Tally) -> None:
    """max_tokens is refused before anything changes, drafts included."""
    cache, x = cache_of(subject, max_tokens=20), rows(30, 1)
    cache.attend(x[:, :, :17], x[:, :, :17], x[:, :, :17])
    for n, commit in ((4, True), (4, False), (30, True)):
        refused(lambda n=n, commit=commit: cache.attend(x[:, :, :n], x[:, :, :n], x[:, :, :n], commit=commit), "CapacityError", ("20",))
    cache.attend(x[:, :, :3], x[:, :, :3], x[:, :, :3])
    if cache.lengths(0).tokens != 20 or cache.pending(0):
        raise Mismatch(
            f"after refused calls the cache holds {cache.lengths(0).tokens} tokens and {cache.pending(0)} pending ones, expected 20 and 0"
        )


def arrays(subject: Subject, tally: Tally) -> None:
    """Wrong dtype, shape and counts; the rows of good calls are as they were."""
    cache, x = cache_of(subject), rows(5, 2)
    cache.attend(x, x, x)
    wrong_dim, narrow = rows(5, 3, dim=32), rows(4, 3)
    for q, k, v, error in (
        (x.astype(np.float16), x, x, "DtypeError"),
        (x.astype(np.float64), x.astype(np.float64), x.astype(np.float64), "DtypeError"),
        (x, x, wrong_dim, "ShapeError"),
        (x, narrow, narrow, "ShapeError"),
        (x[0], x[0], x[0], "ShapeError"),
        (x[:, :, :0], x[:, :, :0], x[:, :, :0], "ShapeError"),
    ):
        refused(lambda q=q, k=k, v=v: cache.attend(q, k, v), error, ())
    for counts in ([6], [-1], [1, 1]):
        refused(lambda counts=counts: cache.attend(x, x, x, counts=counts), "InputError", ())
    same("the floating keys after refused calls", cache.residual(0)["key"], x[0], tally)


def files(subject: Subject, tally: Tally) -> None:
    """A file of another spec and a damaged one."""
    cache, x = cache_of(subject), rows(20, 4)
    cache.attend(x, x, x)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.safetensors"
        cache.save(path)
        refused(lambda: subject.load(path, spec_of({"key.bits": 4})), "SaveFileError", ())
        data = bytearray(path.read_bytes())
        data[-3] ^= 0x10
        path.write_bytes(bytes(data))
        refused(lambda: subject.load(path, spec_of({})), "SaveFileError", ())
        path.write_bytes(bytes(data[: len(data) // 2]))
        refused(lambda: subject.load(path, spec_of({})), "SaveFileError", ())


def cases() -> list[Case]:
    out: list[Case] = [
        Special(id=f"stream/refused.{run.__name__}", profile="stream", about=(run.__doc__ or "").rstrip("."), run=run, cost=2)
        for run in (capacity, arrays, files)
    ]
    steps, whole = Streams("refused", geometry=Geometry(batch=2, dtype="float32")), Tensors("refused")
    absent = (Refused(Select((2,)), "InputError"), Refused(Select((-1,)), "InputError"))
    steps.add("indices", "requests that do not exist", Attend(3), *absent, Attend())
    about = "keys whose tokens do not fill their groups: nothing is dropped silently"
    whole.add("tail", about, "key", lambda: tensor((1, 1, 12, 16), 1), "float16", error="ShapeError", says=("12", "8"))
    return [*out, *steps.cases, *whole.cases]
