"""The planner: the best plan of a stated space, with its certificate. No torch, no device.

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

import functools
import heapq
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any

from autoplan.config.offload import held_on_host
from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.time.breakdown import estimated
from autoplan.cost_models.time.price import ranges_of
from autoplan.search import clock
from autoplan.search.candidate_layout import CandidateLayout
from autoplan.search.candidates import Candidates
from autoplan.search.certificate import Certificate, SearchResult, Status, certificate_of
from autoplan.search.degrees import Space, num_cuts, search_order
from autoplan.search.estimate import Planned, chosen_recompute, estimate_config
from autoplan.search.first_plans import Neighbours, as_before, mesh_of, usual
from autoplan.search.garbage import collected_seldom
from autoplan.search.group_bounds import GroupKey, group_key
from autoplan.search.infeasible import InfeasibleReport, NotFasterError, NothingFits, no_plan
from autoplan.search.intra import StoppedError
from autoplan.search.later_choices import NEAR, more_stages, other_copies, shorter_parts
from autoplan.search.layers_alike import with_layers_alike
from autoplan.search.layouts import ILP_LIMIT_S
from autoplan.search.outcomes import SOLVED, Decided, Outcome, all_counted
from autoplan.search.pair import LostHelperError
from autoplan.search.progress import Progress, Teller
from autoplan.search.request import (
    PlanRequest,
    least_memory_first,
    most_on_host_first,
    offload_kinds,
    offloaded,
    space_of,
    without_activations,
)
from autoplan.search.simplicity import MOST_EXAMINED, Complexity, complexity, limit_s, simpler_first
from autoplan.search.standings import Evaluated
from autoplan.search.within_graphs import within_graphs

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

# Usual layouts and their neighbours are evaluated first, in at most this share of the time; neighbours only in spaces
# that are not searched as fast without.
_FIRST_SHARE, _FEW = 0.5, 200
# Candidates that differ from the best plan in one choice, and of its mesh, that are evaluated whatever the gap is.
_MOST_CHANGES = 16
# Groups that are bounded, and lists of usual layouts that are solved, before the clock and the best plan are looked at
# again; and candidates that are looked at, of so many. Some are in either half of a search of two processes.
_GROUPS_AT_ONCE, _LISTS_AT_ONCE = 96, 4
_LEAST_STEPS, _MOST_STEPS, _STEP_OF = 8, 32, 16
_FEW_TO_SHARE = 1_000  # candidates from which on a helper takes less time than it takes to start
# Shares of the time after which candidates with a bound are evaluated although others have none yet.
_BOUND_SHARES = (0.75, 1.0)


_Entry = tuple[float, int, int, tuple[Any, ...], ParallelConfig]  # bound, 1 if it is that with memory, order


class _Search(Candidates):
    """One search: which candidates come when. With a helper, both processes come to the same."""

    def __init__(self, request: PlanRequest, told: Callable[[Progress], None] | None, start_s: float) -> None:
        super().__init__(request, start_s)
        self.teller, self.num_candidates = Teller(told), 0
        self.pending: dict[GroupKey, list[ParallelConfig]] = defaultdict(list)  # candidates without a bound
        self.grouped: list[ParallelConfig] = []  # all others
        self.neighbours: Neighbours | None = None
        self.offloaded: set[ParallelConfig] = set()  # candidates whose kinds of offload are candidates, too
        self.later: dict[ParallelConfig, None] = {}  # made near the best plans
        self.not_made = Counter[Decided | None]()  # candidates with offload, decided as those without
        self.not_made_bounds = Counter[float]()  # likewise: numbers of candidates by bound
        self.counts_offload = False  # `checked` and these have the candidates with offload
        self.status = Status.COMPLETE

    def run(self, helped: bool) -> SearchResult:
        """Evaluate the first plans, bound all candidates, then refine and evaluate them best first.

        Args:
            helped: with a helper, if that pays.

        Raises:
            LostHelperError: the helper is gone.
        """
        with self.phases.spent("space"):
            self.checked = space_of(self.request)
        self.num_candidates = len(self.checked.candidates)
        try:
            if helped and self.num_candidates >= _FEW_TO_SHARE:
                self.pair.start(self._help)
            self._search()
        except KeyboardInterrupt:
            if not self.plans.best:
                raise
            self.status = Status.INTERRUPTED
        finally:
            self.pair.close()
        if self.status is Status.INTERRUPTED and not self.counts_offload:
            self._count_offload(-math.inf)
        if not self.plans.best and self.request.below_s < math.inf:
            text = f"no plan was found whose step takes less than {self.request.below_s:.6g} s"
            raise NotFasterError(text, self._certificate(self.checked))
        if not self.plans.best:
            shortages = [(found, c) for c, found in self.shortages.items()]
            raise no_plan(self.points, self.checked, shortages, self.outcomes, self.elapsed_s())
        chosen, *equals = self.plans.equals(self._complexity)
        self.request.layouts.found_best([chosen.candidate, self.plans.best[0].candidate])
        others = self.plans.asked(self.plans.others(chosen), [chosen])[: self.request.top - 1]
        plans = tuple(self._planned(entry) for entry in (chosen, *others))
        near = tuple((self._config(entry), entry.step_s) for entry in sorted(equals, key=lambda e: e.step_s))
        return SearchResult(plans, self._certificate(self.checked), self.request, near)

    def _help(self) -> None:
        self.teller = Teller(None)
        self._search()

    def _search(self) -> None:
        candidates = self.checked.candidates
        for candidate in candidates:
            self.pending[group_key(candidate)].append(candidate)
        self._first_plans(candidates)
        self._offload_near_best()
        self._near_best()
        for share in _BOUND_SHARES:
            if self.pending:
                self._bound_groups(share * self.request.time_limit_s)
                self._best_first(self.bounds)
        self._near_best()
        self._with_offload()
        if not self.plans.known:
            self._least_memory_first(self.checked)
        self._single_changes(candidates)
        self._look_for_simpler(self.checked)

    def _out_of_time(self) -> bool:
        if self.past(self.request.time_limit_s):
            self.status = Status.TIME_LIMIT
        return self.status is Status.TIME_LIMIT

    def _tell(self, bound_s: float) -> None:
        """Report how far the search is to its caller. `bound_s`: the least bound of the candidates at hand."""
        known = bool(self.grouped) and not self.pending
        best_s = self.plans.best[0].step_s if self.plans.best else None
        self.teller.tell(self.num_candidates - len(self.outcomes), best_s, bound_s if known else None)

    def _first_plans(self, candidates: Sequence[ParallelConfig]) -> None:
        """Evaluate what was best before, usual layouts, then neighbours of the best plan while they are better."""
        until_s = _FIRST_SHARE * self.request.time_limit_s
        lists = usual(candidates, self.quick_time.bound_s)
        first = [as_before(candidates, self.request.layouts.best), *lists]
        for i, some in enumerate(first):
            if i % _LISTS_AT_ONCE == 2:
                self.with_methods(chain(*first[i : i + _LISTS_AT_ONCE]))  # several layouts at once
            if self.plans.known and self.past(until_s):
                break
            self._evaluate_some(some)
        if not self.plans.known:
            self._first_offloads(lists)
        if not self.plans.best or len(candidates) < _FEW:
            return
        with self.phases.spent("space"):
            self.neighbours = Neighbours(candidates)
        examined = None
        while examined != self.plans.best[0] and not self.past(until_s):
            examined = self.plans.best[0]
            for some in self.neighbours.of(examined.candidate.but(context_method=None, offload=())):
                self._evaluate_some(some)
                if self.plans.best[0] != examined:
                    break

    def _first_offloads(self, first: Sequence[Sequence[ParallelConfig]]) -> None:
        """Evaluate usual layouts, of which none fits, with each kind of offload."""
        made = chain(*self.with_methods(chain(*first)))
        known = [c for c in made if c in self.first_bounds]
        self.offloaded.update(known)
        self._search_offloads([each for c in known for each in offloaded(self.request, c)])

    def _evaluate_some(self, candidates: Sequence[ParallelConfig]) -> None:
        """Evaluate those of the candidates that may be better than the best plan, best first."""
        some = list(chain(*self.with_methods(candidates)))
        self.bound_groups(c for c in some if c not in self.outcomes and c not in self.bounds)
        self._best_first({c: self.bounds[c] for c in some if c in self.bounds})

    def _bound_groups(self, until_s: float) -> None:
        """Bound pending candidates, a few groups at a time (`autoplan.search.group_bounds`), small micro-batches first.

        Candidates of cut sequences are replaced by one per combination of context-parallel methods.
        """
        keys = sorted(self.pending)
        for i in range(0, len(keys), _GROUPS_AT_ONCE):
            if self.bounds and self.past(until_s if self.plans.known else self.patience_s / 2):
                self._out_of_time()
                return
            self._tell(0.0)
            given = [c for key in keys[i : i + _GROUPS_AT_ONCE] for c in self.pending[key]]
            found = self.with_methods(given)
            self.bound_groups(chain(*found))
            self.grouped += chain(*(each or [c] for c, each in zip(given, found, strict=True)))
            for key in keys[i : i + _GROUPS_AT_ONCE]:  # not before: an interrupted search still knows of them
                del self.pending[key]

    def _with_offload(self) -> None:
        """Search candidates with offload: bounded by the same degrees without it, examined if memory binds."""
        self._offload_near_best()
        stopped = self._out_of_time() and self.plans.known
        self._search_offloads(self._count_offload(-math.inf if stopped else self.plans.enough_s()))

    def _count_offload(self, enough: float) -> list[ParallelConfig]:
        """Add candidates with offload to `checked`, and return them.

        Those of degrees that are excluded with any memory or have no bound, or one from `enough` seconds on, are only
        counted, and stay open.
        """
        new = [each for c in self.later if c in self.offloaded for each in offloaded(self.request, c)]
        self.not_made, self.not_made_bounds = Counter(), Counter()
        left = [each for members in self.pending.values() for c in members for each in self._with_known_methods(c)]
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
        self.checked = replace(self.checked, candidates=(*self.grouped, *left, *self.later, *new))
        self.counts_offload = True
        return new

    def _with_known_methods(self, candidate: ParallelConfig) -> list[ParallelConfig]:
        """Return a pending candidate as the first plans may have decided it: one per combination of its methods."""
        known = self.points.known_methods((candidate.tp, candidate.micro_batch_size, candidate.cp))
        return [candidate] if known is None else self._methods_of(candidate) or [candidate]

    def _search_offloads(self, candidates: Sequence[ParallelConfig]) -> None:
        """Bound candidates with offload, of degrees with a bound, then take them best first."""
        new: dict[ParallelConfig, list[ParallelConfig]] = {}
        for c in candidates:
            if c not in self.bounds:
                new.setdefault(c.but(offload=()), []).append(c)
        enough = self.plans.enough_s()
        self.offload_bounds(new)
        self._best_first(most_on_host_first({c: self.bounds[c] for c in candidates}, enough))

    def _offload_near_best(self) -> None:
        """Evaluate offload at the degrees of the best plan and their neighbours, while the best plan gets better."""
        examined = None
        while self.neighbours and self.plans.best and examined != self.plans.best[0] and not self._out_of_time():
            examined = self.plans.best[0]
            degrees = examined.candidate.but(context_method=None, offload=())
            near = [degrees, *next(self.neighbours.of(degrees))]
            known = (c for c in chain(*self.with_methods(near)) if c in self.first_bounds)
            enough = self.plans.enough_s()
            open_to = [c for c in known if self.first_bounds[c] < enough and c not in self.offloaded]
            self.offloaded.update(open_to)
            self._search_offloads([each for c in open_to for each in offloaded(self.request, c)])

    def _near_best(self) -> None:
        """Search other numbers of stages per rank, shorter parts of sequences, and copies (`later_choices`)."""
        if not self.plans.known:
            return
        near = limit_s(self.plans.cutoff_s(), NEAR)
        # without memory: more stages may need less of it, where fewer are too big or recompute
        some = (c for c, bound in self.first_bounds.items() if bound <= near and not c.offload)
        plain = dict.fromkeys(c.but(context_method=None) for c in some)
        self._evaluate_later(list(dict.fromkeys(each for c in plain for each in more_stages(self.request, c))))
        for choices in (shorter_parts, other_copies):
            if self.plans.best:
                self._evaluate_later(choices(self.request, self.plans.best[0]))

    def _evaluate_later(self, found: list[ParallelConfig]) -> None:
        self.later |= dict.fromkeys(c for c in chain(*self.with_methods(found)) if self._is_new(c))
        self._evaluate_some(found)

    def _is_new(self, candidate: ParallelConfig) -> bool:
        """Return True for a candidate that neither the space nor an earlier look near the best plan has."""
        plain = candidate.but(context_method=None)
        known = candidate in self.first_bounds or plain in self.pending.get(group_key(plain), ())
        return not known and candidate not in self.later

    def _best_first(self, bounds: Mapping[ParallelConfig, float], gap: float | None = None) -> None:
        """Take the candidate with the least bound; make its cutter, refine the bound, then evaluate it.

        Args:
            gap: the share by which others may be faster; None: that of the request.
        """
        # among equals, the one with most on the host comes first: if it is too big, so are the others
        enough = self.plans.enough_s(gap)
        heap: list[_Entry] = [
            (bound, 0, -len(held_on_host(candidate.offload)), search_order(candidate), candidate)
            for candidate, bound in bounds.items()
            if bound < enough and candidate not in self.outcomes
        ]
        heapq.heapify(heap)
        at_once = min(_MOST_STEPS, max(_LEAST_STEPS, len(heap) // _STEP_OF))
        while heap:
            bound, refined, _, _, candidate = heap[0]
            self._tell(bound)
            if bound >= self.plans.enough_s(gap):
                return
            if self._out_of_time() and (self.plans.known or self.past(self.patience_s / 2)):
                return
            if refined:
                heapq.heappop(heap)
                if self._open_below(candidate, self.plans.enough_s(gap)):
                    self.evaluate(candidate, self.plans.cutoff_s(), num_cuts(candidate))
                continue
            for refined, candidate in self._step_first(heap, self.plans.enough_s(gap), at_once):
                held = -len(held_on_host(candidate.offload))
                heapq.heappush(heap, (self.bounds[candidate], refined, held, search_order(candidate), candidate))

    def _step_first(self, heap: list[_Entry], enough_s: float, most: int) -> list[tuple[int, ParallelConfig]]:
        """Do a step for the first candidates that need one, and return those that are left, with 1 if it was the last.

        Their number does not depend on the processes: what is found is the same with any.
        """
        some: dict[ParallelConfig, int] = {}
        while heap and not heap[0][1] and heap[0][0] < enough_s and len(some) < most:
            candidate = heapq.heappop(heap)[-1]
            if self._open_below(candidate, enough_s):
                some[candidate] = int(candidate in self.prepared)
        self.share(list(some), functools.partial(self.step, cutoff_s=enough_s))
        return [(refined, c) for c, refined in some.items() if c in self.prepared and c not in self.outcomes]

    def _open_below(self, candidate: ParallelConfig, enough_s: float) -> bool:
        return candidate not in self.outcomes and self.bounds[candidate] < enough_s

    def _least_memory_first(self, checked: Space) -> None:
        """Evaluate open candidates, if nothing was found yet, until the first plan that fits or until patience ends."""

        def tried(candidate: ParallelConfig) -> None:
            if candidate in self.bounds:
                self.exclude(candidate)
            if candidate not in self.prepared and candidate not in self.outcomes:
                self.bound(candidate, min(ILP_LIMIT_S, max(0.0, self.patience_s - self.elapsed_s())))
            if candidate in self.prepared:
                self.refine(candidate, math.inf)

        rest = [c for c in checked.candidates if c not in self.outcomes]
        for candidate in sorted(rest, key=least_memory_first):
            if self.past(self.patience_s):
                return
            self.share([candidate], tried)
            if candidate in self.prepared and candidate not in self.outcomes:
                self.evaluate(candidate, math.inf, num_cuts(candidate, patient=True))
            if self.plans.best:
                return

    def _single_changes(self, candidates: Sequence[ParallelConfig]) -> None:
        """Without a given gap, evaluate for any gain what shares the mesh of the best plan or is one choice away."""
        self.neighbours, examined, usual_gap = self.neighbours or Neighbours(candidates), None, self.request.gap is None
        while usual_gap and self.plans.best and examined != self.plans.best[0] and not self._out_of_time():
            examined = self.plans.best[0]
            degrees = examined.candidate.but(context_method=None, offload=())
            later = [c for c in self.later if mesh_of(c) == mesh_of(degrees)]
            for near, others in ((next(self.neighbours.of(degrees)), []), (self.neighbours.on_mesh(degrees), later)):
                made = chain(*self.with_methods(near), others)
                known = (c for c in made if c in self.bounds and c not in self.outcomes)
                bounds = sorted((self.bounds[c], search_order(c), c) for c in known)
                most = {c: bound for bound, _, c in bounds[:_MOST_CHANGES] if bound < examined.step_s}
                self._best_first(most, gap=0.0)

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
        found, out = {e.candidate for e in (*self.plans.best, *self.plans.twins)}, (Outcome.ILLEGAL, Outcome.TOO_BIG)
        bounds = ((c, self.bounds.get(c, math.inf)) for c in checked.candidates)
        some = [
            (c, bound)
            for c, bound in bounds
            if bound <= below and c not in found and self.outcomes.get(c, (None, ""))[0] not in out
        ]
        for candidate in simpler_first(some, least, below)[:MOST_EXAMINED]:
            if self._out_of_time():
                return
            if complexity(candidate) >= least:
                continue
            self.share([candidate], functools.partial(self._refined, below_s=below))
            if candidate in self.prepared and self._may_be(candidate, below):
                self.evaluate(candidate, below, num_cuts(candidate))
                least = self._complexity(self.plans.equals(self._complexity)[0])

    def _refined(self, candidate: ParallelConfig, below_s: float) -> None:
        """Refine a candidate that may be as fast as this."""
        if candidate not in self.prepared:
            self.prepare(candidate)
        if candidate in self.prepared and self._may_be(candidate, below_s):
            self.refine(candidate, math.nextafter(below_s, math.inf))

    def _may_be(self, candidate: ParallelConfig, below_s: float) -> bool:
        too_big = self.outcomes.get(candidate, SOLVED)[0] is Outcome.TOO_BIG
        return not too_big and self.bounds[candidate] <= below_s

    def _planned(self, entry: Evaluated) -> Planned:
        candidate = self.points.decided(entry.candidate)
        pricer = self.points.known_pricer(candidate)
        estimate = estimated(pricer, entry.chunks, entry.recompute, events=True)
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
        cutoff, enough = self.plans.cutoff_s(), self.plans.enough_s()
        best, best_s = None, self.request.below_s
        if self.plans.best:
            best, best_s = self.plans.best[0].candidate, self.plans.best[0].step_s
        others, quick_s = (self.not_made, self.not_made_bounds), self.quick_time.bound_s
        known = ((c, self.bounds.get(c)) for c in checked.candidates)
        bounds = {c: quick_s(c) if bound is None else bound for c, bound in known}
        end = all_counted(checked.candidates, self.outcomes, bounds, *others, cutoff)
        steps = best_s, enough, cutoff
        made = certificate_of(self.request, checked, self.points, best, end, self.status, steps)
        considered = made.considered + self.not_made.total() + self.not_made_bounds.total()
        spent_s = time.perf_counter() - self.began
        return replace(made, considered=considered, solve_time_s=spent_s, by_phase_s=dict(self.phases))


def search_plan(request: PlanRequest, told: Callable[[Progress], None] | None = None) -> SearchResult:
    """Return the best plans of the space, and the certificate. `told` gets the progress a few times a second.

    Where CUDA graphs of the stack exclude the recompute of the best plan, it is the best one that runs, and the
    result's `request` has the settings with which it does (`autoplan.search.within_graphs`).

    Raises: PinError if nothing is legal, NothingFits (has a report), StoppedError if no plan was found in time.

    Example:
        >>> from autoplan import Cluster, PlanRequest, load_model, search_plan
        >>> search_plan(PlanRequest(load_model("gpt2"), Cluster.parse("1xh100"), 1024, 16)).plans[0].config.dp
        1
    """
    return within_graphs(search_as_given(request, told), functools.partial(search_as_given, told=told))


def search_as_given(request: PlanRequest, told: Callable[[Progress], None] | None = None) -> SearchResult:
    """As `search_plan`, with the settings of the request, also where the stack does not run the best plan with them."""
    start_s = clock.now_s()
    try:
        found: SearchResult | NotFasterError = _search_once(request, told)
    except NotFasterError as error:
        found = error
    result = with_layers_alike(request, found, _search_once, start_s + request.time_limit_s)
    return replace(result, request=request)


def _search_once(request: PlanRequest, told: Callable[[Progress], None] | None = None) -> SearchResult:
    start_s = clock.now_s()
    with collected_seldom():
        with suppress(LostHelperError):
            return _Search(request, told, start_s).run(helped=True)
        return _Search(request, told, start_s).run(helped=False)
