"""Lower bounds of many candidates at once: those with the same work inside blocks differ in pipeline and state only.

The operations of a layer, and its collectives over tp, cp and ep, depend on the layout, the size of a micro-batch and
the degrees of experts and contexts. With T the seconds of forward and backward of the whole model for one micro-batch,
no step of m micro-batches over pp stages is shorter than

    m T / pp                                under any schedule: some rank does at least its share
    step_factor(pp, m) T                    under 1F1B (autoplan.search.cuts)
    max over ranks r of   m T_r + W_r       under others, whose few cuts are known (autoplan.search.rank_paths)

All else (sends, ZeRO, recompute, the update, memory) only adds to it; `autoplan.search.state_bounds` adds some of it.
So no `Pricer` is made for a candidate until the best plan known leaves room for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.arrays import Array
from autoplan.program.context_pins import MethodChoice
from autoplan.schedules.schedule import SCHEDULES, settled
from autoplan.search.cuts import step_factor
from autoplan.search.interleaved_cuts import LeastPass, even_cuts
from autoplan.search.rank_paths import rank_paths


class GroupKey(NamedTuple):
    """The choices that the work inside blocks depends on.

    `copies`: the ranks that hold each chunk; with two, a forward runs beside a backward, and hides more of what experts
    exchange.
    """

    micro_batch_size: int
    tp: int
    cp: int
    ep: int
    expert_tp: int
    copies: int


def group_key(candidate: ParallelConfig) -> GroupKey:
    """Return the group of a candidate."""
    c = candidate
    return GroupKey(c.micro_batch_size, c.tp, c.cp, c.ep, c.expert_tp, SCHEDULES[c.schedule].num_copies)


def grouped(candidates: Iterable[ParallelConfig]) -> Iterable[list[ParallelConfig]]:
    """Return the candidates by what the work inside blocks depends on, methods of context parallelism included."""
    found: dict[tuple[GroupKey, MethodChoice], list[ParallelConfig]] = {}
    for candidate in candidates:
        found.setdefault((group_key(candidate), candidate.methods), []).append(candidate)
    return found.values()


def step_bounds_s(least: LeastPass, members: Sequence[ParallelConfig], below_s: float = np.inf) -> list[float]:
    """Return the bounds of the module for candidates with the same work inside blocks.

    Args:
        below_s: bounds that are not below it are not made stronger.
    """
    num = np.array([c.num_micro_batches for c in members], dtype=float)
    stages = np.array([c.pp for c in members], dtype=float)
    plain = np.array([SCHEDULES[c.schedule].windows for c in members], dtype=bool)
    total = least.total_s
    rates = np.array([step_factor(c.pp, c.num_micro_batches, least.forward_share) for c in members])
    found: list[float] = np.where(plain, total * rates, num * total / stages).tolist()
    alike: dict[tuple[str, int, int, int], list[int]] = {}
    for i, c in enumerate(members):
        if found[i] < below_s and not plain[i] and c.stages is None and SCHEDULES[c.schedule].num_copies == 1:
            fewer = settled(c.schedule, c.pp, c.num_micro_batches, c.virtual_stages)  # as many forwards come first
            alike.setdefault((c.schedule, c.pp, c.virtual_stages, fewer), []).append(i)
    for key, at in alike.items():
        for i, bound in zip(at, _chunked_s(least, *key, num[at]), strict=True):
            found[i] = max(found[i], bound)
    return found


def _chunked_s(least: LeastPass, schedule: str, pp: int, virtual_stages: int, fewer: int, num: Array) -> list[float]:
    """Return the bound for schedules with fixed cuts, by number of micro-batches, `fewer` of which settle."""
    found = np.full(len(num), np.inf)
    for cut in even_cuts(least.seconds, pp, virtual_stages):
        each, waits = rank_paths(schedule, pp, virtual_stages, fewer, cut, least.kinds).seconds(least.passes)
        found = np.minimum(found, (num[:, None] * each + waits).max(axis=1))
    out: list[float] = found.tolist()
    return out
