"""Small kernels for rewrites, with nothing of a cache in them, and the checks that a correct rewrite passes."""

from __future__ import annotations

import numpy as np

from kivi.ir.build import constant, indices, kernel, loop, pointer, where
from kivi.ir.xdsl import f32, i32, i64
from kivi.passes.rewrites import rewrite
from kivi.passes.tensors import Kernel
from tests.ir.test_tile import execute

U = 2.0**-24
ROWS, TOKENS, WIDTH = 2, 8, 16


def gamma(n: int) -> float:
    """The relative error of n roundings."""
    return n * U / (1 - n * U)


def run(made: Kernel, grid, **arguments) -> None:
    execute(made.module, made.name, grid, {name: arguments[name] for name in made.arguments})


def product_kernel(form: str, masked: bool = False, place: int = 0, mask: int = 255, stray: bool = False) -> Kernel:
    """Sums of weight * (scale * code + origin): "scores" over channels, "outputs" over tokens.

    Codes are the fields `mask` at bit `place` of words. `stray`: a scale for every code, which may not leave its product.
    """
    scores = form == "scores"

    def body(a, w, s, m, seen, o):
        t, c = indices(TOKENS, 0, 2), indices(WIDTH, 1, 2)
        shape = (TOKENS, WIDTH)
        at = t.spread(shape) * WIDTH + c.spread(shape)
        code = ((w.load(at) >> place) & mask).to(f32)
        along = at if stray else (c if scores else t)
        element = s.load(along) * code + m.load(c if scores else t)
        if scores:
            weight = a.load((indices(ROWS, 0, 2) * WIDTH).spread((ROWS, WIDTH)) + indices(WIDTH, 1, 2).spread((ROWS, WIDTH)))
            product, axis, out = weight.expand(1) * element.expand(0), 2, (ROWS, TOKENS)
        else:
            inner = indices(ROWS, 0, 2) * TOKENS + indices(TOKENS, 1, 2)
            weight = a.load(inner)
            product, axis, out = weight.expand(2) * element.expand(0), 1, (ROWS, WIDTH)
            if masked:
                product = where((seen.load(inner) > 0).expand(2).spread(product.shape), product, 0.0)
        result = product.reduce("add", axis).reshape(*out)
        o.store(indices(out[0], 0, 2) * out[1] + indices(out[1], 1, 2), result)

    arguments = {"a": pointer(f32), "w": pointer(i32), "s": pointer(f32), "m": pointer(f32), "seen": pointer(i32), "o": pointer(f32)}
    return Kernel(form, kernel(form, arguments, body), [[], [], []], list(arguments))


def product_data(form: str, masked: bool, stray: bool, top: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Arguments of a product kernel; the words hold codes up to `top` in every byte."""
    rng = np.random.default_rng(seed)
    n, across = (WIDTH, TOKENS) if form == "scores" else (TOKENS, WIDTH)
    seen = rng.integers(0, 2, (ROWS, n)).astype(np.int32) if masked else np.ones((ROWS, n), np.int32)
    return {
        "a": rng.normal(0, 1, (ROWS, n)).astype(np.float32),
        "w": rng.integers(-(2**31), 2**31, (TOKENS, WIDTH)).astype(np.int32),
        "s": rng.uniform(0.1, 3.0, (TOKENS, WIDTH) if stray else n).astype(np.float32),
        "m": rng.normal(0, 4, n).astype(np.float32),
        "seen": seen,
        "o": np.full((ROWS, across), np.nan, np.float32),
    }


def check_product(form: str, rewrites, masked=False, place=0, mask=3, stray=False) -> np.ndarray:
    """A product kernel after some rewrites, within the bound of `fold_scale`; returns what it computed."""
    data = product_data(form, masked, stray, mask)
    if masked:  # an unseen NaN must not arrive as 0 * NaN
        data["m"][3] = np.nan
        data["seen"][:, 3] = 0
    run(rewrite(product_kernel(form, masked, place, mask, stray), rewrites), (1,), **data)
    codes = ((data["w"].view(np.uint32) >> place) & mask).astype(np.float64)
    a, s, m = (data[name].astype(np.float64) for name in "asm")
    if masked:
        a, m = np.where(data["seen"] > 0, a, 0.0), np.nan_to_num(m)
    if form == "scores":
        first, second = (lambda a, s, m: a @ (s * codes).T), (lambda a, m: (a @ m)[:, None])
    else:
        first, second = (lambda a, s, m: a @ ((s if stray else s[:, None]) * codes)), (lambda a, m: (a @ m)[:, None])
    exact = first(a, s, m) + second(a, m)
    n = a.shape[1]
    bound = gamma(n + 2) * (first(abs(a), s, m) + second(abs(a), abs(m)))
    assert (np.abs(data["o"] - exact) <= bound).all()
    return data["o"]


def total_kernel(low: int) -> Kernel:
    """The sum of x[low : n], counted in integers so that every trip shows."""

    def body(x, n, slot, shares, o):
        [total] = loop(low, n, [constant(0, i32)], lambda i, sum_: [sum_ + x.load(i.to(i64))])
        o.store(slot.to(i64), total)

    arguments = {"x": pointer(i32), "n": i32, "slot": i32, "shares": i32, "o": pointer(i32)}
    return Kernel("total", kernel("total", arguments, body), [[], [], []], list(arguments))


def check_split(low: int, n: int, shares: int) -> None:
    """Every trip is in one share, and no share reads past the end."""
    x = 1 << np.arange(max(n, 1), dtype=np.int32)
    out = np.full(shares, -1, np.int32)
    made = rewrite(total_kernel(low), ["split_kv"])
    assert made.grid[1] == [("shares", 1)]
    run(made, (1, shares), x=x, n=n, shares=shares, o=out)
    assert (out >= 0).all()
    assert int(out.sum()) == sum(1 << i for i in range(low, n))
    assert int(np.bitwise_or.reduce(out)) == int(out.sum())  # shares do not overlap
    run(total_kernel(low), (1,), x=x, n=n, slot=0, shares=shares, o=out)
    assert int(out[0]) == sum(1 << i for i in range(low, n))


def sums_kernel() -> Kernel:
    """Row sums of x, of y and of the transpose of z, added: the first two reductions join, the third, along another axis, does not."""

    def body(x, y, z, o):
        at = (indices(8, 0, 2) * 8).spread((8, 8)) + indices(8, 1, 2).spread((8, 8))
        rows = [p.load(at).reduce("add", 1).reshape(8) for p in (x, y)]
        o.store(indices(8), rows[0] + z.load(at).reduce("add", 0).reshape(8) + rows[1])

    arguments = {name: pointer(f32) for name in "xyzo"}
    return Kernel("sums", kernel("sums", arguments, body), [[], [], []], list(arguments))


def check_join() -> None:
    """Small integers add up exactly in any order."""
    rng = np.random.default_rng(1)
    data = {name: rng.integers(-99, 99, (8, 8)).astype(np.float32) for name in "xyz"}
    out = np.zeros(8, np.float32)
    made = rewrite(sums_kernel(), ["join_sums"])
    assert str(made.module).count("tile.reduce") == 2
    run(made, (1,), **data, o=out)
    assert np.array_equal(out, data["x"].sum(1) + data["y"].sum(1) + data["z"].sum(0))
