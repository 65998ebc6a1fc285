"""Fewer nodes than the cluster has, where its number of devices does not divide: the others are left idle.

The degrees of a plan multiply to the number of devices: dp divides the batch, tp stays within a node or so, and pp is
at most the number of layers. A prime factor of the devices that neither the batch nor a node nor the layers have is
left for pp, where it makes stages of unequal size, or for nothing: 1,000 devices are 8 x 125, and a batch of 1,024 has
no factor of 5. Then fewer nodes may do more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import AutoplanError
from autoplan.search.certificate import SearchResult, Status
from autoplan.search.layouts import PlanRequest
from autoplan.search.planner import search_plan
from autoplan.search.progress import Progress

MOST_TRIED = 2  # numbers of nodes besides all of them; each is a search of its own


@dataclass(frozen=True)
class Use:
    """The best plans, and the request that they answer: that of the user, or with some nodes idle."""

    request: PlanRequest
    result: SearchResult

    def text(self, cluster: str) -> str:
        """Return the words for the cluster in commands, given those of the whole one."""
        c = self.request.cluster
        if not c.idle_nodes or "idle=" in cluster:
            return cluster
        return f"{cluster}{',' if '@' in cluster else '@'}nodes={c.num_nodes},idle={c.idle_nodes}"


def best_use(request: PlanRequest, told: Callable[[Progress], None] | None = None) -> Use:
    """Return the best plan on all nodes, or on fewer if that is faster.

    Raises: as `search_plan`, of all nodes, if there is no plan on fewer either.
    """
    uses: list[Use] = []
    failed: AutoplanError | None = None
    for cluster in (request.cluster, *fewer_nodes(request)):
        part = request if cluster is request.cluster else replace(request, cluster=cluster)
        try:
            uses.append(Use(part, search_plan(part, told)))
        except AutoplanError as error:
            failed = failed or error
            continue
        if uses[-1].result.certificate.status == Status.INTERRUPTED:
            break
    if not uses:
        raise failed or AutoplanError("no plan")
    return min(uses, key=lambda use: use.result.fastest_s)


def fewer_nodes(request: PlanRequest) -> list[Cluster]:
    """Return the clusters of fewer nodes that may do more, the most promising first; mostly none.

    They are those whose devices, less what unequal stages waste, are more than those of all nodes. A job that is
    executed has all its devices, and the links of a fabric belong to all of them.
    """
    r, whole = request, request.cluster
    if r.executed or whole.fabric is not None or whole.idle_nodes or r.facts.model is None:
        return []
    per_node, batch, layers = whole.devices_per_node, r.global_batch_size, r.facts.model.num_layers
    some = range(whole.num_nodes, whole.num_nodes // 2, -1)
    at_work = {nodes: _at_work(nodes * per_node, per_node, batch, layers) for nodes in some}
    better = [nodes for nodes, most in at_work.items() if most > at_work[whole.num_nodes]]
    better.sort(key=lambda nodes: (-at_work[nodes], -nodes))
    return [whole.with_(nodes=nodes, idle=whole.num_nodes - nodes) for nodes in better[:MOST_TRIED]]


def _at_work(devices: int, per_node: int, batch: int, layers: int) -> float:
    """Return how many devices do as much as these, if what dp, tp and equal stages cannot divide is left to pp."""
    left = devices // math.gcd(devices, batch * per_node * layers)
    if left > layers:
        return 0.0
    return devices * layers / (math.ceil(layers / left) * left)
