"""Running one case against a subject: feed the events, compare with the naive model after each."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kivi import errors
from kivi.conformance import case as c
from kivi.conformance import packer, quantizer
from kivi.conformance.bounds import Bound, Numerics, output_bound
from kivi.conformance.compare import Mismatch, Tally, same, within
from kivi.conformance.expect import RequestState, Step, apply, expectation
from kivi.conformance.floats import NUMPY
from kivi.conformance.inputs import view
from kivi.conformance.model import Sealed
from kivi.conformance.subject import Subject


def check(one: c.Case, subject: Subject, tally: Tally) -> None:
    """Raises `Mismatch` where the subject is wrong, any other exception where it broke; figures go to `tally`."""
    if isinstance(one, c.Quantize):
        check_quantize(one, subject, tally)
    elif isinstance(one, c.Stream):
        check_stream(one, subject, tally)
    elif isinstance(one, c.Special):
        one.run(subject, tally)
    else:
        raise TypeError(f"{one!r} is not a case")


# -- whole tensors --------------------------------------------------------------------------------------------------------


def check_quantize(one: c.Quantize, subject: Subject, tally: Tally) -> None:
    """Codes, scale, origin, dequantized values and words of every layout, bit for bit."""
    x = view(one.x, one.view)
    before = x.copy()
    if one.error:
        refused(lambda: subject.quantize(x, one.spec, one.which), one.error, one.says)
        return
    qt = subject.quantize(x, one.spec, one.which)
    same("the caller's x", x, before)
    side, rule = getattr(one.spec, one.which), quantizer.Rule.of(one.spec, one.which)
    plain = np.ascontiguousarray(one.x)
    grid = (quantizer.quantize_key if one.which == "key" else quantizer.quantize_value)(plain, rule, side.group)
    compare_tensor(qt, one.which, grid, side.group, tally)
    if (qt.which, qt.tokens, qt.spec.hash) != (one.which, plain.shape[2], one.spec.hash):
        raise Mismatch(
            f"the tensor says which={qt.which}, tokens={qt.tokens}, spec {qt.spec.hash[:8]}; it was made as {one.which}, {plain.shape[2]}"
        )
    for layout in one.layouts:
        check_layout(one, subject, qt, grid.codes, layout, tally)


def compare_tensor(qt: Any, which: str, grid: quantizer.Grid, group: int, tally: Tally) -> None:
    """A `QuantizedTensor` against a grid with scale and origin one number a group."""
    axes = "request head token channel"
    same(f"{which} scale", qt.scale, grid.scale, tally, axes)
    same(f"{which} origin", qt.origin, grid.origin, tally, axes)
    same(f"{which} codes", qt.codes(), grid.codes, tally, axes)
    scale, origin = (spread(a, which, group, grid.codes.shape) for a in (grid.scale, grid.origin))
    for dtype in NUMPY:
        exact = quantizer.dequantize(grid.codes, scale, origin, dtype)
        same(f"{which} dequantized to {dtype}", qt.dequantize(dtype), exact, tally, axes)
    same(f"{which} dequantized by default", qt.dequantize(), quantizer.dequantize(grid.codes, scale, origin, "float32"), tally, axes)
    nbytes = sum(np.asarray(a).nbytes for a in (qt.words, qt.scale, qt.origin))
    if qt.nbytes != nbytes:
        raise Mismatch(f"{which} nbytes is {qt.nbytes}, but words, scale and origin take {nbytes}")


def check_layout(one: c.Quantize, subject: Subject, native: Any, codes: np.ndarray, layout: str, tally: Tally) -> None:
    """Words as the digit string says, by repacking and by quantizing straight to the layout, and back to the native words."""
    bits, page = getattr(one.spec, one.which).bits, one.spec.key.residual
    packed = native.repack(layout)
    if packed.layout != layout:
        raise Mismatch(f"repack({layout!r}) gave layout {packed.layout!r}")
    expected = np.stack([[packer.pack(head, layout, one.which, bits, page) for head in request] for request in codes])
    words = np.asarray(packed.words)
    same(
        f"{layout} {one.which} words",
        words.view(f"uint{8 * words.itemsize}").astype(np.uint64),
        expected,
        tally,
        "request head major minor",
    )
    same(f"{layout} {one.which} codes", packed.codes(), codes, tally)
    back = packed.repack(native.layout)
    same(f"{native.layout} words after {layout} and back", back.words, np.asarray(native.words), tally)
    straight = subject.quantize(one.x.copy(), one.spec, one.which, layout=layout)
    same(f"{layout} words of a tensor quantized to it", straight.words, words, tally)
    same(f"{layout} scale", straight.scale, np.asarray(native.scale), tally)
    same(f"{layout} origin", straight.origin, np.asarray(native.origin), tally)


def spread(meta: np.ndarray, which: str, group: int, shape: tuple[int, ...]) -> np.ndarray:
    """Scale or origin as one number for each of the codes [..., T, D] of this shape."""
    return quantizer.spread_key(meta, group, shape[-2]) if which == "key" else quantizer.spread_value(meta, group, shape[-1])


# -- streams --------------------------------------------------------------------------------------------------------------


def check_stream(one: c.Stream, subject: Subject, tally: Tally) -> None:
    """Outputs within their bounds, lengths after every event, the full state after edits, seals and the last event."""
    player = Player(one, subject)
    numerics = Numerics.declared(subject.backend.manifest)
    kept: list[tuple[str, Any, np.ndarray]] = []
    for i, step in enumerate(expectation(one)):
        where = f"event {i} ({_short(step.event)})"
        try:
            out = player.play(step)
            if out is not None:
                compare_outputs(out, step, one.geometry.dtype, numerics, tally)
                kept.append((where, out, np.array(out)))
            compare_state(player.cache, step, one.spec, tally)
            if step.waiting is not None:
                compare_full(player.waiting, step.waiting, one.spec, tally, "the cache that waits: ")
        except Mismatch as error:
            raise Mismatch(f"{where}: {error}") from None
        except (errors.InputError, errors.StateError) as error:
            raise Mismatch(f"{where} is refused, but nothing is wrong with it: {type(error).__name__}: {error}") from None
    for where, out, copy in kept:
        same(f"the output of {where}, read again at the end,", out, copy)
    tally.ran = _ran(player.cache)
    if tally.ran.get("backend") != subject.name or tally.ran.get("mode") != subject.backend.mode:
        raise Mismatch(f"cache.ran says {tally.ran}, but the subject is {subject.name} in mode {subject.backend.mode}")
    if tally.ran.get("layout") != layout_of(one.spec, subject):
        raise Mismatch(f"cache.ran says layout {tally.ran.get('layout')!r}, expected {layout_of(one.spec, subject)!r}")


class Player:
    """A subject's cache, and the events of a case on it, one after another."""

    def __init__(self, one: c.Stream, subject: Subject) -> None:
        self.spec, self.subject = one.spec, subject
        self.cache: Any = subject.cache(one.spec, **asdict(one.geometry))
        self.waiting: Any = None

    def play(self, step: Step) -> Any:
        """One event; returns the output of an attend, else None. Raises `Mismatch` where what must be refused is not."""
        event = step.event
        if isinstance(event, c.Attend):
            return call(self.cache, step, event)
        if isinstance(event, c.Refused):
            refused(partial(_attempt, self.cache, step), event.error, event.says)
        elif isinstance(event, c.Fork):
            self.waiting, self.cache = self.cache, self.cache.fork()
        elif isinstance(event, c.Swap):
            self.waiting, self.cache = self.cache, self.waiting
        elif isinstance(event, c.Reload):
            self.cache = reload(self.cache, self.subject, self.spec)
        elif isinstance(event, c.Move):
            self.cache = self.cache.to(self.subject.backend)
        else:
            apply(self.cache, event)
        return None


