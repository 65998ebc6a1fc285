"""The progress of a search, for people who wait for it, and what took its time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_EVERY_S = 0.2  # a person reads no faster


@dataclass(frozen=True)
class Progress:
    """A moment of a search.

    Attributes:
        num_left: candidates that are not decided yet.
        best_s: seconds of a step of the best plan so far; None before the first.
        gap: the share by which the best plan of the space may be shorter; None while some candidate has no bound.
    """

    num_left: int
    best_s: float | None
    gap: float | None


class Teller:
    """Tells somebody how far a search is, a few times a second."""

    def __init__(self, told: Callable[[Progress], None] | None) -> None:
        self._told, self._next_s = told, 0.0

    def tell(self, num_left: int, best_s: float | None, bound_s: float | None) -> None:
        """Tell it, unless that was done a moment ago.

        Args:
            bound_s: the least bound of all open candidates; None while some have none.
        """
        if self._told is None or time.perf_counter() < self._next_s:
            return
        self._next_s = time.perf_counter() + _EVERY_S
        gap = None if best_s is None or bound_s is None else max(0.0, 1 - bound_s / best_s)
        self._told(Progress(num_left, best_s, gap))


class Phases(defaultdict[str, float]):
    """Seconds by phase of a search."""

    def __init__(self) -> None:
        super().__init__(float)

    @contextmanager
    def spent(self, name: str) -> Iterator[None]:
        """Add the time spent inside to a phase, without that of nested phases."""
        began, before = time.perf_counter(), sum(self.values())
        try:
            yield
        finally:
            self[name] += time.perf_counter() - began - (sum(self.values()) - before)
