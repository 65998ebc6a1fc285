"""Lower bounds of many candidates at once: those with the same work inside blocks differ in pipeline and state only.

The operations of a layer, and its collectives over tp, cp and ep, depend on the layout, the size of a micro-batch and
the degrees of experts and contexts. With T the seconds of forward and backward of the whole model for one micro-batch,
no step of m micro-batches over pp stages is shorter than

    m T / pp                                under any schedule: some rank does at least its share
    T / (1 - (1 - 1 / m)^pp)                under 1F1B (autoplan.search.cuts)

All else (sends, ZeRO, recompute, the update, memory) only adds to it. So no `Pricer` is made for a candidate until the
best plan known leaves room for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.time.blocks import BlockPricer
from autoplan.schedules.schedule import SCHEDULES
from autoplan.search.layouts import LayoutCache


class GroupKey(NamedTuple):
    """What the work inside blocks depends on."""

    micro_batch_size: int
    tp: int
    cp: int
    ep: int
    expert_tp: int


def group_key(candidate: ParallelConfig) -> GroupKey:
    """Return the group of a candidate."""
    c = candidate
    return GroupKey(c.micro_batch_size, c.tp, c.cp, c.ep, c.expert_tp)


def least_pass_s(points: LayoutCache, candidate: ParallelConfig, limit_s: float) -> float | None:
    """Return the T of the module for a candidate; None if no layout exists. Raises StoppedError."""
    point = points.of(candidate, limit_s)
    if point is None:
        return None
    pricer = BlockPricer(point.workload, candidate, points.costs, points.precision)
    each = {name: pricer.least_s(block, point.times[name]) for name, block in point.workload.blocks.items()}
    return sum(each[name] for unit in point.workload.units for name in unit)


def step_bounds_s(pass_s: float, members: Sequence[ParallelConfig]) -> list[float]:
    """Return the bounds of the module for candidates with the same T."""
    num = np.array([c.num_micro_batches for c in members], dtype=float)
    stages = np.array([c.pp for c in members], dtype=float)
    plain = np.array([SCHEDULES[c.schedule].windows for c in members], dtype=bool)
    spread = pass_s / (1.0 - (1.0 - 1.0 / num) ** stages)
    found: list[float] = np.where(plain, spread, num * pass_s / stages).tolist()
    return found
