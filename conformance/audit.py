"""Backends against each other, bit by bit: the same inputs, and all that comes out compared.

The suite decides whether a backend is right; an audit says where two of them differ. What is stored (codes, scales, origins, words,
floating rows, dequantized values) has one right value, so a difference is a fault of at least one. Outputs of attention may differ by
roundings: how often they are equal, and the largest distance in units of the last place, are figures and no verdict; but where one is
finite, so is the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

import kivi
from kivi.conformance import case as c
from kivi.conformance import provenance
from kivi.conformance.check import Player, join_segments
from kivi.conformance.compare import differs
from kivi.conformance.expect import expectation
from kivi.conformance.floats import NUMPY, bits_of
from kivi.conformance.inputs import view
from kivi.conformance.subject import Subject
from kivi.conformance.suite import select_cases
from kivi.errors import InputError, UnsupportedError
from kivi.spec import CacheSpec

VERSION = 1
STATUSES = ("same", "differs", "unsupported", "errored")
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Observed:
    """Something that came out of a backend. `stored`: its bits are specified; else it is an output of attention."""

    name: str
    array: np.ndarray
    stored: bool


@dataclass(frozen=True)
class Compared:
    """One case on one backend beside the first one.

    status     "same": all that is stored agrees; "differs"; "unsupported" or "errored" by either, with the reason
    stored     elements compared bit for bit
    differing  how many of these differ, or of the outputs are finite on one side only; first_difference: where, and both numbers
    outputs    elements of attention's outputs; how many are equal to the bit; the largest distance in ULP of their dtype, which is large
               where an output is nearly zero; and the largest difference as a share of the largest element of its call
    """

    id: str
    profile: str
    status: str
    reason: str = ""
    stored: int = 0
    differing: int = 0
    first_difference: str = ""
    outputs: int = 0
    equal: int = 0
    ulp: int = 0
    difference: float = 0.0


@dataclass(frozen=True)
class Audit:
    """Every other backend beside the first. `backends` say what ran, as in a `Report`; `cases`: backend as it was named -> comparisons.
    `left_out`: cases that compare two runs of one backend, and so say nothing here."""

    backends: dict[str, dict[str, Any]]
    cases: dict[str, list[Compared]]
    left_out: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Nothing that is stored differs, nothing broke, and something was compared."""
        every = [one for compared in self.cases.values() for one in compared]
        compared = any(one.status == "same" and one.stored + one.outputs for one in every)
        return compared and not any(one.status in ("differs", "errored") for one in every)

    def to_json(self) -> str:
        """JSON text, with strict numbers."""
        cases = {name: [asdict(one) for one in compared] for name, compared in self.cases.items()}
        data = {"version": VERSION, "ok": self.ok, "backends": self.backends, "cases": cases, "left_out": self.left_out}
        return json.dumps(data, indent=1, allow_nan=False)


