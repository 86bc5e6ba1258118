"""Pages: what one holds, and the pool that lends them.

A page holds the sealed keys and values of up to R consecutive tokens of one request, all KV heads. For each head its six
fields lie in one record, so a kernel can fetch them together. The pool grows by slabs and never moves a page (SPEC 9).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from kivi.dtypes import np_dtype
from kivi.errors import CapacityError, StateError
from kivi.layout import Arrangement, Layout, arrangement

if TYPE_CHECKING:
    from kivi.backend import Backend
    from kivi.spec import CacheSpec

ALIGN = 16  # bytes; the widest load of a GPU thread


@dataclass(frozen=True)
class Field:
    """One field of a page record: its place in bytes, dtype by name, and shape."""

    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class PageFormat:
    """The record of one page and one KV head, derived from the spec, the head dimensions and the layout."""

    spec: CacheSpec
    layout: Layout
    kv_heads: int
    head_dim: int
    value_head_dim: int
    key_metadata: str
    value_metadata: str

    @property
    def tokens(self) -> int:
        """Tokens a page holds: R."""
        return self.spec.key.residual

    @cached_property
    def key(self) -> Arrangement:
        return arrangement(self.layout, "key", self.spec.key.bits, self.tokens, self.head_dim)

    @cached_property
    def value(self) -> Arrangement:
        return arrangement(self.layout, "value", self.spec.value.bits, self.tokens, self.value_head_dim)

    def seals_apart(self, which: str) -> bool:
        """Whether the codes of what is sealed at once lie in words of their own, a row of a value or a group of a key: then one program can
        seal them without the rows of other tokens."""
        if which == "value":
            return all(digit.axis == "t" for digit in self.value.slots)
        return all((digit.axis, digit.weight) == ("c", 1 << i) for i, digit in enumerate(self.key.slots))

    @cached_property
    def fields(self) -> dict[str, Field]:
        """Field name -> place. Key metadata [R/G, D], value metadata [R, ceil(Dv/G)]."""
        key_meta = (self.tokens // self.spec.key.group, self.head_dim)
        value_meta = (self.tokens, -(-self.value_head_dim // self.spec.value.group))
        wanted = [
            ("key.words", self.layout.word, self.key.shape),
            ("key.scale", self.key_metadata, key_meta),
            ("key.origin", self.key_metadata, key_meta),
            ("value.words", self.layout.word, self.value.shape),
            ("value.scale", self.value_metadata, value_meta),
            ("value.origin", self.value_metadata, value_meta),
        ]
        fields, at = {}, 0
        for name, dtype, shape in wanted:
            fields[name] = Field(at, dtype, shape)
            at += -(-fields[name].bytes // ALIGN) * ALIGN
        return fields

    @cached_property
    def bytes(self) -> int:
        """Bytes of one record, padding included."""
        last = list(self.fields.values())[-1]
        return last.offset + -(-last.bytes // ALIGN) * ALIGN

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all heads."""
        return self.bytes * self.kv_heads


class PagePool:
    """Pages of one format on one backend, reference counted.

    A page is lent with zeroed bytes and one reference; it returns to the free list when the last reference is dropped.
    """

    def __init__(self, backend: Backend, form: PageFormat, max_pages: int | None = None) -> None:
        self.backend = backend
        self.format = form
        self.max_pages = max_pages
        self.slabs: dict[int, dict[str, Any]] = {}
        self.raw: list[Any] = []
        self.refs: list[int] = []
        self._where: list[tuple[int, int]] = []
        self._free: list[int] = []
        # Forks share a pool and may be used from several threads; and wherever one is collected, it releases its pages.
        self._lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> PagePool:
        raise StateError("a pool is shared by caches and not copied; copy the cache")

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs, each page once, lent or not."""
        return len(self.refs) * self.format.page_bytes

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def where(self, page: int) -> tuple[int, int]:
        """(slab, index in the slab) of a page."""
        return self._where[page]

    def view(self, page: int, field: str) -> Any:
        """The backend's array of one field of a page: [Hkv, *shape]."""
        slab, index = self._where[page]
        if slab not in self.slabs:
            self.slabs[slab] = self.backend.page_views(self.raw[slab], self.format)
        return self.slabs[slab][field][index]

    def lend(self, count: int) -> list[int]:
        """`count` zeroed pages with one reference each. Raises `CapacityError`; then none is lent."""
        with self._lock:
            self._grow(count - len(self._free))
            pages = [self._free.pop() for _ in range(count)]
            for page in pages:
                self.refs[page] = 1
        for page in pages:
            slab, index = self._where[page]
            self.raw[slab][index] = 0
        return pages

    def retain(self, page: int) -> None:
        with self._lock:
            self.refs[page] += 1

    def release(self, page: int) -> None:
        with self._lock:
            self.refs[page] -= 1
            if self.refs[page] == 0:
                self._free.append(page)

    def _grow(self, missing: int) -> None:
        if missing <= 0:
            return
        total = len(self.refs)
        size = max(missing, total // 8)
        if self.max_pages is not None:
            if total + missing > self.max_pages:
                raise CapacityError(
                    f"the page pool is full: {total - len(self._free)} of max_pages = {self.max_pages} pages are in use and "
                    f"{missing + len(self._free)} more are needed; crop or reset a request, or raise max_pages"
                )
            size = min(size, self.max_pages - total)
        form = self.format
        try:
            raw, first = self.backend.slab(size, form.kv_heads, form.bytes)
        except MemoryError as error:
            raise CapacityError(
                f"backend {self.backend.name!r} could not allocate {size * form.page_bytes} bytes for {size} pages: {error}; "
                f"free memory, or bound the cache with max_tokens"
            ) from error
        if not self.raw or raw is not self.raw[-1]:
            self.raw.append(raw)
        self._where += [(len(self.raw) - 1, first + i) for i in range(size)]
        self.refs += [0] * size
        self._free += range(total + size - 1, total - 1, -1)
