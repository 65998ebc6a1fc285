"""The proof of a search about its best plan, and the restrictions of the space that it covers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from autoplan.config.html import table
from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.config.recompute import RecomputeMix
from autoplan.program.facts import facts_of_model
from autoplan.schedules.schedule import searched_words
from autoplan.search.degrees import MAX_ACTIONS, Space
from autoplan.search.estimate import Planned
from autoplan.search.later_choices import NEAR
from autoplan.search.layouts import ENOUGH_TOKENS, LayoutCache
from autoplan.search.outcomes import Outcome, Settled
from autoplan.search.request import PlanRequest
from autoplan.search.space import least_part

_NEAR = 0.05  # a stopped search with a larger gap has not found the best plan
_RESTRICTIONS = (
    "ranks ordered pp, dp, cp, tp: tp over neighbours, pp over the farthest",
    "one layout per tensor-parallel degree and micro-batch size, shared by all equal layers, and by micro-batches of "
    f"{ENOUGH_TOKENS:,} tokens or more of which tp divides the same part: the fastest with the least stored state",
    "when layouts are chosen, costs that occur once per step are weighted as without a pipeline",
    "layouts are chosen by the sum of operations and collectives: no overlap, no fusion, no waiting for the host",
)
_LADDER = (
    "recompute: for every kind of layer the choices on the convex front of seconds and bytes freed (groups of regions, "
    "full); a stage frees its cheapest bytes first, and those of its first layers first"
)
_OFFLOAD = (
    "offload: the optimizer state of all stages, parameters with it where they are sharded, and activations as one "
    "more choice of recompute; its copies overlap with computing only together with the traffic of ZeRO"
)
_EXPERTS = (
    "experts split by tp, or spread over ep neighbouring ranks (those of tp that etp leaves, then cp, then dp), whole "
    "(etp = 1), or split over all of tp where there are too few"
)
_SCHEDULES = (
    f"schedules: 1F1B with every cut; {searched_words()}, up to {MAX_ACTIONS:,} actions, with the fastest of a "
    "few even cuts and recomputed layers taken in turn from a rank's stages",
    "other numbers of stages per rank, those that cut the model into equal stages, for degrees with which one of "
    f"these, with unlimited memory, is not known to be more than {NEAR:.0%} slower than the best plan, without offload",
)


class Status(StrEnum):
    """The end of a search: everything decided, or stopped.

    NEAR: the bounds of open candidates, and of those with more cuts than are tried, are within the allowed gap.
    CUTS: some candidate has more cuts than are tried, and a bound below the best plan.
    LAYOUTS: only the proof of some layout was stopped.
    """

    COMPLETE = "complete"
    NEAR = "within the gap asked for"
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
        open: not decided, because the search was stopped, a candidate has more cuts than are tried, or its bound is so
            near the best plan that the request does not ask for more.
        gap: (best - bound) / best: the best step of the space is at most this share shorter than the one found. The
            bound of a candidate that was not looked at is that of `autoplan.search.quick_time`; 1 if it knows none.
        intra_gap: the gap of a layout inside its blocks.
    """

    considered: int
    illegal: int
    too_big: int
    bounded_out: int
    solved: int
    open: int
    gap: float
    intra_gap: float
    solve_time_s: float
    restrictions: tuple[str, ...]
    status: str
    illegal_by_rule: Mapping[str, int]
    too_big_by_term: Mapping[str, int]
    by_phase_s: Mapping[str, float]

    def _repr_html_(self) -> str:
        """Return a table for a notebook: the counts, and what they prove."""
        names = ("considered", "illegal", "too_big", "bounded_out", "solved", "open")
        rows = [(name.replace("_", " "), f"{getattr(self, name):,}") for name in names]
        proved = f"{self.status} in {self.solve_time_s:.1f} s; " + (
            "no bound on the best step" if self.gap >= 1 else f"the best step is at most {100 * self.gap:.1f} % shorter"
        )
        return table("certificate", ("candidates", "number"), rows, proved)

    @property
    def stopped(self) -> bool:
        """Return True if the search was stopped, so that a better plan may exist."""
        return self.status in (Status.TIME_LIMIT, Status.INTERRUPTED)

    @property
    def stopped_far(self) -> bool:
        """Return True if the search was stopped before it could tell that no plan is much faster."""
        return self.stopped and self.gap > _NEAR


def how_searched(certificate: Certificate | None) -> dict[str, str | float | None]:
    """Return how a search ended and its gap, by the names of JSON answers; None without a search."""
    if certificate is None:
        return {"search_status": None, "gap": None}
    return {"search_status": str(certificate.status), "gap": certificate.gap}


@dataclass(frozen=True)
class SearchResult:
    """Plans, the chosen one first, then the fastest others, and the certificate of the fastest.

    Attributes:
        request: what the plans answer: what was asked, or with settings of the stack with which its best plan runs
            (`autoplan.search.within_graphs`).
        equals: all plans that were found equal to the fastest within `PlanRequest.equal_within`, but the chosen one,
            with their step times in seconds, fastest first. The chosen one is the simplest of them.
    """

    plans: tuple[Planned, ...]
    certificate: Certificate
    request: PlanRequest
    equals: tuple[tuple[ParallelConfig, float], ...] = ()

    def restricted(self, said: str) -> SearchResult:
        """Return the result with one more restriction in its certificate."""
        restrictions = (*self.certificate.restrictions, said)
        return replace(self, certificate=replace(self.certificate, restrictions=restrictions))

    def stopped(self) -> SearchResult:
        """Return the result as the best so far: Ctrl-C ended what would have gone on from it."""
        return replace(self, certificate=replace(self.certificate, status=Status.INTERRUPTED))

    @property
    def known(self) -> tuple[tuple[ParallelConfig, float], ...]:
        """Every plan with its step in seconds."""
        return (*((p.config, p.estimate.step_time_s.mid) for p in self.plans), *self.equals)

    @property
    def fastest(self) -> ParallelConfig:
        """The fastest plan."""
        return min(self.known, key=lambda entry: entry[1])[0]

    @property
    def fastest_s(self) -> float:
        """The step of the fastest plan in seconds."""
        return min(seconds for _, seconds in self.known)


