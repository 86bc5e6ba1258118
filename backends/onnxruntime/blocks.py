"""Whole tensors in blocks of one page, as graphs take them: pages of all requests and heads along one axis (SPEC 8.4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kivi.layout import Arrangement, Layout, Which, arrangement
from kivi.spec import CacheSpec


@dataclass(frozen=True)
class Block:
    """`pages` pages of `tokens` tokens each from token `start` on; `at`: where their words begin along the token star."""

    form: Arrangement
    start: int
    pages: int
    tokens: int
    at: int

    def rows(self, x: np.ndarray, per_row: int) -> np.ndarray:
        """Rows of x [B, H, T / per_row, C] as [B * H * pages, rows of a page, C]."""
        return np.ascontiguousarray(self._part(x, per_row)).reshape(-1, -(-self.tokens // per_row), x.shape[3])

    def put(self, target: np.ndarray, blocks: np.ndarray, per_row: int) -> None:
        """The inverse of `rows`."""
        part = self._part(target, per_row)
        part[...] = blocks.reshape(part.shape)

    def words(self, words: np.ndarray) -> np.ndarray:
        """Words [B, H, major, minor] of a tensor as [B * H * pages, major, minor]."""
        return np.ascontiguousarray(self._pages(words)).reshape(-1, *self.form.shape)

    def put_words(self, target: np.ndarray, blocks: np.ndarray) -> None:
        """The inverse of `words`."""
        part = self._pages(target)
        part[...] = blocks.view(target.dtype).reshape(part.shape)

    def _part(self, x: np.ndarray, per_row: int) -> np.ndarray:
        first = self.start // per_row
        return x[:, :, first : first + self.pages * -(-self.tokens // per_row)]

    def _pages(self, words: np.ndarray) -> np.ndarray:
        """A view [B, H, pages, major, minor] of words joined along the token star."""
        (major, minor), axis = self.form.shape, self.form.token_axis
        end = self.at + self.pages * self.form.shape[axis]
        batch, heads = words.shape[:2]
        if axis == 0:
            return words[:, :, self.at : end].reshape(batch, heads, self.pages, major, minor)
        split = words[..., self.at : end]
        return np.lib.stride_tricks.as_strided(
            split,
            (batch, heads, self.pages, major, minor),
            (*split.strides[:2], minor * split.strides[3], *split.strides[2:]),
        )


def blocks(which: Which, bits: int, spec: CacheSpec, layout: Layout, tokens: int, channels: int) -> list[Block]:
    """The whole pages of a tensor, then the one that is left."""
    page, out, at = spec.key.residual, [], 0
    for start, pages, count in ((0, tokens // page, page), (tokens // page * page, 1, tokens % page)):
        if pages and count:
            form = arrangement(layout, which, bits, count, channels)
            out.append(Block(form, start, pages, count, at))
            at += pages * form.shape[form.token_axis]
    return out


def joined_shape(which: Which, bits: int, spec: CacheSpec, layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the words of a whole tensor [B, H, T, C], pages joined along the token star."""
    full = arrangement(layout, which, bits, spec.key.residual, shape[3])
    size = list(full.shape)
    parts = blocks(which, bits, spec, layout, shape[2], shape[3])
    size[full.token_axis] = sum(b.pages * b.form.shape[full.token_axis] for b in parts)
    return (*shape[:2], *size)
