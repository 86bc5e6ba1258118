"""How the rows of a left-padded batch line up with the requests of a `kivi.KVCache`.

transformers counts slots: a batch is a rectangle, short prompts have padding in front, and a mask hides it. kivi counts tokens:
a request holds its own tokens and nothing else, and in a chunk the real tokens come first. This module reads the mask, checks
that it is causal with left padding and nothing else, and turns each row of a chunk around.

Reading a mask's and positions' values synchronizes with the device once a forward pass, not once a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kivi.errors import IntegrationError

UNKNOWN = -1 << 62  # the offset of a request that has no token yet


@dataclass(frozen=True)
class Chunk:
    """`n` new slots behind `width` old ones. `counts`: real tokens of each request among the new slots; None: all of them."""

    width: int
    n: int
    counts: np.ndarray | None

    def to_front(self, x: Any) -> Any:
        """`x` [B, H, n, D] with the padding of each row moved behind its real tokens."""
        return x if self.counts is None else self._rotate(x, self.n - self.counts)

    def to_back(self, x: Any) -> Any:
        """The inverse of `to_front`."""
        return x if self.counts is None else self._rotate(x, self.counts)

    def _rotate(self, x: Any, by: np.ndarray) -> Any:
        slot = (np.arange(self.n) + by[:, None]) % self.n
        return x.gather(2, torch.from_numpy(slot).to(x.device)[:, None, :, None].expand_as(x))


class LeftPadding:
    """Padding in front of each request, shared by all layers of a cache."""

    def __init__(self) -> None:
        self.padding = np.zeros(0, np.int64)  # masked slots in front of each request
        self.offset: np.ndarray | None = None  # position id minus slot, the same for all tokens of a request
        self._last: tuple[tuple, Chunk] | None = None

    def chunk(self, mask: Any, positions: Any, batch: int, width: int, n: int) -> Chunk:
        """The chunk that a forward pass appends, checked against what the cache holds.

        `mask`: what the mask function returned, or a 4D mask of the caller; `positions`: position ids [B or 1, n] or None.
        Raises `IntegrationError` for another mask, and for a cache that holds other requests than the ones that continue.
        """
        call = (mask, positions, batch, width, n)
        if self._last is not None and all(a is b or (type(a) is int and a == b) for a, b in zip(self._last[0], call, strict=True)):
            return self._last[1]
        padding = np.zeros(batch, np.int64) if mask is None else _read(mask, batch, width, n)
        if width:
            self._check_continues(padding, batch, width)
        real = n - np.clip(padding - width, 0, n)
        offset = _offsets(positions, batch, width, n, real)
        if width and offset is not None and self.offset is not None:
            _check_positions(self.offset, offset, width)
        self.padding, self.offset = padding, _merge(self.offset if width else None, offset)
        chunk = Chunk(width, n, None if (real == n).all() else real)
        self._last = (call, chunk)
        return chunk

    def tokens(self, width: int) -> np.ndarray:
        """Real tokens of each request among the first `width` slots."""
        return np.maximum(width - self.padding, 0)

    def take(self, rows: np.ndarray) -> None:
        """Keep these requests, in this order; one may appear several times. Nothing to do before the first tokens."""
        if not len(self.padding):
            return
        self.padding = self.padding[rows]
        self.offset = None if self.offset is None else self.offset[rows]
        self._last = None

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]

    def _check_continues(self, padding: np.ndarray, batch: int, width: int) -> None:
        if batch != len(self.padding):
            raise IntegrationError(
                f"the cache holds {len(self.padding)} requests of {width} tokens and was given a batch of {batch}; "
                "a new batch needs a new KiviCache, or reset() on this one"
            )
        held, now = np.minimum(self.padding, width), np.minimum(padding, width)
        if (held != now).any():
            row = int(np.flatnonzero(held != now)[0])
            raise IntegrationError(
                f"the attention mask hides {now[row]} of the {width} slots of request {row}, but {held[row]} were hidden when they were "
                "stored; pass the mask of the whole sequence, or a new KiviCache for another batch"
            )


def _read(mask: Any, batch: int, width: int, n: int) -> np.ndarray:
    """Masked slots in front of each request. Raises unless the mask is causal with left padding and nothing else."""
    total = width + n
    if not isinstance(mask, torch.Tensor) or mask.ndim != 4:
        what = f"a tensor of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else f"a {type(mask).__name__}"
        raise IntegrationError(f"kivi reads masks of shape [batch, 1, new tokens, all tokens], not {what}")
    if mask.shape[0] not in (1, batch) or tuple(mask.shape[1:]) != (1, n, total):
        raise IntegrationError(
            f"the attention mask has shape {tuple(mask.shape)} where [{batch}, 1, {n}, {total}] was due: {width} tokens are stored and "
            f"{n} are new; masks that differ between heads, or are sized for a static cache, are not supported"
        )
    visible = (mask if mask.dtype == torch.bool else _from_additive(mask))[:, 0].cpu().numpy()
    slots = np.arange(total)
    causal = slots <= width + np.arange(n)[:, None]
    padding = np.empty(len(visible), np.int64)
    for row, seen in enumerate(visible):
        shown = seen[-1]
        first = int(shown.argmax()) if shown.any() else total
        real = max(n - max(first - width, 0), 0)
        blank = seen[: n - real]  # queries of padding see nothing, or all of it where sdpa needs something to see
        right = (seen[n - real :] == (causal & (slots >= first))[n - real :]).all() and (blank == blank[:, :1]).all()
        if not right:
            raise IntegrationError(_describe(seen, first, width, row))
        padding[row] = first
    return np.broadcast_to(padding, (batch,)).copy()


def _from_additive(mask: Any) -> Any:
    hidden = mask <= torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else torch.zeros_like(mask, dtype=torch.bool)
    if not (hidden | (mask == 0)).all():
        raise IntegrationError("the attention mask adds a bias to some scores; kivi serves masks that show (0) or hide (-inf) a token only")
    return ~hidden


def _describe(seen: np.ndarray, first: int, width: int, row: int) -> str:
    if not seen[-1, -1]:
        fault = "its last token is hidden (right padding: set tokenizer.padding_side = 'left')"
    elif not seen[-1, first:].all():
        fault = "a token in the middle is hidden"
    elif np.triu(seen, width + 1).any():
        fault = "a token sees later ones (bidirectional or prefix attention)"
    else:
        fault = "a token does not see all earlier ones (a window, or several sequences packed into one row)"
    return f"the attention mask of request {row} is not causal with left padding: {fault}; kivi cannot serve it"


def _offsets(positions: Any, batch: int, width: int, n: int, real: np.ndarray) -> np.ndarray | None:
    """Position id minus slot of the first new token of each request, UNKNOWN where it has none.

    None when there is nothing to compare: the model passes no position ids, or ids of several axes (images).
    """
    if not isinstance(positions, torch.Tensor) or positions.ndim != 2 or positions.shape[1] != n or positions.shape[0] not in (1, batch):
        return None
    shift = np.broadcast_to(positions.detach().cpu().numpy() - width - np.arange(n), (batch, n))
    first = np.minimum(n - real, n - 1)
    offset = np.take_along_axis(shift, first[:, None], 1)[:, 0]
    return np.where(real > 0, offset, UNKNOWN)


def _merge(old: np.ndarray | None, new: np.ndarray | None) -> np.ndarray | None:
    if old is None or new is None:
        return new
    return np.where(new == UNKNOWN, old, new)


def _check_positions(held: np.ndarray, now: np.ndarray, width: int) -> None:
    wrong = (held != now) & (held != UNKNOWN) & (now != UNKNOWN)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise IntegrationError(
            f"request {row} goes on at position {now[row] + width}, but the cache holds its tokens up to position {held[row] + width - 1}: "
            "it holds an earlier sequence, so pass a new KiviCache for a new prompt, or reset() this one (or, if the sequence is the same, "
            "position_ids do not count on from those of the earlier call)"
        )
