"""Plans that Megatron runs where its CUDA graphs of layers exclude the recompute of the best plan.

Graphs are a setting of the stack, not of a candidate, and the price of a plan is with them. A plan that has, beside
them, recompute that they exclude (`autoplan.config.recompute.outside_graphs`) would be of no run, so the best one that
runs is searched: without graphs, without such recompute, or with modules that graphs allow.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from autoplan.config.kernels import Launch
from autoplan.config.parallel import ParallelConfig
from autoplan.config.recompute import NONE, outside_graphs
from autoplan.errors import AutoplanError
from autoplan.search.certificate import SearchResult, Status
from autoplan.search.layers_alike import module_sets
from autoplan.search.request import PlanRequest
from autoplan.search.stack_settings import at_degrees, lacks_graphs
from autoplan.stacks.like import Like

_Search = Callable[[PlanRequest], SearchResult]
_SAID = "CUDA graphs of layers: without them, or without the recompute that they exclude"


def within_graphs(result: SearchResult, search: _Search) -> SearchResult:
    """Return the result, or the best one that runs where the graphs of the stack exclude the recompute of its plan.

    Searched are plans without graphs, without recompute, and with the modules whose recompute graphs allow that are
    fastest at the degrees of the plan. What was given or pinned stays. Ctrl-C ends it with the best so far.

    Args:
        search: searches one request with the settings that it has.
    """
    r, config = result.request, result.plans[0].config
    if result.certificate.status is Status.INTERRUPTED or not lacks_graphs(r, config):
        return result
    found: list[SearchResult] = []

    def look(request: PlanRequest) -> None:
        below_s = found[-1].fastest_s if found else r.below_s
        try:
            faster = search(replace(request, below_s=below_s))
        except AutoplanError:  # nothing fits without such recompute, or nothing is as fast
            return
        found.append(replace(faster, request=request))
        if faster.certificate.status is Status.INTERRUPTED:
            raise KeyboardInterrupt

    interrupted = False
    try:
        if isinstance(r.like, Like) and "launch" not in r.like.given:
            look(replace(r, like=r.like.but(launch=str(Launch.ASYNC))))
        for how in _recompute_within(r, config, search):
            look(replace(r, pins={**r.pins, "recompute": how}))
    except KeyboardInterrupt:
        interrupted = True
    best = found[-1].restricted(_SAID) if found else result
    return best.stopped() if interrupted else best


def _recompute_within(request: PlanRequest, config: ParallelConfig, search: _Search) -> list[str]:
    """Return the recompute of all layers to be searched with graphs: none, and the fastest modules at these degrees."""
    if "recompute" in request.pins:
        return []
    at, steps = at_degrees(request, config), dict[str, float]()
    for how in module_sets(request, config):
        if not outside_graphs(how):
            with suppress(AutoplanError):  # it does not fit, or is not legal
                found = search(replace(at, pins={**at.pins, "recompute": how}))
                if found.certificate.status is Status.INTERRUPTED:
                    raise KeyboardInterrupt
                steps[how] = found.fastest_s
    return [NONE, *([min(steps, key=lambda how: steps[how])] if steps else [])]
