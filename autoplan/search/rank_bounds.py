"""Bounds of schedules with few cuts, of all ranks of many candidates at once (`autoplan.search.state_bounds`).

Candidates of any schedule and number of stages that have as many chunks per rank are bounded together: the arrays have
one entry for every candidate, cut and rank. Entries of one candidate and cut follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.arrays import Array
from autoplan.cost_models.memory.least import most_held
from autoplan.cost_models.memory.stage_ends import Beyond
from autoplan.schedules.schedule import chunks_of_ranks, settled
from autoplan.search.rank_paths import RankPaths, rank_paths, units_until
from autoplan.search.state_arrays import Alike, PassTimes, least_of
from autoplan.units import ORDER_OF_SUMS

_CLOSE = 1 - ORDER_OF_SUMS
_AT_ONCE = 1 << 17  # numbers in the largest array: a piece of it stays in the cache of a processor

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class CutRanks:
    """The ranks of one cut.

    Attributes:
        units: units by rank, chunk of the rank and kind.
        held: micro-batches of every chunk held when its rank holds most.
        runs: at that moment, micro-batches held of the chunk that runs, and the kind of its last unit.
        ends: how many units are before a chunk, if it receives its input, if its rank holds it as output (0 where it is
            not so), and until the end of the chunk.
        paths: what the paths through the actions of ranks count.
    """

    units: Array
    held: Array
    runs: tuple[Array, Indices]
    ends: tuple[Indices, Indices, Indices]
    paths: RankPaths


def ranks_of(c: ParallelConfig, cut: tuple[int, ...], kinds: tuple[int, ...]) -> CutRanks:
    """Return the ranks of a cut of a candidate. `kinds`: of every unit."""
    fewer = settled(c.schedule, c.pp, c.num_micro_batches, c.virtual_stages)  # a rank holds as many with these
    return _ranks(c.schedule, c.pp, c.virtual_stages, fewer, cut, kinds)


@lru_cache(maxsize=2048)  # workloads of a search share them
def _ranks(
    schedule: str, pp: int, virtual_stages: int, num: int, cut: tuple[int, ...], kinds: tuple[int, ...]
) -> CutRanks:
    stops, until = np.cumsum(cut), units_until(cut, kinds)[:, :-1]
    mine = np.array(chunks_of_ranks(schedule, pp, virtual_stages))
    most = most_held(schedule, pp, num, virtual_stages)
    turned = (mine[:, :, None] - 1 == mine[:, None]).any(axis=2)
    received = (mine > 0) & ~turned
    return CutRanks(
        np.diff(until, axis=0)[mine],
        most.held[mine],
        (most.held[most.running], np.array(kinds)[stops[most.running] - 1]),
        (np.where(received, stops[mine - 1], 0), np.where(turned, stops[mine - 1], 0), stops[mine]),
        rank_paths(schedule, pp, virtual_stages, num, cut, kinds),
    )


class RankRows:
    """The ranks of candidates with as many chunks per rank.

    Attributes:
        rows: the candidates that have a cut here.
        seconds: by rank, of the longer of both paths.

    Args:
        cuts: of some candidates (rows of `a`), the ranks of one of their cuts. A row may come several times.
        num_micro_batches: by row.
    """

    def __init__(self, cuts: Sequence[tuple[Indices, CutRanks]], a: PassTimes, num_micro_batches: Array) -> None:
        sizes = [len(ranks.units) for _, ranks in cuts]
        firsts = np.cumsum([0, *sizes[:-1]]).tolist()
        each = [(rows, n, first) for (rows, _), n, first in zip(cuts, sizes, firsts, strict=True)]
        self._row_of_cut: Indices = np.concatenate([rows for rows, *_ in each])
        self._row: Indices = np.concatenate([np.repeat(rows, n) for rows, n, _ in each])
        self._at: Indices = np.concatenate([np.tile(np.arange(first, first + n), len(rows)) for rows, n, first in each])
        lengths = np.repeat(sizes, [len(rows) for rows, _ in cuts])
        self._starts: Indices = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        self._cut: Indices = np.repeat(np.arange(len(lengths)), lengths)
        self._units, self._held = (
            np.concatenate([getattr(ranks, name) for _, ranks in cuts]) for name in ("units", "held")
        )
        fill_forward, fill_backward, turn_forward, turn_inputs = (
            np.concatenate([getattr(ranks.paths, name) for _, ranks in cuts])[self._at, :-1]
            for name in ("fill_forward", "fill_backward", "turn_forward", "turn_inputs")
        )
        self._runs, self._kind = (np.concatenate([ranks.runs[i] for _, ranks in cuts]) for i in range(2))
        self._ends = tuple(np.concatenate([ranks.ends[i] for _, ranks in cuts]) for i in range(3))
        self._owned: Array = self._units.sum(axis=1)
        self._num: Array = num_micro_batches
        self.rows: Indices = np.unique(self._row_of_cut)
        forward, backward, inputs = a.forward[self._row], a.backward[self._row], a.inputs[self._row]
        fill = _dot(forward, fill_forward) + _dot(backward, fill_backward)
        turn = _dot(forward, turn_forward) + _dot(inputs, turn_inputs)
        self.seconds: Array = self._num[self._row] * _dot(forward + backward, self._owned[self._at])
        self.seconds += np.maximum(fill, turn)

    def fastest(self, by_rank: Array) -> Array:
        """Return by row the least of its cuts, of each the longest of its ranks; inf for other rows."""
        out = np.full(len(self._num), np.inf)
        np.minimum.at(out, self._row_of_cut, np.maximum.reduceat(by_rank, self._starts))
        return out

    def fitting_s(self, a: Alike, row: Indices, below_s: float, crosses: Beyond) -> Array:
        """Return `seconds` with the recompute with which a cut fits, where all is below `below_s` without.

        Args:
            row: the row of `a` of every row here; -1 for rows that are not looked at.
            crosses: the bytes of a micro-batch that are held at the ends of chunks, at least.
        """
        beside = np.where(row >= 0, a.beside[row], np.inf)
        some = np.maximum.reduceat(self.seconds, self._starts) + beside[self._row_of_cut] < below_s
        return self.seconds + self._num[self._row] * self._forced_s(a, some[self._cut], row, crosses)

    def _forced_s(self, a: Alike, some: NDArray[np.bool_], row: Indices, crosses: Beyond) -> Array:
        """Return by rank the least seconds of recompute per micro-batch with which a cut fits.

        Args:
            some: the ranks that are looked at; for all others it is 0.
            row, crosses: as for `fitting_s`.
        """
        weighted = (self._units * self._held[:, :, None]).sum(axis=1)
        received, turned, stop = self._ends
        beside = crosses.received[received] + crosses.turned[turned] + crosses.sent[stop]
        always = (self._held * (a.free_saved + beside)).sum(axis=1)
        looked = np.flatnonzero(some)
        at, rows = self._at[looked], row[self._row[looked]]
        room = a.room[rows] - _dot(a.states[rows], self._owned[at]) - always[at]
        host = a.host_room[rows] - _dot(a.host_states[rows], self._owned[at]) if a.moved.any() else room
        too_big = np.zeros(len(room), dtype=bool)
        for share in _shares(a):  # a byte on the host may take the place of this many on the device
            least = weighted @ (a.kept + share * a.moved).min(axis=0) * _CLOSE + a.transient.min(axis=0)[self._kind]
            too_big |= least[at] > room + share * host
        out = np.zeros(len(some))
        out[looked[too_big]] = np.inf
        most = weighted @ a.kept[0] + a.transient[0][self._kind]
        short = np.flatnonzero((most[at] > room) & ~too_big)
        width = a.prices.shape[1] + a.both.device.shape[1]
        step = max(1, _AT_ONCE // (self._units[0].size * width))
        for piece in (short[i : i + step] for i in range(0, len(short), step)):
            found = self._dual_s(a, at[piece], rows[piece], room[piece], host[piece])
            out[looked[piece]] = np.maximum(0.0, found)
        return out

    def _dual_s(self, a: Alike, at: Indices, rows: Indices, room: Array, host: Array) -> Array:
        """Return by rank the best of the bounds of all prices.

        On the host a rank holds at least what its chunks keep there of the micro-batches held here: it is priced as if
        as many as it holds at most were all of the chunk that keeps most.
        """
        units, held = self._units[at], self._held[at]
        scale = 1.0 / np.maximum(1.0, held.max(axis=1))[:, None]
        device = np.concatenate([a.prices[rows], a.both.device[rows]], axis=1) * scale
        there = np.concatenate([np.zeros((len(rows), a.prices.shape[1])), a.both.host[rows]], axis=1) * scale
        found = self._running(a, at, rows, device, there) - device * room[:, None]
        if a.both.host.size:
            found -= there * host[:, None]
        for v in range(held.shape[1]):
            each = held[:, v, None, None]
            moved = there[:, :, None] * each if a.both.host.size else None
            least = least_of(a.again[rows], a.kept, a.moved, device[:, :, None] * each, moved)
            found += np.einsum("qpk,qk->qp", least, units[:, v])
        out: Array = found.max(axis=1)
        return out

    def _running(self, a: Alike, at: Indices, rows: Indices, device: Array, host: Array) -> Array:
        """Return by rank and pair of prices the cost of the last unit of a chunk that runs backward.

        It is beyond what the unit costs otherwise: while it runs, no other one of the chunk is freed yet.
        """
        kind, held = self._kind[at], self._runs[at, None]
        both, alone = (np.full(device.shape, np.inf) for _ in range(2))
        for k in range(len(a.kept)):
            has = np.isfinite(a.kept[k])[kind]
            kept, needs, moved = (np.where(has, each[k, kind], 0.0)[:, None] for each in (a.kept, a.transient, a.moved))
            least = np.where(has, a.again[rows, k, kind], np.inf)[:, None] + held * (device * kept + host * moved)
            np.minimum(alone, least, out=alone)
            np.minimum(both, least + device * needs, out=both)
        out: Array = both - alone
        return out


def _shares(a: Alike) -> set[float]:
    """Return 0, and for each kind of unit how many bytes of its least choice on the device it spares per byte moved."""
    out = {0.0}
    for kept, moved in zip(a.kept.T, a.moved.T, strict=True):
        if moved.any():
            out.add(max(0.0, float((kept[moved == 0].min() - kept[moved > 0].min()) / moved.max())))
    return out


def _dot(a: Array, b: Array) -> Array:
    """Return the sum of products of every row."""
    out: Array = np.einsum("qk,qk->q", a, b)
    return out