def layout_of(spec: Any, subject: Subject) -> str:
    """The name of the layout that the spec asks for: "auto" is the backend's native one."""
    named = spec.packing.layout
    if not isinstance(named, str):
        return named.name
    return subject.backend.manifest.capabilities.native_layout if named == "auto" else named


def call(cache: Any, step: Step, event: c.Attend) -> Any:
    """One attend; afterwards the caller's arrays must be as they were, and are then overwritten: a cache may not keep them."""
    assert step.inputs is not None
    arrays = [view(a, event.view) for a in step.inputs]
    counts = None if event.counts is None else np.array(event.counts, np.int64)
    try:
        out = cache.attend(*arrays, counts=counts, commit=event.commit)
    finally:
        for name, array, original in zip("qkv", arrays, step.inputs, strict=True):
            same(f"the caller's {name}", array, original)
        if counts is not None:
            same("the caller's counts", counts, np.array(event.counts, np.int64))
    overwrite(*arrays, *([] if counts is None else [counts]))
    return out


def overwrite(*arrays: np.ndarray) -> None:
    """Write into arrays that went in or came out: what the cache holds must be its own."""
    for array in arrays:
        if array.flags.writeable:
            array[...] = 77


def compare_outputs(out: Any, step: Step, dtype: str, numerics: Numerics, tally: Tally) -> None:
    q, _, v = step.inputs  # type: ignore[misc]
    if not isinstance(out, np.ndarray):
        raise Mismatch(f"NumPy arrays went in, a {type(out).__name__} came out")
    if out.shape != (*q.shape[:3], v.shape[3]) or out.dtype != q.dtype:
        raise Mismatch(f"the output is {out.dtype}{out.shape}, expected {q.dtype}{(*q.shape[:3], v.shape[3])}")
    assert step.outputs is not None
    assert step.counts is not None
    for b, (heads, count) in enumerate(zip(step.outputs, step.counts, strict=True)):
        if (np.asarray(out[b, :, count:], np.float32) != 0).any():
            raise Mismatch(f"rows past counts[{b}] = {count} are not zero")
        if heads is None:
            continue
        exact = np.stack([h.out for h in heads])
        bound = Bound(*(np.stack(parts) for parts in zip(*(output_bound(h, numerics, dtype) for h in heads), strict=True)))
        within(f"output of request {b}", out[b, :, :count], exact, bound, dtype, tally, "head row channel")


