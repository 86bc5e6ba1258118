"""Bytes: what is reported is what is allocated, and what is allocated is the formula and named padding (report 32)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from kivi.conformance.case import Case, Run, Special, spec_of
from kivi.conformance.compare import Mismatch, Tally
from kivi.conformance.packer import layout_text, pack
from kivi.conformance.subject import Subject

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


def formula(spec: Any, g: dict[str, Any], lengths: list[Any]) -> Fraction:
    """`D [(sealed) (b/8 + 2e/G) + (floating) f]` for keys and values of each request and KV head."""
    total = Fraction(0)
    for which, dim in (("key", g["head_dim"]), ("value", g.get("value_head_dim") or g["head_dim"])):
        side = getattr(spec, which)
        metadata = BYTES[g["dtype"] if side.metadata == "input" else side.metadata]
        for n in lengths:
            sealed, floating = getattr(n, f"{which}_sealed"), getattr(n, f"{which}_residual")
            total += (
                g["kv_heads"]
                * dim
                * (sealed * (Fraction(side.bits, 8) + Fraction(2 * metadata, side.group)) + floating * BYTES[g["dtype"]])
            )
    return total


def accounts(changes: dict[str, Any], g: dict[str, Any], chunks: tuple[int, ...]) -> Run:
    def run(subject: Subject, tally: Tally) -> None:
        spec, rng = spec_of(changes), np.random.default_rng(32)
        cache = subject.cache(spec, **g)
        value_dim = g.get("value_head_dim") or g["head_dim"]
        for n in chunks:
            shapes = (g["q_heads"], g["head_dim"]), (g["kv_heads"], g["head_dim"]), (g["kv_heads"], value_dim)
            cache.attend(*(rng.standard_normal((g["batch"], heads, n, dim)).astype(g["dtype"]) for heads, dim in shapes))
            report = cache.memory()
            expected = formula(spec, g, [cache.lengths(b) for b in range(g["batch"])])
            tokens = sum(cache.lengths(b).tokens for b in range(g["batch"]))
            full = g["kv_heads"] * tokens * (g["head_dim"] + value_dim) * BYTES[g["dtype"]]
            for what, got, wanted in (
                ("formula", report["formula"], expected),
                ("full_precision", report["full_precision"], full),
                ("measured", report["measured"], cache.nbytes),
                ("formula and padding", report["formula"] + sum(report["padding"].values()), report["measured"]),
                ("by_kind", sum(report["by_kind"].values()), report["measured"]),
            ):
                if got != wanted:
                    raise Mismatch(f"memory()['{what}'] is {got} at {tokens} tokens, expected {wanted}")
            negative = {k: v for k, v in report["padding"].items() if v < 0}
            if negative:
                raise Mismatch(f"negative padding {negative} at {tokens} tokens")

    return run


def grows(subject: Subject, tally: Tally) -> None:
    """Sealed history takes the packed size: from 8 to 24 pages nbytes grows by the formula's share and by the places that the layout leaves
    empty in each page, counted from the layout's own digits; with one page of leeway."""
    spec, g = spec_of({}), {"batch": 1, "q_heads": 2, "kv_heads": 2, "head_dim": 64, "dtype": "float16"}
    cache, rng, sizes = subject.cache(spec, **g), np.random.default_rng(33), []
    for _ in range(3):
        x = rng.standard_normal((1, 2, 128, 64)).astype(np.float16)
        cache.attend(x, x, x)
        sizes.append(cache.nbytes)
    packed, layout = 16 * 2 * 2 * 64 * (Fraction(2, 8) + Fraction(4, 8)), cache.ran.layout
    codes = np.zeros((16, 64), np.uint8)
    words = sum(pack(codes, layout, which, 2, 16).size * layout_text(layout, which)[1] // 8 for which in ("key", "value"))
    page = packed + 2 * words - 16 * 2 * 2 * 64 * Fraction(2, 8)
    for grown in (sizes[1] - sizes[0], sizes[2] - sizes[1]):
        if not 8 * page <= grown <= 9 * page + 512:
            raise Mismatch(
                f"128 more tokens took {grown} bytes; packed they take {int(8 * packed)}, in pages of layout {layout!r} {int(8 * page)}, "
                f"in full precision {128 * 2 * 2 * 64 * 2}"
            )


def cases() -> list[Case]:
    even = {"batch": 2, "q_heads": 2, "kv_heads": 2, "head_dim": 64, "dtype": "float16"}
    odd = {"batch": 1, "q_heads": 2, "kv_heads": 1, "head_dim": 80, "value_head_dim": 40, "dtype": "float32"}
    chunks = (5, 11, 1, 20)

    def special(name: str, about: str, run: Any, cost: int) -> Special:
        return Special(id=f"stream/memory.{name}", profile="stream", about=about, run=run, cost=cost, reports=(32,))

    return [
        special("even", "groups and words that divide", accounts({}, even, chunks), 16),
        special(
            "three-bits",
            "three-bit codes, fp32 metadata",
            accounts({"key.bits": 3, "value.bits": 3, "key.metadata": "float32", "value.metadata": "float32"}, even, chunks),
            16,
        ),
        special("odd", "short last groups and unfinished words", accounts({"value.group": 32, "value.bits": 1}, odd, chunks), 4),
        special("growth", "bytes that are really allocated grow like packed ones", grows, 6),
    ]
