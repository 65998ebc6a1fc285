"""The planner: the best plan of a stated space, with its certificate. No torch, no processes, no device.

    result = search_plan(PlanRequest(graph, cluster, seq_len=8192, global_batch_size=1024))
    result.plans[0].config, result.plans[0].estimate, result.certificate

One integer program over degrees, cuts and layouts:

    minimise over (pp, dp, cp, tp, ep, etp, zero, b), cuts u_1 < ... < u_pp, recomputed layers r_1 .. r_pp, layouts x
             step(pp, dp, cp, tp, ep, etp, zero, b, u, r, x)          the event simulation of `price`
    subject to   memory_s(...) <= capacity                for every stage s
                 x legal on tp                            (autoplan.program.problem)

Its inner problems decompose once the degrees are fixed, so the search branches on the degrees here. Layouts are the
intra-op integer program per (tp, b), solved by HiGHS. Cut and recompute are exact by a dynamic programme with branch
and bound (autoplan.search.cuts). Degrees are taken best first by a lower bound computed for all at once, until the
least open bound is not below the best *evaluated* plan. `restrictions` names everything that narrows the space.

Offloading is never faster, so it is tried only for degrees whose bound without memory is below the best plan, and only
if memory binds (`Cutter.binds`). If it does not bind, every plan with offloading has one without that is no slower.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from autoplan.config.offload import held_on_host
from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.time.price import ranges_of
from autoplan.program.legality.data import NO_METHOD
from autoplan.search import clock
from autoplan.search.certificate import Certificate, SearchResult, Status, certificate_of
from autoplan.search.cuts import Cutter, Shortage
from autoplan.search.degrees import Space, num_cuts, search_order
from autoplan.search.estimate import Planned, chosen_recompute, estimate_config
from autoplan.search.first_plans import Neighbours, as_before, usual
from autoplan.search.garbage import collected_seldom
from autoplan.search.group_bounds import GroupKey, group_key, grouped, step_bounds_s
from autoplan.search.infeasible import InfeasibleReport, NothingFits, no_plan
from autoplan.search.interleaved_cuts import ChunkCutter
from autoplan.search.intra import StoppedError
from autoplan.search.later_choices import NEAR, more_stages, shorter_parts
from autoplan.search.layouts import ILP_LIMIT_S, CandidateLayout, LayoutCache
from autoplan.search.outcomes import BOUNDED_OUT, LARGE_VALUES, NO_LAYOUT, SOLVED, Decided, Outcome, all_counted
from autoplan.search.progress import Phases, Progress, Teller
from autoplan.search.quick_memory import QuickMemory
from autoplan.search.quick_time import QuickTime
from autoplan.search.request import (
    PlanRequest,
    check_task,
    least_memory_first,
    less_offloaded,
    most_on_host_first,
    offload_kinds,
    offloaded,
    space_of,
    without_activations,
)
from autoplan.search.simplicity import MOST_EXAMINED, Complexity, complexity, limit_s, simpler_first
from autoplan.search.standings import Evaluated, Standings

__all__ = [
    "CandidateLayout",
    "Certificate",
    "InfeasibleReport",
    "NothingFits",
    "PlanRequest",
    "Planned",
    "SearchResult",
    "Status",
    "StoppedError",
    "estimate_config",
    "search_plan",
]

# While nothing is found, a search goes on past its time limit: to this multiple of it, and at least this long. In the
# second half of that time, candidates with the least memory come first instead of the fastest.
_PATIENCE, _LEAST_PATIENCE_S = 5.0, 60.0
# Usual layouts and their neighbours are evaluated first, in at most this share of the time; neighbours only in spaces
# that are not searched as fast without.
_FIRST_SHARE, _FEW = 0.5, 200
_MOST_CHANGES = 16  # candidates that differ from the best plan in one choice, and are evaluated whatever the gap is
# Shares of the time after which candidates with a bound are evaluated although others have none yet.
_BOUND_SHARES = (0.75, 1.0)


class _Search:
    """One search. Every candidate has at most one outcome, with the rule or term that decided; without one it is open.

    Attributes:
        bounds: the best lower bound in seconds of each candidate that has one.
        plans: evaluated plans.
    """

    def __init__(self, request: PlanRequest, told: Callable[[Progress], None] | None) -> None:
        check_task(request)
        self.request, self.start, self.began = request, clock.now_s(), time.perf_counter()
        self.teller, self.num_candidates, self.phases = Teller(told), 0, Phases()
        self.points = LayoutCache(request, self.phases)
        self.quick, self.quick_time = QuickMemory(request), QuickTime(request)
        self.outcomes: dict[ParallelConfig, Decided] = {}
        self.bounds: dict[ParallelConfig, float] = {}
        self.first_bounds: dict[ParallelConfig, float] = {}  # bounds that ignore memory
        self.cutters: dict[ParallelConfig, Cutter | ChunkCutter] = {}
        self.plans = Standings(request)
        self.pending: dict[GroupKey, list[ParallelConfig]] = defaultdict(list)  # candidates without a bound
        self.grouped: list[ParallelConfig] = []  # all others
        self.neighbours: Neighbours | None = None
        self.offloaded: set[ParallelConfig] = set()  # candidates whose kinds of offload are candidates, too
        self.later: list[ParallelConfig] = []  # made near the best plans
        self.not_made = Counter[Decided | None]()  # candidates with offload, decided as those without
        self.not_made_bounds = Counter[float]()  # likewise: numbers of candidates by bound
        self.shortages: list[tuple[Shortage, ParallelConfig]] = []
        self.status = Status.COMPLETE
        longer_s = max(_PATIENCE * request.time_limit_s, _LEAST_PATIENCE_S)
        self.patience_s = longer_s if request.patient else request.time_limit_s

    def run(self) -> SearchResult:
        """Evaluate the first plans, bound all candidates, then refine and evaluate them best first."""
        with self.phases.spent("space"):
            checked = space_of(self.request)
        candidates = checked.candidates
        self.num_candidates = len(candidates)
        try:
            self._first_plans(candidates)
            self._offload_near_best()
            self._near_best()
            for candidate in candidates:
                self.pending[group_key(candidate)].append(candidate)
            for share in _BOUND_SHARES:
                if self.pending:
                    self._bound_groups(share * self.request.time_limit_s)
                    self._best_first(self.bounds)
            self._near_best()
            checked = self._with_offload(checked)
            if not self.plans.known:
                self._least_memory_first(checked)
            self._single_changes(candidates)
            self._look_for_simpler(checked)
        except KeyboardInterrupt:
            if not self.plans.best:
                raise
            self.status = Status.INTERRUPTED
        if not self.plans.best:
            raise no_plan(self.points, checked, self.shortages, self.outcomes, self._elapsed_s())
        chosen, *equals = self.plans.equals(self._complexity)
        self.request.layouts.found_best([chosen.candidate, self.plans.best[0].candidate])
        others = self.plans.asked([e for e in self.plans.best if e != chosen], [chosen])[: self.request.top - 1]
        plans = tuple(self._planned(entry) for entry in (chosen, *others))
        near = tuple((self._config(entry), entry.step_s) for entry in sorted(equals, key=lambda e: e.step_s))
        return SearchResult(plans, self._certificate(checked), near)

    def _elapsed_s(self) -> float:
        return clock.now_s() - self.start

    def _out_of_time(self) -> bool:
        if self._elapsed_s() > self.request.time_limit_s:
            self.status = Status.TIME_LIMIT
        return self.status is Status.TIME_LIMIT

    def _layout_limit_s(self) -> float:
        """Return the seconds that the next layout may take: the rest of the time, or more while there is no bound."""
        total = self.request.time_limit_s if self.bounds else self.patience_s
        return min(ILP_LIMIT_S, max(0.0, total - self._elapsed_s()))

    def _tell(self, bound_s: float) -> None:
        """Report how far the search is to its caller. `bound_s`: the least bound of the candidates at hand."""
        known = bool(self.grouped) and not self.pending
        best_s = self.plans.best[0].step_s if self.plans.best else None
        self.teller.tell(self.num_candidates - len(self.outcomes), best_s, bound_s if known else None)

    def _first_plans(self, candidates: Sequence[ParallelConfig]) -> None:
        """Evaluate what was best before, usual layouts, then neighbours of the best plan while they are better."""
        until_s = _FIRST_SHARE * self.request.time_limit_s
        first = usual(candidates, self.quick_time.bound_s)
        for some in (as_before(candidates, self.request.layouts.best), *first):
            if self.plans.known and self._elapsed_s() > until_s:
                break
            self._evaluate_some(some, until_s)
        if not self.plans.known:
            self._first_offloads(first)
        if not self.plans.best or len(candidates) < _FEW:
            return
        with self.phases.spent("space"):
            self.neighbours = Neighbours(candidates)
        examined = None
        while examined != self.plans.best[0] and self._elapsed_s() < until_s:
            examined = self.plans.best[0]
            for some in self.neighbours.of(examined.candidate.but(context_method=None, offload=())):
                self._evaluate_some(some, until_s)
                if self.plans.best[0] != examined:
                    break

    def _first_offloads(self, first: Sequence[Sequence[ParallelConfig]]) -> None:
        """Evaluate usual layouts, of which none fits, with each kind of offload."""
        made = (c for some in first for each in some for c in self._with_methods(each))
        known = [c for c in made if c in self.first_bounds]
        self.offloaded.update(known)
        self._search_offloads([each for c in known for each in offloaded(self.request, c)])

    def _evaluate_some(self, candidates: Sequence[ParallelConfig], until_s: float) -> None:
        """Evaluate those of the candidates that may be better than the best plan, best first."""
        some: list[ParallelConfig] = []
        for candidate in candidates:
            if self.plans.known and self._elapsed_s() > until_s:
                break
            some += self._with_methods(candidate)
        for members in grouped(c for c in some if c not in self.outcomes and c not in self.bounds):
            self._bound_group(members)
        self._best_first({c: self.bounds[c] for c in some if c in self.bounds})

    def _with_methods(self, candidate: ParallelConfig) -> list[ParallelConfig]:
        """Return one candidate per combination of context-parallel methods; nothing if that decides the candidate."""
        found = [candidate]
        if not self._out_at_once(candidate):
            with suppress(StoppedError):
                found = self.points.with_methods(candidate, self._layout_limit_s())
        if not found:
            self.outcomes[candidate] = (Outcome.ILLEGAL, NO_METHOD)
        return found

    def _bound_groups(self, until_s: float) -> None:
        """Bound pending candidates, a group at a time (`autoplan.search.group_bounds`), small micro-batches first.

        Candidates of cut sequences are replaced by one per combination of context-parallel methods.
        """
        for key in sorted(self.pending):
            if self.bounds and self._elapsed_s() > (until_s if self.plans.known else self.patience_s / 2):
                self._out_of_time()
                return
            self._tell(0.0)
            some: list[ParallelConfig] = []
            for candidate in self.pending.pop(key):
                found = self._with_methods(candidate)
                self.grouped += found or [candidate]
                some += found
            for members in grouped(some):
                self._bound_group(members)

    def _bound_group(self, members: Sequence[ParallelConfig]) -> None:
        """Bound candidates with the same work inside blocks, or decide them all."""
        members = [c for c in members if not self._out_at_once(c)]
        if not members:
            return
        with self.phases.spent("bounds"):
            try:
                least = self.points.least_pass(members[0], self._layout_limit_s())
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
                    self._exclude(candidate)

    def _bound_states(self, candidates: Sequence[ParallelConfig], below_s: float) -> None:
        """Make the bounds of candidates with the same work inside blocks stronger, by their states and memory.

        While there is no plan, which hints at little memory, those that cannot fit are decided before and get none.
        """
        if not self.plans.known:
            for candidate in candidates:
                self._exclude(candidate)
            candidates = [c for c in candidates if c not in self.outcomes]
        found = self.points.state_bounds(candidates, below_s) if candidates else None
        for candidate, (free, tight) in zip(candidates, found or (), strict=found is not None):
            self.first_bounds[candidate] = max(free, self.first_bounds.get(candidate, 0.0))
            self.bounds[candidate] = max(free, tight, self.bounds.get(candidate, 0.0))
            if tight == math.inf:
                self._decide([candidate], LARGE_VALUES)

    def _bound(self, candidate: ParallelConfig, limit_s: float | None = None) -> None:
        """Decide a candidate, or give it a cutter and a first bound; it gets neither if its layout was stopped."""
        if self._out_at_once(candidate):
            return
        with self.phases.spent("bounds"):
            try:
                kept = self.cutters.get(candidate.but(offload=())) if self._offers_offload(candidate) else None
                limit_s = self._layout_limit_s() if limit_s is None else limit_s
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

    def _out_at_once(self, candidate: ParallelConfig) -> bool:
        """Decide or bound a candidate that fits under no layout (by its states only without a plan), or is too slow."""
        if (term := self.quick.shortage(candidate, states=not self.plans.known)) is not None:
            self._decide([candidate], (Outcome.TOO_BIG, term))
            return True
        if slow := (bound := self.quick_time.bound_s(candidate)) >= self.plans.far_s():
            self.bounds[candidate] = self.first_bounds[candidate] = bound
        return slow

    def _exclude(self, candidate: ParallelConfig) -> None:
        """Decide a candidate whose states and least activations do not fit, whatever its cut and recompute are."""
        if (term := self.points.shortage(candidate)) is not None:
            self._decide([candidate], (Outcome.TOO_BIG, term))

    def _decide(self, candidates: Sequence[ParallelConfig], how: Decided) -> None:
        """Give candidates an outcome, if they have none."""
        for candidate in candidates:
            self.outcomes.setdefault(candidate, how)

    def _refine(self, candidate: ParallelConfig, cutoff_s: float) -> float:
        """Return the bound that includes memory, from `cutoff_s` on perhaps a weaker one.

        If nothing fits, it is inf: the candidate is decided.
        """
        cutter = self.cutters[candidate]
        with self.phases.spent("bounds"):
            bound = cutter.bound_s(cutoff_s)
            if isinstance(cutter, ChunkCutter):
                self.first_bounds[candidate] = max(self.first_bounds[candidate], cutter.known_free_s)
            if bound == math.inf:
                self._too_big(candidate)
                term = cutter.lacks_with_less_on_host(self.shortages[-1][0]) if candidate.offload else None
                if term is not None:
                    self._decide(less_offloaded(self.request, candidate), (Outcome.TOO_BIG, term))
            else:
                self.bounds[candidate] = bound = max(bound, self.bounds[candidate])  # perhaps weaker
                least = cutter.less_on_host_s() if bound >= cutoff_s and isinstance(cutter, ChunkCutter) else 0.0
                for other in less_offloaded(self.request, candidate) if least else ():
                    if other in self.bounds:
                        self.bounds[other] = max(least, self.bounds[other])
        return bound

    def _too_big(self, candidate: ParallelConfig) -> None:
        cutter = self.cutters[candidate]
        shortage = cutter.any_shortage() if self.plans.known else cutter.shortage()  # with a plan, only the term counts
        self.shortages.append((shortage, candidate))
        self.outcomes[candidate] = (Outcome.TOO_BIG, shortage.term)

    def _with_offload(self, checked: Space) -> Space:
        """Search candidates with offload: bounded by the same degrees without it, examined if memory binds.

        Those of degrees that are excluded with any memory or have no bound, or come after the time, are only counted.
        """
        self._offload_near_best()
        new: list[ParallelConfig] = []
        stopped = self._out_of_time() and self.plans.known
        enough = -math.inf if stopped else self.plans.enough_s()  # what is not made stays open
        left = [c for members in self.pending.values() for c in members]
        for candidate in (*self.grouped, *left):
            outcome, bound = self.outcomes.get(candidate), self.first_bounds.get(candidate)
            if outcome is not None and outcome[0] is Outcome.ILLEGAL:
                continue
            if candidate in self.offloaded or (bound is not None and bound < enough):
                new += offloaded(self.request, candidate)
            elif bound is None:  # too big by the quick bound, or open
                self.not_made[outcome] += len(offload_kinds(self.request, candidate))
            else:
                self.not_made_bounds[bound] += len(offload_kinds(self.request, candidate))
        self._search_offloads(new)
        return replace(checked, candidates=(*self.grouped, *left, *self.later, *new))

    def _search_offloads(self, candidates: Sequence[ParallelConfig]) -> None:
        """Bound candidates with offload, of degrees with a bound, then take them best first."""
        new: dict[ParallelConfig, list[ParallelConfig]] = {}
        for c in candidates:
            if c not in self.bounds:
                new.setdefault(c.but(offload=()), []).append(c)
        enough = self.plans.enough_s()
        with self.phases.spent("bounds"):
            for members in grouped(new):
                left: list[ParallelConfig] = []
                for kept, bound in zip(members, self.points.offloaded_bounds_s(members, enough), strict=True):
                    self.bounds |= dict.fromkeys(new[kept], max(self.first_bounds[kept], bound))
                    left += new[kept] if bound < enough else []
                self._bound_states(left, enough)
        self._best_first(most_on_host_first({c: self.bounds[c] for c in candidates}, enough))

    def _offload_near_best(self) -> None:
        """Evaluate offload at the degrees of the best plan and their neighbours, while the best plan gets better."""
        examined = None
        while self.neighbours and self.plans.best and examined != self.plans.best[0] and not self._out_of_time():
            examined = self.plans.best[0]
            degrees = examined.candidate.but(context_method=None, offload=())
            near = [degrees, *next(self.neighbours.of(degrees))]
            known = (c for each in near for c in self._with_methods(each) if c in self.first_bounds)
            enough = self.plans.enough_s()
            open_to = [c for c in known if self.first_bounds[c] < enough and c not in self.offloaded]
            self.offloaded.update(open_to)
            self._search_offloads([each for c in open_to for each in offloaded(self.request, c)])

    def _near_best(self) -> None:
        """Search other numbers of stages per rank, and shorter parts of sequences (`later_choices`)."""
        near = limit_s(self.plans.cutoff_s(), NEAR)
        new: dict[ParallelConfig, float] = {}
        for candidate, cutter in self.cutters.items():
            decided = self.outcomes.get(candidate, SOLVED)[0] is not Outcome.SOLVED
            if decided or not isinstance(cutter, ChunkCutter) or self.bounds[candidate] > near:
                continue
            some = more_stages(self.request, candidate)
            new |= {each: cutter.least_s for each in some if each not in self.bounds}
        self.later, self.bounds = [*self.later, *new], self.bounds | new
        self._best_first(new)
        if self.plans.best:
            parts = shorter_parts(self.request, self.plans.best[0])
            self.later += [c for each in parts for c in self._with_methods(each) if c not in self.first_bounds]
            self._evaluate_some(parts, self.request.time_limit_s)

    def _memory_binds(self, candidate: ParallelConfig) -> bool:
        """Return False, and decide or bound the candidate, if offloading cannot help its degrees."""
        kept = candidate.but(offload=())
        binds = self.outcomes.get(kept, (None, ""))[0] is Outcome.TOO_BIG
        if kept not in self.cutters:
            self._bound(kept)
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

    def _best_first(self, bounds: Mapping[ParallelConfig, float], gap: float | None = None) -> None:
        """Take the candidate with the least bound; make its cutter, refine the bound, then evaluate it.

        Args:
            gap: the share by which others may be faster; None: that of the request.
        """
        # among equals, the one with most on the host comes first: if it is too big, so are the others
        enough = self.plans.enough_s(gap)
        heap = [
            (bound, 0, -len(held_on_host(candidate.offload)), search_order(candidate), candidate)
            for candidate, bound in bounds.items()
            if bound < enough and candidate not in self.outcomes
        ]
        heapq.heapify(heap)
        while heap:
            bound, refined, _, _, candidate = heap[0]
            self._tell(bound)
            if bound >= self.plans.enough_s(gap):
                return
            if self._out_of_time() and (self.plans.known or self._elapsed_s() > self.patience_s / 2):
                return
            heapq.heappop(heap)
            if candidate in self.outcomes or self.bounds[candidate] >= self.plans.enough_s(gap):
                continue
            if refined:
                self._evaluate(candidate, self.plans.cutoff_s(), num_cuts(candidate))
                continue
            if candidate not in self.cutters:
                if not self._prepare(candidate):
                    continue
                bound = self.bounds[candidate]
            else:
                refined, bound = 1, self._refine(candidate, self.plans.enough_s(gap))
            if bound < math.inf:
                held = -len(held_on_host(candidate.offload))
                heapq.heappush(heap, (bound, refined, held, search_order(candidate), candidate))

    def _prepare(self, candidate: ParallelConfig) -> bool:
        """Give a candidate its cutter. Return False if it is decided, or its layout was stopped."""
        if self._offers_offload(candidate):
            self._exclude(candidate)
            if candidate not in self.outcomes and not self._memory_binds(candidate):
                return False
        if candidate not in self.outcomes:
            self._bound(candidate)
        return candidate in self.cutters

    def _offers_offload(self, candidate: ParallelConfig) -> bool:
        """Return True for a candidate with offload that is not pinned."""
        return bool(candidate.offload) and "offload" not in self.request.pins

    def _evaluate(self, candidate: ParallelConfig, cutoff_s: float, max_evaluated: int) -> None:
        """Search the cuts of a candidate; it stays open if none is found and none is excluded."""
        with self.phases.spent("evaluation"):
            cut = self.cutters[candidate].search(cutoff_s, max_evaluated)
        if cut.chunks is None and cut.exact and cutoff_s == math.inf:
            self._too_big(candidate)
        elif cut.chunks is not None:
            self.bounds[candidate] = max(self.bounds[candidate], cut.bound_s)
            self.outcomes[candidate] = SOLVED
            self.plans.add(candidate, cut)
        elif cut.exact:
            self.outcomes[candidate] = SOLVED
            self.bounds[candidate] = max(self.bounds[candidate], cutoff_s)
        else:
            self.bounds[candidate] = max(self.bounds[candidate], cut.bound_s)

    def _least_memory_first(self, checked: Space) -> None:
        """Evaluate open candidates, if nothing was found yet, until the first plan that fits or until patience ends."""
        rest = [c for c in checked.candidates if c not in self.outcomes]
        for candidate in sorted(rest, key=least_memory_first):
            left = self.patience_s - self._elapsed_s()
            if left <= 0:
                return
            if candidate in self.bounds:
                self._exclude(candidate)
            if candidate not in self.cutters and candidate not in self.outcomes:
                self._bound(candidate, min(ILP_LIMIT_S, left))
            if candidate in self.cutters and self._refine(candidate, math.inf) < math.inf:
                self._evaluate(candidate, math.inf, num_cuts(candidate, patient=True))
            if self.plans.best:
                return

    def _single_changes(self, candidates: Sequence[ParallelConfig]) -> None:
        """Without a given gap, evaluate what differs from the best plan in one choice, though faster by less."""
        self.neighbours, examined, usual_gap = self.neighbours or Neighbours(candidates), None, self.request.gap is None
        while usual_gap and self.plans.best and examined != self.plans.best[0] and not self._out_of_time():
            examined = self.plans.best[0]
            degrees = examined.candidate.but(context_method=None, offload=())
            near = (c for each in next(self.neighbours.of(degrees)) for c in self._with_methods(each))
            bounds = sorted((self.bounds[c], search_order(c), c) for c in near if c in self.bounds)
            self._best_first({c: bound for bound, _, c in bounds[:_MOST_CHANGES] if bound < examined.step_s}, gap=0.0)

    def _complexity(self, entry: Evaluated) -> Complexity:
        pricer = self.points.known_pricer(entry.candidate)
        stages = zip(ranges_of(entry.chunks), entry.recompute, strict=True)
        again = sum(len(pricer.recomputed(units, steps)) for units, steps in stages)
        return complexity(entry.candidate, again / max(1, sum(pricer.workload.layers)))

    def _look_for_simpler(self, checked: Space) -> None:
        """Evaluate candidates that may be simpler than the best plan and are equal to it within the error."""
        if not self.plans.best or not self.request.equal_within:
            return
        below = limit_s(self.plans.best[0].step_s, self.request.equal_within)
        least = self._complexity(self.plans.equals(self._complexity)[0])
        found, out = {e.candidate for e in self.plans.best}, (Outcome.ILLEGAL, Outcome.TOO_BIG)
        bounds = ((c, self.bounds.get(c, math.inf)) for c in checked.candidates)
        some = [
            (c, bound)
            for c, bound in bounds
            if bound <= below and c not in found and self.outcomes.get(c, (None, ""))[0] not in out
        ]
        for candidate in simpler_first(some, least, below)[:MOST_EXAMINED]:
            if self._out_of_time():
                return
            if complexity(candidate) >= least or not (candidate in self.cutters or self._prepare(candidate)):
                continue
            if self.bounds[candidate] <= below and self._refine(candidate, math.nextafter(below, math.inf)) <= below:
                self._evaluate(candidate, below, num_cuts(candidate))
                least = self._complexity(self.plans.equals(self._complexity)[0])

    def _planned(self, entry: Evaluated) -> Planned:
        candidate = self.points.decided(entry.candidate)
        estimate = self.points.known_pricer(candidate).estimate(entry.chunks, entry.recompute, events=True)
        return Planned(self._config(entry), estimate, self.points.known(candidate))

    def _config(self, entry: Evaluated) -> ParallelConfig:
        """Return the configuration of an evaluated plan."""
        candidate = self.points.decided(entry.candidate)
        config = without_activations(candidate).but(stages=entry.chunks)
        if "recompute" in self.request.pins:
            return config
        pricer = self.points.known_pricer(candidate)
        return config.but(recompute=chosen_recompute(pricer, entry.chunks, entry.recompute))

    def _certificate(self, checked: Space) -> Certificate:
        best, cutoff, enough = self.plans.best[0], self.plans.cutoff_s(), self.plans.enough_s()
        others, quick_s = (self.not_made, self.not_made_bounds), self.quick_time.bound_s
        known = ((c, self.bounds.get(c)) for c in checked.candidates)
        bounds = {c: quick_s(c) if bound is None else bound for c, bound in known}
        end = all_counted(checked.candidates, self.outcomes, bounds, *others, cutoff)
        steps = best.step_s, enough, cutoff
        made = certificate_of(self.request, checked, self.points, best.candidate, end, self.status, steps)
        considered = made.considered + self.not_made.total() + self.not_made_bounds.total()
        spent_s = time.perf_counter() - self.began
        return replace(made, considered=considered, solve_time_s=spent_s, by_phase_s=dict(self.phases))


def search_plan(request: PlanRequest, told: Callable[[Progress], None] | None = None) -> SearchResult:
    """Return the best plans of the space, and the certificate. `told` gets the progress a few times a second.

    Raises: PinError if nothing is legal, NothingFits (has a report), StoppedError if no plan was found in time.

    Example:
        >>> from autoplan import Cluster, PlanRequest, load_model, search_plan
        >>> search_plan(PlanRequest(load_model("gpt2"), Cluster.parse("1xh100"), 1024, 16)).plans[0].config.dp
        1
    """
    with collected_seldom():
        return _Search(request, told).run()
