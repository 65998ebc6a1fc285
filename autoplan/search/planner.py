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

Offloading is never faster, so it comes last: only for degrees whose bound without memory is below the best plan, and
only if memory binds (`Cutter.binds`). If it does not bind, every plan with offloading has one without that is no
slower.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum, StrEnum

from autoplan.config.offload import held_on_host
from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.cost_models.memory.recompute_frontier import recompute_mapping
from autoplan.cost_models.time.price import Pricer, ranges_of
from autoplan.errors import InfeasibleError
from autoplan.ops.record import OpKind
from autoplan.ops.table import nodes_with
from autoplan.schedules.schedule import searched_words
from autoplan.search.cuts import Cut, Cutter, Shortage
from autoplan.search.degrees import MAX_ACTIONS, Space, search_order
from autoplan.search.estimate import Planned, estimate_config
from autoplan.search.infeasible import InfeasibleReport, NothingFits, nothing_fits
from autoplan.search.interleaved_cuts import ChunkCutter
from autoplan.search.intra import StoppedError
from autoplan.search.layouts import (
    ILP_LIMIT_S,
    CandidateLayout,
    LayoutCache,
    PlanRequest,
    QuickMemory,
    check_task,
    least_memory_first,
    offloaded,
    space_of,
    without_activations,
)
from autoplan.search.space import LEAST_PART

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

# Simulated actions that one candidate may cost before its open bound counts as a gap. Unlike a time limit, this is
# deterministic.
_MAX_ACTIONS = 100_000
# While nothing is found, a search goes on past its time limit: to this multiple of it, and at least this long. In the
# second half of that time, candidates with the least memory come first instead of the fastest.
_PATIENCE, _LEAST_PATIENCE_S = 5.0, 60.0
_RESTRICTIONS = (
    "all devices are used, in micro-batches of one size",
    "ranks ordered pp, dp, cp, tp: tp over neighbours, pp over the farthest",
    "one layout per tensor-parallel degree and micro-batch size, the same for all equal layers: the fastest with the "
    "least stored state",
    "layouts weigh what happens once per step as without a pipeline",
    "layouts weigh operations and collectives one by one: nothing hidden, nothing fused, no waiting for the host",
)
_LADDER = (
    "recompute: of every kind of layer the choices on the convex front of seconds and bytes freed (groups of regions, "
    "full), cheapest bytes of a stage first, first layers first"
)
_OFFLOAD = (
    "offload: optimizer state of all stages, parameters with it where they are sharded, and what layers keep, as one "
    "more choice of recompute; nothing of it hidden behind computing but with the traffic of ZeRO"
)
_EXPERTS = (
    "experts where tp has them, or spread over ep ranks that are neighbours (what etp leaves of tp, then cp, then dp), "
    "whole (etp = 1), or split over all of tp where there are too few"
)
_SCHEDULES = (
    f"schedules: 1F1B with every cut; {searched_words()}, up to {MAX_ACTIONS:,} actions, of a few even cuts the "
    "fastest, and layers computed again taken in turn from a rank's stages"
)


class Status(StrEnum):
    """The end of a search: everything decided, or stopped.

    CUTS: some candidate has more cuts than are tried, and a bound below the best plan.
    LAYOUTS: only the proof of some layout was stopped.
    """

    COMPLETE = "complete"
    CUTS = "not all cuts tried"
    LAYOUTS = "layouts stopped by time limit"
    TIME_LIMIT = "stopped by time limit"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Certificate:
    """The proof of how good the best plan is, at these prices and within these restrictions.

    `considered` = `illegal` + `too_big` + `bounded_out` + `solved` + `open`.

    Attributes:
        bounded_out: a proved lower bound is not below the best plan (if several plans are requested: the last of them).
        open: not decided, because the search was stopped or a candidate has more cuts than are tried.
        gap: (best - bound) / best: the best step of the space is at most this share shorter than the one found; 1 if
            nothing is known about it.
        intra_gap: the gap of a layout inside its blocks.
    """

    considered: int
    illegal: int
    too_big: int
    bounded_out: int
    solved: int
    open: int
    gap: float
    solve_time_s: float
    restrictions: tuple[str, ...]
    status: str
    illegal_by_rule: Mapping[str, int]
    too_big_by_term: Mapping[str, int]
    by_phase_s: Mapping[str, float]
    intra_gap: float


