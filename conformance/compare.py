"""Comparing arrays: bit for bit with a message that says where, or within bounds with the use of the bound on record."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kivi.conformance.bounds import Bound
from kivi.conformance.floats import NUMPY, bits_of, fmt


class Mismatch(AssertionError):
    """The subject disagrees with what is expected; the message says where and by how much."""


@dataclass
class Tally:
    """Figures of one case: the largest |error| / bound; the same without the rounding of the output, which an honest fp16 output
    uses up whatever the pipeline; errors in ULP of the output dtype."""

    bound_use: float = 0.0
    pipeline_use: float = 0.0
    ulp_max: float = 0.0
    ulp_sum: float = 0.0
    elements: int = 0
    bits: int = 0
    excess: float = 0.0
    ran: dict = field(default_factory=dict)

    @property
    def ulp_mean(self) -> float:
        return self.ulp_sum / self.elements if self.elements else 0.0


def same(name: str, got: np.ndarray, expected: np.ndarray, tally: Tally | None = None, axes: str = "") -> None:
    """Shape, dtype and every bit. `axes`: names of the axes for the message, e.g. "head token channel"."""
    got = np.asarray(got)
    if got.shape != expected.shape:
        raise Mismatch(f"{name} has shape {got.shape}, expected {expected.shape}")
    if got.dtype != expected.dtype:
        raise Mismatch(f"{name} has dtype {got.dtype}, expected {expected.dtype}")
    wrong = differs(got, expected)
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise Mismatch(
            f"{name} differs in {int(wrong.sum())} of {wrong.size} elements, first at {_place(where, axes)}: "
            f"got {got[where]}, expected {expected[where]}"
        )
    if tally is not None:
        tally.bits += expected.size


def differs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where two arrays of one shape and dtype do not have the same bits; one NaN is as good as another."""
    out = bits_of(a) != bits_of(b)
    return out & ~(np.isnan(a) & np.isnan(b)) if a.dtype in NUMPY.values() else out


def within(name: str, got: np.ndarray, exact: np.ndarray, limit: Bound, dtype: str, tally: Tally, axes: str = "") -> None:
    """|got - exact| <= limit, element by element; NaN where, and only where, exact is NaN."""
    bound = limit.total
    got64 = np.asarray(got).astype(np.float64)
    if got64.shape != exact.shape:
        raise Mismatch(f"{name} has shape {got64.shape}, expected {exact.shape}")
    unknown = np.isnan(exact)
    stray = np.isnan(got64) != unknown
    if stray.any():
        where = tuple(int(i) for i in np.argwhere(stray)[0])
        raise Mismatch(f"{name} at {_place(where, axes)}: got {got64[where]}, expected {exact[where]}")
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where(unknown, 0.0, np.abs(got64 - exact))
    use = error / np.where(unknown, 1.0, bound)
    worst = float(use.max(initial=0.0))
    if worst > 1.0:
        where = tuple(int(i) for i in np.argwhere(use == use.max())[0])
        tally.excess = max(tally.excess, worst)
        raise Mismatch(
            f"{name} is {worst:.4g} times the bound off at {_place(where, axes)}: got {got64[where]:.9g}, exact {exact[where]:.9g}, "
            f"bound {bound[where]:.3g} ({int((use > 1).sum())} of {use.size} elements are beyond theirs)"
        )
    ulps = error / (2 * fmt(dtype).half_ulp(np.where(unknown, 1.0, exact)))
    tally.bound_use = max(tally.bound_use, worst)
    with np.errstate(invalid="ignore"):
        beyond = np.maximum(0.0, error - limit.rounding) / (bound - limit.rounding)
    tally.pipeline_use = max(tally.pipeline_use, float(np.nan_to_num(beyond).max(initial=0.0)))
    tally.ulp_max = max(tally.ulp_max, float(ulps.max(initial=0.0)))
    tally.ulp_sum += float(ulps.sum())
    tally.elements += int(ulps.size)


def _place(where: tuple[int, ...], axes: str) -> str:
    names = axes.split()
    return ", ".join(f"{n} {i}" for n, i in zip(names, where, strict=True)) if len(names) == len(where) else f"index {where}"
