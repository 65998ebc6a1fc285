"""The recompute frontier: the recompute of a stage as one number, its steps on a sequence of choices.

A layer may keep everything, recompute some groups of regions, or recompute all of itself. Of these choices, only those
on the convex front of (additional seconds, freed bytes) are used, from the cheapest byte to the dearest. A step takes
one layer from its choice to the next on its front. Steps are ordered by seconds per freed byte, which is the same for
all layers of one kind, and first layers come first. Hence no other way to free that many bytes costs less, except for
the last step (a greedy knapsack: the loss is at most one step of one layer). With `full` as the only choice, n steps
recompute the first n layers in full.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoplan.config.recompute import FULL, NONE, recompute_kind


@dataclass(frozen=True)
class RecomputeChoice:
    """One choice of one unit: the bytes that it frees and the seconds that it adds, both relative to `none`."""

    name: str
    freed_bytes: float
    recompute_s: float


@dataclass(frozen=True)
class Rung:
    """A step of all layers of one kind, from one choice of their front to the next.

    `choices`: by unit, the choice after the step; None if the unit is of another kind. `freed_bytes` and `recompute_s`:
    by
    unit, relative to the choice before.
    """

    choices: tuple[str | None, ...]
    freed_bytes: tuple[float, ...]
    recompute_s: tuple[float, ...]


class RecomputeFrontier:
    """The recompute frontier of a model: its steps, cheapest byte first."""

    def __init__(self, rungs: Sequence[Rung]) -> None:
        self.rungs: tuple[Rung, ...] = tuple(rungs)

    @cached_property
    def _below(self) -> list[int]:
        """The steps of all units before each."""
        heights = (len(each) - each.count(None) for each in zip(*(r.choices for r in self.rungs), strict=True))
        return list(itertools.accumulate(heights, initial=0))

    @cached_property
    def holds_on_host(self) -> bool:
        """True if some choice keeps activations on the host."""
        names = {name for rung in self.rungs for name in {*rung.choices} if name is not None}
        return any(recompute_kind(name).on_host for name in names)

    @cached_property
    def stays_on_host(self) -> bool:
        """True if no step takes activations of a unit off the host: every step leaves as many there, or more."""
        there = [[name is not None and recompute_kind(name).on_host for name in rung.choices] for rung in self.rungs]
        leaves = [
            [name is not None and not on_host for name, on_host in zip(rung.choices, now, strict=True)]
            for rung, now in zip(self.rungs, there, strict=True)
        ]
        return not any(
            before and after
            for k, now in enumerate(there)
            for later in leaves[k + 1 :]
            for before, after in zip(now, later, strict=True)
        )

    @classmethod
    def of(cls, options: Sequence[Sequence[RecomputeChoice]], kinds: Sequence[object]) -> RecomputeFrontier:
        """Return the frontier of a model.

        Args:
            options: The choices of every unit besides `none`; empty for a unit without a layer.
            kinds: Units with equal kinds have the same front, which is found for the first of them.
        """
        units: dict[object, list[int]] = {}
        for u, kind in enumerate(kinds):
            if options[u]:
                units.setdefault(kind, []).append(u)
        found: list[tuple[float, int, int, Rung]] = []
        for mine in units.values():
            u = mine[0]
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
        """Return the frontier with `full` as the only choice of every layer."""
        options = [
            [RecomputeChoice(FULL, size, seconds)] if layer else []
            for layer, size, seconds in zip(layers, freed, recompute_s, strict=True)
        ]
        return cls.one(options)

    @classmethod
    def one(cls, options: Sequence[Sequence[RecomputeChoice]]) -> RecomputeFrontier:
        """Return the frontier with at most one choice per unit, the same for all: n steps take the first n units."""
        name = next((each[0].name for each in options if each), NONE)
        return cls([cls._rung(options, [u for u, each in enumerate(options) if each], NONE, name)])

    @staticmethod
    def _rung(options: Sequence[Sequence[RecomputeChoice]], mine: Sequence[int], before: str, after: str) -> Rung:
        choices: list[str | None] = [None] * len(options)
        freed, again = [0.0] * len(options), [0.0] * len(options)
        shared: Sequence[RecomputeChoice] | None = None  # units may share the list of their choices
        size = seconds = 0.0
        for u in mine:
            if options[u] is not shared:
                shared = options[u]
                by_name = {NONE: RecomputeChoice(NONE, 0.0, 0.0)} | {c.name: c for c in shared}
                size = by_name[after].freed_bytes - by_name[before].freed_bytes
                seconds = max(0.0, by_name[after].recompute_s - by_name[before].recompute_s)
            choices[u], freed[u], again[u] = after, size, seconds
        return Rung(tuple(choices), tuple(freed), tuple(again))

    def choices(self, units: Sequence[int], level: int) -> dict[int, str]:
        """Return the choice of each of `units` after `level` steps, without units that keep everything."""
        out: dict[int, str] = {}
        for rung in self.rungs:
            for u in units:
                if level <= 0:
                    return out
                name = rung.choices[u]
                if name is not None:
                    out[u], level = name, level - 1
        return out

    def height(self, units: range) -> int:
        """Return the number of steps of these units."""
        return self._below[units.stop] - self._below[units.start] if self.rungs and units else 0


def front(options: Sequence[RecomputeChoice]) -> list[RecomputeChoice]:
    """Return the convex front from `none` on: each choice frees more bytes, at no less per byte than the one before."""
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
    """Return the recompute choices by name of the call. `calls`: the calls of every unit that are layers."""
    return {name: how for u, how in sorted(choices.items()) for name in calls[u]}
