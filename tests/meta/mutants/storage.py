"""Mutants of edits and storage: crop, reorder, select, repeat, fork, save, pages, byte counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kivi import storefile
from kivi.backend import Windows
from kivi.backends.reference.driver import ReferenceBackend
from kivi.cache import KVCache
from tests.meta.mutants import mutant


@mutant
def crop_keeps_value_frontier(patch):
    """crop leaves the value frontier where it was."""
    honest = KVCache.crop

    def wrong(self, t):
        before = self._state.value_sealed
        honest(self, t)
        self._state = replace(self._state, value_sealed=np.where(self._state.tokens > 0, before, 0))

    patch.setattr(KVCache, "crop", wrong)


@mutant
def crop_to_whole_groups(patch):
    """crop inside a key group drops the whole group."""
    honest = KVCache.crop

    def wrong(self, t):
        wanted = np.broadcast_to(t, self._state.tokens.shape)
        group = self.spec.key.group
        inside = (wanted < self._state.key_sealed) & (wanted >= 0)
        honest(self, np.where(inside, wanted // group * group, wanted).tolist())

    patch.setattr(KVCache, "crop", wrong)


@mutant
def crop_unseals(patch):
    """After a crop the key frontier is what a fresh cache would have."""
    honest = KVCache.crop

    def wrong(self, t):
        honest(self, t)
        s, r = self._state, self.spec.key.residual
        fresh = s.tokens // r * r
        self._state = replace(s, key_sealed=np.minimum(s.key_sealed, fresh), value_sealed=np.minimum(s.value_sealed, fresh))

    patch.setattr(KVCache, "crop", wrong)


@mutant
def crop_of_floating_only(patch):
    """crop cannot go below the key frontier, and says nothing."""
    honest = KVCache.crop

    def wrong(self, t):
        wanted = np.broadcast_to(t, self._state.tokens.shape)
        honest(self, np.where(wanted >= 0, np.maximum(wanted, np.where(wanted == 0, 0, self._state.key_sealed)), wanted).tolist())

    patch.setattr(KVCache, "crop", wrong)


@mutant
def crop_clamps(patch):
    """crop beyond the end is accepted."""
    honest = KVCache.crop
    patch.setattr(KVCache, "crop", lambda self, t: honest(self, np.clip(t, 0, self._state.tokens).tolist()))


@mutant
def crop_of_first_request(patch):
    """crop applies request 0's length to all."""
    honest = KVCache.crop
    patch.setattr(
        KVCache, "crop", lambda self, t: honest(self, np.minimum(np.atleast_1d(t)[0], self._state.tokens).tolist() if np.ndim(t) else t)
    )


@mutant
def page_row_ignores_first_token(patch):
    """A value is written to row t mod R of its page, also when the page starts elsewhere."""
    honest = KVCache._value_seals

    def wrong(self, old, new):
        for seal in honest(self, old, new):
            row = seal.first % self.spec.key.residual
            yield replace(seal, row=row) if row + seal.count <= self.spec.key.residual else seal

    patch.setattr(KVCache, "_value_seals", wrong)


@mutant
def reorder_forgets_the_residual(patch):
    """Batch edits move pages and counts, not the floating rows."""
    honest = KVCache._copied

    def wrong(self, state, index):
        new = honest(self, state, index)
        rows = [i % self.batch for i in range(len(index))]
        return replace(new, windows=Windows(state.windows.key[rows].copy(), state.windows.value[rows].copy()))

    patch.setattr(KVCache, "_copied", wrong)


@mutant
def reorder_forgets_the_values(patch):
    """Batch edits move the floating keys, not the floating values."""
    honest = KVCache._copied

    def wrong(self, state, index):
        new = honest(self, state, index)
        rows = [i % self.batch for i in range(len(index))]
        return replace(new, windows=Windows(new.windows.key, state.windows.value[rows].copy()))

    patch.setattr(KVCache, "_copied", wrong)


@mutant
def reorder_forgets_the_pages(patch):
    """Batch edits move floating rows and counts, not the sealed pages."""
    honest = KVCache._copied

    def wrong(self, state, index):
        new = honest(self, state, index)
        table = new.table.copy()
        for j in range(len(index)):
            here = j % self.batch
            n = min(int(new.pages[j]), int(state.pages[here]))
            table[j, :n, 0] = state.table[here, :n, 0]
            for page in table[j, :n, 0].tolist():
                self.pool.retain(page)
        return replace(new, table=table)

    patch.setattr(KVCache, "_copied", wrong)


@mutant
def reorder_forgets_the_counts(patch):
    """Batch edits move rows and pages, not the lengths."""
    honest = KVCache.reorder

    def wrong(self, idx):
        before = self._state
        honest(self, idx)
        fits = np.minimum(before.tokens, self._state.tokens)
        self._state = replace(self._state, tokens=np.where(fits >= self._state.key_sealed, fits, self._state.tokens))

    patch.setattr(KVCache, "reorder", wrong)


@mutant
def reorder_inverse(patch):
    """reorder moves request b to place idx[b]."""
    honest = KVCache.reorder
    patch.setattr(
        KVCache,
        "reorder",
        lambda self, idx: honest(
            self, np.argsort(idx).tolist() if len(set(idx)) == len(idx) else list(idx)[::-1] if idx[0] != idx[-1] else idx
        ),
    )
    patch.setattr(
        KVCache, "select", lambda self, idx: self._take([self.batch - 1 - i for i in idx] if len(idx) > 1 else list(idx), "select")
    )


@mutant
def select_keeps_old_batch(patch):
    """select leaves the other requests in the batch."""
    patch.setattr(KVCache, "select", lambda self, idx: self._take([*idx, *[b for b in range(self.batch) if b not in idx]], "select"))


