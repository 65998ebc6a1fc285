"""Fewer nodes than the cluster has, where its number of devices does not divide: the others are left idle.

The degrees of a plan multiply to the number of devices: dp divides the batch, tp stays within a node or so, and pp is
at most the number of layers. A prime factor of the devices that neither the batch nor a node nor the layers have is
left for pp, where it makes stages of unequal size, or for nothing: 1,000 devices are 8 x 125, and a batch of 1,024 has
no factor of 5. Then fewer nodes may do more.
"""

from __future__ import annotations

import math

from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.search.request import PlanRequest

MOST_TRIED = 2  # numbers of nodes besides all of them; each is a search of its own


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
