"""`QuantizedTensor`: packed codes with their scales and origins, and what is needed to read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kivi.dtypes import check_float, named
from kivi.layout import Layout, Which, named_layout
from kivi.spec import CacheSpec
from kivi.subnormals import Kept

if TYPE_CHECKING:
    from kivi.backend import Backend


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A quantized tensor of shape [B, Hkv, T, D].

    words     packed codes [B, Hkv, major, minor], as `packing` arranges them (SPEC 8)
    scale     keys [B, Hkv, ceil(T/G), D], values [B, Hkv, T, ceil(D/G)], in the metadata dtype
    origin    like scale: the floating-point value of code 0, not an integer zero point (SPEC 2.1)
    """

    words: Any
    scale: Any
    origin: Any
    which: Which
    spec: CacheSpec
    packing: Layout
    shape: tuple[int, int, int, int]
    dtype: str
    backend: Backend

    @property
    def layout(self) -> str:
        """Name of the layout of `words`."""
        return self.packing.name

    @property
    def tokens(self) -> int:
        return self.shape[2]

    @property
    def bits(self) -> int:
        return (self.spec.key if self.which == "key" else self.spec.value).bits

    @property
    def group(self) -> int:
        return (self.spec.key if self.which == "key" else self.spec.value).group

    @property
    def nbytes(self) -> int:
        """Bytes of words, scale and origin."""
        return int(self.words.nbytes + self.scale.nbytes + self.origin.nbytes)

    def codes(self) -> Any:
        """Codes, uint8 [B, Hkv, T, D]."""
        return self.backend.codes(self)

    def dequantize(self, dtype: str = "float32") -> Any:
        """`scale * code + origin` in float32 with two roundings, then cast: [B, Hkv, T, D] (SPEC 3.4)."""
        with Kept():
            return self.backend.dequantize(self, check_float(named(dtype), "dtype"))

    def repack(self, layout: str | Layout) -> QuantizedTensor:
        """The same codes in another layout, bit for bit (SPEC 8.7); scale and origin are the same arrays. Raises `SpecError`."""
        target = layout if isinstance(layout, Layout) else named_layout(str(layout))
        return self.backend.repack(self, target)
