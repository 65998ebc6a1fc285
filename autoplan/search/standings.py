"""The evaluated plans of a search, and the step time that another plan must beat."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoplan.config.parallel import ParallelConfig
from autoplan.search.cuts import Cut
from autoplan.search.degrees import search_order
from autoplan.search.request import PlanRequest
from autoplan.search.simplicity import Complexity, kind_of, limit_s


@dataclass(frozen=True)
class Evaluated:
    """A candidate at its best cut: the units of every chunk, and the steps of recompute of every stage."""

    step_s: float
    candidate: ParallelConfig
    chunks: tuple[int, ...]
    recompute: tuple[int, ...]


class Standings:
    """Evaluated plans.

    Attributes:
        best: the fastest of every choice of degrees, best first: requested plans differ in degrees.
        twins: those with the degrees of a faster one, which may be simpler: without offload, with another method of cp.
    """

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.best: list[Evaluated] = []
        self.twins: list[Evaluated] = []

    @property
    def known(self) -> bool:
        """True if there is a plan, here or in the search that this one shall beat."""
        return bool(self.best) or self.request.below_s < math.inf

    def cutoff_s(self) -> float:
        """Return the step time that a plan must beat to be among the requested ones."""
        asked = self.asked(self.best)
        found = asked[self.request.top - 1].step_s if len(asked) >= self.request.top else math.inf
        return min(found, self.request.below_s)

    def enough_s(self, gap: float | None = None) -> float:
        """Return the bound from which on a candidate is not looked at: its plans are hardly better, if at all.

        They improve the requested plans by no more than `gap`; None: the one that the request allows.
        """
        return self.cutoff_s() * (1.0 - (self.request.allowed_gap if gap is None else gap))

    def far_s(self) -> float:
        """Return the bound from which on no plan of a candidate is asked for, or equal to the best within the error."""
        return limit_s(self.cutoff_s(), self.request.equal_within)

    def equals(self, complexity: Callable[[Evaluated], Complexity]) -> list[Evaluated]:
        """Return the plans that are equal to the fastest within the error, the simplest first.

        Of twins the simplest is one of them, and the fastest of all plans is.
        """
        below = limit_s(self.best[0].step_s, self.request.equal_within)
        if below == self.best[0].step_s:
            return self.best[:1]
        near = [e for e in (*self.best, *self.twins) if e.step_s <= below]
        near.sort(key=lambda e: (complexity(e), e.step_s))
        simplest = dict[ParallelConfig, Evaluated]()
        for entry in near:
            simplest.setdefault(degrees_of(entry), entry)
        return [e for e in near if e == self.best[0] or e == simplest[degrees_of(e)]]

    def asked(self, entries: list[Evaluated], beside: Sequence[Evaluated] = ()) -> list[Evaluated]:
        """Return the entries that may be answers: all, or the first of each kind that is not among those beside."""
        if not self.request.by_kind:
            return entries
        kinds = {kind_of(e.candidate) for e in beside}
        first = {kind: e for e in reversed(entries) if (kind := kind_of(e.candidate)) not in kinds}
        return [e for e in entries if first.get(kind_of(e.candidate)) is e]

    def others(self, chosen: Evaluated) -> list[Evaluated]:
        """Return the best plans with other degrees than the chosen one's."""
        return [e for e in self.best if degrees_of(e) != degrees_of(chosen)]

    def add(self, candidate: ParallelConfig, cut: Cut) -> None:
        """Add the plan of a candidate."""
        added = Evaluated(cut.step_s, candidate, cut.chunks or (), cut.recompute)
        self.best.append(added)
        self.best.sort(key=lambda e: (e.step_s, search_order(e.candidate)))
        slower = [e for e in self.best if degrees_of(e) == degrees_of(added)][1:]
        self.best = [e for e in self.best if e not in slower]
        self.twins += slower


def degrees_of(entry: Evaluated) -> ParallelConfig:
    """Return what all twins share."""
    return entry.candidate.but(context_method=None, offload=())
