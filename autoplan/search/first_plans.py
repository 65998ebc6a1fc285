"""The candidates that a search looks at first: best ones of others, usual layouts, neighbours of the best plan so far.

Usual are the layouts of published runs: pipelines with small micro-batches and sharded optimizer state, ZeRO 3 without
a pipeline with any micro-batch, experts on one rank, a node or several nodes, all under 1F1B. They are ranked like all
others. A good plan that is known early spares the search most of the other candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoplan.config.parallel import ParallelConfig
from autoplan.schedules.schedule import PLAIN_SCHEDULE, SCHEDULES

_EXPERT_RANKS = (1, 8, 64)  # all experts on every rank, spread over a node, over several (DeepSeek-V3)
_LARGEST = 16  # sequences of a micro-batch
_FAR = 2.0  # times the least bound
_STEP = 4  # neighbours differ by at most this factor in a degree
_ORDER = {name: i for i, name in enumerate(SCHEDULES)}


def as_before(candidates: Sequence[ParallelConfig], best: Sequence[ParallelConfig]) -> list[ParallelConfig]:
    """Return the candidates that are like the best ones of other searches, but for dp and the number of micro-batches.

    Args:
        best: those candidates, of the points of a sweep for example; first the last one.
    """
    if not best:
        return []
    like: dict[tuple[object, ...], ParallelConfig] = {}
    for c in candidates:
        like.setdefault(_but_dp(c), c)
    return list(dict.fromkeys(like[_but_dp(c)] for c in best if _but_dp(c) in like))


def _but_dp(c: ParallelConfig) -> tuple[object, ...]:
    return *_mesh(c), c.micro_batch_size, c.zero_stage, c.ep, c.expert_tp, c.schedule, c.virtual_stages


def usual(
    candidates: Sequence[ParallelConfig], bound_s: Callable[[ParallelConfig], float] = lambda _: 0.0
) -> list[list[ParallelConfig]]:
    """Return one candidate for every usual combination of mesh, micro-batch, ZeRO and ranks of experts.

    They are listed by tp, because these share a layout. tp 1 comes first: its layout is known at once. Then comes the
    largest, which needs the least memory. Of each tp, pipelines with ZeRO 1 and the most ranks per expert come first:
    where experts are many, no other usual layout is sure to be near the best. Lists of which all steps are much longer
    than the least bound of others come last.

    Args:
        bound_s: a lower bound of the step of a candidate, quickly.
    """
    sizes = {_mesh(c): 0 for c in candidates}
    plain = [c for c in candidates if c.schedule == PLAIN_SCHEDULE and c.micro_batch_size <= _LARGEST]
    for c in plain:
        sizes[_mesh(c)] = min(sizes[_mesh(c)] or c.micro_batch_size, c.micro_batch_size)
    found: dict[tuple[int, ...], ParallelConfig] = {}
    for c in plain:
        least = c.micro_batch_size == sizes[_mesh(c)]
        if (least and c.zero_stage == 1) or (c.pp == 1 and c.zero_stage == 3) or (least and c.pp == c.dp == 1):
            key = (*_mesh(c), c.micro_batch_size, c.zero_stage, min(_EXPERT_RANKS, key=lambda n: _apart(c, n)))
            if key not in found or _unusual(c, key[-1]) < _unusual(found[key], key[-1]):
                found[key] = c
    return _far_last(_listed(found), bound_s)


def _listed(found: Mapping[tuple[int, ...], ParallelConfig]) -> list[list[ParallelConfig]]:
    """Return usual candidates in the order of `usual`. A key ends with the usual number of ranks of experts."""
    lists: dict[tuple[bool, int, bool], list[ParallelConfig]] = {}
    most = max((kind[-1] for kind in found), default=1)
    for kind, c in found.items():
        first = c.pp > 1 and c.zero_stage == 1 and kind[-1] == most
        lists.setdefault((c.tp > 1, -c.tp, not first), []).append(c)
    return [lists[key] for key in sorted(lists)]


def _far_last(
    lists: Sequence[list[ParallelConfig]], bound_s: Callable[[ParallelConfig], float]
) -> list[list[ParallelConfig]]:
    bounds = [min(map(bound_s, some)) for some in lists]
    far = [bound > _FAR * min(bounds) for bound in bounds]
    return [some for last in (False, True) for some, late in zip(lists, far, strict=True) if late is last]


def _mesh(c: ParallelConfig) -> tuple[int, int, int]:
    return c.pp, c.tp, c.cp


def _apart(c: ParallelConfig, expert_ranks: int) -> float:
    return abs(math.log2(c.ep / expert_ranks))


def _unusual(c: ParallelConfig, expert_ranks: int) -> tuple[float, ...]:
    """Return how far a candidate is from the usual one with so many ranks of experts."""
    return c.zero_replicas, _apart(c, expert_ranks), c.expert_tp, c.ep


class Neighbours:
    """The candidates of a space by how they differ."""

    def __init__(self, candidates: Sequence[ParallelConfig]) -> None:
        self.candidates = candidates
        rows = [_row(c) for c in candidates]
        self._table: NDArray[np.int64] = np.array(rows, dtype=np.int64).reshape(len(rows), -1)

    def of(self, best: ParallelConfig) -> Iterator[list[ParallelConfig]]:
        """Yield the candidates that differ from `best` in one choice, then those in the mesh and one more."""
        mine = np.array(_row(best), dtype=np.int64)
        differs = self._table != mine
        mesh, size, state = differs[:, :4].any(axis=1), differs[:, 4], differs[:, 5:7].any(axis=1)
        experts, order = differs[:, 7:9].any(axis=1), differs[:, 9:].any(axis=1)
        near = self._table[:, :5]
        close = ((near <= _STEP * mine[:5]) & (_STEP * near >= mine[:5])).all(axis=1)
        changes = np.stack([mesh, size, state, experts, order]).sum(axis=0)
        yield self._chosen(close & (changes == 1))
        yield self._chosen(close & mesh & (changes == 2))

    def on_mesh(self, best: ParallelConfig) -> list[ParallelConfig]:
        """Return the candidates on the mesh of `best`: other micro-batches, states, experts, schedules."""
        return self._chosen((self._table[:, :4] == np.array(mesh_of(best), dtype=np.int64)).all(axis=1))

    def _chosen(self, rows: NDArray[np.bool_]) -> list[ParallelConfig]:
        return [self.candidates[i] for i in np.flatnonzero(rows).tolist()]


def mesh_of(c: ParallelConfig) -> tuple[int, int, int, int]:
    """Return pp, dp, tp, cp."""
    return c.pp, c.dp, c.tp, c.cp


def _row(c: ParallelConfig) -> tuple[int, ...]:
    return (
        *mesh_of(c),
        c.micro_batch_size,
        c.zero_stage,
        c.zero_replicas,
        c.ep,
        c.expert_tp,
        _ORDER[c.schedule],
        c.virtual_stages,
    )
