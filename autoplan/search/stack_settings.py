"""Settings of a stack beside its defaults, tried at the degrees of the best plan (`--like`).

A stack has a default of each option, by version and device, and other values that it can take
(`autoplan.stacks.records.Abilities`). A search over all of them would multiply its candidates. So each is priced at the
degrees of the best plan; only if the plan gets faster by more than plans may differ and still be equal, all degrees are
searched with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autoplan.config.parallel import ParallelConfig
from autoplan.program.legality import not_executed
from autoplan.program.legality.steps import OUTSIDE_GRAPHS
from autoplan.search.request import PlanRequest
from autoplan.stacks.like import Like
from autoplan.stacks.records import SETTINGS

_DEGREES = ("tp", "pp", "dp", "cp", "ep", "zero_stage", "micro_batch_size", "schedule", "virtual_stages")


@dataclass(frozen=True)
class OtherSetting:
    """Another value of an option, and the request with it."""

    option: str
    value: str
    request: PlanRequest


def other_settings(request: PlanRequest, config: ParallelConfig) -> Iterator[OtherSetting]:
    """Yield every other value that the stack can take and that was not given."""
    like = request.like
    for name in SETTINGS if isinstance(like, Like) else ():
        if not isinstance(like, Like) or name in like.given or (name == "dispatcher" and config.ep == 1):
            continue
        for value in getattr(like.can, name):
            if value != getattr(request.options, name):
                yield OtherSetting(name, str(value), replace(request, like=like.but(**{name: value})))


def settings_taken(asked: PlanRequest, answered: PlanRequest) -> dict[str, str]:
    """Return the settings of the stack that the second request gives otherwise than the first, as texts by name."""
    was, now = (r.like.given if isinstance(r.like, Like) else {} for r in (asked, answered))
    return {name: str(value) for name, value in now.items() if was.get(name) != value}


def lacks_graphs(request: PlanRequest, config: ParallelConfig) -> bool:
    """Return True for a plan that is priced with CUDA graphs, which Megatron does not take with its recompute."""
    return OUTSIDE_GRAPHS in not_executed(config, request.facts)


def at_degrees(request: PlanRequest, config: ParallelConfig) -> PlanRequest:
    """Return the request for the degrees of a plan alone; its stages and recompute stay open unless pinned."""
    degrees = {name: getattr(config, name) for name in _DEGREES}
    if config.spreads_experts:
        degrees["etp"] = config.expert_tp
    return replace(request, pins={**degrees, **request.pins}, top=1, by_kind=False)
