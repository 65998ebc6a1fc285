"""Names that are given once."""

from __future__ import annotations

from collections.abc import Iterable


class FreshNames:
    """The names that are taken so far, of the values of a graph or the variables of a text."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._next: dict[str, int] = {}

    def fresh(self, base: str) -> str:
        """Return a new name: `base`, with a number if it is taken. It may be taken by a base that ends in a number."""
        count = self._next.get(base, 0)
        name = f"{base}_{count}" if count else base
        while name in self._taken:
            count += 1
            name = f"{base}_{count}"
        self._next[base] = count + 1
        self._taken.add(name)
        return name
