"""What a value is along the lanes of a vector while `tile` is lowered to `vec`.

Most integers of a kernel are places: the same in every lane, or growing by a constant from lane to lane. Such a value is kept as its
number in lane 0 and its step, and becomes a vector only where something irregular needs it. So neighbouring addresses are known to be
neighbours and are loaded at once, and what is the same in all lanes is computed once, by scalar instructions.
"""

from __future__ import annotations

from math import gcd

from kivi.ir.tile import Sign
from kivi.ir.vector_build import Vector, constant, iota
from kivi.ir.xdsl import Attribute, IntegerType, i32, i64

MOST_STEP = 1 << 24  # beyond, a step is no place


class Lane:
    """A value along the lanes: `first + lane * step`, or any `vector`.

    number   the value of lane 0 if it is known when the kernel is made
    align    a number that is known to divide lane 0's
    """

    def __init__(self, first: Vector | None, step: int = 0, align: int = 1, number: int | None = None, element: Attribute = i32) -> None:
        self._first, self.step, self.number = first, step, number
        self.align = abs(number) if number else 0 if number == 0 else align
        self.element = first.element if first is not None else element
        self.vector: Vector | None = None

    @classmethod
    def of(cls, value: Vector) -> Lane:
        """A scalar, or an irregular vector."""
        if not value.lanes:
            return cls(value)
        out = cls(None, element=value.element)
        out.vector = value
        return out

    @classmethod
    def known(cls, number: int, element: Attribute = i32) -> Lane:
        return cls(None, number=number, element=element)

    @property
    def regular(self) -> bool:
        return self.vector is None

    @property
    def uniform(self) -> bool:
        """The same in every lane."""
        return self.regular and self.step == 0

    @property
    def first(self) -> Vector:
        """The value in lane 0, of a regular value."""
        if self._first is None:  # made anew for each use: where one is made, another need not reach
            assert self.number is not None
            return constant(self.number, self.element)
        return self._first

    def spread(self, lanes: int) -> Vector:
        """A scalar if the value is uniform, else a vector."""
        if self.vector is not None:
            return self.vector
        if not self.step:
            return self.first
        along = iota(lanes, self.element)
        along = along if self.step == 1 else along * self.step
        return along if self.number == 0 else along + self.first

    def full(self, lanes: int) -> Vector:
        """A vector of `lanes` lanes; a scalar for none."""
        return self.spread(lanes).spread(lanes) if lanes else self.first


def add(a: Lane, b: Lane, lanes: int) -> Lane:
    if not (a.regular and b.regular):
        return Lane.of(a.spread(lanes) + b.spread(lanes))
    if a.number is not None and b.number is not None:
        return Lane(None, a.step + b.step, number=_wrapped(a.number + b.number, a.element), element=a.element)
    first = b.first if a.number == 0 else a.first if b.number == 0 else a.first + b.first
    return Lane(first, a.step + b.step, gcd(a.align, b.align))


def subtract(a: Lane, b: Lane, lanes: int) -> Lane:
    if not (a.regular and b.regular):
        return Lane.of(a.spread(lanes) - b.spread(lanes))
    if a.number is not None and b.number is not None:
        return Lane(None, a.step - b.step, number=_wrapped(a.number - b.number, a.element), element=a.element)
    return Lane(a.first if b.number == 0 else a.first - b.first, a.step - b.step, gcd(a.align, b.align))


def multiply(a: Lane, b: Lane, lanes: int) -> Lane:
    if a.number is not None and a.uniform:
        a, b = b, a
    if b.number is not None and b.uniform and a.regular and abs(a.step * b.number) < MOST_STEP:
        if b.number == 1:
            return a
        if a.number is not None:
            return Lane(None, a.step * b.number, number=_wrapped(a.number * b.number, a.element), element=a.element)
        if b.number == 0:
            return Lane.known(0, a.element)
        return Lane(a.first * b.first, a.step * b.number, a.align * abs(b.number))
    if a.uniform and b.uniform:
        return Lane(a.first * b.first, 0, a.align * b.align)
    return Lane.of(a.spread(lanes) * b.spread(lanes))


def divide(a: Lane, b: Lane, lanes: int) -> Lane:
    """The quotient of unsigned integers."""
    c = b.number if b.uniform else None
    if c is not None and c > 0 and a.regular:
        if c == 1:
            return a
        if a.number is not None and a.number >= 0 and a.step == 0:
            return Lane.known(a.number // c, a.element)
        align = a.align // c if a.align % c == 0 else 1
        if a.step % c == 0 and (a.step == 0 or a.align % c == 0):
            return Lane(a.first // c, a.step // c, align)
        if _within(a, c, lanes):
            return Lane(a.first // c, 0, align)
    if a.uniform and b.uniform:
        return Lane(a.first // b.first)
    return Lane.of(a.spread(lanes) // b.spread(lanes))


def remainder(a: Lane, b: Lane, lanes: int) -> Lane:
    """The remainder of unsigned integers."""
    c = b.number if b.uniform else None
    if c is not None and c > 0 and a.regular:
        if a.number is not None and a.number >= 0 and a.step == 0:
            return Lane.known(a.number % c, a.element)
        align = gcd(a.align, c)
        if a.step % c == 0:
            return Lane(a.first % c, 0, align)
        if _within(a, c, lanes):
            return Lane(a.first % c, a.step, align)
    if a.uniform and b.uniform:
        return Lane(a.first % b.first)
    return Lane.of(a.spread(lanes) % b.spread(lanes))


def extend(a: Lane, element: Attribute, sign: Sign, lanes: int) -> Lane:
    """Another integer width. A place is below 2^31, and may be negative only before the first lane that counts: its sign is kept."""
    if element == a.element:
        return a
    if not a.regular:
        return Lane.of(a.spread(lanes).to(element, sign))
    if a.number is not None:
        number = a.number
        if number < 0 and sign is Sign.UNSIGNED and not a.step and isinstance(a.element, IntegerType):
            number += 1 << a.element.width.data
        return Lane(None, a.step, number=_wrapped(number, element), element=element)
    return Lane(a.first.to(element, Sign.SIGNED if a.step else sign), a.step, a.align)


def is_place(element: Attribute) -> bool:
    """Whether values of a type are kept as places."""
    return element in (i32, i64)


def _within(a: Lane, c: int, lanes: int) -> bool:
    """Whether all lanes lie in one block of c, by what is known of lane 0."""
    block = gcd(a.align, c)
    return a.step > 0 and a.step * (max(lanes, 1) - 1) < block


def _wrapped(number: int, element: Attribute) -> int:
    assert isinstance(element, IntegerType)
    bits = element.width.data
    number &= (1 << bits) - 1
    return number - (1 << bits) if number >> (bits - 1) else number
