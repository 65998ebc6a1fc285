"""The best plan of a request, or of one that differs in what a search holds fixed: nodes in use, settings of the stack.

Each is a search of its own, near the best plan: fewer nodes where devices do not divide (`autoplan.search.idle`), other
settings of the stack at the degrees of the best plan (`autoplan.search.stack_settings`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from autoplan.config.kernels import Launch
from autoplan.config.parallel import ParallelConfig
from autoplan.config.recompute import NONE, outside_graphs
from autoplan.cost_models.hardware.cluster import in_use_text
from autoplan.errors import AutoplanError
from autoplan.search.certificate import SearchResult, Status
from autoplan.search.idle import fewer_nodes
from autoplan.search.layers_alike import module_sets
from autoplan.search.planner import search_plan
from autoplan.search.progress import Progress
from autoplan.search.request import PlanRequest
from autoplan.search.stack_settings import at_degrees, lacks_graphs, other_settings
from autoplan.stacks.like import Like

_Told = Callable[[Progress], None] | None


@dataclass(frozen=True)
class Use:
    """The best plans, and the request that they answer.

    Attributes:
        request: that of the user, or with some nodes idle and other settings of the stack.
        settings: options that differ from those of the user's request, as texts by name.
    """

    request: PlanRequest
    result: SearchResult
    settings: Mapping[str, str] = field(default_factory=dict)

    def text(self, cluster: str) -> str:
        """Return the words for the cluster in commands, given those of the whole one."""
        c = self.request.cluster
        return in_use_text(cluster, c.num_nodes, c.idle_nodes) if c.idle_nodes else cluster

    def asked(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the command with which this use is asked for."""
        return {**asked, **self.settings, "cluster": self.text(asked["cluster"])}


def best_use(request: PlanRequest, told: _Told = None) -> Use:
    """Return the best plan on all nodes or fewer, with the settings of the stack or better ones.

    Ctrl-C ends it with the best plan so far, whose certificate says `interrupted`.

    Raises: as `search_plan`, of all nodes, if there is no plan on fewer either; KeyboardInterrupt before any plan.
    """
    use = _on_nodes(request, told)
    if _interrupted(use):
        return use
    try:
        return _with_settings(_within_graphs(use, told), told)
    except KeyboardInterrupt:
        return _stopped(use)


def _interrupted(use: Use) -> bool:
    return use.result.certificate.status == Status.INTERRUPTED


def _stopped(use: Use) -> Use:
    """Return the use as the best so far: Ctrl-C ended what would have gone on from it."""
    certificate = replace(use.result.certificate, status=Status.INTERRUPTED)
    return replace(use, result=replace(use.result, certificate=certificate))


def _on_nodes(request: PlanRequest, told: _Told) -> Use:
    uses: list[Use] = []
    failed: AutoplanError | None = None
    for cluster in (request.cluster, *fewer_nodes(request)):
        part = request if cluster is request.cluster else replace(request, cluster=cluster)
        try:
            uses.append(Use(part, search_plan(part, told)))
        except AutoplanError as error:
            failed = failed or error
            continue
        except KeyboardInterrupt:
            if not uses:
                raise
            uses[-1] = _stopped(uses[-1])
        if _interrupted(uses[-1]):
            break
    if not uses:
        raise failed or AutoplanError("no plan")
    best = min(uses, key=lambda use: use.result.fastest_s)
    return _stopped(best) if any(map(_interrupted, uses)) else best


def _within_graphs(use: Use, told: _Told) -> Use:
    """Return the use, or the best one that Megatron runs where its CUDA graphs exclude the recompute of the plan.

    Searched are plans without graphs, without recompute, and with the modules whose recompute graphs allow that are
    fastest at the degrees of the plan. What was given or pinned stays.
    """
    r, config = use.request, use.result.plans[0].config
    if not lacks_graphs(r, config):
        return use
    found: list[Use] = []

    def look(request: PlanRequest, settings: Mapping[str, str]) -> None:
        try:
            result = search_plan(replace(request, below_s=found[-1].result.fastest_s if found else r.below_s), told)
        except AutoplanError:  # nothing fits without such recompute, or nothing is as fast
            return
        found.append(Use(replace(request, below_s=r.below_s), result, settings))
        if _interrupted(found[-1]):
            raise KeyboardInterrupt

    interrupted = False
    try:
        if isinstance(r.like, Like) and "launch" not in r.like.given:
            without = {"launch": str(Launch.ASYNC)}
            look(replace(r, like=r.like.but(**without)), without)
        for how in _recompute_within(r, config):
            look(replace(r, pins={**r.pins, "recompute": how}), {})
    except KeyboardInterrupt:
        interrupted = True
    said = "CUDA graphs of layers: without them, or without the recompute that they exclude"
    best = _restricted(found[-1], said) if found else use
    return _stopped(best) if interrupted else best


def _restricted(use: Use, said: str) -> Use:
    """Return the use with one more restriction in its certificate."""
    certificate = use.result.certificate
    certificate = replace(certificate, restrictions=(*certificate.restrictions, said))
    return replace(use, result=replace(use.result, certificate=certificate))


def _at_degrees(request: PlanRequest) -> SearchResult:
    """Return what a search at the degrees of a plan finds. KeyboardInterrupt also if that ended it with a plan."""
    found = search_plan(request)
    if found.certificate.status == Status.INTERRUPTED:
        raise KeyboardInterrupt
    return found


def _recompute_within(request: PlanRequest, config: ParallelConfig) -> list[str]:
    """Return the recompute of all layers to be searched with graphs: none, and the fastest modules at these degrees."""
    if "recompute" in request.pins:
        return []
    at, steps = at_degrees(request, config), dict[str, float]()
    for how in module_sets(request, config):
        if not outside_graphs(how):
            with suppress(AutoplanError):  # it does not fit, or is not legal
                steps[how] = _at_degrees(replace(at, pins={**at.pins, "recompute": how})).fastest_s
    return [NONE, *([min(steps, key=lambda how: steps[how])] if steps else [])]


def _with_settings(use: Use, told: _Told) -> Use:
    """Return the use, or a better one with one other setting; the certificate says what was tried."""
    plan = use.result.plans[0]
    below = plan.estimate.step_time_s.mid / (1 + use.request.equal_within)
    better: Use | None = None
    tried = []
    for other in other_settings(use.request, plan.config):
        tried.append(f"{other.option}={other.value}")
        try:
            found = _at_degrees(at_degrees(other.request, plan.config))
        except AutoplanError:  # nothing fits with it, or no layout was found in time
            continue
        if found.fastest_s < below and not lacks_graphs(other.request, found.plans[0].config):
            below, better = found.fastest_s, Use(other.request, found, {other.option: other.value})
    if not tried:
        return use
    if better is not None:
        again = replace(better, result=search_plan(better.request, told))
        taken = again.result.fastest_s < use.result.fastest_s
        use = again if taken and not lacks_graphs(again.request, again.result.plans[0].config) else use
    where = "settings of the stack: its defaults; at the degrees of the best plan also, one at a time, "
    return _restricted(use, where + ", ".join(tried))