@dataclass(frozen=True)
class SearchResult:
    """Plans, best first, and the certificate of the first."""

    plans: tuple[Planned, ...]
    certificate: Certificate


class _Outcome(Enum):
    """The way in which a candidate was decided."""

    ILLEGAL = "illegal"
    TOO_BIG = "too big"
    BOUNDED_OUT = "bounded out"
    SOLVED = "solved"


_Entry = tuple[float, ParallelConfig, tuple[int, ...], tuple[int, ...]]  # step, cut, recomputed layers


class _Search:
    """One search. Every candidate has at most one outcome, with the rule or term that decided; without one it is open.

    Attributes:
        bounds: the best lower bound in seconds of each candidate that has one.
        best: evaluated plans, best first.
    """

    def __init__(self, request: PlanRequest) -> None:
        check_task(request)
        self.request, self.start = request, time.perf_counter()
        self.phases: dict[str, float] = defaultdict(float)
        self.points = LayoutCache(request, self.phases)
        self.quick = QuickMemory(request, self.points.capacity_bytes)
        self.outcomes: dict[ParallelConfig, tuple[_Outcome, str]] = {}
        self.bounds: dict[ParallelConfig, float] = {}
        self.first_bounds: dict[ParallelConfig, float] = {}  # bounds that ignore memory
        self.cutters: dict[ParallelConfig, Cutter | ChunkCutter] = {}
        self.best: list[_Entry] = []
        self.shortages: list[tuple[Shortage, ParallelConfig]] = []
        self.status = Status.COMPLETE
        self.patience_s = max(_PATIENCE * request.time_limit_s, _LEAST_PATIENCE_S)

    def run(self) -> SearchResult:
        """Bound all candidates, then refine and evaluate them best first."""
        with self._phase("space"):
            checked = space_of(self.request)
        try:
            checked = self._bound_all(checked)
            self._best_first(self.bounds)
            checked = self._with_offload(checked)
            if not self.best:
                self._least_memory_first(checked)
        except KeyboardInterrupt:
            if not self.best:
                raise
            self.status = Status.INTERRUPTED
        if not self.best:
            raise self._nothing(checked)
        plans = tuple(self._planned(entry) for entry in self.best[: self.request.top])
        return SearchResult(plans, self._certificate(checked))

    # -- time -------------------------------------------------------------------------------------------------------

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self.start

    def _out_of_time(self) -> bool:
        if self._elapsed_s() > self.request.time_limit_s:
            self.status = Status.TIME_LIMIT
        return self.status is Status.TIME_LIMIT

    def _layout_limit_s(self) -> float:
        """Return the seconds that the next layout may take: the rest of the time, or more while there is no cutter."""
        total = self.request.time_limit_s if self.cutters else self.patience_s
        return min(ILP_LIMIT_S, max(0.0, total - self._elapsed_s()))

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to a phase, without that of nested phases."""
        began, before = time.perf_counter(), sum(self.phases.values())
        try:
            yield
        finally:
            self.phases[name] += time.perf_counter() - began - (sum(self.phases.values()) - before)

    # -- candidates -------------------------------------------------------------------------------------------------

    def _bound_all(self, checked: Space) -> Space:
        """Bound every candidate, with cut sequences one per combination of context-parallel methods."""
        out = list(checked.candidates)
        for k, candidate in enumerate(checked.candidates):
            if self.cutters and self._out_of_time():  # the rest stays open
                break
            found = [candidate]
            if not self.quick.too_big(candidate):
                with suppress(StoppedError):
                    found = self.points.with_methods(candidate, self._layout_limit_s())
            if not found:
                self.outcomes[candidate] = (_Outcome.ILLEGAL, "the pinned context_method does not exist at this tp")
                continue
            out[k] = found[0]
            out += found[1:]
            for each in found:
                self._bound(each)
        return replace(checked, candidates=tuple(out))

    def _bound(self, candidate: ParallelConfig, limit_s: float | None = None) -> None:
        """Decide a candidate, or give it a cutter and a first bound; it gets neither if its layout was stopped."""
        if self.quick.too_big(candidate):
            self.outcomes[candidate] = (_Outcome.TOO_BIG, "activations")
            return
        with self._phase("bounds"):
            try:
                cutter = self.points.cutter(candidate, self._layout_limit_s() if limit_s is None else limit_s)
            except StoppedError:
                return
            if cutter is None:
                self.outcomes[candidate] = (_Outcome.ILLEGAL, "no layout exists at this tp")
                return
            self.bounds[candidate] = self.first_bounds[candidate] = cutter.quick_bound_s()
            self.cutters[candidate] = cutter

    def _refine(self, candidate: ParallelConfig) -> float:
        """Return the bound that includes memory; if nothing fits, it is inf and the candidate is decided."""
        cutter = self.cutters[candidate]
        with self._phase("bounds"):
            bound = cutter.bound_s()
            if bound == math.inf:
                self._too_big(candidate)
                if candidate.offload and isinstance(cutter, Cutter) and cutter.lacks_device_memory():
                    for each in offloaded(self.request, candidate):  # candidates with less on the host are too big, too
                        if held_on_host(each.offload) < held_on_host(candidate.offload):
                            self.outcomes.setdefault(each, self.outcomes[candidate])
            else:
                self.bounds[candidate] = bound
        return bound

    def _too_big(self, candidate: ParallelConfig) -> None:
        shortage = self.cutters[candidate].shortage()
        self.shortages.append((shortage, candidate))
        self.outcomes[candidate] = (_Outcome.TOO_BIG, shortage.term)

    def _cutoff_s(self) -> float:
        """Return the step time that a plan must beat to be among the requested ones."""
        return self.best[self.request.top - 1][0] if len(self.best) >= self.request.top else math.inf

    def _with_offload(self, checked: Space) -> Space:
        """Search candidates with offload: bounded by the same degrees without it, examined if memory binds."""
        new: list[ParallelConfig] = []
        for candidate in checked.candidates:
            outcome = self.outcomes.get(candidate)
            if outcome is not None and outcome[0] is _Outcome.ILLEGAL:
                continue
            for each in offloaded(self.request, candidate):
                new.append(each)
                if outcome is not None and candidate not in self.cutters:  # too big by the quick bound
                    self.outcomes[each] = outcome
                elif candidate in self.first_bounds:
                    self.bounds[each] = self.first_bounds[candidate]
        self._best_first({c: self.bounds[c] for c in new if c in self.bounds})
        return replace(checked, candidates=(*checked.candidates, *new))

    def _memory_binds(self, candidate: ParallelConfig) -> bool:
        """Return False, and decide the candidate, if offloading cannot help its degrees."""
        with self._phase("bounds"):
            cutter, cutoff = self.cutters[candidate.but(offload=())], self._cutoff_s()
            binds = cutter.free_bound_s() < cutoff and cutter.binds(cutoff)
        if not binds:
            self.outcomes[candidate] = (_Outcome.BOUNDED_OUT, "")
        return binds

    def _best_first(self, bounds: Mapping[ParallelConfig, float]) -> None:
        """Take the candidate with the least bound; refine it the first time, evaluate it the second."""
        # among equals, the one with most on the host comes first: if it is too big, so are the others
        heap = [
            (bound, 0, -len(held_on_host(candidate.offload)), search_order(candidate), candidate)
            for candidate, bound in bounds.items()
        ]
        heapq.heapify(heap)
        while heap:
            bound, refined, _, _, candidate = heap[0]
            cutoff = self._cutoff_s()
            if bound >= cutoff:
                return
            if self._out_of_time() and (self.best or self._elapsed_s() > self.patience_s / 2):
                return
            heapq.heappop(heap)
            if candidate in self.outcomes:
                continue
            if refined:
                self._evaluate(candidate, cutoff, max(2, min(2000, _MAX_ACTIONS // candidate.num_actions)))
                continue
            if candidate not in self.cutters and not self._prepare(candidate):
                continue
            bound = self._refine(candidate)
            if bound < math.inf:
                heapq.heappush(
                    heap, (bound, 1, -len(held_on_host(candidate.offload)), search_order(candidate), candidate)
                )

    def _prepare(self, candidate: ParallelConfig) -> bool:
        """Give a candidate with offload its cutter. Return False if it is decided, or its layout was stopped."""
        if self._memory_binds(candidate):
            self._bound(candidate)
        return candidate in self.cutters

    def _evaluate(self, candidate: ParallelConfig, cutoff_s: float, max_evaluated: int) -> None:
        """Search the cuts of a candidate; it stays open if none is found and none is excluded."""
        with self._phase("evaluation"):
            cut = self.cutters[candidate].search(cutoff_s, max_evaluated)
        if cut.chunks is None and cut.exact and cutoff_s == math.inf:
            self._too_big(candidate)
        elif cut.chunks is not None:
            self._take(candidate, cut)
        elif cut.exact:
            self.outcomes[candidate] = (_Outcome.SOLVED, "")
            self.bounds[candidate] = max(self.bounds[candidate], cutoff_s)
        else:
            self.bounds[candidate] = max(self.bounds[candidate], cut.bound_s)

    def _take(self, candidate: ParallelConfig, cut: Cut) -> None:
        self.bounds[candidate] = max(self.bounds[candidate], cut.bound_s)
        self.outcomes[candidate] = (_Outcome.SOLVED, "")
        degrees = candidate.but(context_method=None, offload=())
        self.best.append((cut.step_s, candidate, cut.chunks or (), cut.recompute))
        self.best.sort(key=lambda e: (e[0], search_order(e[1])))
        alike = [e for e in self.best if e[1].but(context_method=None, offload=()) == degrees]
        self.best = [e for e in self.best if e not in alike[1:]]  # requested plans differ in degrees

    def _least_memory_first(self, checked: Space) -> None:
        """Evaluate open candidates, if nothing was found yet, until the first plan that fits or until patience ends."""
        rest = [c for c in checked.candidates if c not in self.outcomes]
        for candidate in sorted(rest, key=least_memory_first):
            left = self.patience_s - self._elapsed_s()
            if left <= 0:
                return
            if candidate not in self.cutters:
                self._bound(candidate, min(ILP_LIMIT_S, left))
            if candidate in self.cutters and self._refine(candidate) < math.inf:
                self._evaluate(candidate, math.inf, max(64, 20 * _MAX_ACTIONS // candidate.num_actions))
            if self.best:
                return

    # -- the answer -------------------------------------------------------------------------------------------------

    def _planned(self, entry: _Entry) -> Planned:
        _, candidate, chunks, recompute = entry
        candidate = self.points.decided(candidate)
        pricer = self.points.pricer(candidate)
        point = self.points.of(candidate)
        if pricer is None or point is None:
            raise InfeasibleError(f"no layout exists at tp={candidate.tp}")
        estimate = pricer.estimate(chunks, recompute, events=True)
        config = without_activations(candidate).but(stages=chunks)
        if "recompute" not in self.request.pins:
            config = config.but(recompute=_chosen(pricer, chunks, recompute))
        return Planned(config, estimate, point)

    def _certificate(self, checked: Space) -> Certificate:
        best, cutoff, least_open, num_open = self.best[0][0], self._cutoff_s(), math.inf, 0
        for candidate in checked.candidates:
            bound = self.bounds.get(candidate, 0.0)
            if candidate not in self.outcomes and bound >= cutoff:
                self.outcomes[candidate] = (_Outcome.BOUNDED_OUT, "")
            num_open += candidate not in self.outcomes
            if self.outcomes.get(candidate, (_Outcome.SOLVED, ""))[0] is _Outcome.SOLVED:
                least_open = min(least_open, bound)
        counts = Counter(outcome for outcome, _ in self.outcomes.values())
        rules = Counter(detail for outcome, detail in self.outcomes.values() if outcome is _Outcome.ILLEGAL)
        status = self.status
        if status is Status.TIME_LIMIT and not num_open:  # everything was decided just in time
            status = Status.COMPLETE
        if status is Status.COMPLETE and not self.points.all_proved:
            status = Status.LAYOUTS
        if status is Status.COMPLETE and least_open < best:
            status = Status.CUTS
        return Certificate(
            considered=checked.num_considered,
            illegal=sum(checked.illegal.values()) + counts[_Outcome.ILLEGAL],
            too_big=counts[_Outcome.TOO_BIG],
            bounded_out=counts[_Outcome.BOUNDED_OUT],
            solved=counts[_Outcome.SOLVED],
            open=num_open,
            gap=max(0.0, (best - least_open) / best) if least_open < best else 0.0,
            solve_time_s=self._elapsed_s(),
            restrictions=self._restrictions(checked),
            status=status,
            illegal_by_rule={**checked.illegal, **rules},
            too_big_by_term=dict(Counter(d for outcome, d in self.outcomes.values() if outcome is _Outcome.TOO_BIG)),
            by_phase_s=dict(self.phases),
            intra_gap=self.points.gap,
        )

    def _restrictions(self, checked: Space) -> tuple[str, ...]:
        """Return everything that narrows the space."""
        r = self.request
        out = [*_RESTRICTIONS, *self._of_degrees(checked)]
        if "recompute" not in r.pins:
            out.append(_LADDER if r.mode is Mode.EAGER else "recompute: none or full, the first layers of a stage")
        if "offload" not in r.pins:
            out.append(
                _OFFLOAD if r.cluster.offloads else "nothing is offloaded: no host link is known beside a device"
            )
        if "zero_replicas" not in r.pins:
            several = any(c.zero_replicas > 1 for c in checked.candidates)
            beside = ", or over those in one scale-up domain, node or rail group (hybrid ZeRO)"
            out.append(f"ZeRO shards over all replicas{beside if several else ''}")
        if "schedule" not in r.pins and "virtual_stages" not in r.pins:
            out.append(_SCHEDULES)
        out += [f"{name} pinned to {value}" for name, value in r.pins.items()]
        out.append(f"{r.memory_margin:.0%} of the memory left free")
        if r.executed:
            out.append("what the runtime executes")
        found = self.points.of(self.best[0][1])
        layouts = () if found is None else found.solution.restrictions
        return (*out, *layouts, *checked.restrictions)

    def _of_degrees(self, checked: Space) -> Iterator[str]:
        """Yield the restrictions of how experts and sequences are spread."""
        cut = any(c.cp > 1 for c in checked.candidates)
        if nodes_with(self.request.graph, OpKind.EXPERTS):
            yield _EXPERTS
        if "cp" not in self.request.pins:
            least = f"cp within one scale-up domain, and where {LEAST_PART:,} tokens per rank are left"
            yield least if cut else "cp = 1"
        if cut:
            yield "layouts of cut sequences as if keys and values were gathered; one method per block"

    def _nothing(self, checked: Space) -> Exception:
        """Return the error if no plan was found."""
        num_open = sum(c not in self.outcomes for c in checked.candidates)
        if num_open:
            r = self.request
            return StoppedError(
                f"no plan was found in {self._elapsed_s():.0f} s (time limit {r.time_limit_s:g} s), and {num_open} of "
                f"{checked.num_considered} candidates are not decided: nothing says that none fits; raise the time "
                "limit, or pin some degrees"
            )
        return nothing_fits(self.points, checked.candidates, self.shortages)


def _chosen(pricer: Pricer, chunks: tuple[int, ...], steps: tuple[int, ...]) -> Mapping[str, str] | tuple[int, ...]:
    """Return the choices behind steps along the frontier: layers per stage if all are full, else a choice per layer."""
    w, counts = pricer.workload, []
    chosen: dict[int, str] = {}
    for units, level in zip(ranges_of(chunks), steps, strict=True):
        mine = pricer.recomputed(units, level)
        layers = [u for u in units if w.layers[u]]
        chosen |= mine
        counts.append(len(mine) if mine == dict.fromkeys(layers[: len(mine)], "full") else -1)
    if min(counts) >= 0:
        return tuple(counts)
    layers_of_units = [
        tuple(c for c, layer in zip(calls, marked, strict=True) if layer)
        for calls, marked in zip(w.unit_calls, w.is_layer, strict=True)
    ]
    return recompute_mapping(chosen, layers_of_units)


def search_plan(request: PlanRequest) -> SearchResult:
    """Return the best plans of the space, and the certificate.

    Raises:
        PinError: the pins leave nothing legal.
        NothingFits: no plan fits the memory; has a report.
        StoppedError: no plan was found in time.
    """
    return _Search(request).run()
