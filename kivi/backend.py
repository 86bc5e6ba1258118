"""What a backend is: its manifest (data), its modes and devices, and the operations that a cache asks of it.

A backend folder holds `backend.toml` (read as `Manifest`, nothing imported) and `driver.py` (imported on selection) with

    probe(mode, device) -> Probe             never raises
    create(manifest, mode, device) -> Backend

A port implements the abstract methods of `Backend`: four on whole tensors, four on a paged cache, and the array plumbing.
All arithmetic is specified in spec/SPEC.md; a backend decides how, never what.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from kivi.arrays import dtype_name, kind
from kivi.dtypes import FLOATS, check_float, fits, metadata_dtype, metadata_that_holds
from kivi.errors import DtypeError, MetadataOverflowError, NonFiniteError, ShapeError, UnsupportedError
from kivi.layout import Layout, Which, named_layout
from kivi.pool import PageFormat, PagePool
from kivi.quantized import QuantizedTensor
from kivi.spec import CacheSpec
from kivi.subnormals import Kept

Mode = Literal["device", "interpreter", "simulator", "shim"]


# -- the manifest: data -----------------------------------------------------------------------------------------------


class Capabilities(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a backend can serve. A request outside it is rejected with the field's name as the reason."""

    bits: tuple[int, ...]
    dtypes: tuple[str, ...]
    metadata: tuple[str, ...]
    numerics: tuple[str, ...]
    order: tuple[str, ...]
    nonfinite: tuple[str, ...]
    overflow: tuple[str, ...]
    native_layout: str
    layouts: tuple[str, ...] | Literal["any"] = "any"
    head_dim_max: int = 1024
    head_dim_multiple: int = 1


