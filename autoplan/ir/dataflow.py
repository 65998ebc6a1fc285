"""Data flow among statements, nodes or calls, each of which reads values and writes values.

flow = Dataflow([(("x",), ("y",)), (("y", "w"), ("z",))])
flow.before, flow.after, flow.leading_to([1]), flow.parts({0, 1}), flow.spans()      by position

Plain lists instead of networkx: an estimate takes 0.9 s, importing networkx 0.2 s more. Networks
(`cost_models.hardware.fabric_graph`) and schedules that never finish (`schedules.graph`) use networkx.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Steps = Sequence[tuple[Collection[str], Collection[str]]]


class Dataflow:
    """The makers and the readers of the values of a sequence of steps, each given as (values read, values written)."""

    def __init__(self, steps: Steps) -> None:
        self.makes: dict[str, int] = {v: i for i, (_, writes) in enumerate(steps) for v in writes}
        self.readers: dict[str, list[int]] = {}
        for i, (reads, _) in enumerate(steps):
            for v in dict.fromkeys(reads):
                self.readers.setdefault(v, []).append(i)
        self.after: list[list[int]] = [[k for v in writes for k in self.readers.get(v, ())] for _, writes in steps]
        self.before: list[list[int]] = [[self.makes[v] for v in reads if v in self.makes] for reads, _ in steps]

    def leading_to(self, found: Iterable[int], through: Callable[[int], bool] = lambda _: True) -> set[int]:
        """Return the steps that lead to `found` through steps that `through` accepts; without `found` itself."""
        return _reached(found, self.before, through)

    def following(self, found: Iterable[int], through: Callable[[int], bool] = lambda _: True) -> set[int]:
        """Return the steps that follow from `found` through steps that `through` accepts; without `found` itself."""
        return _reached(found, self.after, through)

    def spans(self) -> dict[str, tuple[int, int]]:
        """Return value -> the step that makes it, and the last one that reads it: it crosses every cut in between."""
        return {v: (made, max((made, *self.readers.get(v, ())))) for v, made in self.makes.items()}

    def parts(self, chosen: Collection[int]) -> list[tuple[int, ...]]:
        """Return the connected parts of the chosen steps, each sorted, by their first step."""
        inside, out, seen = set(chosen), [], set[int]()
        both = [[*a, *b] for a, b in zip(self.after, self.before, strict=True)]
        for first in sorted(inside):
            if first not in seen:
                part = {first} | _reached([first], both, inside.__contains__)
                seen |= part
                out.append(tuple(sorted(part)))
        return out


def _reached(found: Iterable[int], way: Sequence[Sequence[int]], through: Callable[[int], bool]) -> set[int]:
    out, queue = set[int](), list(found)
    while queue:
        for k in way[queue.pop()]:
            if k not in out and through(k):
                out.add(k)
                queue.append(k)
    return out


def last_uses(steps: Iterable[tuple[int, Iterable[str], Iterable[str]]], kept: Collection[str]) -> dict[int, list[str]]:
    """Return step -> the values made by earlier steps that no later one reads, without those that are kept.

    Args:
        steps: (number, values read, values written) of every step, in order.
    """
    made, last, out = set[str](), dict[str, int](), dict[int, list[str]]()
    for number, reads, writes in steps:
        last |= {value: number for value in reads if value in made}
        made.update(writes)
    for value, number in last.items():
        if value not in kept:
            out.setdefault(number, []).append(value)
    return out


class Classes(Generic[Key]):
    """Union-find: classes of equal keys. The second of two joined classes gives the representative."""

    def __init__(self) -> None:
        self._parent: dict[Key, Key] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._parent

    def find(self, key: Key) -> Key:
        """Return the representative of a key; a new key is its own."""
        parent = self._parent
        while parent.setdefault(key, key) != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    def join(self, a: Key, b: Key) -> None:
        """Join the classes of two keys, with the representative of `b`."""
        self._parent[self.find(a)] = self.find(b)

    def members(self) -> dict[Key, list[Key]]:
        """Return representative -> keys, in the order in which they were added."""
        out: dict[Key, list[Key]] = {}
        for key in list(self._parent):
            out.setdefault(self.find(key), []).append(key)
        return out
