"""One training run over several pools of devices, beside each pool alone.

found = pools([PlanRequest(graph, Cluster.parse(text), 4096, 256) for text in ("2x8xh100", "4x8xa100-80gb")])
found.search.best.config.stages, found.alone
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from autoplan.errors import AutoplanError
from autoplan.search.planner import Planned, PlanRequest, search_plan
from autoplan.search.pools import PooledSearch, search_pools


@dataclass(frozen=True)
class Alone:
    """The best plan of one pool by itself; without one, the reason."""

    request: PlanRequest
    planned: Planned | None
    reason: str = ""


@dataclass(frozen=True)
class Pools:
    """The best plan over all pools, and what it is compared with.

    `alone`: the plans of pools by themselves; after Ctrl-C those so far.
    """

    search: PooledSearch
    alone: tuple[Alone, ...] = ()

    @property
    def best_alone_s(self) -> float | None:
        """The shortest step of a pool alone, in seconds; None if no pool has a plan."""
        steps = [a.planned.estimate.step_time_s.mid for a in self.alone if a.planned is not None]
        return min(steps, default=None)


def pools(
    requests: Sequence[PlanRequest],
    *,
    nic_gbit_s: float | None = None,
    alone: bool = True,
    told: Callable[[str], None] | None = None,
) -> Pools:
    """Return the best plan over the devices of several pools (`autoplan.search.pools`).

    Args:
        requests: the same task on the cluster of each pool.
        nic_gbit_s: the network between pools, Gbit/s per device and direction; None: the slower of their own.
        alone: also plan the task on each pool by itself.
        told: called with a line of progress.

    Raises:
        AutoplanError: PinError for pools that cannot share a pipeline; InfeasibleError if nothing fits.

    Example:
        >>> from autoplan import Cluster, PlanRequest, load_model, pools
        >>> gpt2, pins = load_model("gpt2"), {"tp": 1, "micro_batch_size": 4, "zero_stage": 1}
        >>> requests = [PlanRequest(gpt2, Cluster.parse(c), 1024, 64, pins) for c in ("1x4xh100", "1x4xa100-80gb")]
        >>> found = pools(requests, alone=False)
        >>> sum(found.search.best.config.stages)
        12
    """
    found = search_pools(requests, nic_gbit_s=nic_gbit_s, told=told)
    by_themselves: list[Alone] = []
    with suppress(KeyboardInterrupt):  # the plan over all pools is there
        for request in requests if alone else ():
            by_themselves.append(_alone(request))
    return Pools(found, tuple(by_themselves))


def _alone(request: PlanRequest) -> Alone:
    try:
        result = search_plan(request)
        return Alone(result.request, result.plans[0])
    except AutoplanError as error:
        return Alone(request, None, str(error))