def final_status(
    status: Status, proved: bool, steps_s: tuple[float, float, float], least_s: float, least_open_s: float
) -> Status:
    """Return the status of a search whose own status is that it is complete, or was stopped.

    Args:
        proved: every layout is proved.
        steps_s: seconds of the best plan, from which on a bound was enough, and which a plan had to beat.
        least_s, least_open_s: the least bound of all candidates, and of the open ones.
    """
    best, enough, cutoff = steps_s
    if status is Status.TIME_LIMIT and least_open_s >= enough:  # everything was decided just in time
        status = Status.COMPLETE
    if status is Status.COMPLETE and not proved:
        status = Status.LAYOUTS
    if status is Status.COMPLETE and least_s < best:
        status = Status.NEAR if least_s >= enough < cutoff else Status.CUTS
    return status


def certificate_of(
    request: PlanRequest,
    checked: Space,
    points: LayoutCache,
    best: ParallelConfig | None,
    end: Settled,
    status: Status,
    steps_s: tuple[float, float, float],
) -> Certificate:
    """Return the certificate of the candidates that were made, without times.

    Args:
        best: the candidate of the best plan; None without one, of a search for less than some seconds.
        status, steps_s: as for `final_status`.
    """
    least, decided = min(end.least_open_s, end.least_solved_s), end.tally
    point, best_s = None if best is None else points.of(best), steps_s[0]
    return Certificate(
        considered=checked.num_considered,
        illegal=sum(checked.illegal.values()) + decided.outcomes[Outcome.ILLEGAL],
        too_big=decided.outcomes[Outcome.TOO_BIG],
        bounded_out=decided.outcomes[Outcome.BOUNDED_OUT],
        solved=decided.outcomes[Outcome.SOLVED],
        open=end.num_open,
        gap=max(0.0, (best_s - least) / best_s) if least < best_s else 0.0,
        solve_time_s=0.0,
        restrictions=restrictions_of(request, checked, () if point is None else point.solution.restrictions),
        status=final_status(status, points.all_proved, steps_s, least, end.least_open_s),
        illegal_by_rule={**checked.illegal, **decided.illegal},
        too_big_by_term=decided.too_big,
        by_phase_s={},
        intra_gap=points.gap,
    )


def restrictions_of(request: PlanRequest, checked: Space, layouts: tuple[str, ...]) -> tuple[str, ...]:
    """Return everything that narrows the space. `layouts`: the restrictions of the layouts inside blocks."""
    r = request
    c = r.cluster
    used = f"{c.num_devices:,} of {c.paid_devices:,} devices are used" if c.idle_nodes else "all devices are used"
    out = [f"{used}, in micro-batches of one size", *_RESTRICTIONS, *_of_degrees(r, checked)]
    if "recompute" not in r.pins:
        out.append(_recompute(r))
    if "offload" not in r.pins:
        out.append(_OFFLOAD if r.cluster.offloads else "nothing is offloaded: the speed of the host link is not known")
    if "zero_replicas" not in r.pins:
        several = any(c.zero_replicas > 1 for c in checked.candidates)
        beside = (
            ", or over those in one scale-up domain, node or rail group (hybrid ZeRO), ZeRO 3 also over one number "
            "between; of a plan also over others"
        )
        out.append(f"ZeRO shards over all replicas{beside if several else ''}")
    if "schedule" not in r.pins and "virtual_stages" not in r.pins:
        out += _SCHEDULES
    out += [f"{name} pinned to {value}" for name, value in r.pins.items()]
    out.append(f"plans that run out of memory with a probability of at most {r.memory_risk:g}")
    if r.executed:
        out.append("only what the runtime executes")
    return (*out, *layouts, *checked.restrictions)


def _recompute(request: PlanRequest) -> str:
    """Return the restriction of the recompute that is searched."""
    if request.recompute_mix is RecomputeMix.UNIFORM:
        return "recompute: none or full, one of them for all layers, as the stack has it"
    if request.recompute_mix is RecomputeMix.FIRST_LAYERS:
        return "recompute: none or full, as many first layers of every stage, as the stack has it"
    return _LADDER if request.mode is Mode.EAGER else "recompute: none or full, the first layers of a stage"


def _of_degrees(request: PlanRequest, checked: Space) -> Iterator[str]:
    """Yield the restrictions of how experts and sequences are spread."""
    cut = any(c.cp > 1 for c in checked.candidates)
    if facts_of_model(request.graph).num_experts:
        yield _EXPERTS
    if "cp" not in request.pins:
        least = f"cp where at least {least_part(request.facts):,} tokens per rank remain"
        half = "half of them at the mesh of a plan, or with a half or a quarter of its tp"
        yield f"{least}, and {half}" if cut else "cp = 1"
    if cut:
        yield "layouts of cut sequences are chosen as if keys and values were gathered; one method per block"
