"""Collecting the cases of a family: what they share is said once, the seed comes from a case's name."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kivi.conformance.case import Case, Geometry, Profile, Quantize, Side, Size, Stream, spec_of
from kivi.conformance.inputs import Inputs, make


def dotted(changes: dict[str, Any]) -> dict[str, Any]:
    """Spec overrides from keywords: `key__bits=4` is `"key.bits": 4`."""
    return {name.replace("__", "."): value for name, value in changes.items()}


def seed_of(name: str) -> int:
    """A seed that stays the same when cases are added around."""
    return zlib.crc32(name.encode())


#: The cache that most cases use: one request, one head, D = 64.
SINGLE = Geometry(dtype="float32")


@dataclass
class Streams:
    """Stream cases `<profile>/<family>.<name>`. Keywords of `add` beyond the named ones are spec overrides."""

    family: str
    profile: Profile = "stream"
    geometry: Geometry = SINGLE
    reports: tuple[int, ...] = ()
    cases: list[Case] = field(default_factory=list)

    def add(
        self,
        name: str,
        about: str,
        *events: Any,
        inputs: str | Inputs = "rich",
        geometry: Geometry | None = None,
        reports: tuple[int, ...] | None = None,
        size: Size = "quick",
        outputs: Any = None,
        **changes: Any,
    ) -> None:
        self.cases.append(
            Stream(
                id=f"{self.profile}/{self.family}.{name}",
                profile=self.profile,
                about=about,
                spec=spec_of(dotted(changes)),
                size=size,
                reports=self.reports if reports is None else reports,
                geometry=geometry or self.geometry,
                inputs=make(inputs, seed_of(name)) if isinstance(inputs, str) else inputs,
                events=events,
                outputs=outputs,
            )
        )


@dataclass
class Tensors:
    """Whole-tensor cases `quantize/<family>.<name>`."""

    family: str
    reports: tuple[int, ...] = ()
    cases: list[Case] = field(default_factory=list)

    def add(
        self,
        name: str,
        about: str,
        which: Side,
        make: Callable[[], np.ndarray],
        dtype: str,
        *,
        reports: tuple[int, ...] | None = None,
        size: Size = "quick",
        view: str = "plain",
        layouts: tuple[str, ...] = (),
        error: str | None = None,
        says: tuple[str, ...] = (),
        **changes: Any,
    ) -> None:
        self.cases.append(
            Quantize(
                id=f"quantize/{self.family}.{name}",
                about=about,
                spec=spec_of(dotted(changes)),
                size=size,
                reports=self.reports if reports is None else reports,
                which=which,
                make=make,
                dtype=dtype,
                view=view,
                layouts=layouts,
                error=error,
                says=says,
            )
        )

    def groups(
        self,
        name: str,
        about: str,
        groups: np.ndarray | list[list[float]] | Callable[[], np.ndarray],
        dtype: str,
        *,
        sides: str = "kv",
        bits: int = 2,
        metadata: str | None = None,
        **more: Any,
    ) -> None:
        """The same groups [n, G] (or a function that makes them) as keys, one channel a group, and as values, one token a group.

        `sides`: "kv" both in the quick size; "k" or "v": that one, the other in the full size only.
        """
        of: Callable[[], np.ndarray] = groups if callable(groups) else lambda: np.asarray(groups, np.float64)
        size = of().shape[1]
        widths: dict[str, Any] = {
            f"{w}__{f}": v for w in ("key", "value") for f, v in (("group", size), ("residual", 2 * size), ("bits", bits))
        }
        if metadata:
            widths |= {"key__metadata": metadata, "value__metadata": metadata}
        quick: dict[str, Size] = {side: "quick" if side in sides else "full" for side in "kv"}
        self.add(f"{name}.key", about, "key", lambda: np.ascontiguousarray(of().T)[None, None], dtype, size=quick["k"], **widths, **more)
        self.add(f"{name}.value", about, "value", lambda: of()[None, None], dtype, size=quick["v"], **widths, **more)
