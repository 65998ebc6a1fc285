"""The links between pipeline ranks over which stages send activations and their gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.hardware.cluster import Cluster, Group
from autoplan.schedules.schedule import ranks_of_chunks


def hop_groups(cluster: Cluster, pp: int, stride: int) -> list[Group]:
    """Return for each r a pair of ranks with the links from pipeline rank r to r + 1 (from the last to the first).

    Two ranks in one unit of a level (a node) may be neighbours in it or not, whatever the stride.

    Args:
        stride: ranks between neighbours of a pipeline.
    """
    out: list[Group] = []
    for r in range(pp if pp > 1 else 0):
        level, below = cluster.shared_level(r * stride, (r + 1) % pp * stride)
        apart = max(stride, below)
        fits = level is cluster.levels[-1] or level.size // apart > 1  # such a pair exists in one unit of the level
        out.append(Group(2, apart if fits else below))
    return out


def boundaries(config: ParallelConfig, hops: Sequence[Group]) -> list[Group | None]:
    """Return the pair of ranks at every boundary between consecutive chunks; None within one rank.

    For a schedule in both directions it is the pair of the first direction: the mirrored pair has the same links in
    equal nodes.
    """
    c = config
    homes = ranks_of_chunks(c.schedule, c.pp, c.virtual_stages)
    out: list[Group | None] = []
    for here, there in itertools.pairwise(homes):
        up = (here + 1) % c.pp == there  # otherwise down, in the second half of a V
        out.append(None if here == there else hops[here if up else there])
    return out
