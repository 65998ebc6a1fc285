"""Two searches of one request, over parts of its space, as one result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from autoplan.config.parallel import ParallelConfig
from autoplan.config.recompute import NONE
from autoplan.search.certificate import Certificate, SearchResult, Status
from autoplan.search.estimate import Planned
from autoplan.search.request import PlanRequest
from autoplan.search.simplicity import Complexity, complexity, kind_of, limit_s

COUNTS = ("considered", "illegal", "too_big", "bounded_out", "solved", "open")
# If either search ended so, both did: the first one of these.
_ENDED = (Status.INTERRUPTED, Status.TIME_LIMIT, Status.LAYOUTS)


def joined_plans(request: PlanRequest, first: SearchResult, second: SearchResult) -> SearchResult:
    """Return the plans of both, with the certificate of the first: its gap is to the fastest plan of both.

    The chosen plan is the simpler one of the two that were chosen, if both are equal to the fastest within the error.
    """
    best_s = min(first.fastest_s, second.fastest_s)
    below_s = limit_s(best_s, request.equal_within)
    may_be = [p for p in (first.plans[0], second.plans[0]) if _seconds(p) <= below_s]
    chosen = min(may_be, key=lambda p: (_complexity(request, p.config), _seconds(p)))
    plans = [chosen]
    for plan in sorted((*first.plans, *second.plans), key=_seconds):
        if len(plans) < request.top and all(_differ(request, plan.config, other.config) for other in plans):
            plans.append(plan)
    equals: list[tuple[ParallelConfig, float]] = []
    for entry in sorted((*first.known, *second.known), key=lambda e: e[1]):
        if entry[1] <= below_s and entry[0] not in (chosen.config, *(config for config, _ in equals)):
            equals.append(entry)
    certificate = _to_best(first.certificate, first.fastest_s, best_s, request.allowed_gap)
    return SearchResult(tuple(plans), certificate, request, tuple(equals))


def joined_certificates(
    one: Certificate, one_s: float, two: Certificate, two_s: float, best_s: float, allowed_gap: float
) -> Certificate:
    """Return the certificate of both parts of a space.

    Args:
        one_s, two_s: seconds of the step that the gap of each is of.
        best_s: seconds of the fastest plan of both.
    """
    parts = [_to_best(*each, best_s, allowed_gap) for each in ((one, one_s), (two, two_s))]
    gap, stati = max(c.gap for c in parts), {c.status for c in parts}
    ended = next((status for status in _ENDED if status in stati), None)
    return replace(
        one,
        **{name: sum(getattr(c, name) for c in parts) for name in COUNTS},
        gap=gap,
        intra_gap=max(c.intra_gap for c in parts),
        status=ended or _open_status(gap, allowed_gap, Status.NEAR if Status.NEAR in stati else Status.COMPLETE),
        illegal_by_rule=_sums(*(c.illegal_by_rule for c in parts)),
        too_big_by_term=_sums(*(c.too_big_by_term for c in parts)),
    )


def _to_best(certificate: Certificate, step_s: float, best_s: float, allowed_gap: float) -> Certificate:
    """Return a certificate about a step of `step_s` as one about a faster plan, which its bounds are nearer to."""
    gap = max(0.0, 1.0 - step_s * (1.0 - certificate.gap) / best_s)
    if certificate.status in _ENDED:
        return replace(certificate, gap=gap)
    closed = Status.COMPLETE if certificate.status == Status.COMPLETE else Status.NEAR
    return replace(certificate, gap=gap, status=_open_status(gap, allowed_gap, closed))


def _open_status(gap: float, allowed_gap: float, closed: str) -> str:
    if gap == 0.0:
        return closed
    return Status.NEAR if gap <= allowed_gap else Status.CUTS


def _sums(one: Mapping[str, int], two: Mapping[str, int]) -> dict[str, int]:
    return dict(Counter(one) + Counter(two))


def _seconds(plan: Planned) -> float:
    return plan.estimate.step_time_s.mid


def _differ(request: PlanRequest, one: ParallelConfig, two: ParallelConfig) -> bool:
    """Return True for configurations that may be answers beside each other (`PlanRequest.top`, `by_kind`)."""
    degrees = [c.but(recompute=NONE, stages=None, offload=(), context_method=None) for c in (one, two)]
    return degrees[0] != degrees[1] and not (request.by_kind and kind_of(one) == kind_of(two))


def _complexity(request: PlanRequest, config: ParallelConfig) -> Complexity:
    layers = request.facts.model.num_layers if request.facts.model is not None else 0
    how = config.recompute
    if isinstance(how, str):
        again = layers * (how != NONE)
    else:
        again = sum(how) if isinstance(how, tuple) else sum(each != NONE for each in how.values())
    return complexity(config, again / max(1, layers))
