"""Covering arrays: a few rows in which every pair (or triple) of settings occurs. Greedy and deterministic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]


def covering(axes: Mapping[str, Sequence[Any]], strength: int, allowed: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Rows {axis: setting} that hold every allowed combination of `strength` settings at least once.

    `allowed` judges partial rows, too: it must not refuse for what a row does not name yet.
    """
    names = list(axes)
    missing = {
        combo
        for chosen in combinations(names, strength)
        for combo in (tuple(zip(chosen, values, strict=True)) for values in product(*(axes[n] for n in chosen)))
        if allowed(dict(combo))
    }
    order = sorted(missing, key=repr)
    rows: list[Row] = []
    for combo in order:
        if combo not in missing:
            continue
        row = dict(combo)
        for name in names:
            if name in row:
                continue
            options = [v for v in axes[name] if allowed({**row, name: v})]
            gains = [sum(c in missing for c in _covered({**row, name: v}, names, strength, name)) for v in options]
            best = max(gains)
            turn = len(rows) % len(options)
            row[name] = next(v for v, g in zip(options[turn:] + options[:turn], gains[turn:] + gains[:turn], strict=True) if g == best)
        rows.append({name: row[name] for name in names})
        missing -= set(_covered(row, names, strength))
    return rows


def _covered(row: Row, names: list[str], strength: int, must: str | None = None) -> list[tuple]:
    """The combinations that a (partial) row holds; with `must`, those that name this axis."""
    present = [n for n in names if n in row]
    return [tuple((n, row[n]) for n in chosen) for chosen in combinations(present, strength) if must is None or must in chosen]
