"""What a search knows of its candidates, and how it learns more of one: bounds, its cutter, its best cut.

A search of two processes (`autoplan.search.pair`) does these for half of the candidates in each; `_Search` of
`autoplan.search.planner` decides which candidates come when, the same in both.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from autoplan.config.parallel import ParallelConfig
from autoplan.program.legality.data import NO_METHOD
from autoplan.search import clock
from autoplan.search.cuts import Cut, Cutter, Shortage
from autoplan.search.group_bounds import grouped, step_bounds_s
from autoplan.search.interleaved_cuts import ChunkCutter
from autoplan.search.intra import StoppedError
from autoplan.search.layouts import ILP_LIMIT_S, LayoutCache
from autoplan.search.outcomes import BOUNDED_OUT, LARGE_VALUES, NO_LAYOUT, SOLVED, Decided, Outcome
from autoplan.search.pair import SearchPair, even_halves
from autoplan.search.progress import Phases
from autoplan.search.quick_memory import QuickMemory
from autoplan.search.quick_time import QuickTime
from autoplan.search.request import PlanRequest, check_task, less_offloaded
from autoplan.search.standings import Standings

# While nothing is found, a search goes on past its time limit: to this multiple of it, and at least this long. In the
# second half of that time, candidates with the least memory come first instead of the fastest.
_PATIENCE, _LEAST_PATIENCE_S = 5.0, 60.0
# How long work takes, roughly: on one more group, in candidates of a group; on the bound with memory of a candidate, in
# cutters that are made. Either process gets as much.
_GROUP, _REFINED = 100, 4.0


class Candidates:
    """The candidates of one search. Each has at most one outcome, with what decided; without one it is open.

    Attributes:
        bounds: the best lower bound in seconds of each candidate that has one.
        first_bounds: bounds that ignore memory.
        prepared: candidates with a cutter, of this process or its helper.
        plans: evaluated plans.
        cutters: those of this process.
        pair: the processes of this search.
    """

    def __init__(self, request: PlanRequest, start_s: float) -> None:
        check_task(request)
        self.request = request
        self.start_s = start_s
        self.began: float = time.perf_counter()
        self.phases: Phases = Phases()
        self.points: LayoutCache = LayoutCache(request, self.phases)
        self.quick: QuickMemory = QuickMemory(request)
        self.quick_time: QuickTime = QuickTime(request)
        self.pair: SearchPair = SearchPair()
        self.outcomes: dict[ParallelConfig, Decided] = {}
        self.bounds: dict[ParallelConfig, float] = {}
        self.first_bounds: dict[ParallelConfig, float] = {}
        self.prepared: set[ParallelConfig] = set()
        self.cutters: dict[ParallelConfig, Cutter | ChunkCutter] = {}
        self.plans: Standings = Standings(request)
        self.shortages: dict[ParallelConfig, Shortage] = {}
        longer_s = max(_PATIENCE * request.time_limit_s, _LEAST_PATIENCE_S)
        self.patience_s: float = longer_s if request.patient else request.time_limit_s
        self._halves: dict[Hashable, int] = {}  # of candidates, by degrees
        self._cut: Cut | None = None

    # -- the clock ----------------------------------------------------------------------------------------------------

    def elapsed_s(self) -> float:
        """Return the seconds since the start, in this process."""
        return clock.now_s() - self.start_s

    def past(self, limit_s: float) -> bool:
        """Return True if the search has taken longer than this."""
        return self.pair.agree(self.elapsed_s() > limit_s)

    def layout_limit_s(self) -> float:
        """Return the seconds that the next layout may take: the rest of the time, or more while there is no bound."""
        total = self.request.time_limit_s if self.bounds else self.patience_s
        return min(ILP_LIMIT_S, max(0.0, total - self.elapsed_s()))

    # -- work of both processes ---------------------------------------------------------------------------------------

    def with_methods(self, candidates: Iterable[ParallelConfig]) -> list[list[ParallelConfig]]:
        """Return for every candidate one per combination of context-parallel methods.

        Nothing if that decides the candidate. Their layouts are known from then on.
        """
        given = list(candidates)
        some = {c: None for c in given if not self.out_at_once(c)}
        with self.phases.spent("bounds"):
            cuts = self.points.open_cuts(some)
            points = self.points
            halves = even_halves(cuts, [1.0] * len(cuts), {})
            self.pair.share(
                cuts,
                halves,
                lambda cut: points.solve(cut, self.layout_limit_s()),
                points.solved,
                points.take,
                by_either=True,
            )
            keys = points.open_methods(some)
            halves = even_halves(keys, [1.0] * len(keys), points.halves)
            methods = self._compare_methods, points.known_methods, points.learn_methods
            self.pair.share(keys, halves, *methods, by_either=True)
        return [self._methods_of(c) if c in some else [c] for c in given]

    def _compare_methods(self, key: tuple[int, int, int]) -> None:
        with suppress(StoppedError):
            self.points.methods_of(*key, self.layout_limit_s())

    def _methods_of(self, candidate: ParallelConfig) -> list[ParallelConfig]:
        found = [candidate]
        if candidate.cp == 1 or candidate.methods:  # most: none needs the time that is left
            return found
        with suppress(StoppedError):
            found = self.points.with_methods(candidate, self.layout_limit_s())
        if not found:
            self.outcomes[candidate] = (Outcome.ILLEGAL, NO_METHOD)
        return found

    def bound_groups(self, candidates: Iterable[ParallelConfig]) -> None:
        """Bound candidates, or decide them, together those with the same work inside blocks."""
        self._share_groups(list(grouped(candidates)), self._bound_group)

    def offload_bounds(self, kinds: dict[ParallelConfig, list[ParallelConfig]]) -> None:
        """Bound candidates with offload, given those of the same degrees without it, whose bounds are known."""
        enough = self.plans.enough_s()

        def bounded(members: Sequence[ParallelConfig]) -> None:
            left: list[ParallelConfig] = []
            for kept, bound in zip(members, self.points.offloaded_bounds_s(members, enough), strict=True):
                self.bounds |= dict.fromkeys(kinds[kept], max(self.first_bounds[kept], bound))
                left += kinds[kept] if bound < enough else []
            self._bound_states(left, enough)

        self._share_groups(list(grouped(kinds)), bounded, lambda kept: kinds[kept])

    def _share_groups(
        self,
        groups: Sequence[list[ParallelConfig]],
        work: Callable[[list[ParallelConfig]], None],
        changed: Callable[[ParallelConfig], list[ParallelConfig]] = lambda c: [c],
    ) -> None:
        """Do some work on groups of candidates, which changes what `changed` returns of their members."""

        def read(members: list[ParallelConfig]) -> list[Any]:
            return [self._known(each) for c in members for each in changed(c)]

        def write(members: list[ParallelConfig], found: list[Any]) -> None:
            for each, known in zip((each for c in members for each in changed(c)), found, strict=True):
                self._learn(each, known)

        weights = [_GROUP + sum(len(changed(c)) for c in members) for members in groups]
        halves = even_halves([_degrees_inside(members[0]) for members in groups], weights, self.points.halves)
        with self.phases.spent("bounds"):
            self.pair.share(groups, halves, work, read, write)

    def share(self, candidates: Sequence[ParallelConfig], work: Callable[[ParallelConfig], None]) -> None:
        """Do some work on single candidates, which changes what is known of them, and of other kinds of offload."""

        def read(candidate: ParallelConfig) -> list[Any]:
            return [self._known(each) for each in self._related(candidate)]

        def write(candidate: ParallelConfig, found: list[Any]) -> None:
            for each, known in zip(self._related(candidate), found, strict=True):
                self._learn(each, known)

        weights = [_REFINED if c in self.prepared else 1.0 for c in candidates]
        halves = even_halves([_degrees(c) for c in candidates], weights, self._halves)
        self.pair.share(candidates, halves, work, read, write)

    def _related(self, candidate: ParallelConfig) -> list[ParallelConfig]:
        """Return the candidates of which work on this one may find something."""
        if not candidate.offload:
            return [candidate]
        return [candidate, candidate.but(offload=()), *less_offloaded(self.request, candidate)]

    def _known(self, candidate: ParallelConfig) -> tuple[Any, ...]:
        """Return what is known of a candidate, as data; `_learn` takes it."""
        known = (of.get(candidate) for of in (self.bounds, self.first_bounds, self.shortages))
        how = self.outcomes.get(candidate)
        return *known, candidate in self.prepared, None if how is None else (how[0].name, how[1])

    def _learn(self, candidate: ParallelConfig, known: tuple[Any, ...]) -> None:
        bound, first, shortage, has, how = known
        if bound is not None:
            self.bounds[candidate] = bound
        if first is not None:
            self.first_bounds[candidate] = first
        if shortage is not None:
            self.shortages[candidate] = shortage
        if has:
            self.prepared.add(candidate)
        if how is not None:
            self.outcomes[candidate] = Outcome[how[0]], how[1]

    # -- bounds of groups ---------------------------------------------------------------------------------------------

    def _bound_group(self, members: Sequence[ParallelConfig]) -> None:
        """Bound candidates with the same work inside blocks, or decide them all."""
        members = [c for c in members if not self.out_at_once(c)]
        if not members:
            return
        try:
            least = self.points.device_pass(members[0], self.layout_limit_s())
        except StoppedError:
            return
        if least is None:
            self._decide(members, NO_LAYOUT)
            return
        enough = self.plans.enough_s()
        left: list[ParallelConfig] = []
        for candidate, bound in zip(members, step_bounds_s(least, members, enough), strict=True):
            if candidate not in self.first_bounds:
                self.bounds[candidate] = self.first_bounds[candidate] = bound
                left += [candidate] if bound < enough else []
        self._bound_states(left, enough)
        for candidate in left:
            if self.bounds[candidate] < enough:
                self.exclude(candidate)

    def _bound_states(self, candidates: Sequence[ParallelConfig], below_s: float) -> None:
        """Make the bounds of candidates with the same work inside blocks stronger, by their states and memory.

        While there is no plan, which hints at little memory, those that cannot fit are decided before and get none.
        """
        if not self.plans.known:
            for candidate in candidates:
                self.exclude(candidate)
            candidates = [c for c in candidates if c not in self.outcomes]
        found = self.points.state_bounds(candidates, below_s) if candidates else None
        for candidate, (free, tight) in zip(candidates, found or (), strict=found is not None):
            self.first_bounds[candidate] = max(free, self.first_bounds.get(candidate, 0.0))
            self.bounds[candidate] = max(free, tight, self.bounds.get(candidate, 0.0))
            if tight == math.inf:
                self._decide([candidate], LARGE_VALUES)

    # -- one candidate ------------------------------------------------------------------------------------------------

    def out_at_once(self, candidate: ParallelConfig) -> bool:
        """Decide or bound a candidate that fits under no layout (by its states only without a plan), or is too slow."""
        if (term := self.quick.shortage(candidate, states=not self.plans.known)) is not None:
            self._decide([candidate], (Outcome.TOO_BIG, term))
            return True
        if slow := (bound := self.quick_time.bound_s(candidate)) >= self.plans.far_s():
            self.bounds[candidate] = self.first_bounds[candidate] = bound
        return slow

    def exclude(self, candidate: ParallelConfig) -> None:
        """Decide a candidate whose states and least activations do not fit, whatever its cut and recompute are."""
        if (term := self.points.shortage(candidate)) is not None:
            self._decide([candidate], (Outcome.TOO_BIG, term))

    def _decide(self, candidates: Sequence[ParallelConfig], how: Decided) -> None:
        """Give candidates an outcome, if they have none."""
        for candidate in candidates:
            self.outcomes.setdefault(candidate, how)

    def bound(self, candidate: ParallelConfig, limit_s: float | None = None) -> None:
        """Decide a candidate, or give it a cutter and a first bound; it gets neither if its layout was stopped."""
        if self.out_at_once(candidate):
            return
        with self.phases.spent("bounds"):
            try:
                kept = self.cutters.get(candidate.but(offload=())) if self._offers_offload(candidate) else None
                limit_s = self.layout_limit_s() if limit_s is None else limit_s
                cutter = self.points.cutter(candidate, limit_s, kept if isinstance(kept, ChunkCutter) else None)
            except StoppedError:
                return
            if cutter is None:
                self._decide([candidate], NO_LAYOUT)
                return
            bound = cutter.quick_bound_s()
            self.first_bounds[candidate] = max(bound, self.first_bounds.get(candidate, 0.0))
            self.bounds[candidate] = max(bound, self.bounds.get(candidate, 0.0))
            self.cutters[candidate] = cutter
            self.prepared.add(candidate)

    def step(self, candidate: ParallelConfig, cutoff_s: float) -> None:
        """Give a candidate its cutter; if it has one, make its bound that with memory (`refine`)."""
        if candidate in self.outcomes or self.bounds[candidate] >= cutoff_s:
            return
        if candidate not in self.prepared:
            self.prepare(candidate)
        else:
            self.refine(candidate, cutoff_s)

    def prepare(self, candidate: ParallelConfig) -> None:
        """Give a candidate its cutter, unless it is decided, or its layout was stopped."""
        if self._offers_offload(candidate):
            self.exclude(candidate)
            if candidate not in self.outcomes and not self._memory_binds(candidate):
                return
        if candidate not in self.outcomes:
            self.bound(candidate)

    def _offers_offload(self, candidate: ParallelConfig) -> bool:
        """Return True for a candidate with offload that is not pinned."""
        return bool(candidate.offload) and "offload" not in self.request.pins

    def _memory_binds(self, candidate: ParallelConfig) -> bool:
        """Return False, and decide or bound the candidate, if offloading cannot help its degrees."""
        kept = candidate.but(offload=())
        binds = self.outcomes.get(kept, (None, ""))[0] is Outcome.TOO_BIG
        if kept not in self.cutters:
            self.bound(kept)
        if binds or kept not in self.cutters:  # its layout was stopped, or a value of the graph is too big for a device
            return binds
        with self.phases.spent("bounds"):
            cutter, cutoff = self.cutters[kept], self.plans.cutoff_s()
            free = max(self.first_bounds[kept], cutter.free_bound_s())
            binds = free < (enough := self.plans.enough_s()) and (self.bounds[kept] >= enough or cutter.binds(cutoff))
            if isinstance(cutter, Cutter):
                cutter.forget()
        if free >= cutoff or not (binds or free >= self.plans.enough_s()):
            self.outcomes[candidate] = BOUNDED_OUT
        self.bounds[candidate] = max(self.bounds[candidate], free)
        return binds

    def refine(self, candidate: ParallelConfig, cutoff_s: float) -> float:
        """Return the bound that includes memory, from `cutoff_s` on perhaps a weaker one.

        If nothing fits, it is inf: the candidate is decided.
        """
        cutter = self.cutters[candidate]
        with self.phases.spent("bounds"):
            bound = cutter.bound_s(cutoff_s)
            if isinstance(cutter, ChunkCutter):
                self.first_bounds[candidate] = max(self.first_bounds[candidate], cutter.known_free_s)
            if bound == math.inf:
                found = self._too_big(candidate)
                term = cutter.lacks_with_less_on_host(found) if candidate.offload else None
                if term is not None:
                    self._decide(less_offloaded(self.request, candidate), (Outcome.TOO_BIG, term))
            else:
                self.bounds[candidate] = bound = max(bound, self.bounds[candidate])  # perhaps weaker
                least = cutter.less_on_host_s() if bound >= cutoff_s and isinstance(cutter, ChunkCutter) else 0.0
                for other in less_offloaded(self.request, candidate) if least else ():
                    if other in self.bounds:
                        self.bounds[other] = max(least, self.bounds[other])
        return bound

    def _too_big(self, candidate: ParallelConfig) -> Shortage:
        cutter = self.cutters[candidate]
        found = cutter.any_shortage() if self.plans.known else cutter.shortage()  # with a plan, only the term counts
        self.shortages[candidate] = found
        self.outcomes[candidate] = (Outcome.TOO_BIG, found.term)
        return found

    def evaluate(self, candidate: ParallelConfig, cutoff_s: float, max_evaluated: int) -> None:
        """Search the cuts of a candidate; it stays open if none is found and none is excluded."""

        def searched(candidate: ParallelConfig) -> None:
            self._cut = cut = self.cutters[candidate].search(cutoff_s, max_evaluated)
            if cut.chunks is None and cut.exact and cutoff_s == math.inf:
                self._too_big(candidate)

        def read(candidate: ParallelConfig) -> tuple[Any, ...]:
            return self._cut, self._known(candidate)

        def write(candidate: ParallelConfig, found: tuple[Any, ...]) -> None:
            self._cut = found[0]
            self._learn(candidate, found[1])

        with self.phases.spent("evaluation"):
            half = even_halves([_degrees(candidate)], [1.0], self._halves)
            self.pair.share([candidate], half, searched, read, write)
        cut = self._cut
        if cut is None:
            raise RuntimeError("the cuts of a candidate were searched by nobody")
        if cut.chunks is None and cut.exact and cutoff_s == math.inf:
            return
        if cut.chunks is not None:
            self.bounds[candidate] = max(self.bounds[candidate], cut.bound_s)
            self.outcomes[candidate] = SOLVED
            self.plans.add(candidate, cut)
        elif cut.exact:
            self.outcomes[candidate] = SOLVED
            self.bounds[candidate] = max(self.bounds[candidate], cutoff_s)
        else:
            self.bounds[candidate] = max(self.bounds[candidate], cut.bound_s)


def _degrees_inside(candidate: ParallelConfig) -> tuple[int, int, int]:
    """Return what decides the layout inside blocks, which takes most of the work of bounding a group."""
    return candidate.tp, candidate.micro_batch_size, candidate.cp


def _degrees(candidate: ParallelConfig) -> Hashable:
    """Return what candidates have in common whose cutters share something: they differ in offload and schedule."""
    c = candidate
    mesh = c.pp, c.dp, c.tp, c.cp, c.ep, c.expert_tp
    return *mesh, c.micro_batch_size, c.num_micro_batches, c.zero_stage, c.zero_replicas, c.methods
