"""The floating-point dtypes of caches and metadata, by name.

Names are strings ("float16", "bfloat16", "float32"), so a spec, a manifest and a save file can say them; NumPy's bfloat16 is
the one of ml_dtypes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from kivi.errors import DtypeError, SpecError
from kivi.spec import CacheSpec

FLOATS = ("float16", "bfloat16", "float32")


@cache
def np_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a name."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def named(dtype: Any) -> str:
    """The name of a dtype given as a name, or as a dtype of NumPy, ml_dtypes or torch."""
    text = str(dtype)
    if isinstance(dtype, str) or dtype is None:
        return text
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    try:
        return np.dtype(dtype).name
    except TypeError:
        return text


def check_float(name: str, what: str) -> str:
    """`name` if it is a supported dtype. Raises `DtypeError`; `what` says whose dtype it is."""
    if name not in FLOATS:
        raise DtypeError(f"{what} = {name!r}, but kivi stores {', '.join(FLOATS)}; convert first")
    return name


def largest(name: str) -> float:
    """The largest finite value of a dtype."""
    return float(ml_dtypes.finfo(np_dtype(name)).max)


def largest_scale(name: str, bits: int) -> float:
    """What a scale is clamped to under `overflow = "saturate"`: finite, and `scale * code` finite in float32 (SPEC 3.7)."""
    return largest(name) if name == "float16" else largest(name) / (1 << bits)


def lowest_origin(name: str) -> float:
    """The lowest float32 that rounds to a finite number of the dtype, half to even."""
    if name == "float32":
        return -largest(name)
    dtype = np_dtype(name)
    top = dtype.type(largest(name))
    tie = np.float32(top) + (np.float32(top) - np.float32(np.nextafter(top, dtype.type(0)))) / np.float32(2)
    return -float(np.nextafter(tie, np.float32(0)))


def metadata_dtype(spec: CacheSpec, which: str, dtype: str) -> str:
    """The dtype of scale and origin for inputs of `dtype`.

    Raises `SpecError` if staged numerics meet another metadata dtype than the input's (SPEC 3.3).
    """
    stated = (spec.key if which == "key" else spec.value).metadata
    if stated == "input":
        return dtype
    if spec.numerics == "staged" and stated != dtype:
        raise SpecError(
            f"{which}.metadata = {stated!r} with numerics = 'staged' and {dtype} input: staged numerics store metadata in the "
            f"input dtype; use {which}.metadata = 'input'"
        )
    return stated


def metadata_that_holds(low: float, high: float, bits: int) -> list[str]:
    """Metadata dtypes wider than float16 that can store scale and origin of a group from `low` to `high`, portable numerics."""
    return [name for name in ("bfloat16", "float32") if fits(np.float32(low), np.float32(high), bits, name)]


def fits(low: Any, high: Any, bits: int, metadata: str) -> Any:
    """Whether a metadata dtype can store scale and origin of groups from `low` to `high`, of the dtype that is computed in (SPEC 3.7)."""
    with np.errstate(all="ignore"):
        scale = ((high - low) / low.dtype.type((1 << bits) - 1)).astype(np_dtype(metadata))
        return (scale <= scale.dtype.type(largest_scale(metadata, bits))) & np.isfinite(low.astype(scale.dtype))
