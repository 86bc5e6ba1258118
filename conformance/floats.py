"""The floating-point formats of the suite: roundoffs, spacing, and conversion that never hides an overflow.

NumPy arrays throughout; bfloat16 is `ml_dtypes.bfloat16`. The constants are data in `bounds.toml`.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

import ml_dtypes
import numpy as np

NUMPY = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}


@dataclass(frozen=True)
class Format:
    """One binary format: `p` significand bits, `emin` the exponent of the smallest normal number."""

    name: str
    p: int
    emin: int
    max: float

    @property
    def unit(self) -> float:
        """Unit roundoff 2^-p."""
        return 2.0**-self.p

    @property
    def half_spacing(self) -> float:
        """Largest absolute error of rounding a number below the smallest normal one."""
        return max(2.0 ** (self.emin - self.p), 5e-324)

    def half_ulp(self, x: np.ndarray) -> np.ndarray:
        """Largest error of rounding a number as large as |x|: half the spacing of its binade."""
        _, exponent = np.frexp(np.abs(x))
        return np.maximum(np.ldexp(1.0, exponent - self.p - 1), self.half_spacing)


@cache
def constants() -> dict:
    """`bounds.toml` as it is."""
    return tomllib.loads((resources.files("kivi.conformance") / "bounds.toml").read_text("utf-8"))


@cache
def fmt(name: str) -> Format:
    """The format called `name`: float16, bfloat16, float32 or float64."""
    return Format(name, **constants()["dtype"][name])


def cast(x: np.ndarray, name: str) -> np.ndarray:
    """`x` rounded half-even to a format; an overflow gives inf, quietly."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.asarray(x).astype(NUMPY[name])


def bits_of(x: np.ndarray) -> np.ndarray:
    """The bit patterns of `x` as unsigned integers, so that comparison tells -0 from +0 and sees NaN as itself."""
    x = np.ascontiguousarray(x)
    return x.view(f"uint{8 * x.dtype.itemsize}")
