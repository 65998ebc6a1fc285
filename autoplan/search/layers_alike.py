"""Recompute that is alike in all layers: Megatron's modules, and its selective recompute.

With fused kernels a search decides how many layers recompute all of themselves. Frameworks can also recompute a part of
every layer: the attention core (`selective`), or some of Megatron's modules. Each such choice is a search of its own,
for plans that are faster than the one that was found:

- modules, at the degrees of that plan, if it recomputes or offloads anything;
- `selective`, at all degrees, where attention keeps its scores. These are most of what a layer keeps, and recomputing
  them costs a few percent (Korthikanti et al., 2022), so that whole layers are seldom worth recomputing there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from autoplan.config.kernels import Attention
from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.config.recompute import NONE, SELECTIVE, kinds_in, modules_choice
from autoplan.errors import InfeasibleError
from autoplan.program.legality import broken
from autoplan.search import clock
from autoplan.search.certificate import SearchResult, Status
from autoplan.search.intra import StoppedError
from autoplan.search.request import PlanRequest
from autoplan.search.simplicity import kind_of, limit_s
from autoplan.search.stack_settings import at_degrees

# Modules by what a byte that they free costs: what is computed again is element-wise, or small products, or large ones.
_CHEAPEST_FIRST = ("moe_act", "layernorm", "mla_up_proj", "shared_experts", "mlp", "core_attn", "moe")
_WORDS = "recompute alike in all layers: "
_NEAR = "at the degrees of the best plan"
_PHASE = "evaluation"  # to which the time counts
_LEAST_S = 1.0  # of a search that begins
_Search = Callable[[PlanRequest], SearchResult]


def with_layers_alike(request: PlanRequest, result: SearchResult, search: _Search, until_s: float) -> SearchResult:
    """Return the result, or a better one whose layers recompute alike. Its certificate names what was searched.

    Args:
        search: searches one request.
        until_s: when the time of the request is over, by `clock`.
    """
    r, everywhere, began_s = request, list[str](), time.perf_counter()
    if r.mode is not Mode.FUSED or "recompute" in r.pins or result.certificate.stopped:
        return result
    near = list[str]()
    try:
        if r.options.attention is Attention.UNFUSED and _is_legal(r, result.plans[0].config, SELECTIVE):
            everywhere.append(SELECTIVE)
            result = _everywhere(r, result, search, until_s)
        fastest = _fastest(result)
        for how in _modules(r, fastest):
            if clock.now_s() > until_s:
                break
            near.append(how)
            result = _better(r, result, _found(replace(at_degrees(r, fastest), gap=0.0), how, result, search, until_s))
    except KeyboardInterrupt:
        result = _with(result, status=Status.INTERRUPTED)
    words = [f"{', '.join(hows)} {where}" for hows, where in ((everywhere, "everywhere"), (near, _NEAR)) if hows]
    if not words:
        return result
    return _with_time(
        _with(result, restrictions=(*result.certificate.restrictions, _WORDS + "; ".join(words))), began_s
    )


def _everywhere(request: PlanRequest, result: SearchResult, search: _Search, until_s: float) -> SearchResult:
    """Return the result with a choice at all degrees; its gap covers them, too."""
    found = _found(replace(request, top=1, by_kind=False), SELECTIVE, result, search, until_s)
    if found is not None:
        return _better(request, result, found, found.fastest_s * (1 - found.certificate.gap))
    if clock.now_s() > until_s:
        return _with(result, status=Status.TIME_LIMIT, gap=1.0)  # no bound is known
    certificate = result.certificate
    status = Status.NEAR if certificate.status == Status.COMPLETE else certificate.status
    return _with(result, gap=max(certificate.gap, request.allowed_gap), status=status)


def _found(
    request: PlanRequest, how: str, result: SearchResult, search: _Search, until_s: float
) -> SearchResult | None:
    """Return what a search finds with a recompute choice that is faster than the result; None if nothing is."""
    left_s = max(_LEAST_S, until_s - clock.now_s())
    pins = {**request.pins, "recompute": how}
    try:
        found = search(replace(request, pins=pins, below_s=result.fastest_s, time_limit_s=left_s))
    except (InfeasibleError, StoppedError):  # none is faster, none fits, or no layout was found in time
        return None
    if found.certificate.status == Status.INTERRUPTED:
        raise KeyboardInterrupt
    return found


def _better(
    request: PlanRequest, result: SearchResult, found: SearchResult | None, bound_s: float = math.inf
) -> SearchResult:
    """Return the result with a faster plan: the chosen one if the other is slower by more than the error of prices.

    Args:
        bound_s: the least step of the space of the faster plan, if it was searched for.
    """
    if found is None:
        return result
    plan, best_s = found.plans[0], found.fastest_s
    least_s, below_s = result.fastest_s * (1 - result.certificate.gap), limit_s(best_s, request.equal_within)
    chosen = result.plans[0]
    if chosen.estimate.step_time_s.mid <= below_s:
        plans, added = result.plans, plan
    else:
        others = [p for p in result.plans if not (request.by_kind and kind_of(p.config) == kind_of(plan.config))]
        plans, added = (plan, *others)[: request.top], chosen
    equals = [*result.equals, (added.config, added.estimate.step_time_s.mid)]
    near = tuple(sorted((e for e in equals if e[1] <= below_s), key=lambda e: e[1]))
    gap, status = max(0.0, 1.0 - min(bound_s, least_s) / best_s), result.certificate.status
    if status == Status.CUTS and gap <= request.allowed_gap:
        status = Status.NEAR
    return _with(replace(result, plans=plans, equals=near), gap=gap, status=status)


def _fastest(result: SearchResult) -> ParallelConfig:
    """Return the fastest plan of a result."""
    plans = [(p.estimate.step_time_s.mid, p.config) for p in result.plans[:1]]
    return min([*plans, *((seconds, config) for config, seconds in result.equals)], key=lambda e: e[0])[1]


def _modules(request: PlanRequest, config: ParallelConfig) -> list[str]:
    """Return the sets of modules to try at the degrees of a plan: none where memory does not bind."""
    if kinds_in(config.recompute) <= {NONE} and not config.offload:
        return []
    there = [m for m in _CHEAPEST_FIRST if _is_legal(request, config, modules_choice([m]))]
    sets = [*([m] for m in there), *(there[:n] for n in range(2, len(there) + 1))]
    return list(dict.fromkeys(modules_choice(some) for some in sets))


def _is_legal(request: PlanRequest, config: ParallelConfig, how: str) -> bool:
    return broken(config.but(recompute=how), request.facts, request.scope) is None


def _with_time(result: SearchResult, began_s: float) -> SearchResult:
    spent_s, c = time.perf_counter() - began_s, result.certificate
    phases = {**c.by_phase_s, _PHASE: c.by_phase_s.get(_PHASE, 0.0) + spent_s}
    return _with(result, solve_time_s=c.solve_time_s + spent_s, by_phase_s=phases)


def _with(result: SearchResult, **changes: Any) -> SearchResult:
    return replace(result, certificate=replace(result.certificate, **changes))
