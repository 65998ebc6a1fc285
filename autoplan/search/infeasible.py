"""Explain why no plan fits: the stage and memory term at fault, and the cheapest change that would help."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoplan.config.parallel import ParallelConfig
from autoplan.config.planning import EXPECTED_RISK
from autoplan.errors import InfeasibleError, PinError
from autoplan.search import clock
from autoplan.search.certificate import Certificate
from autoplan.search.cuts import Shortage
from autoplan.search.degrees import Space, search_order
from autoplan.search.intra import StoppedError
from autoplan.search.layout_problem import no_layout
from autoplan.search.layouts import ILP_LIMIT_S, LayoutCache
from autoplan.search.quick_memory import QuickMemory
from autoplan.search.request import PlanRequest, least_memory_first, offloaded, space_of
from autoplan.units import ORDER_OF_SUMS

_BUDGET_S = 30.0  # time to find the cheapest change
_LEAST_S = 5.0  # of it for more memory of the host, at least
_MORE_NODES = (2, 4, 8, 16, 32)
_NUM_SHORTAGES = 8  # candidates to examine if the search recorded no shortage
_NUM_CUTS = 64  # cuts to evaluate before a candidate counts as too big


@dataclass(frozen=True)
class InfeasibleReport:
    """The reason why no plan fits, and the cheapest change that would help."""

    stage: int
    term: str
    needed_bytes: float
    available_bytes: float
    config: str
    cheapest_change: str


class NothingFits(InfeasibleError):
    """No plan of the space fits the memory; `report` gives the reason."""

    def __init__(self, message: str, report: InfeasibleReport) -> None:
        super().__init__(message)
        self.report = report

    def __reduce__(self) -> tuple[type[NothingFits], tuple[str, InfeasibleReport]]:
        # rank 0 sends the error to the other ranks; without this only the message would arrive
        return type(self), (str(self), self.report)


class NotFasterError(InfeasibleError):
    """No plan was found that takes less than `PlanRequest.below_s`.

    Attributes:
        certificate: what the search proves about that step; None in an error of another rank.
    """

    def __init__(self, text: str, certificate: Certificate | None = None) -> None:
        super().__init__(text)
        self.certificate = certificate

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self),)


def no_plan(
    points: LayoutCache,
    space: Space,
    shortages: Sequence[tuple[Shortage, ParallelConfig]],
    decided: Container[ParallelConfig],
    elapsed_s: float,
) -> Exception:
    """Return the error for a search without a plan: it was stopped, or every candidate was seen and none fits.

    Args:
        shortages: shortages of the candidates that were refused with a layout.
        decided: all candidates with an outcome.
    """
    if num_open := sum(c not in decided for c in space.candidates):
        return StoppedError(
            f"no plan was found in {elapsed_s:.0f} s (time limit {points.request.time_limit_s:g} s), and {num_open} of "
            f"{space.num_considered} candidates are undecided, so one may still fit; raise the time limit, or pin some "
            "degrees"
        )
    return _nothing_fits(points, space.candidates, shortages)


def _nothing_fits(
    points: LayoutCache, candidates: Sequence[ParallelConfig], shortages: Sequence[tuple[Shortage, ParallelConfig]]
) -> InfeasibleError:
    """Return the error for a space in which every candidate was seen and none fits."""
    r = points.request
    shortages = shortages or _shortages(points, candidates)
    if not shortages:
        return no_layout(r, "any tensor-parallel degree that is allowed")
    shortage, candidate = min(shortages, key=lambda e: (e[0].needed_bytes / e[0].available_bytes, search_order(e[1])))
    c = candidate
    name = f"pp={c.pp} dp={c.dp} tp={c.tp} zero_stage={c.zero_stage} micro_batch_size={c.micro_batch_size}"
    name += f" offload={'+'.join(c.offload)}" if c.offload else ""
    change = cheapest_change(r, shortage) if r.patient else ""
    report = InfeasibleReport(
        shortage.stage, shortage.term, shortage.needed_bytes, shortage.available_bytes, name, change
    )
    where, limit = f"on stage {shortage.stage}", shortage.available_bytes / 1e9
    room = f"a device has {limit:.1f} GB"
    if shortage.on_host:
        where, room = f"in the host's memory {where}", f"a device's share of it is {limit:.1f} GB (@host_memory_gb)"
    message = (
        f"nothing fits: the closest plan ({name}) {_need(r)} {shortage.needed_bytes / 1e9:.1f} GB {where}, {room}; the "
        f"largest term is {shortage.term}. {change}".rstrip()
    )
    return NothingFits(message, report)


def _need(request: PlanRequest) -> str:
    """Return the verb for what has to fit: the high end of a need, or the expected one."""
    return "needs" if request.memory_risk == EXPECTED_RISK else f"at a memory risk of {request.memory_risk:g} needs"


def _shortages(points: LayoutCache, candidates: Sequence[ParallelConfig]) -> list[tuple[Shortage, ParallelConfig]]:
    """Return what the smallest candidates lack, if the quick bound refused all of them. Raises StoppedError."""
    found = []
    smallest = sorted(candidates, key=least_memory_first)[:_NUM_SHORTAGES]
    more = (each for c in smallest if not c.offload for each in offloaded(points.request, c))
    for candidate in sorted(dict.fromkeys((*smallest, *more)), key=least_memory_first)[:_NUM_SHORTAGES]:
        cutter = points.cutter(candidate)
        if cutter is not None:
            found.append((cutter.shortage(), candidate))
    return found


def cheapest_change(request: PlanRequest, shortage: Shortage, budget_s: float = _BUDGET_S) -> str:
    """Return a sentence with the cheapest change that makes a plan fit.

    Dropping a pin costs nothing, then dropping all pins; then more nodes, with or without the pins; else more memory.

    Args:
        budget_s: seconds for all attempts together; each gets at most half of the rest.
    """
    r, end = request, clock.now_s() + budget_s
    undecided = 0
    for sentence, changed in _changes(r):
        now = clock.now_s()
        fits = feasible(changed, now + (end - now) / 2)
        if fits:
            unknown = f" {undecided} smaller changes could not be decided in {budget_s:g} s." if undecided else ""
            return f"{sentence} it fits.{unknown}"
        undecided += fits is None
    missing = (shortage.needed_bytes - shortage.available_bytes) / 1e9
    if not shortage.on_host:
        return f"With {missing:.1f} GB more memory per device it fits."
    # other stages, or the same with less on the host, may lack memory of the device
    enough = shortage.needed_bytes / 1e9 * (1 + ORDER_OF_SUMS)
    now = clock.now_s()
    if feasible(replace(r, cluster=r.cluster.with_(host_memory_gb=enough)), now + max(_LEAST_S, end - now)):
        return f"With {missing:.1f} GB more host memory per device it fits."
    return f"The closest plan lacks {missing:.1f} GB of the host's memory per device, and perhaps more of the device's."


def _changes(request: PlanRequest) -> list[tuple[str, PlanRequest]]:
    """Return changes of a request, cheapest first."""
    r = request

    def without(names: Mapping[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in r.pins.items() if k not in names}

    out = [(f"Without the pin {k}={v}", replace(r, pins=without({k: v}))) for k, v in r.pins.items()]
    if r.memory_risk < EXPECTED_RISK:
        sentence = f"At a memory risk of {EXPECTED_RISK} (the expected need, without its uncertainty)"
        out.append((sentence, replace(r, memory_risk=EXPECTED_RISK)))
    if len(r.pins) > 1:
        out.append(("Without pins", replace(r, pins={})))
    if r.executed or r.cluster.fabric is not None:  # the devices of the job or of the fabric are fixed
        return out
    for pins, text in ((r.pins, ""), ({}, " and without pins")) if r.pins else ((r.pins, ""),):
        for factor in _MORE_NODES:
            cluster = r.cluster.with_(nodes=r.cluster.num_nodes * factor)
            sentence = f"With {cluster.num_nodes} nodes ({cluster.num_devices} devices){text}"
            out.append((sentence, replace(r, cluster=cluster, pins=pins)))
    return out


def feasible(request: PlanRequest, deadline: float) -> bool | None:
    """Return True if some plan fits; None if that was not decided before `deadline` (of `clock.now_s`).

    For each mesh only the smallest micro-batches with the least and the most ZeRO are tried: others need more memory.
    """
    try:
        found = space_of(request).candidates
    except PinError:
        return False
    points = LayoutCache(request)
    quick = QuickMemory(request)
    decided = True
    smallest = _smallest(found)
    for candidate in (*smallest, *(each for c in smallest for each in offloaded(request, c))):
        left = deadline - clock.now_s()
        if left <= 0:
            return None
        if quick.shortage(candidate, states=True) is not None:
            continue
        try:
            cutter = points.cutter(candidate, min(ILP_LIMIT_S, left))
        except StoppedError:
            decided = False
            continue
        if cutter is not None and cutter.bound_s() < math.inf:
            cut = cutter.search(math.inf, _NUM_CUTS)
            if cut.chunks is not None:
                return True
            decided = decided and cut.exact
    return False if decided else None


def _smallest(candidates: Sequence[ParallelConfig]) -> list[ParallelConfig]:
    out: dict[tuple[int, int, int, bool], ParallelConfig] = {}
    for c in sorted(candidates, key=least_memory_first):
        out.setdefault((c.pp, c.tp, c.cp, c.zero_stage == 0), c)
    return sorted(out.values(), key=least_memory_first)