def compare_state(cache: Any, step: Step, spec: Any, tally: Tally) -> None:
    if cache.batch != len(step.lengths):
        raise Mismatch(f"the cache has {cache.batch} requests, expected {len(step.lengths)}")
    for b, (lengths, pending) in enumerate(zip(step.lengths, step.pending, strict=True)):
        got = cache.lengths(b)
        found = {name: int(getattr(got, name)) for name in lengths}
        if found != lengths:
            raise Mismatch(f"lengths of request {b} are {found}, expected {lengths}")
        if cache.pending(b) != pending:
            raise Mismatch(f"request {b} has {cache.pending(b)} pending tokens, expected {pending}")
    if step.state is not None:
        compare_full(cache, step.state, spec, tally)
        if step.clamped is not None and (clamped := cache.memory()["clamped"]) != step.clamped:
            raise Mismatch(f"memory()['clamped'] is {clamped}, expected {step.clamped}")


def compare_full(cache: Any, state: list[RequestState], spec: Any, tally: Tally, prefix: str = "") -> None:
    """Sealed tokens bit for bit, wherever segments begin; floating rows bit for bit. What was read out is then overwritten."""
    for b, request in enumerate(state):
        sealed, residual = cache.sealed(b), cache.residual(b)
        for which, expected, floating in (("key", request.key, request.key_residual), ("value", request.value, request.value_residual)):
            name = f"{prefix}request {b} {which}"
            got = join_segments(sealed[which], which, getattr(spec, which).group)
            if (got is None) != (expected is None):
                raise Mismatch(f"{name}: {'nothing is sealed' if got is None else 'something is sealed'}, expected the opposite")
            if got is not None and expected is not None:
                for part in ("scale", "origin", "codes"):
                    same(f"{name} {part}", getattr(got, part), getattr(expected, part), tally, "head token channel")
            rows = np.asarray(residual[which])
            if floating is None:
                if rows.size:
                    raise Mismatch(f"{name}: {rows.shape[-2]} floating rows, expected none")
            else:
                same(f"{name} floating rows", rows, floating, tally, "head row channel")
            for _, qt in sealed[which]:
                if qt.layout != cache.ran.layout:
                    raise Mismatch(f"{name}: a segment has layout {qt.layout!r}, but cache.ran says {cache.ran.layout!r}")
                overwrite(*(np.asarray(a) for a in (qt.words, qt.scale, qt.origin)))
            overwrite(rows)


