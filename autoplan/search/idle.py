"""Fewer nodes than the cluster has, where its number of devices does not divide: the others are left idle.

The degrees of a plan multiply to the number of devices: dp divides the batch, tp stays within a node or so, and pp is
at most the number of layers. A prime factor of the devices that neither the batch nor a node nor the layers have is
left for pp, where it makes stages of unequal size, or for nothing: 1,000 devices are 8 x 125, and a batch of 1,024 has
no factor of 5. Then fewer nodes may do more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.search.request import PlanRequest

MOST_TRIED = 2  # numbers of nodes besides all of them; each is a search of its own
# Stages of unequal numbers of layers do less than `_Use.at_work` says, which knows neither bubbles nor the head: 64
# devices in dp alone were up to 2.3 times as fast as 72 in 9 stages, which count as 64. Numbers of nodes that divide,
# or leave less to pp, are tried down to this share of the most.
_LEAST_SHARE = 0.7


def fewer_nodes(request: PlanRequest) -> list[Cluster]:
    """Return the clusters of fewer nodes that may do more, the most promising first; mostly none.

    They are those whose devices, less what unequal stages waste, are more than those of all nodes, and those that
    leave less to unequal stages and are not many fewer. A job that is executed has all its devices, and the links of a
    fabric belong to all of them.
    """
    r, whole = request, request.cluster
    if r.executed or whole.fabric is not None or whole.idle_nodes or r.facts.model is None:
        return []
    per_node, batch, layers = whole.devices_per_node, r.global_batch_size, r.facts.model.num_layers
    uses = [_use(nodes, per_node, batch, layers) for nodes in range(whole.num_nodes, whole.num_nodes // 2, -1)]
    every, least = uses[0], _LEAST_SHARE * max(use.at_work for use in uses)
    better = [u for u in uses[1:] if u.at_work > every.at_work or (u.left < every.left and u.at_work >= least)]
    better.sort(key=lambda u: (-u.at_work, u.left, -u.nodes))
    divided = [u for u in better if u.left == 1 and u.at_work >= least][:1]
    tried = [*divided, *(u for u in better if u not in divided)][:MOST_TRIED]
    tried.sort(key=better.index)
    return [whole.with_(nodes=u.nodes, idle=whole.num_nodes - u.nodes) for u in tried]


@dataclass(frozen=True)
class _Use:
    """A number of nodes.

    Attributes:
        left: the stages of a pipeline that take what dp, tp and equal stages cannot divide; 1: nothing is left.
        at_work: how many devices do as much as these, by the layers of the largest of these stages.
    """

    nodes: int
    left: int
    at_work: float


def _use(nodes: int, per_node: int, batch: int, layers: int) -> _Use:
    devices = nodes * per_node
    left = devices // math.gcd(devices, batch * per_node * layers)
    return _Use(nodes, left, 0.0 if left > layers else devices * layers / (math.ceil(layers / left) * left))
