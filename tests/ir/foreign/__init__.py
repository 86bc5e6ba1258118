"""Kernels that have nothing to do with caches: what a level of the IR means, and that its printers print the dialect.

Each is a .mlir file, with arguments, grid and expected result here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kivi.ir.tile import Tile
from kivi.ir.xdsl import ModuleOp, parse


@dataclass(frozen=True)
class Foreign:
    """A kernel, its grid, and `make()` -> arguments in order; arrays named "o" are compared with `expected(arguments)`."""

    name: str
    grid: tuple[int, ...]
    make: Callable[[], dict[str, Any]]
    expected: Callable[[dict[str, Any]], np.ndarray]
    exact: bool = True

    def module(self) -> ModuleOp:
        return parse((Path(__file__).parent / f"{self.name}.mlir").read_text(), Tile)


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


def aligned(x: np.ndarray, to: int = 16) -> np.ndarray:
    """A copy that starts at a multiple of `to` bytes."""
    room = np.zeros(x.nbytes + to, np.uint8)
    out = room[-room.ctypes.data % to :][: x.nbytes].view(x.dtype).reshape(x.shape)
    out[...] = x
    return out


def _softmax(a: dict[str, Any]) -> np.ndarray:
    weight = np.exp(a["x"].astype(np.float64) - a["x"].max(1, keepdims=True))
    return weight / weight.sum(1, keepdims=True)


FOREIGN = [
    Foreign("row_softmax", (3,), lambda: {"x": _random(3, 40), "o": np.zeros((3, 40), np.float32), "n": 40}, _softmax, exact=False),
    Foreign(
        "prefix_minimum",
        (4,),
        lambda: {"x": _random(4, 24), "o": np.zeros((4, 24), np.float32), "blocks": 3},
        lambda a: np.minimum.accumulate(a["x"], axis=1),
    ),
    Foreign(
        "strided_copy",
        (3,),
        lambda: {"x": np.arange(-500, 500, dtype=np.int16), "o": np.full(80, -1, np.int16), "stride": 11, "n": 75},
        lambda a: np.concatenate([a["x"][: 75 * 11 : 11], np.full(5, -1, np.int16)]),
    ),
    Foreign(
        "row_totals",
        (3,),
        lambda: {"x": aligned(np.arange(-150, 154, dtype=np.int16).reshape(19, 16)), "o": np.full(24, -1, np.float32), "n": 19},
        lambda a: np.concatenate([a["x"].sum(1), np.full(5, -1)]).astype(np.float32),
    ),
    Foreign("named", (1,), lambda: {"o": np.zeros(3, np.int32), "n": 2}, lambda a: np.array([35, 35, 11], np.int32)),
]
