"""Mutants of the words: lane order, signs, planes, padding, pages."""

from __future__ import annotations

import numpy as np

from kivi import layout
from kivi.backends.reference.driver import ReferenceBackend
from kivi.layout import Arrangement
from tests.meta.mutants import mutant


@mutant
def reversed_lanes(patch):
    """Codes fill a word from the top."""
    pack, unpack = layout._shift_or, layout._fields
    patch.setattr(layout, "_shift_or", lambda codes, bits: pack(codes[..., ::-1], bits))
    patch.setattr(layout, "_fields", lambda words, bits, count: unpack(words, bits, count)[..., ::-1])


@mutant
def sign_extension(patch):
    """The topmost code of a word is read with an arithmetic shift and no mask."""

    def wrong(words, bits, count):
        codes = honest(words, bits, count)
        top = (words.view(f"int{8 * words.itemsize}") >> (bits * (count - 1))).astype(np.uint8)
        if bits * count == 8 * words.itemsize:
            codes[..., -1] = top
        return codes

    honest = layout._fields
    patch.setattr(layout, "_fields", wrong)


@mutant
def repack_drops_a_plane(patch):
    """Repacking three-bit codes loses the high bits."""
    honest = ReferenceBackend.relayout

    def wrong(self, qt, target):
        if qt.bits == 3:
            words = np.asarray(qt.words)
            kept = layout.unpack(words, qt.packing, qt.which, 3, qt.spec.key.residual, qt.tokens, qt.shape[3]) & 3
            return layout.pack(kept, target, qt.which, 3, qt.spec.key.residual)
        return honest(self, qt, target)

    patch.setattr(ReferenceBackend, "relayout", wrong)


@mutant
def planes_swapped(patch):
    """Three-bit units put the high plane first, in writing and in reading."""
    pack, unpack = Arrangement._words_of, Arrangement._codes_of
    patch.setattr(Arrangement, "_words_of", lambda self, units: np.roll(pack(self, units), 1, -1))
    patch.setattr(Arrangement, "_codes_of", lambda self, words: unpack(self, np.roll(words, -1, -1)))


@mutant
def planes_interleaved(patch):
    """Three-bit units split even and odd codes instead of the halves."""
    pack, unpack = Arrangement._words_of, Arrangement._codes_of
    order = lambda n: np.concatenate([np.arange(0, n, 2), np.arange(1, n, 2)])  # noqa: E731
    patch.setattr(Arrangement, "_words_of", lambda self, units: pack(self, units[..., order(units.shape[-1])] if self.bits == 3 else units))

    def back(self, words):
        codes = unpack(self, words)
        return codes[..., np.argsort(order(codes.shape[-1]))] if self.bits == 3 else codes

    patch.setattr(Arrangement, "_codes_of", back)


@mutant
def padding_of_ones(patch):
    """Places without a code hold ones."""
    honest = np.pad

    class Module:
        def __getattr__(self, name):
            return getattr(np, name)

        def pad(self, codes, widths):
            return honest(codes, widths, constant_values=1)

    patch.setattr(layout, "np", Module())


@mutant
def words_run_on(patch):
    """Words do not restart at each page."""
    pack, unpack = layout.pack, layout.unpack
    patch.setattr(layout, "pack", lambda codes, form, which, bits, page: pack(codes, form, which, bits, max(page, codes.shape[-2])))
    patch.setattr(
        layout,
        "unpack",
        lambda words, form, which, bits, page, tokens, channels: unpack(words, form, which, bits, max(page, tokens), tokens, channels),
    )


@mutant
def repack_keeps_the_layout(patch):
    """Repacking to lanes32 gives hp16."""
    honest = ReferenceBackend.relayout
    patch.setattr(
        ReferenceBackend,
        "relayout",
        lambda self, qt, target: honest(self, qt, layout.named_layout("hp16") if target.name == "lanes32" else target),
    )


@mutant
def last_channel_lost(patch):
    """An odd last channel of a layout with far-apart lanes is not stored."""
    honest = Arrangement.pack

    def wrong(self, codes):
        codes = np.array(codes)
        if self.slots[-1].weight > 1 and self.slots[0].axis == "c":
            codes[..., -1] = 0
        return honest(self, codes)

    patch.setattr(Arrangement, "pack", wrong)


@mutant
def value_seal_disturbs_neighbour(patch):
    """Sealing a value row rewrites the words it shares with other tokens from scratch."""
    honest = Arrangement.unpack

    def forgetful(self, words):
        codes = honest(self, words)
        return (
            np.zeros_like(codes)
            if self.tokens < 64 and self.token_step > 1 and self.tokens == self.token_step and self.channels % 2 == 0
            else codes
        )

    patch.setattr(Arrangement, "unpack", forgetful)
