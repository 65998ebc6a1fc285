"""A number with its interval and its evidence. Every term of an estimate is a Quantity.

Quantity(low, mid, high, Tag.MEASURED)
a + b          intervals add (errors of one kind of term go the same way); the tag is the weaker of the two
a * 3.0        scales all three
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Tag(IntEnum):
    """The evidence for a number, strongest first. EXACT: it follows from the model and the plan."""

    EXACT = -1
    MEASURED = 0
    FITTED = 1
    ASSUMED = 2

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with an interval, `low <= mid <= high`, in the unit of its context (seconds unless stated otherwise)."""

    low: float
    mid: float
    high: float
    tag: Tag

    def __add__(self, other: Quantity) -> Quantity:
        if other is ZERO and self.high:
            return self
        return Quantity(
            self.low + other.low, self.mid + other.mid, self.high + other.high, max(self._weight(), other._weight())
        )

    def _weight(self) -> Tag:
        return self.tag if self.high else Tag.EXACT  # a zero weakens no sum

    def __mul__(self, factor: float) -> Quantity:
        return Quantity(self.low * factor, self.mid * factor, self.high * factor, self.tag)

    __rmul__ = __mul__

    def less(self, other: Quantity) -> Quantity:
        """Return the rest after hiding `other`, never below 0. The low end hides the most, the high end the least."""
        return Quantity(
            max(0.0, self.low - other.high),
            max(0.0, self.mid - other.mid),
            max(0.0, self.high - other.low),
            max(self.tag, other.tag),
        )

    def beyond(self, part: Quantity) -> Quantity:
        """Return the rest without `part`, never below 0; low, mid and high are each subtracted from their own."""
        low, mid, high = (max(0.0, getattr(self, w) - getattr(part, w)) for w in ("low", "mid", "high"))
        return Quantity(min(low, mid), mid, max(mid, high), self.tag)

    @staticmethod
    def spread(mid: float, relative: float, tag: Tag) -> Quantity:
        """Return `mid` with an interval of a factor of `1 + relative` either way."""
        return Quantity(mid / (1 + relative), mid, mid * (1 + relative), tag)


ZERO = Quantity(0.0, 0.0, 0.0, Tag.EXACT)


def total(quantities: list[Quantity]) -> Quantity:
    """Return the sum; ZERO for an empty list."""
    low = mid = high = 0.0
    tag = Tag.EXACT
    for q in quantities:  # as ZERO + q + .., without an object for every sum
        tag = max(tag if high else Tag.EXACT, q.tag if q.high else Tag.EXACT)
        low, mid, high = low + q.low, mid + q.mid, high + q.high
    return Quantity(low, mid, high, tag)
