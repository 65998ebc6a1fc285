"""The groups of ranks that send to each other, by the axes of a configuration: their sizes and strides.

Ranks are numbered pp, dp, cp, tp, major to minor; the ranks of a stage are numbered a second time as replicas, ep, etp.
Counts of ranks are properties of `ParallelConfig`; names on a mesh are in `autoplan.config.mesh`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.hardware.parts import Group
from autoplan.schedules.schedule import num_copies


def axis_groups(sizes: Sequence[int]) -> dict[tuple[int, ...], Group]:
    """Return the groups of adjacent axes by their positions, for axes of these sizes, major to minor."""
    return {
        tuple(range(first, last)): Group(prod(sizes[first:last]), prod(sizes[last:]))
        for first in range(len(sizes))
        for last in range(first + 1, len(sizes) + 1)
    }


def mesh_groups(config: ParallelConfig, axes: Sequence[tuple[str, int]]) -> dict[str, Group]:
    """Return the rank group of every axis: pp, dp, cp and tp, major to minor; ep and etp fold into dp * cp * tp.

    `batch`: the ranks of one stage that share a micro-batch index.

    Args:
        axes: The sub-axes of tp, major to minor.
    """
    c, stage = config, config.stage_ranks
    adjacent = axis_groups([size for _, size in axes])
    return {
        "tp": Group(c.tp, 1),
        "cp": Group(c.cp, c.tp),
        "dp": Group(c.dp, c.tp * c.cp),
        "pp": Group(c.pp, stage),
        "batch": Group(c.dp * c.cp, c.tp),
        "replicas": _replicas(c.num_shards, c.tp, c),
        "zero_replicas": Group(c.zero_replicas, stage // c.zero_replicas),
        "etp": Group(c.expert_tp, 1),
        "ep": Group(c.ep, c.expert_tp),
        "expert_replicas": _replicas(_expert_shards(c), c.ep * c.expert_tp, c),
        **{name: adjacent[i,] for i, (name, _) in enumerate(axes)},
    }


def replica_counts(config: ParallelConfig) -> dict[bool, int]:
    """Return the sizes of the groups `replicas` (under False) and `expert_replicas` (under True) alone."""
    copies = num_copies(config.schedule)
    return {False: config.num_shards * copies, True: _expert_shards(config) * copies}


def _expert_shards(config: ParallelConfig) -> int:
    c = config
    return max(1, c.stage_ranks // (c.ep * c.expert_tp * c.zero_replicas))


def _replicas(size: int, stride: int, config: ParallelConfig) -> Group:
    """Return the ranks with the same parameters: those of one stage, or of both ranks that hold it (DualPipe).

    The two ranks are priced as neighbours; a pair alone as the one that is farthest apart, first and last rank.
    """
    copies = num_copies(config.schedule)
    if copies > 1 and size == 1:
        return Group(copies, (config.pp - 1) * config.stage_ranks)
    return Group(size * copies, stride)
