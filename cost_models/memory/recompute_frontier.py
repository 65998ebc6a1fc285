"""What a stage computes again, as one number: how many steps it goes down a ladder of choices.

A layer may keep everything, compute some groups of regions again, or all of itself. Of these choices only those on the
convex front of (seconds more, bytes freed) are on the ladder, from the cheapest byte to the dearest. A step takes one
layer from its choice to the next on its front; steps go by seconds per byte freed, the same for all layers of one kind,
first layers first. So of all ways to free that many bytes none costs less, but for the last step (a greedy knapsack:
what is left of the last layer's step is at most one step of one layer). A ladder of `full` alone is the first layers in
full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoplan.config.recompute import FULL, NONE


@dataclass(frozen=True)
class RecomputeChoice:
    """Of one unit: what it keeps and what it takes longer than `none`."""

    name: str
    freed_bytes: float
    recompute_s: float


@dataclass(frozen=True)
class Rung:
    """A step of all layers of one kind: from one choice of their front to the next.

    `choices` by unit, None where the unit is of another kind; gains and seconds beyond the choice before.
    """

    choices: tuple[str | None, ...]
    freed_bytes: tuple[float, ...]
    recompute_s: tuple[float, ...]


class RecomputeFrontier:
    """Rungs, cheapest byte first."""

    def __init__(self, rungs: Sequence[Rung]) -> None:
        self.rungs = tuple(rungs)

    @classmethod
    def of(cls, options: Sequence[Sequence[RecomputeChoice]], kinds: Sequence[object]) -> RecomputeFrontier:
        """That of a model.

        Args:
            options: the choices of every unit beside `none`; empty for what is no layer.
            kinds: units with equal kinds have the same front, that of the first of them.
        """
        first: dict[object, int] = {}
        for u, kind in enumerate(kinds):
            if options[u]:
                first.setdefault(kind, u)
        found: list[tuple[float, int, int, Rung]] = []
        for kind, u in first.items():
            mine = [v for v in range(len(kinds)) if kinds[v] == kind and options[v]]
            before = RecomputeChoice(NONE, 0.0, 0.0)
            for k, choice in enumerate(front(options[u])):
                found.append((_slope(before, choice), u, k, cls._rung(options, mine, before.name, choice.name)))
                before = choice
        found.sort(key=lambda entry: entry[:3])
        return cls([rung for *_, rung in found])

    @classmethod
    def full_only(
        cls, layers: Sequence[bool], freed: Sequence[float], recompute_s: Sequence[float]
    ) -> RecomputeFrontier:
        """Layers in full or not at all."""
        options = [
            [RecomputeChoice(FULL, size, seconds)] if layer else []
            for layer, size, seconds in zip(layers, freed, recompute_s, strict=True)
        ]
        return cls([cls._rung(options, [u for u, layer in enumerate(layers) if layer], NONE, FULL)])

    @staticmethod
    def _rung(options: Sequence[Sequence[RecomputeChoice]], mine: Sequence[int], before: str, after: str) -> Rung:
        choices: list[str | None] = [None] * len(options)
        freed, again = [0.0] * len(options), [0.0] * len(options)
        for u in mine:
            by_name = {NONE: RecomputeChoice(NONE, 0.0, 0.0)} | {c.name: c for c in options[u]}
            choices[u] = after
            freed[u] = by_name[after].freed_bytes - by_name[before].freed_bytes
            again[u] = max(0.0, by_name[after].recompute_s - by_name[before].recompute_s)
        return Rung(tuple(choices), tuple(freed), tuple(again))

    def choices(self, units: Sequence[int], level: int) -> dict[int, str]:
        """What each of `units` computes again `level` steps down; those that keep everything are left out."""
        out: dict[int, str] = {}
        for rung in self.rungs:
            for u in units:
                if level <= 0:
                    return out
                name = rung.choices[u]
                if name is not None:
                    out[u], level = name, level - 1
        return out

    def height(self, units: Sequence[int]) -> int:
        """How many steps there are."""
        return sum(rung.choices[u] is not None for rung in self.rungs for u in units)


def front(options: Sequence[RecomputeChoice]) -> list[RecomputeChoice]:
    """The convex front from `none` on: each next choice frees more, at no less per byte than the one before."""
    at, out = RecomputeChoice(NONE, 0.0, 0.0), list[RecomputeChoice]()
    while True:
        more = [c for c in options if c.freed_bytes > at.freed_bytes]
        if not more:
            return out
        here = at
        at = min(more, key=lambda c: (_slope(here, c), -c.freed_bytes))
        out.append(at)


def _slope(before: RecomputeChoice, after: RecomputeChoice) -> float:
    return (after.recompute_s - before.recompute_s) / (after.freed_bytes - before.freed_bytes)


def recompute_mapping(choices: Mapping[int, str], calls: Sequence[Sequence[str]]) -> dict[str, str]:
    """By name of the call. `calls`: of every unit, those that are layers."""
    return {name: how for u, how in sorted(choices.items()) for name in calls[u]}
