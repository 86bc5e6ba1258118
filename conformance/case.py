"""What a case is: frozen data that says what to feed and in which order. What is expected comes from the naive model.

Three kinds, one a profile's worth of checks each:

    Quantize   one tensor through `quantize`, `codes`, `dequantize`, `repack`: bit for bit
    Stream     events on a cache: outputs within their bound, state bit for bit
    Special    a function, for what the two cannot say (goldens, two runs that must agree)

A trace file holds one family of cases and a function `cases()` that returns them. A case is in the quick size unless it
says `size="full"`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from typing import Any, Literal

import numpy as np

from kivi.conformance.floats import cast
from kivi.conformance.inputs import Inputs, frozen
from kivi.spec import CacheSpec

Profile = Literal["quantize", "attention", "stream"]
Size = Literal["quick", "full"]
Side = Literal["key", "value"]
Run = Callable[[Any, Any], None]

#: Groups of 8, residuals of 16: small enough for an interpreter, large enough for several groups a page and several pages.
BASE: dict[str, Any] = {"key.group": 8, "key.residual": 16, "value.group": 8, "value.residual": 16}


def spec_of(changes: Mapping[str, Any]) -> CacheSpec:
    """`BASE` with `changes`. Staged numerics take the input's dtype for metadata unless told otherwise."""
    staged = {"key.metadata": "input", "value.metadata": "input"} if changes.get("numerics") == "staged" else {}
    return CacheSpec(name="case").override({**BASE, **staged, **changes})


# -- events ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Poke:
    """Write `value` into one element of the next call's tensor "q", "k" or "v"."""

    tensor: str
    request: int
    head: int
    token: int
    channel: int
    value: float


@dataclass(frozen=True)
class Attend:
    """Append and attend to the next n tokens. `view`: how the arrays lie in memory; `padding`: what rows past counts hold."""

    n: int = 1
    counts: tuple[int, ...] | None = None
    commit: bool = True
    view: str = "plain"
    padding: float = 0.0
    pokes: tuple[Poke, ...] = ()


@dataclass(frozen=True)
class Commit:
    n: int | tuple[int, ...] | None = None


@dataclass(frozen=True)
class Rollback:
    pass


@dataclass(frozen=True)
class Crop:
    t: int | tuple[int, ...]


@dataclass(frozen=True)
class Reorder:
    index: tuple[int, ...]


@dataclass(frozen=True)
class Select:
    index: tuple[int, ...]


@dataclass(frozen=True)
class Repeat:
    n: int


@dataclass(frozen=True)
class Fork:
    """Fork and go on with the child; the parent waits. `Swap` changes places."""


@dataclass(frozen=True)
class Swap:
    """Go on with the cache that waits."""


@dataclass(frozen=True)
class Reset:
    pass


@dataclass(frozen=True)
class Reload:
    """Save, load, go on with what was loaded."""


@dataclass(frozen=True)
class Move:
    """Move to the subject's own backend: everything is carried over."""


@dataclass(frozen=True)
class Refused:
    """The event must raise `kivi.errors.<error>` with all of `says` in its message (any case), and change nothing."""

    event: Any
    error: str
    says: tuple[str, ...] = ()


def decode(n: int) -> tuple[Attend, ...]:
    """n steps of one token."""
    return (Attend(),) * n


def draft(n: int) -> Attend:
    """n speculative tokens in one call."""
    return Attend(n, commit=False)


# -- cases ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Geometry:
    """Shape and limits of a cache, by the names of `KVCache`; `scale` None means 1/sqrt(head_dim)."""

    batch: int = 1
    q_heads: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    value_head_dim: int | None = None
    dtype: str = "float16"
    scale: float | None = None
    max_tokens: int | None = None
    max_pages: int | None = None

    @property
    def value_dim(self) -> int:
        return self.value_head_dim or self.head_dim

    @property
    def softmax_scale(self) -> float:
        return self.scale if self.scale is not None else self.head_dim**-0.5


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """Common part. `about`: what goes wrong in a backend that fails it; `reports`: field reports it answers."""

    id: str
    profile: Profile
    about: str
    spec: CacheSpec = field(default_factory=lambda: spec_of({}))
    size: Size = "quick"
    reports: tuple[int, ...] = ()

    @property
    def instances(self) -> int:
        """Program instances, counting one for each request, KV head and (in `quantize`) page: attention, quantize, dequantize, repack."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, eq=False)
class Quantize(Case):
    """`make()` -> x [B, Hkv, T, D]; `dtype` its format. `error`: class name that quantizing must raise, with `says` in its text."""

    profile: Profile = "quantize"
    which: Side = "key"
    make: Callable[[], np.ndarray]
    dtype: str = "float16"
    view: str = "plain"
    layouts: tuple[str, ...] = ()
    error: str | None = None
    says: tuple[str, ...] = ()

    @cached_property
    def x(self) -> np.ndarray:
        return frozen(cast(self.make(), self.dtype))

    @property
    def instances(self) -> int:
        batch, heads, tokens, _ = self.x.shape
        pages = ceil(tokens / self.spec.key.residual)
        return batch * heads * pages * (1 if self.error else 2 + len(self.layouts))


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream(Case):
    """Events on a cache fed from `inputs`. `outputs`: where an example is written out, the last row of each attend (request 0, head
    0) to six digits after the point; the oracle must give them."""

    profile: Profile = "stream"
    geometry: Geometry
    inputs: Inputs
    events: tuple[Any, ...]
    outputs: Any = None

    @property
    def instances(self) -> int:
        heads, total, batch = self.geometry.kv_heads, 0, self.geometry.batch
        for event in self.events:
            if isinstance(event, Attend):
                total += heads * batch
            elif isinstance(event, Select | Reorder):
                batch = len(event.index)
            elif isinstance(event, Repeat):
                batch *= event.n
        return total

    @property
    def rows(self) -> int:
        """Largest batch on the way."""
        batch = most = self.geometry.batch
        for event in self.events:
            batch = len(event.index) if isinstance(event, Select | Reorder) else batch * event.n if isinstance(event, Repeat) else batch
            most = max(most, batch)
        return most

    @property
    def length(self) -> int:
        """Rows of input that the events take."""
        inner = [e.event if isinstance(e, Refused) else e for e in self.events]
        return sum(e.n for e in inner if isinstance(e, Attend))


@dataclass(frozen=True, kw_only=True, eq=False)
class Special(Case):
    """`run(subject, tally)` raises `Mismatch`, or adds its figures to the tally. `cost`: program instances."""

    run: Run
    cost: int = 1

    @property
    def instances(self) -> int:
        return self.cost
