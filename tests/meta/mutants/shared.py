"""Mutants of what caches share and keep: pages of forks and batches, the pool's bookkeeping, settings and limits of copies."""

from __future__ import annotations

from dataclasses import replace

from kivi import storefile
from kivi.backends.reference.driver import ReferenceBackend
from kivi.cache import KVCache
from kivi.errors import MetadataOverflowError
from kivi.pool import PagePool
from tests.meta.mutants import mutant


def zero(cache, pages) -> None:
    for page in pages:
        slab, index = cache.pool.where(page)
        cache.pool.raw[slab][index] = 0


def pages_of(state, requests) -> set[int]:
    return {page for b in requests for page, _, _ in state.rows(b)}


# -- bytes that others still read -----------------------------------------------------------------------------------------


@mutant
def reset_zeroes_pages(patch):
    """reset clears the bytes of its pages, also of those that a fork still uses."""
    honest = KVCache.reset

    def wrong(self):
        zero(self, pages_of(self._state, range(self.batch)))
        honest(self)

    patch.setattr(KVCache, "reset", wrong)


@mutant
def crop_zeroes_cut_rows(patch):
    """crop clears the rows that it cuts off a page, also of one that others read to its end."""
    honest = KVCache.crop

    def wrong(self, t):
        honest(self, t)
        for b in range(self.batch):
            for page, first, end in self._state.rows(b)[-1:]:
                for part in ("scale", "origin"):
                    self.pool.view(page, f"value.{part}")[:, end - first :] = 0
                    self.pool.view(page, f"key.{part}")[:, -((first - end) // self.spec.key.group) :] = 0

    patch.setattr(KVCache, "crop", wrong)


@mutant
def crop_zeroes_dropped_pages(patch):
    """crop clears the pages that it drops, also those that others still read."""
    honest = KVCache.crop

    def wrong(self, t):
        before = [pages_of(self._state, [b]) for b in range(self.batch)]
        honest(self, t)
        for b, pages in enumerate(before):
            zero(self, pages - pages_of(self._state, [b]))

    patch.setattr(KVCache, "crop", wrong)


@mutant
def select_zeroes_dropped_pages(patch):
    """Batch edits clear the pages of requests that are not kept, also those that kept ones share."""
    honest = KVCache._take

    def wrong(self, index, what):
        before = self._state
        honest(self, index, what)
        zero(self, pages_of(before, set(range(len(before.pages))) - set(index)))

    patch.setattr(KVCache, "_take", wrong)


@mutant
def dropped_cache_zeroes_pages(patch):
    """A cache that is gone clears its pages, also those of its forks."""
    honest = KVCache.__del__

    def wrong(self):
        if hasattr(self, "_state"):
            zero(self, pages_of(self._state, range(self.batch)))
        honest(self)

    patch.setattr(KVCache, "__del__", wrong)


@mutant
def wide_table_loses_a_row(patch):
    """A block table that grows beyond eight rows for the second time repeats its first page in the fifth row."""
    honest = KVCache._extend_table

    def wrong(self, state, blocks):
        table, pages = honest(self, state, blocks)
        if table.shape[1] > state.table.shape[1] >= 8:
            table[:, 4, 0] = table[:, 0, 0]
        return table, pages

    patch.setattr(KVCache, "_extend_table", wrong)


# -- pages that are lost --------------------------------------------------------------------------------------------------


def keeping(patch, name: str) -> None:
    """No page is released while the method runs."""
    honest, release, depth = getattr(KVCache, name), PagePool.release, []

    def wrong(self, *arguments):
        depth.append(name)
        try:
            return honest(self, *arguments)
        finally:
            depth.pop()

    patch.setattr(KVCache, name, wrong)
    patch.setattr(PagePool, "release", lambda self, page: None if depth else release(self, page))


@mutant
def reset_keeps_pages(patch):
    """reset gives no page back."""
    keeping(patch, "reset")


@mutant
def crop_keeps_pages(patch):
    """crop gives no page back."""
    keeping(patch, "crop")


@mutant
def batch_edits_keep_pages(patch):
    """reorder, select and repeat give no page back."""
    keeping(patch, "_take")


@mutant
def dropped_cache_keeps_pages(patch):
    """A cache that is gone gives no page back."""
    keeping(patch, "__del__")


@mutant
def failed_step_keeps_pages(patch):
    """A step that fails keeps the pages it took."""
    keeping(patch, "_give_back")


# -- settings, limits, counts ---------------------------------------------------------------------------------------------


def forgets(patch, where: str, **settings) -> None:
    """The copies made by fork, or by load and to, have other settings."""

    def changed(cache):
        new = {name: value(cache.geometry) if callable(value) else value for name, value in settings.items()}
        cache.geometry = replace(cache.geometry, **new)
        if "max_pages" in settings:
            cache.pool.max_pages = settings["max_pages"]
        return cache

    if where == "fork":
        honest = KVCache.fork
        patch.setattr(KVCache, "fork", lambda self: changed(honest(self)))
    else:
        restore = storefile.restore
        patch.setattr(storefile, "restore", lambda *arguments: changed(restore(*arguments)))


def usual_scale(geometry) -> float:
    return geometry.head_dim**-0.5


@mutant
def fork_loses_scale(patch):
    """A fork has the softmax scale 1/sqrt(D)."""
    forgets(patch, "fork", scale=usual_scale)


@mutant
def load_loses_scale(patch):
    """A loaded cache has the softmax scale 1/sqrt(D)."""
    forgets(patch, "load", scale=usual_scale)


@mutant
def fork_loses_max_tokens(patch):
    """A fork has no max_tokens."""
    forgets(patch, "fork", max_tokens=None)


@mutant
def load_loses_max_tokens(patch):
    """A loaded cache has no max_tokens."""
    forgets(patch, "load", max_tokens=None)


@mutant
def load_loses_max_pages(patch):
    """A loaded cache has no max_pages."""
    forgets(patch, "load", max_pages=None)


@mutant
def max_tokens_ignores_pending(patch):
    """Pending tokens take no room until they are committed."""
    from kivi import checks

    honest, attend, waiting = checks.room, KVCache.attend, []

    def wrong(self, *arguments, **more):
        waiting.append(self._state.pending)
        try:
            return attend(self, *arguments, **more)
        finally:
            waiting.pop()

    patch.setattr(KVCache, "attend", wrong)
    patch.setattr(checks, "room", lambda after, most: honest(after - waiting[-1], most))


@mutant
def failed_commit_drops_pending(patch):
    """A commit that is refused for an overflow drops the pending tokens."""
    honest = KVCache.commit

    def wrong(self, n=None):
        try:
            honest(self, n)
        except MetadataOverflowError:
            self.rollback()
            raise

    patch.setattr(KVCache, "commit", wrong)


@mutant
def failed_commit_drops_the_rest(patch):
    """A commit that is refused for an overflow drops the pending tokens that it was not to keep."""
    honest = KVCache.commit

    def wrong(self, n=None):
        try:
            honest(self, n)
        except MetadataOverflowError:
            if n is not None:
                self._state = replace(self._state, pending=self._state.pending * 0 + n)
            raise

    patch.setattr(KVCache, "commit", wrong)


def counting(patch, change) -> None:
    honest = KVCache.memory
    patch.setattr(KVCache, "memory", lambda self: {**honest(self), "clamped": change(honest(self)["clamped"])})


@mutant
def clamped_is_zero(patch):
    """memory() counts no saturated scale or origin."""
    counting(patch, lambda count: 0)


@mutant
def clamped_once_a_step(patch):
    """A step adds one to the count of saturated numbers at most."""
    honest = ReferenceBackend.append
    patch.setattr(ReferenceBackend, "append", lambda self, *arguments: min(1, honest(self, *arguments)))


@mutant
def clamped_by_the_last_step(patch):
    """The count of saturated numbers is that of the last step."""
    honest = KVCache._grow
    patch.setattr(KVCache, "_grow", lambda self, state, *arguments: honest(self, replace(state, clamped=0), *arguments))
