"""Where things lie in a paged cache, as `tile` operations: records of pages, rows of windows and chunks."""

from __future__ import annotations

from dataclasses import dataclass

from kivi.dtypes import np_dtype
from kivi.ir.build import TYPES, Aligned, Pointer, Tile
from kivi.ir.tile import PtrType
from kivi.ir.xdsl import Attribute, i32, i64
from kivi.passes import numbers
from kivi.passes.numbers import float_pointer
from kivi.pool import ALIGN, PageFormat


@dataclass(frozen=True)
class Pages:
    """The pool through typed pointers to its base. A record is addressed by its distance from there in bytes."""

    form: PageFormat
    words: Pointer
    key_metadata: Pointer
    value_metadata: Pointer

    @staticmethod
    def arguments(form: PageFormat) -> dict[str, Aligned]:
        kinds = {
            "page_words": PtrType(TYPES[form.layout.word]),
            "page_key_metadata": float_pointer(form.key_metadata),
            "page_value_metadata": float_pointer(form.value_metadata),
        }
        return {name: Aligned(kind, ALIGN) for name, kind in kinds.items()}

    def record(self, page: Tile, head: Tile) -> Tile:
        """Distance in bytes of one head's record; `page` is that of the page's first record."""
        return (page + head.to(i64) * self.form.bytes).multiple_of(ALIGN)

    def base(self, record: Tile, field: str) -> Tile:
        """Offset of a field's first element, in elements of its type."""
        place = self.form.fields[field]
        size = np_dtype(place.dtype).itemsize
        return (record // size + place.offset // size).multiple_of(ALIGN // size)

    def load_word(self, at: Tile, mask: Tile | None) -> Tile:
        """Words as i32, without their sign."""
        return self.words.load(at, mask).to(i32)

    def load_metadata(self, which: str, at: Tile, mask: Tile | None, other: float) -> Tile:
        pointer, dtype = self._metadata(which)
        return numbers.load_float(pointer, dtype, at, mask, other)

    def store_metadata(self, which: str, at: Tile, x: Tile, mask: Tile) -> None:
        pointer, dtype = self._metadata(which)
        numbers.store_float(pointer, dtype, at, x, mask)

    def _metadata(self, which: str) -> tuple[Pointer, str]:
        return (self.key_metadata, self.form.key_metadata) if which == "key" else (self.value_metadata, self.form.value_metadata)


@dataclass(frozen=True)
class Rows:
    """Floating rows of one (request, head): tokens below `stored` in a ring window, later ones in the chunk of this call."""

    dtype: str
    window: Pointer
    window_base: Tile
    capacity: Tile
    channels: int
    chunk: Pointer
    chunk_base: Tile
    chunk_token: Tile
    chunk_channel: Tile
    stored: Tile

    def load(self, token: Tile, channel: Tile, mask: Tile) -> Tile:
        """Elements as float32, 0 where masked. token and channel have one shape."""
        old = token < self.stored
        slot = (token % self.capacity).to(i64) * self.channels + channel.to(i64)
        x = numbers.load_float(self.window, self.dtype, self.window_base + slot, mask & old)
        place = (token - self.stored).to(i64) * self.chunk_token + channel.to(i64) * self.chunk_channel
        return x + numbers.load_float(self.chunk, self.dtype, self.chunk_base + place, mask & (token >= self.stored))

    @staticmethod
    def arguments(name: str, dtype: str) -> dict[str, Attribute]:
        """Arguments that `of` takes for rows called `name`."""
        return {
            f"{name}_window": float_pointer(dtype),
            f"{name}_capacity": i32,
            f"{name}": float_pointer(dtype),
            **{f"{name}_{axis}": i64 for axis in ("batch", "head", "token", "channel")},
        }

    @classmethod
    def of(cls, name: str, dtype: str, channels: int, given: dict, request: Tile, head: Tile, heads: int, stored: Tile) -> Rows:
        """From kernel arguments."""
        capacity = given[f"{name}_capacity"]
        window_base = (request * heads + head).to(i64) * (capacity * channels).to(i64)
        chunk_base = request.to(i64) * given[f"{name}_batch"] + head.to(i64) * given[f"{name}_head"]
        return cls(
            dtype,
            given[f"{name}_window"],
            window_base,
            capacity,
            channels,
            given[name],
            chunk_base,
            given[f"{name}_token"],
            given[f"{name}_channel"],
            stored,
        )