def join_segments(segments: list[tuple[int, Any]], which: str, group: int) -> Sealed | None:
    """The segments of `cache.sealed(b)` as one run from token 0, scale and origin spread to one number a channel."""
    parts, at = [], 0
    for start, qt in segments:
        if start != at:
            raise Mismatch(f"{which} segments leave tokens {at} to {start} out, or overlap")
        codes = np.asarray(qt.codes())[0]
        scale, origin = (spread(np.asarray(a)[0], which, group, codes.shape) for a in (qt.scale, qt.origin))
        same(
            f"the decoded {which} segment from token {start}",
            np.asarray(qt.dequantize())[0],
            quantizer.dequantize(codes, scale, origin, "float32"),
        )
        parts.append(Sealed(codes, scale, origin))
        at += codes.shape[1]
    if at == 0:
        return None
    return Sealed(*(np.concatenate([getattr(p, name) for p in parts], 1) for name in ("codes", "scale", "origin")))


# -- helpers --------------------------------------------------------------------------------------------------------------


def refused(attempt: Any, error: str, says: tuple[str, ...]) -> None:
    """The attempt must raise exactly this error of kivi's tree (or a subclass), and say what it should."""
    kind = getattr(errors, error)
    try:
        attempt()
    except kind as raised:
        missing = [word for word in says if word.lower() not in str(raised).lower()]
        if missing:
            raise Mismatch(f"{error} does not mention {', '.join(map(repr, missing))}: {raised}") from None
    except errors.UnsupportedError:
        raise
    except Mismatch:
        raise
    except Exception as raised:
        raise Mismatch(f"raised {type(raised).__name__} ({raised}), expected {error}") from None
    else:
        raise Mismatch(f"nothing was raised, expected {error}")


def reload(cache: Any, subject: Subject, spec: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.safetensors"
        cache.save(path)
        return subject.load(path, spec)


def _attempt(cache: Any, step: Step) -> None:
    """The event inside a `Refused`."""
    event = step.event.event
    if isinstance(event, c.Attend):
        call(cache, step, event)
    else:
        _edit(cache, event)


def _edit(cache: Any, event: Any) -> None:
    if isinstance(event, c.Fork):
        cache.fork()
    elif isinstance(event, c.Reload):
        with tempfile.TemporaryDirectory() as folder:
            cache.save(Path(folder) / "cache.safetensors")
    else:
        apply(cache, event)


def _ran(cache: Any) -> dict[str, Any]:
    ran = cache.ran
    return {name: getattr(ran, name) for name in ("backend", "mode", "device", "kernel", "layout") if hasattr(ran, name)}


def _short(event: Any) -> str:
    inner = _short(event.event) if isinstance(event, c.Refused) else None
    fields = {k: v for k, v in vars(event).items() if v not in (None, 0.0, (), "plain") and k not in ("event", "pokes")}
    text = ", ".join(f"{k}={v}" for k, v in fields.items() if not (k == "commit" and v is True))
    return f"{type(event).__name__.lower()}({inner + ', ' if inner else ''}{text})"
