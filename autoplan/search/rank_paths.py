"""Lower bounds of a step from two paths through the actions of every rank, for a known cut.

A rank r runs its actions one after the other. With T_r the seconds of a micro-batch on all of its chunks (F, B: forward
and backward of a chunk; I: the part of B that the chunk before waits for, all of it unless the schedule splits it), no
step of m micro-batches is shorter than

    m T_r  +  sum of F, and of B unless it is split, over the chunks before the first of r
    m T_r  -  sum of w_c F_c over the chunks c of r  +  sum of all F  +  sum of I over the chunks behind k and before l

First: before r starts, a micro-batch has passed the chunks before; r's last backward is that of its first chunk, and
those of the chunks before follow. Second: before its first backward, of chunk k, r runs w_c forwards of chunk c, and a
micro-batch passes all chunks, and those behind k backwards. Then r runs all else; if its last action is a whole
backward, of chunk l, those of the chunks before follow.

Recompute belongs to backwards: it makes both paths as much longer as m T_r.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autoplan.cost_models.arrays import Array
from autoplan.schedules.schedule import SCHEDULES, chunks_of_ranks, settled, warm_ups


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one micro-batch by kind of unit.

    Attributes:
        forward, backward: of its passes.
        inputs: of a backward without the gradients of weights.
        beside: of a forward and of a backward of every chunk besides.
    """

    forward: Array
    backward: Array
    inputs: Array
    beside: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class RankPaths:
    """What the paths of the ranks of a cut count, by rank and kind of unit; in a last column in chunks.

    Attributes:
        split: the schedule splits backwards.
        owned: of the rank's own chunks.
        fill_forward, fill_backward: units of the first path whose forward, and whose backward, are not of r.
        turn_forward, turn_inputs: likewise of the second, of forwards without the w_c that r runs itself.
    """

    split: bool
    owned: Array
    fill_forward: Array
    fill_backward: Array
    turn_forward: Array
    turn_inputs: Array

    def seconds(self, each: PassSeconds) -> tuple[Array, Array]:
        """Return by rank T, and what the longer path takes besides m T."""
        forward, backward = (np.append(s, b) for s, b in zip((each.forward, each.backward), each.beside, strict=True))
        inputs = np.append(each.inputs, each.beside[1]) if self.split else backward
        fill = self.fill_forward @ forward + self.fill_backward @ backward
        turn = self.turn_forward @ forward + self.turn_inputs @ inputs
        return self.owned @ (forward + backward), np.maximum(fill, turn)


def rank_paths(
    schedule: str,
    pp: int,
    virtual_stages: int,
    num_micro_batches: int,
    cut: tuple[int, ...],
    kinds: tuple[int, ...],
) -> RankPaths:
    """Return the paths of a cut under a schedule with one copy of every chunk.

    Args:
        cut: units of every chunk.
        kinds: of every unit.
    """
    fewer = settled(schedule, pp, num_micro_batches, virtual_stages)  # as many forwards come first with these
    return _rank_paths(schedule, pp, virtual_stages, fewer, cut, kinds)


@lru_cache(maxsize=4096)  # workloads of a search share them
def _rank_paths(
    schedule: str, pp: int, virtual_stages: int, num: int, cut: tuple[int, ...], kinds: tuple[int, ...]
) -> RankPaths:
    until = units_until(cut, kinds)
    mine = np.array(chunks_of_ranks(schedule, pp, virtual_stages))
    forwards, turns, last = (np.array(each) for each in zip(*warm_ups(schedule, pp, num, virtual_stages), strict=True))
    units, split, before = np.diff(until, axis=0)[mine], SCHEDULES[schedule].split_backward, until[mine[:, 0]]
    return RankPaths(
        split,
        units.sum(axis=1),
        before,
        np.zeros_like(before) if split else before,
        until[-1] - (forwards[:, :, None] * units).sum(axis=1),
        until[-1] - until[turns + 1] + until[last],
    )


def units_until(cut: tuple[int, ...], kinds: tuple[int, ...]) -> Array:
    """Return how many units of each kind are in the first chunks (rows, from none to all), and how many chunks."""
    one = np.zeros((len(kinds) + 1, max(kinds) + 2))
    one[np.arange(1, len(one)), list(kinds)] = 1.0
    until: Array = one.cumsum(axis=0)[[0, *np.cumsum(cut)]]
    until[:, -1] = np.arange(len(until))
    return until