class Numerics(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Roundoffs of the attention pipeline, from which the conformance bounds are derived (SPEC 7). Formats by name.

    accumulate   of products, sums and the softmax
    operand      to which both operands of a product are rounded first (matrix units)
    score        to which logits are stored before the softmax, `score_roundings` times
    probability  to which the softmax is rounded before it meets V
    part         of partial outputs that are added at the end, with `parts` roundings
    exp_ulp      error of one exp, in ulp of `accumulate`
    flush        whether subnormals of `accumulate` are flushed to zero
    """

    accumulate: Literal["float64", "float32"] = "float32"
    operand: str | None = None
    score: str | None = None
    score_roundings: int = 1
    probability: str | None = None
    part: str | None = None
    parts: int = 1
    exp_ulp: float = 2.0
    flush: bool = False


class DeviceRule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table `[[requires_device]]` of a manifest: what some requests need of a device. A device must meet every rule that applies.

    api            of the devices that the rule is about: "cuda", "hip"
    capabilities   those that serve, each named exactly: "8.6", "gfx942". "10.0" is neither "10.3" nor "12.0"
    newer          whether a capability above all of these serves, too; one between them that is not named never does
    dtypes         the rule applies to requests that have one of these as their own dtype or that of their metadata; none: to all
    head_dim_above it applies to requests with a larger head_dim or value_head_dim
    reason         why, for the message
    """

    api: str
    capabilities: tuple[str, ...]
    newer: bool = False
    dtypes: tuple[str, ...] = ()
    head_dim_above: int = 0
    reason: str


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """backend.toml: everything that can be known about a backend without importing it.

    requires         package -> versions; "a | b | c" stands for the first of them that is installed
    mode_requires    mode -> what it requires beyond that
    requires_device  what requests need of a device, in mode "device"
    environment      variables that a probe reads
    self_check       whether a device is checked with a few conformance cases before it is first chosen; false for what defines the truth
    """

    kivi_backend: Literal[1]
    name: str
    summary: str
    priority: int
    modes: dict[Mode, tuple[str, ...]]
    extra: str | None = None
    requires: dict[str, str] = {}
    mode_requires: dict[Mode, dict[str, str]] = {}
    requires_device: tuple[DeviceRule, ...] = ()
    environment: tuple[str, ...] = ()
    self_check: bool = True
    capabilities: Capabilities
    numerics: Numerics = Numerics()


class DeviceInfo(Struct, frozen=True, kw_only=True):
    """One device, as a probe found it.

    device      its name in this process: "cpu", "cuda:0"
    name        its model; api: "cuda", "hip", or empty for a host
    capability  compute capability "9.0", architecture "gfx942"; driver: the driver's version; memory: bytes
    reason      why the backend cannot use it whatever the request; empty if it can
    """

    device: str
    name: str = ""
    api: str = ""
    capability: str = ""
    driver: str = ""
    memory: int = 0
    reason: str = ""

    def __str__(self) -> str:
        facts = ", ".join(fact for fact in (self.name, self.capability and f"capability {self.capability}") if fact)
        return f"{self.device} ({facts})" if facts else self.device


class Probe(Struct, frozen=True, kw_only=True):
    """Whether a backend can run here, in which mode, on which devices, and if not, why.

    devices  names of those that it can use; found: data of all that it saw, the unusable ones too, with their reasons
    state    why it is not available, in a word; set by kivi
    """

    available: bool
    mode: str
    devices: tuple[str, ...] = ()
    reason: str = ""
    versions: dict[str, str] = {}
    found: tuple[DeviceInfo, ...] = ()
    state: str = ""


# -- what a cache hands to a backend ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seal:
    """Quantize `count` rows of one request, from token `first` on, into rows `row...` of a page."""

    which: Which
    request: int
    first: int
    count: int
    page: int
    row: int


@dataclass(frozen=True)
class Windows:
    """Floating rows of all requests: ring buffers, token t in slot t mod capacity.

    key [B, Hkv, capacity, D], value [B, Hkv, capacity, Dv], arrays of the backend; the two capacities may differ.
    """

    key: Any
    value: Any

    @property
    def key_capacity(self) -> int:
        return int(self.key.shape[2])

    @property
    def value_capacity(self) -> int:
        return int(self.value.shape[2])


@dataclass(frozen=True)
class Append:
    """New rows and what they cause. All counts are int64 arrays [B].

    stored      tokens whose floating rows are in `source`, the new ones excluded
    counts      new rows of each request in k and v
    seals       rows to quantize; token t >= stored is row t - stored of k or v, an older one lies in `source`
    keep_key    first token whose key row must be in `target` afterwards; likewise keep_value
    source      windows before; `target`: windows afterwards, the same object or a fresh one
    """

    stored: np.ndarray
    counts: np.ndarray
    seals: tuple[Seal, ...]
    keep_key: np.ndarray
    keep_value: np.ndarray
    source: Windows
    target: Windows


@dataclass(frozen=True)
class Reading:
    """What the queries of one call see. All counts are int64 arrays [B].

    Request b holds `stored` tokens: [0, key_sealed) have their keys in pages, [0, value_sealed) their values, the rest lie in
    `windows`. `chunk` rows of k and v follow them. The last `counts` of these stored + chunk tokens are those of the query
    rows: row i sits at position stored + chunk - counts + i and sees itself and everything before (SPEC 5).

    table       int64 [B, M, 2]: (page, first token), `pages` rows are valid; a page ends where the next begins, or at key_sealed
    """

    stored: np.ndarray
    key_sealed: np.ndarray
    value_sealed: np.ndarray
    pages: np.ndarray
    table: np.ndarray
    windows: Windows
    pool: PagePool
    chunk: np.ndarray
    counts: np.ndarray
    scale: float


class Served(NamedTuple):
    """What served the shapes of one bucket."""

    backend: str
    mode: str
    device: str
    kernel: str
    layout: str


class Ran(NamedTuple):
    """What ran: part of every result (`cache.ran`). `ran["mode"]` reads as `ran.mode`.

    served  shape bucket (`kivi.ranks.Bucket`) -> what served it last; a move to another backend leaves the entries of before
    """

    backend: str
    mode: str
    device: str
    kernel: str
    layout: str
    versions: dict[str, str]
    served: dict[Any, Served] = {}

    def __getitem__(self, key: Any) -> Any:
        return getattr(self, key) if isinstance(key, str) else tuple.__getitem__(self, key)

    def keys(self) -> tuple[str, ...]:
        return self._fields


# -- the backend ------------------------------------------------------------------------------------------------------


class Backend(ABC):
    """One backend in one mode on one device. Its arrays are its own kind; callers' arrays pass `adopt` and `give`."""

    def __init__(self, manifest: Manifest, mode: str, device: str, versions: dict[str, str]) -> None:
        self.manifest = manifest
        self.name = manifest.name
        self.mode = mode
        self.device = device
        self.versions = versions

    def __repr__(self) -> str:
        return f"<kivi backend {self.name} ({self.mode}, {self.device})>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        """A backend holds a device and compiled kernels: copies of what uses it share it."""
        return self

    #: Whether `KernelBackend.record` works in this mode.
    can_record = False

    @property
    def kernel(self) -> str:
        """Name of the attention kernel in use, for `cache.ran`."""
        return self.name

    def kernels(self) -> dict[str, list[str]]:
        """SHA-256 of the IR of the generated kernels that this process has loaded, by name; empty for a backend that generates none."""
        return {}

    # array plumbing

    @abstractmethod
    def adopt(self, x: Any, what: str) -> Any:
        """A caller's array as one of the backend, without a copy where the memory allows. Raises `DeviceError`."""

    @abstractmethod
    def give(self, a: Any, like: Any) -> Any:
        """An array of the backend as one of the library of `like`."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A zero-filled array; dtypes by name."""

    def slab(self, pages: int, heads: int, size: int) -> tuple[Any, int]:
        """Zeroed memory of so many pages, each [heads, size] bytes: an array of pages, uint8 [P, heads, size], and which is the first of
        them. Slabs may be parts of one array, which then is the same object."""
        return self.zeros((pages, heads, size), "uint8"), 0

    @abstractmethod
    def to_host(self, a: Any) -> np.ndarray:
        """A NumPy copy or view."""

    @abstractmethod
    def from_host(self, a: np.ndarray) -> Any:
        """An array of the backend with these contents."""

    @abstractmethod
    def page_views(self, raw: Any, form: PageFormat) -> dict[str, Any]:
        """Typed views into `raw`, uint8 [pages, Hkv, form.bytes]: field name -> [pages, Hkv, *shape]."""

    @abstractmethod
    def first_bad(self, x: Any, counts: np.ndarray, lowest: float) -> tuple[int, int, int, int] | None:
        """Index of the first element of x [B, H, n, D] that is not finite or below `lowest`, rows past counts[b] aside."""

    # whole tensors

    @abstractmethod
    def encode(self, x: Any, which: Which, spec: CacheSpec, metadata: str, layout: Layout) -> tuple[Any, Any, Any]:
        """(words, scale, origin) of x [B, Hkv, T, D]: SPEC 3 and 8. Raises `MetadataOverflowError`."""

    @abstractmethod
    def codes(self, qt: QuantizedTensor) -> Any:
        """Codes of a tensor, uint8 [B, Hkv, T, D]."""

    @abstractmethod
    def dequantize(self, qt: QuantizedTensor, dtype: str) -> Any:
        """SPEC 3.4."""

    @abstractmethod
    def relayout(self, qt: QuantizedTensor, layout: Layout) -> Any:
        """The words of `qt` in another layout."""

    # a paged cache

    @abstractmethod
    def append(self, pool: PagePool, step: Append, k: Any, v: Any) -> int:
        """Carry out `step`: first the seals, then the rows into the target windows. Returns how many scales and origins
        were clamped. May raise at any point: nothing it writes is visible before the cache commits its counts."""

    @abstractmethod
    def attend(self, reading: Reading, q: Any, k: Any, v: Any) -> Any:
        """Attention of q [B, Hq, n, D] over `reading`: [B, Hq, n, Dv] in the dtype of q, zeros past counts (SPEC 5, 7)."""

    @abstractmethod
    def gather(self, a: Any, index: list[int]) -> Any:
        """A new array of the rows `index` of the first axis."""

    @abstractmethod
    def copy_page(self, pool: PagePool, source: int, target: int) -> None:
        """Copy all bytes of one page to another."""

    # shared by all backends

    def layout_for(self, spec: CacheSpec) -> Layout:
        """The layout that this backend uses for `spec`. Raises `UnsupportedError` if it does not have the named one."""
        return layout_for(self.manifest, spec)

    def quantize(self, x: Any, spec: CacheSpec, which: Which, layout: str | Layout | None = None) -> QuantizedTensor:
        """Quantize a whole tensor x [B, Hkv, T, D], as one request that never pauses (SPEC 2, 3).

        `layout`: a name or a `Layout`; default: the spec's. Raises `ShapeError` (four dimensions; keys: T a multiple of G),
        `DtypeError`, `NonFiniteError`, `MetadataOverflowError`.
        """
        if which not in ("key", "value"):
            raise DtypeError(f"which = {which!r}; a tensor is quantized as 'key' or as 'value'")
        if not isinstance(spec, CacheSpec):
            raise DtypeError(f"spec is a {type(spec).__name__}; load one with kivi.load_spec")
        kind(x, "x")
        dtype = check_float(dtype_name(x), "dtype of x")
        if len(x.shape) != 4 or 0 in (x.shape[0], x.shape[1], x.shape[3]):
            raise ShapeError(f"x has shape {tuple(x.shape)}; quantize takes [batch, kv_heads, tokens, head_dim], none but tokens 0")
        tokens = int(x.shape[2])
        if which == "key" and tokens % spec.key.group:
            raise ShapeError(
                f"x has {tokens} tokens, not a multiple of key.group = {spec.key.group}: keys are quantized in whole groups of "
                f"tokens; cut or collect to a multiple (a cache does)"
            )
        metadata = metadata_dtype(spec, which, dtype)
        chosen = self.layout_for(spec) if layout is None else layout if isinstance(layout, Layout) else named_layout(layout)
        native = self.adopt(x, "x")
        if spec.nonfinite == "reject":
            self.check_finite(native, "x", np.full(x.shape[0], tokens))
        with Kept():
            words, scale, origin = (self.give(a, x) for a in self.encode(native, which, spec, metadata, chosen))
        batch, heads, _, channels = (int(n) for n in x.shape)
        return QuantizedTensor(words, scale, origin, which, spec, chosen, (batch, heads, tokens, channels), dtype, self)

    def repack(self, qt: QuantizedTensor, layout: Layout) -> QuantizedTensor:
        """See `QuantizedTensor.repack`."""
        if layout == qt.packing:
            return qt
        words = self.relayout(qt, layout)
        return QuantizedTensor(words, qt.scale, qt.origin, qt.which, qt.spec, layout, qt.shape, qt.dtype, self)

    def check_finite(self, x: Any, what: str, counts: np.ndarray, lowest: float = -np.inf, tokens: np.ndarray | None = None) -> None:
        """Raise for the first element of x [B, H, n, D] that is not finite, or so low that it cannot be an origin.

        `tokens`: position of each request's row 0, for the message. Raises `NonFiniteError`, `MetadataOverflowError`.
        """
        found = self.first_bad(x, counts, lowest)
        if found is None:
            return
        value, where = float(self.to_host(x[found])), place(found, tokens)
        if np.isfinite(value):
            raise MetadataOverflowError(
                f"{what} holds {value:g} at {where}, which no {what}.metadata of this spec can store as an origin; "
                f"use {what}.metadata = 'bfloat16' or 'float32', or overflow = 'saturate'"
            )
        raise NonFiniteError(
            f"{what} holds {value} at {where}; the spec says nonfinite = 'reject': clean the input, or use nonfinite = 'propagate'"
        )


def layout_for(manifest: Manifest, spec: CacheSpec) -> Layout:
    """The layout that a backend uses for `spec`: the named one, or its native one. Raises `UnsupportedError`."""
    named, can = spec.packing.layout, manifest.capabilities
    layout = named if isinstance(named, Layout) else named_layout(can.native_layout if named == "auto" else named)
    if can.layouts != "any" and layout.name not in can.layouts:
        raise UnsupportedError(f"backend {manifest.name!r} has no layout {layout.name!r}; it has {', '.join(can.layouts)}")
    return layout


def place(index: tuple[int, int, int, int], tokens: np.ndarray | None = None) -> str:
    """An element's address in words."""
    b, h, t, c = (int(i) for i in index)
    return f"request {b}, head {h}, token {t + (0 if tokens is None else int(tokens[b]))}, channel {c}"


def extremes(x: np.ndarray) -> tuple[float, float]:
    """The least and the greatest finite value of rows that hold an offending group."""
    x = x.astype(np.float32)
    finite = np.where(np.isfinite(x), x, 0.0)
    return float(finite.min()), float(finite.max())


def overflow_error(where: str, which: str, low: float, high: float, spec: CacheSpec, metadata: str) -> MetadataOverflowError:
    """The error of SPEC 3.7 for a group, or rows that hold it, with values from `low` to `high`."""
    return _overflow(where, f"values from {low:g} to {high:g}", which, low, high, spec, metadata)


def group_overflow_error(where: str, which: str, rows: np.ndarray, spec: CacheSpec, metadata: str, first: int = 0) -> MetadataOverflowError:
    """The error of SPEC 3.7.3 for rows [B, H, n, D] or [H, n, D] of whole groups, one of which overflows: it names the one that needs the
    largest numbers. `first`: the token of row 0."""
    side = spec.key if which == "key" else spec.value
    axis, x = (-2 if which == "key" else -1), rows if spec.numerics == "staged" else rows.astype(np.float32)
    starts = np.arange(0, x.shape[axis], side.group)
    with np.errstate(all="ignore"):
        low, high = np.minimum.reduceat(x, starts, axis), np.maximum.reduceat(x, starts, axis)  # NaN where a group has one
    over = np.isfinite(low) & np.isfinite(high) & ~fits(low, high, side.bits, metadata)  # others decode to NaN, and store no number (3.6.3)
    low, high = low.astype(np.float64), high.astype(np.float64)
    with np.errstate(all="ignore"):
        need = np.maximum(np.abs(low), (high - low) / ((1 << side.bits) - 1))
    worst = np.unravel_index(int(np.argmax(np.where(over, need, -1.0))), need.shape)
    *outer, t, c = (int(i) for i in worst)
    names = [f"{name} {i}" for name, i in zip(("request", "head")[-len(outer) :], outer, strict=True)]
    if which == "key":
        names += [f"channel {c}", f"tokens {first + t * side.group} to {first + (t + 1) * side.group - 1}"]
    else:
        names += [f"token {first + t}", f"channels {c * side.group} to {min((c + 1) * side.group, x.shape[-1]) - 1}"]
    lowest, highest = float(low[worst]), float(high[worst])
    held = f"the group of {', '.join(names)} has values from {lowest:g} to {highest:g}, which"
    return _overflow(where, held, which, lowest, highest, spec, metadata)


def _overflow(where: str, held: str, which: str, low: float, high: float, spec: CacheSpec, metadata: str) -> MetadataOverflowError:
    side = spec.key if which == "key" else spec.value
    wider = metadata_that_holds(low, high, side.bits) if spec.numerics == "portable" else []
    remedy = f"use {which}.metadata = {wider[0]!r}, or " if wider else "use "
    return MetadataOverflowError(
        f"{where}: {held} need a scale or an origin that {which}.metadata = {metadata!r} cannot hold; the spec says "
        f"overflow = 'reject': {remedy}overflow = 'saturate'"
    )


def read_manifest(text: str, where: str) -> Manifest:
    """A manifest from TOML text. Raises `UnsupportedError` naming the file."""
    try:
        manifest = msgspec.toml.decode(text.encode(), type=Manifest)
    except msgspec.DecodeError as error:
        raise UnsupportedError(f"{where} is not a valid backend manifest: {error}") from None
    unknown = [d for d in manifest.capabilities.dtypes if d not in FLOATS]
    if unknown:
        raise UnsupportedError(f"{where}: capabilities.dtypes names {', '.join(unknown)}; known are {', '.join(FLOATS)}")
    return manifest