@mutant
def select_takes_first(patch):
    """select keeps the first len(idx) requests."""
    patch.setattr(KVCache, "select", lambda self, idx: self._take(list(range(len(idx))), "select"))


@mutant
def repeat_tiles(patch):
    """repeat lays whole batches side by side instead of copies of each request."""
    patch.setattr(KVCache, "repeat", lambda self, n: self._take([b for _ in range(n) for b in range(self.batch)], "repeat"))


@mutant
def fork_shares_the_table(patch):
    """fork shares the block table, which both branches extend in place."""
    honest = KVCache.fork

    def wrong(self):
        twin = honest(self)
        twin._state = replace(twin._state, table=self._state.table)
        return twin

    patch.setattr(KVCache, "fork", wrong)


@mutant
def fork_shares_windows(patch):
    """fork shares the floating windows."""
    honest = KVCache._copied

    def wrong(self, state, index):
        new = honest(self, state, index)
        return replace(new, windows=state.windows) if index == list(range(self.batch)) else new

    patch.setattr(KVCache, "_copied", wrong)


@mutant
def pages_freed_while_shared(patch):
    """Dropping one user of a shared page gives it back."""
    from kivi.pool import PagePool

    def wrong(self, page):
        self.refs[page] = 0
        if page not in self._free:
            self._free.append(page)

    patch.setattr(PagePool, "release", wrong)


@mutant
def copy_page_loses_metadata(patch):
    """Copying an open page copies its first half."""

    def wrong(self, pool, source, target):
        (a, i), (b, j) = pool.where(source), pool.where(target)
        half = pool.raw[a].shape[-1] // 2
        pool.raw[b][j][..., :half] = pool.raw[a][i][..., :half]

    patch.setattr(ReferenceBackend, "copy_page", wrong)


@mutant
def reorder_requantizes(patch):
    """Batch edits decode and encode sealed keys again, with a truncated scale."""
    honest = KVCache._copied

    def wrong(self, state, index):
        new = honest(self, state, index)
        for j in range(len(index)):
            for page, _, _ in new.rows(j):
                scale = self.pool.view(page, "key.scale")
                scale[...] = (
                    np.nextafter(scale.astype(np.float32), np.float32(0)).astype(scale.dtype)
                    if scale.dtype == np.float32
                    else scale * scale.dtype.type(0.999)
                )
        return new

    patch.setattr(KVCache, "_copied", wrong)


def saved(patch, change) -> None:
    honest = storefile.snapshot

    def wrong(cache):
        snap = honest(cache)
        change(cache, snap.tensors)
        return snap

    patch.setattr(storefile, "snapshot", wrong)


@mutant
def saved_file_loses_a_row(patch):
    """A saved file repeats the second last floating row in place of the last."""

    def change(cache, tensors):
        for name in tensors:
            if name.startswith("residual.value") and tensors[name].shape[1] > 1:
                tensors[name] = tensors[name].copy()
                tensors[name][:, -1] = tensors[name][:, -2]

    saved(patch, change)


@mutant
def saved_origins_lost(patch):
    """A saved file holds the value scales twice, the origins not at all."""
    saved(patch, lambda cache, tensors: tensors.update({"value.origin": tensors["value.scale"]}))


@mutant
def saved_in_half(patch):
    """Floating keys are saved in fp16 precision."""

    def change(cache, tensors):
        for name in tensors:
            if name.startswith("residual.key"):
                tensors[name] = tensors[name].astype(np.float16).astype(tensors[name].dtype)

    saved(patch, change)


@mutant
def saved_frontier_lost(patch):
    """A saved file takes the frontier of a cache without crops."""

    def change(cache, tensors):
        fresh = np.maximum(0, tensors["tokens"] - cache.spec.value.residual)
        tensors["value_sealed"] = np.where(tensors["value_sealed"] > fresh, fresh, tensors["value_sealed"])
        for b in range(cache.batch):
            rows = tensors[f"residual.value.{b}"]
            missing = int(tensors["tokens"][b] - tensors["value_sealed"][b]) - rows.shape[1]
            tensors[f"residual.value.{b}"] = np.concatenate([np.zeros((rows.shape[0], missing, rows.shape[2]), rows.dtype), rows], 1)

    saved(patch, change)


@mutant
def bytes_by_formula(patch):
    """nbytes is the formula, not what is allocated."""
    honest = KVCache.memory

    def wrong(self):
        return {**honest(self), "measured": int(honest(self)["formula"])}

    patch.setattr(KVCache, "memory", wrong)


@mutant
def full_precision_mirror(patch):
    """Every token's rows are kept in full precision as well (report 32)."""
    honest = KVCache._window

    def wrong(self, window, old_from, new_from, stored, counts, residual):
        chosen = honest(self, window, old_from, new_from, stored, counts, residual)
        needed = int((stored + counts).max()) + 8
        return (
            chosen if needed <= chosen.shape[2] else self.backend.zeros((*window.shape[:2], needed, window.shape[3]), self.geometry.dtype)
        )

    patch.setattr(KVCache, "_window", wrong)


@mutant
def metadata_not_counted(patch):
    """The formula leaves scales and origins out."""
    from kivi import memory

    patch.setattr(memory.Side, "sealed_token", property(lambda self: self.head_dim * memory.Fraction(self.bits, 8)))


@mutant
def mode_misreported(patch):
    """What ran is reported under another mode."""
    honest = KVCache.ran
    patch.setattr(KVCache, "ran", property(lambda self: honest.fget(self)._replace(mode="interpreter")))