def audit(
    backends: Sequence[Any],
    *,
    profile: str = "all",
    size: str = "quick",
    cases: Sequence[str] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    spec: CacheSpec | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Compare two or more backends with the first of them.

    backends   each a `Backend`, a `Subject`, a name, or "name:mode"
    cases      patterns of ids of the suite's cases, to compare a part
    tensors    instead of the suite's: arrays [B, Hkv, T, D], each quantized as keys (its whole groups) and as values of `spec`
    progress   called with (done, total) after each case

    Raises `InputError`, `UnknownBackendError`, `BackendUnavailableError`. What a case raises is its result.
    """
    subjects = {_label(one): _subject(one) for one in backends}
    distinct = {(s.name, s.backend.mode, s.backend.device) for s in subjects.values()}
    if len(distinct) < max(2, len(subjects)):
        given = ", ".join(subjects) or "none"
        raise InputError(f"an audit compares two backends or more, each named once, and got {given}; name another, or another mode")
    chosen = select_cases(profile, size, cases) if tensors is None else list(own_cases(tensors, spec or CacheSpec()))
    usable = [one for one in chosen if isinstance(one, c.Quantize | c.Stream)]
    first, *others = subjects
    out: dict[str, list[Compared]] = {name: [] for name in others}
    for done, one in enumerate(usable, 1):
        seen = _observed(one, subjects[first])
        for name in others:
            out[name].append(compared(one, seen, _observed(one, subjects[name])))
        if tensors is not None:
            vars(one).pop("x", None)  # what may be large is not kept for a second run
        if progress is not None:
            progress(done, len(usable))
    made = {name: {**provenance.of(subject), "kernels": subject.backend.kernels()} for name, subject in subjects.items()}
    return Audit(made, out, [one.id for one in chosen if one not in usable])


def own_cases(tensors: Mapping[str, np.ndarray], spec: CacheSpec) -> Iterator[c.Quantize]:
    """A case for each tensor and side. Raises `InputError` for one that is no [B, Hkv, T, D] of floats with a token."""
    for name, x in tensors.items():
        if x.ndim != 4 or x.dtype not in NUMPY.values() or 0 in x.shape:
            dtypes = ", ".join(NUMPY)
            raise InputError(f"tensor {name!r} is {x.dtype} {x.shape}; an audit takes [B, Hkv, T, D] of {dtypes}, none of them 0")
        whole = x.shape[2] - x.shape[2] % spec.key.group
        dtype = next(label for label, kind in NUMPY.items() if kind == x.dtype)
        for which, rows in (("key", x[:, :, :whole]), ("value", x)):
            if rows.size:
                make = partial(np.ascontiguousarray, rows)
                about = "a tensor of the caller"
                yield c.Quantize(id=f"{name}.{which}", about=about, spec=spec, which=which, make=make, dtype=dtype)  # type: ignore[arg-type]


# -- what comes out -------------------------------------------------------------------------------------------------------


def observe(one: c.Quantize | c.Stream, subject: Subject) -> list[Observed]:
    """All that comes out of one case, in order. What is refused as it should be leaves nothing to see."""
    return list(_tensor(one, subject) if isinstance(one, c.Quantize) else _stream(one, subject))


def _tensor(one: c.Quantize, subject: Subject) -> Iterator[Observed]:
    if one.error:
        return
    qt = subject.quantize(view(one.x, one.view), one.spec, one.which)
    for name, array in (("scale", qt.scale), ("origin", qt.origin), ("codes", qt.codes())):
        yield Observed(name, np.asarray(array), stored=True)
    for dtype in NUMPY:
        yield Observed(f"dequantized to {dtype}", np.asarray(qt.dequantize(dtype)), stored=True)
    for layout in dict.fromkeys((*one.layouts, "official_int32")):
        yield Observed(f"{layout} words", np.asarray(qt.repack(layout).words), stored=True)


def _stream(one: c.Stream, subject: Subject) -> Iterator[Observed]:
    player = Player(one, subject)
    for i, step in enumerate(expectation(one)):
        out = player.play(step)
        if out is not None:
            yield Observed(f"output of event {i}", np.array(out), stored=False)
        if step.state is None:
            continue
        for b in range(player.cache.batch):
            sealed, residual = player.cache.sealed(b), player.cache.residual(b)
            for which in ("key", "value"):
                name = f"request {b} after event {i}: {which}"
                found = join_segments(sealed[which], which, getattr(one.spec, which).group)
                for part in ("scale", "origin", "codes") if found is not None else ():
                    yield Observed(f"{name} {part}", getattr(found, part), stored=True)
                yield Observed(f"{name} floating rows", np.array(residual[which]), stored=True)


# -- the comparison -------------------------------------------------------------------------------------------------------


def compared(one: c.Quantize | c.Stream, first: list[Observed] | Exception, other: list[Observed] | Exception) -> Compared:
    """What two backends made of one case."""
    if isinstance(first, Exception) or isinstance(other, Exception):
        raised = {"the first": first, "this one": other}
        broke = {name: seen for name, seen in raised.items() if isinstance(seen, Exception)}
        errors = {name: seen for name, seen in broke.items() if not isinstance(seen, UnsupportedError)}
        name, error = next(iter((errors or broke).items()))
        return Compared(one.id, one.profile, "errored" if errors else "unsupported", f"{name}: {type(error).__name__}: {error}")
    figures: dict[str, Any] = dict.fromkeys(("stored", "differing", "outputs", "equal", "ulp"), 0)
    figures |= {"first_difference": "", "difference": 0.0}
    for a, b in zip(first, other, strict=False):
        unlike = (a.name, a.array.shape, a.array.dtype) != (b.name, b.array.shape, b.array.dtype)
        wrong = unequal = np.ones(b.array.shape, bool) if unlike else differs(a.array, b.array)
        if b.stored:
            figures["stored"] += b.array.size
        else:
            figures["outputs"] += b.array.size
            figures["equal"] += b.array.size - int(unequal.sum())
            if not unlike:
                wrong = np.isfinite(a.array) != np.isfinite(b.array)  # no rounding makes that
                figures["ulp"] = max(figures["ulp"], distance(a.array, b.array))
                figures["difference"] = max(figures["difference"], share(a.array, b.array))
        if unlike or wrong.any():
            figures["differing"] += max(int(wrong.sum()), 1)
            figures["first_difference"] = figures["first_difference"] or (_unlike(a, b) if unlike else _place(a, b, wrong))
    if len(first) != len(other):
        figures["differing"] += 1
        figures["first_difference"] = figures["first_difference"] or f"{len(first)} arrays came out of the one, {len(other)} of the other"
    return Compared(one.id, one.profile, "differs" if figures["differing"] else "same", **figures)


def distance(a: np.ndarray, b: np.ndarray) -> int:
    """The most numbers of the dtype that lie between two elements at one place; NaN counts where only one is."""
    lines = []
    for x in (a, b):
        bits = bits_of(x).astype(np.int64)
        top = np.int64(1) << (8 * x.dtype.itemsize - 1)
        lines.append(np.where(bits >= top, top - bits, bits))  # -0 and 0 meet, and each sign goes its way
    both = np.isnan(a) & np.isnan(b)
    return int(np.where(both, 0, np.abs(lines[0] - lines[1])).max(initial=0))


def share(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference of two outputs as a share of the largest element of either, where both are finite."""
    both = np.isfinite(a) & np.isfinite(b)
    a, b = (np.where(both, x.astype(np.float64), 0) for x in (a, b))
    largest = max(np.abs(x).max(initial=0) for x in (a, b))
    return float(np.abs(a - b).max(initial=0) / largest) if largest else 0.0


def _place(a: Observed, b: Observed, differs: np.ndarray) -> str:
    at = tuple(int(i) for i in np.argwhere(differs)[0])
    return f"{b.name} at {list(at)}: {a.array[at]} and {b.array[at]}"


def _unlike(a: Observed, b: Observed) -> str:
    return f"{a.name} is {a.array.dtype}{a.array.shape}, {b.name} is {b.array.dtype}{b.array.shape}"


def _observed(one: c.Quantize | c.Stream, subject: Subject) -> list[Observed] | Exception:
    try:
        return observe(one, subject)
    except Exception as error:  # whatever a backend does must not end the audit
        return error


def _subject(backend: Any) -> Subject:
    if isinstance(backend, Subject):
        return backend
    if isinstance(backend, str):
        name, _, mode = backend.partition(":")
        backend = kivi.get_backend(name, mode=mode or None)
    return Subject(backend)


def _label(backend: Any) -> str:
    if isinstance(backend, str):
        return backend
    be = backend.backend if isinstance(backend, Subject) else backend
    return f"{be.name}:{be.mode}"
