"""The best plan of a request, or of one that differs in what a search holds fixed: nodes in use, settings of the stack.

Each is a search of its own, near the best plan: fewer nodes where devices do not divide (`autoplan.search.idle`), other
settings of the stack at the degrees of the best plan (`autoplan.search.stack_settings`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from autoplan.cost_models.hardware.cluster import in_use_text
from autoplan.errors import AutoplanError
from autoplan.search.certificate import SearchResult, Status
from autoplan.search.idle import fewer_nodes
from autoplan.search.planner import search_plan
from autoplan.search.progress import Progress
from autoplan.search.request import PlanRequest
from autoplan.search.stack_settings import OtherSetting, at_degrees, lacks_graphs, other_settings, settings_taken

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
        return _with_settings(use, told)
    except KeyboardInterrupt:
        return _stopped(use)


def _interrupted(use: Use) -> bool:
    return use.result.certificate.status is Status.INTERRUPTED


def _stopped(use: Use) -> Use:
    return replace(use, result=use.result.stopped())


def _used(asked: PlanRequest, result: SearchResult, settings: Mapping[str, str] = MappingProxyType({})) -> Use:
    """Return the use of a result; `settings` are those that `asked` differs by from the request of the user."""
    return Use(result.request, result, {**settings, **settings_taken(asked, result.request)})


def _on_nodes(request: PlanRequest, told: _Told) -> Use:
    uses: list[Use] = []
    failed: AutoplanError | None = None
    for cluster in (request.cluster, *fewer_nodes(request)):
        part = request if cluster is request.cluster else replace(request, cluster=cluster)
        try:
            uses.append(_used(part, search_plan(part, told)))
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


def _at_degrees(request: PlanRequest) -> SearchResult:
    """Return what a search at the degrees of a plan finds. KeyboardInterrupt also if that ended it with a plan."""
    found = search_plan(request)
    if found.certificate.status == Status.INTERRUPTED:
        raise KeyboardInterrupt
    return found


def _with_settings(use: Use, told: _Told) -> Use:
    """Return the use, or a better one with one other setting; the certificate says what was tried."""
    plan = use.result.plans[0]
    below = plan.estimate.step_time_s.mid / (1 + use.request.equal_within)
    better: OtherSetting | None = None
    tried = []
    for other in other_settings(use.request, plan.config):
        tried.append(f"{other.option}={other.value}")
        try:
            found = _at_degrees(at_degrees(other.request, plan.config))
        except AutoplanError:  # nothing fits with it, or no layout was found in time
            continue
        if found.fastest_s < below and not lacks_graphs(found.request, found.plans[0].config):
            below, better = found.fastest_s, other
    if not tried:
        return use
    if better is not None:
        again = search_plan(better.request, told)
        if again.fastest_s < use.result.fastest_s and not lacks_graphs(again.request, again.plans[0].config):
            use = _used(better.request, again, {**use.settings, better.option: better.value})
    where = "settings of the stack: its defaults; at the degrees of the best plan also, one at a time, "
    return replace(use, result=use.result.restricted(where + ", ".join(tried)))
