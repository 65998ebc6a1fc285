"""Lower bounds of candidates that include parameters and the recompute that memory forces. No `Pricer` is made.

Let unit u take T_u seconds per micro-batch, S_u bytes of states, and under recompute choice h R_uh more seconds and
K_uh bytes of activations. Stage i holds w_i micro-batches, and C_i bytes fit. Whatever the cut and the choices are, for
any weights z_i >= 0 (of sum 1) and y_i >= 0 the step of m micro-batches under 1F1B is at least

    max_i (m t_i + sum_{j<i} t_j)  >=  sum_i a_i t_i       with  t_i = sum over i of T_u + R_uh,
                                                           a_i = m z_i + sum_{j>i} z_j
                                   >=  sum_u min_ih [a_i (T_u + R_uh) + y_i (S_u + w_i K_uh)]  -  sum_i y_i C_i

since all that fits has  sum over i of (S_u + w_i K_uh) <= C_i. So every choice of z and y gives a bound; a bad choice
gives a weak one. Good ones let all stages take equally long, and make y_i the price of a byte there: the seconds per
byte of the last recompute choice that the stage needs.

Where that leaves a candidate below the best plan, all cuts into whole units are looked at: a stage of units i .. j - 1
takes at least  T + max_y [sum_u min_h (R_uh + y K_uh) + y (S - C) / w]  seconds per micro-batch, and a dynamic
programme gives the least step of all cuts: that of `autoplan.search.windows`, without a `Pricer`.

Schedules with few cuts are bounded cut by cut: a rank r with chunks c of known units needs at least

    max_y  sum_c sum_u min_h (R_uh + y w_c K_uh)  +  y (S_r - C_r)

seconds of recompute per micro-batch. Their bubble is that of a step with the least seconds of every pass, which is
simulated once for all candidates that differ in parameters only: a step never gets shorter if an action gets longer.
Under 1F1B it is the least over all cuts into whole units, by a dynamic programme.

All bounds add the traffic once per step and the update, of which some rank has at
least its share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoplan.config.offload import ACTIVATIONS, of_states
from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.cost_models.arrays import Array
from autoplan.cost_models.memory.least import LeastMemory, most_held
from autoplan.cost_models.memory.room import Room
from autoplan.cost_models.time.least import LeastSeconds, LeastTime
from autoplan.cost_models.time.simulation import ChunkTimes, simulate
from autoplan.schedules.schedule import SCHEDULES, actions, chunks_of_ranks, num_copies
from autoplan.search.interleaved_cuts import even_cuts
from autoplan.search.windows import between_ends, by_stage, illegal_windows, prefix
from autoplan.units import ORDER_OF_SUMS

_CLOSE = 1 - ORDER_OF_SUMS
_COMPARED = 6  # steps that were simulated last, with which another one is compared
_ROUNDS = 3  # improvements of the weights
_BEYOND = 4.0  # price of a byte where no choice frees enough, over that of the dearest choice


# By schedule and cut: the seconds of forwards, of both parts of backwards, and the end of their step.
Simulated = dict[object, list[tuple[Array, float]]]


@dataclass(frozen=True)
class _Passes:
    """Arrays of candidates that differ only in the sharding of parameters; rows are candidates.

    Attributes:
        forward, backward: seconds by kind of unit.
        counts: units of each kind.
        beside: the seconds per step outside of passes.
    """

    forward: Array
    backward: Array
    counts: Array
    beside: Array


@dataclass(frozen=True)
class _Alike(_Passes):
    """Passes over equal units, bounded together with their memory.

    Attributes:
        states: by kind of unit, in bytes of activations.
        again, kept: the seconds (row, choice, kind) and bytes (choice, kind) of recompute choices; inf, both, of those
            that a kind does not have.
        room: the bytes that states and activations of the fullest moment may take.
        free_saved: bytes that every stage holds per micro-batch besides its units'.
    """

    states: Array
    again: Array
    kept: Array
    room: Array
    free_saved: float


class StateBounds:
    """The bounds of the module for one workload.

    Args:
        even_s: seconds by unit by which cuts of other schedules are even.
        fixed: recompute is pinned.
        simulated: steps by schedule and cut, shared by the workloads of a search.
    """

    def __init__(
        self, time: LeastTime, memory: LeastMemory, even_s: tuple[float, ...], fixed: bool, simulated: Simulated
    ) -> None:
        self.time = time
        self.simulated = simulated
        self.memory = memory
        self.even_s = even_s
        self.fixed = fixed
        self._bubbles: dict[object, float] = {}
        self._chunks: dict[tuple[int, ...], Array] = {}

    def of(self, members: Sequence[ParallelConfig], room: Room, below_s: float = np.inf) -> list[tuple[float, float]]:
        """Return for every candidate the bound with unlimited memory, and with the memory there is.

        Args:
            below_s: bounds that are not below it are not made stronger.
        """
        out = [(0.0, 0.0)] * len(members)
        for at in _alike(members):
            some = [members[i] for i in at]
            found = [self.time.of(_on_device(c)) for c in some]
            passes = self._passes(some[0], found)
            free = self._free_s(some[0], passes)
            if below_s < np.inf and (free < below_s).any():
                beside = passes.beside
                free = np.maximum(free, self._unloaded_s(some[0], below_s - float(beside.max())) + beside)
            bounds = free.copy()
            open_to = np.flatnonzero(free < below_s)
            if len(open_to) and num_copies(some[0].schedule) == 1:
                arrays = self._arrays([some[i] for i in open_to], [found[i] for i in open_to], room)
                bounds[open_to] = np.maximum(free[open_to], self._tight_s(some[0], arrays, below_s))
            for i, least, bound in zip(at, free.tolist(), bounds.tolist(), strict=True):
                out[i] = least * _CLOSE, bound * _CLOSE
        return out

    def offloaded_s(
        self,
        members: Sequence[ParallelConfig],
        kinds: Sequence[Sequence[tuple[str, ...]]],
        room: Room,
        below_s: float = np.inf,
    ) -> list[float]:
        """Return for every candidate a bound with the memory there is, under whichever of its kinds of offload.

        They are bounded together: as fast as without, and with the least memory that any of them leaves on the device.

        Args:
            below_s: as for `of`.
        """
        out = [0.0] * len(members)
        for at in _alike(members):
            some = [members[i] for i in at]
            if num_copies(some[0].schedule) == 1 and all(kinds[i] for i in at):
                arrays = self._arrays(some, [self.time.of(c) for c in some], room, [kinds[i] for i in at])
                for i, bound in zip(at, self._tight_s(some[0], arrays, below_s).tolist(), strict=True):
                    out[i] = bound * _CLOSE
        return out

    def _passes(self, first: ParallelConfig, found: Sequence[LeastSeconds]) -> _Passes:
        return _Passes(
            np.array([each.forward for each in found]),
            np.array([each.backward for each in found]),
            self.time.counts,
            np.array([each.once + each.update for each in found]) / first.pp,
        )

    def _arrays(
        self,
        members: Sequence[ParallelConfig],
        found: Sequence[LeastSeconds],
        room: Room,
        kinds: Sequence[Sequence[tuple[str, ...]]] = (),
    ) -> _Alike:
        """Return the arrays of candidates. `kinds`: of each, the kinds of offload of which any may be chosen."""
        t, first = self.time, members[0]
        on_device = [[_on_device(c)] for c in members]
        if kinds:
            on_device = [
                [c.but(offload=kind) for kind in {*map(of_states, mine)}]
                for c, mine in zip(members, kinds, strict=True)
            ]
        need, transient = self.memory.need_bytes(room), self.memory.least_transient
        on_host = ACTIVATIONS in first.offload or any(ACTIVATIONS in kind for mine in kinds for kind in mine)
        again = np.repeat(t.again[None], len(members), axis=0)
        again[:, 1] = [each.whole for each in found]
        kept = t.kept if on_host else np.where(t.on_host[:, None], np.inf, t.kept)
        if self.fixed:  # which choice is not known here: the least bytes, for nothing
            kept = t.least_by_kind(self.memory.kept)[None]
            again = np.zeros((len(members), *kept.shape))
        again = np.where(np.isinf(kept), np.inf, again)
        known = {(c.dp, c.zero_replicas): c for c in members}
        by_degrees = {key: self.memory.fixed_bytes(c, room) for key, c in known.items()}
        fixed = np.array([by_degrees[c.dp, c.zero_replicas] for c in members])
        buffers = np.array([min(sum(self.memory.least_buffers(c)) for c in some) for some in on_device])
        sizes = (np.minimum.reduce([self.memory.unit_states(c) for c in some]) for some in on_device)
        states = np.array([t.least_by_kind(each) for each in sizes]) / need
        passes = self._passes(first, found)
        room_left = (room.device_bytes - fixed - buffers) / need - transient
        return _Alike(
            passes.forward,
            passes.backward,
            passes.counts,
            passes.beside,
            states,
            again,
            kept,
            room_left,
            self.memory.free_saved,
        )

    # -- unlimited memory ---------------------------------------------------------------------------------------------

    def _free_s(self, c: ParallelConfig, a: _Passes) -> Array:
        total = (a.forward + a.backward) @ a.counts
        m, schedule = c.num_micro_batches, SCHEDULES[c.schedule]
        bound: Array = m * total / c.pp
        if schedule.windows:
            bound = total / (1.0 - (1.0 - 1.0 / m) ** c.pp)
        elif num_copies(c.schedule) == 1:
            cuts = (self._ranks_s(c, a, cut).max(axis=1) for cut in self._cuts(c))
            bound = np.maximum(bound, np.array(list(cuts)).min(axis=0))
        return bound + a.beside

    def _unloaded_s(self, c: ParallelConfig, below_s: float) -> float:
        """Return the least step of the cuts of a schedule without what parameters and memory add to passes: simulated.

        Where any cut is legal, it is a bound over cuts into whole units. It is 0 where it would be below `below_s`, and
        where a backward may not be split as the schedule has it: then gradients of weights come earlier.
        """
        schedule, costs = SCHEDULES[c.schedule], self.time.costs
        if num_copies(c.schedule) > 1:
            return 0.0
        if schedule.windows:
            return self._whole_units_s(c)
        whole = self.fixed or costs.mode is Mode.COMPILED or costs.measures_host or costs.overhead_s("split_layer_s")
        if schedule.split_backward and whole:
            return 0.0
        least = np.inf
        for cut in self._cuts(c):
            least = min(least, self._end_s(c, cut, below_s))
            if least < below_s:
                return 0.0
        return least

    def _end_s(self, c: ParallelConfig, cut: tuple[int, ...], below_s: float) -> float:
        """Return the simulated step of a cut; if it is not below `below_s`, perhaps less, but not below it either.

        If no action is shorter than r times what it was in a known step, the step is no shorter than r times that one,
        and likewise for longer ones. So it is simulated only if steps of other workloads do not tell on which side it
        is; 0 if they tell that it is below.
        """
        forward, backward, weight = (self._held(cut) @ seconds for seconds in self.time.passes(c))
        weight = np.minimum(weight, backward)
        parts = np.concatenate([forward, backward - weight, weight])
        known = self.simulated.setdefault((c.schedule, c.virtual_stages, c.num_micro_batches, cut), [])
        for others, end_s in known[: -_COMPARED - 1 : -1]:
            some = others > 0
            ratios = parts[some] / others[some]
            if end_s * ratios.min() >= below_s:
                return float(end_s * ratios.min())
            if end_s * ratios.max() < below_s and not parts[~some].any():
                return 0.0
        table = actions(c.schedule, c.pp, c.num_micro_batches, c.virtual_stages)
        times = zip(forward.tolist(), backward.tolist(), weight.tolist(), strict=True)
        end = simulate(table, [ChunkTimes(*each) for each in times], events=False).end_s
        known.append((parts, end))
        return end

    def _whole_units_s(self, c: ParallelConfig) -> float:
        """Return the least of  max_s (m T_s + sum_{i<s} T_i)  over all cuts into stages of whole units."""
        key = c.pp, c.num_micro_batches, num_copies(c.schedule)
        if key not in self._bubbles:
            forward, backward, _ = self.time.passes(c)
            sums = np.concatenate([[0.0], np.cumsum((forward + backward)[self.time.kinds])])
            n = len(sums) - 1
            each = np.where(np.tri(n + 1, dtype=bool), np.inf, sums[None, :] - sums[:, None])
            most, rest = c.num_micro_batches * each, np.where(np.arange(n + 1) == n, 0.0, np.inf)
            for _ in range(c.pp):  # the last stage first
                rest = np.maximum(most, each + rest).min(axis=1)
            self._bubbles[key] = float(rest[0])
        return self._bubbles[key]

    def _cuts(self, c: ParallelConfig) -> tuple[tuple[int, ...], ...]:
        return even_cuts(self.even_s, c.pp, c.virtual_stages) if c.stages is None else (c.stages,)

    def _held(self, cut: Sequence[int]) -> Array:
        """Return the number of units of each kind (columns) in every chunk of a cut."""
        key = tuple(cut)
        if key not in self._chunks:
            one = np.zeros((len(self.time.kinds) + 1, len(self.time.counts)))
            one[np.arange(1, len(one)), self.time.kinds] = 1.0
            self._chunks[key] = np.diff(one.cumsum(axis=0)[[0, *np.cumsum(cut)]], axis=0)
        return self._chunks[key]

    def _ranks_s(self, c: ParallelConfig, a: _Passes, cut: Sequence[int]) -> Array:
        """Return per candidate and rank the seconds of all micro-batches, and those before its first stage starts."""
        held, ranks = self._held(cut), _ranks_of(c.schedule, c.pp, c.virtual_stages)
        forward, backward = a.forward @ held.T, a.backward @ held.T
        before = forward if SCHEDULES[c.schedule].split_backward else forward + backward
        waits = (before.cumsum(axis=1) - before)[:, ranks.first]
        each = (forward + backward) @ ranks.holds.T
        out: Array = c.num_micro_batches * each + waits
        return out

    # -- the memory there is ------------------------------------------------------------------------------------------

    def _tight_s(self, c: ParallelConfig, a: _Alike, below_s: float) -> Array:
        if SCHEDULES[c.schedule].windows and c.virtual_stages == 1:
            found = self._any_cut_s(c, a) + a.beside
            if below_s < np.inf and 1 < c.pp <= len(self.time.kinds):
                for row in np.flatnonzero(found < below_s).tolist():
                    found[row] = max(found[row], self._whole_units_that_fit_s(c, a, row) + a.beside[row])
            return found
        best = np.full(len(a.beside), np.inf)
        for cut in self._cuts(c):
            found = self._ranks_s(c, a, cut)
            if (found.max(axis=1) + a.beside < below_s).any():
                found = found + c.num_micro_batches * self._forced_s(c, a, cut)
            best = np.minimum(best, found.max(axis=1))
        return best + a.beside

    def _any_cut_s(self, c: ParallelConfig, a: _Alike) -> Array:
        """Return the bound over all cuts into one stage per rank."""
        held = most_held(c.schedule, c.pp, c.num_micro_batches, 1).held
        room = a.room[:, None] - a.free_saved * held
        seconds, states = a.forward + a.backward, a.states @ a.counts
        total = (seconds @ a.counts)[:, None]
        prices = _prices(a)
        # least seconds of recompute and the bytes' price, by candidate and price, of the whole model
        whole = _least(a, prices[:, :, None]) @ a.counts
        share = np.full(room.shape, 1.0 / c.pp)
        best = np.zeros(len(total))
        for _ in range(_ROUNDS):
            priced = (share * states[:, None] - room) / held
            need = share[:, :, None] * whole[:, None] + prices[:, None] * priced[:, :, None]
            at = need.argmax(axis=2)
            again = np.maximum(0.0, need.max(axis=2)) / share
            price = np.take_along_axis(prices, at, axis=1)
            each = total + np.take_along_axis(whole, at, axis=1) + price * states[:, None] / held
            weights, shares = _weights(1.0 / each, c.num_micro_batches)
            inside = _least(a, price[:, :, None]) + seconds[:, None, :] + (price / held)[:, :, None] * a.states[:, None]
            bound = (weights[:, :, None] * inside).min(axis=1) @ a.counts - (weights * price * room / held).sum(axis=1)
            best = np.maximum(best, bound / shares)
            share = 1.0 / (total + again)
            share /= share.sum(axis=1, keepdims=True)
        return best

    def _whole_units_that_fit_s(self, c: ParallelConfig, a: _Alike, row: int) -> float:
        """Return the least of  max_s (m T_s + sum_{i<s} T_i)  over all cuts into whole units; inf if none fits.

        T_s has the least seconds of recompute with which stage s fits, whatever the choices of its units are. While its
        last unit runs backward, no other one is freed yet.
        """
        pp, m, kinds = c.pp, c.num_micro_batches, self.time.kinds
        held = most_held(c.schedule, pp, m, 1).held

        def windows(by_kind: Array) -> Array:
            return by_stage(between_ends(prefix(by_kind[kinds])), pp)

        lacks = windows(a.states[row]) - (a.room[row] - a.free_saved * held)[:, None, None]  # without activations
        lacks = lacks / held[:, None, None]
        crosses, transient = self.memory.beside_ends  # a stage holds what it receives and sends, too
        lacks = lacks + by_stage(crosses[:, None] + crosses[None, :], pp)
        lacks += (
            by_stage(np.tile(transient - self.memory.least_transient, (len(transient), 1)), pp) / held[:, None, None]
        )
        again = np.zeros(lacks.shape)
        one = _rows(a, np.array([row]))
        prices = _prices(one)[0]
        for price, least in zip(prices[1:], _least(one, prices[None, 1:, None])[0], strict=True):
            np.maximum(again, windows(least) + price * lacks, out=again)
        each = windows(a.forward[row] + a.backward[row]) + again
        each[illegal_windows(len(kinds), pp, None) | (windows(a.kept.min(axis=0)) * _CLOSE + lacks > 0)] = np.inf
        most, rest = m * each, np.where(np.arange(each.shape[1]) == each.shape[1] - 1, 0.0, np.inf)
        for s in reversed(range(pp)):
            rest = np.maximum(most[s], each[s] + rest).min(axis=1)
        return float(rest[0])

    def _forced_s(self, c: ParallelConfig, a: _Alike, cut: Sequence[int]) -> Array:
        """Return per candidate and rank the least seconds of recompute per micro-batch with which a cut fits."""
        units, of_rank = self._held(cut), _ranks_of(c.schedule, c.pp, c.virtual_stages).holds
        held = most_held(c.schedule, c.pp, c.num_micro_batches, c.virtual_stages).held
        most, least = (units @ kept * held for kept in (a.kept[0], a.kept.min(axis=0)))  # bytes of every chunk
        room = a.room[:, None] - (a.states @ units.T + a.free_saved * held) @ of_rank.T
        too_big = of_rank @ least * _CLOSE > room
        out = np.where(too_big, np.inf, 0.0)
        short = (of_rank @ most > room) & ~too_big
        rows = np.flatnonzero(short.any(axis=1))
        if not rows.size:
            return out
        some, of_most = _rows(a, rows), np.maximum(1.0, (of_rank * held).max(axis=1))
        prices = _prices(some)[:, None] / of_most[:, None]  # by candidate, rank and price
        by_chunk = prices[:, of_rank.argmax(axis=0)] * held[:, None]
        inside = _least(some, by_chunk.reshape(len(rows), -1, 1)).reshape(*by_chunk.shape, -1)
        found = of_rank @ (inside * units[:, None]).sum(axis=3) - prices * room[rows][:, :, None]
        out[rows] = np.where(short[rows], np.maximum(0.0, found.max(axis=2)), out[rows])
        return out


@dataclass(frozen=True)
class _Ranks:
    """The chunks of ranks: 1 where a rank (row) holds a chunk, and the first chunk of each."""

    holds: Array
    first: NDArray[np.int64]


@lru_cache(maxsize=1024)
def _ranks_of(schedule: str, pp: int, virtual_stages: int) -> _Ranks:
    mine = chunks_of_ranks(schedule, pp, virtual_stages)
    holds = np.zeros((pp, max(map(max, mine)) + 1))
    for rank, chunks in enumerate(mine):
        holds[rank, list(chunks)] = 1.0
    return _Ranks(holds, np.array([chunks[0] for chunks in mine]))


def _least(a: _Alike, price: Array) -> Array:
    """Return the least of seconds and bytes at a price, over recompute choices: by candidate, price and kind."""
    out = np.full((*price.shape[:2], a.kept.shape[1]), np.inf)
    for k, kept in enumerate(np.where(np.isinf(a.kept), 0.0, a.kept)):
        np.minimum(out, a.again[:, None, k] + price * kept, out=out)
    return out


def _prices(a: _Alike) -> Array:
    """Return by candidate the prices of a byte worth trying: 0, what choices cost per byte that they free, and more.

    They are those of the convex front of the kind of unit with most activations.
    """
    main = int(np.argmax(a.kept[0] * a.counts))
    kept = a.kept[:, main]
    choices, rows = np.unique(a.again[:, :, main], axis=0, return_inverse=True)  # most candidates have equal ones
    found = [_front(again, kept) for again in choices]
    most = max(map(len, found))
    out = np.array([prices + prices[-1:] * (most - len(prices)) for prices in found])[rows.ravel()]
    dear = out.max(axis=1, keepdims=True)
    whole = ((a.forward + a.backward) @ a.counts)[:, None] / max(1.0, float(kept[0]))
    return np.concatenate([out, _BEYOND * np.where(dear > 0, dear, whole)], axis=1)


def _front(again: Array, kept: Array) -> list[float]:
    """Return 0 and what the choices of the convex front cost per byte, cheapest first."""
    at, prices = 0, [0.0]
    while (less := np.flatnonzero(kept < kept[at])).size:
        slopes = (again[less] - again[at]) / (kept[at] - kept[less])
        best = np.lexsort((kept[less], slopes))[0]  # of equal slopes, the one that frees most
        prices.append(max(0.0, float(slopes[best])))
        at = int(less[best])
    return prices


def _weights(wanted: Array, num_micro_batches: int) -> tuple[Array, Array]:
    """Return by candidate a_i for the z >= 0 whose a_i are as `wanted`, as near as can be, and the sum of z."""
    m = float(num_micro_batches)
    out, behind = np.zeros_like(wanted), np.zeros(len(wanted))
    for i in reversed(range(wanted.shape[1])):
        z = np.maximum(0.0, (wanted[:, i] - behind) / m)
        out[:, i] = m * z + behind
        behind = behind + z
    return out, behind


def _alike(members: Sequence[ParallelConfig]) -> Iterator[list[int]]:
    """Yield the positions of the candidates that differ only in the sharding of parameters."""
    found: dict[object, list[int]] = {}
    for i, c in enumerate(members):
        key = c.schedule, c.pp, c.virtual_stages, c.num_micro_batches, c.stages, ACTIVATIONS in c.offload
        found.setdefault(key, []).append(i)
    yield from found.values()


def _on_device(c: ParallelConfig) -> ParallelConfig:
    """Return a candidate with activations on the device: they are a choice of recompute here."""
    return c.but(offload=of_states(c.offload)) if c.offload else c


def _rows(a: _Alike, at: NDArray[np.int64]) -> _Alike:
    return _Alike(
        a.forward[at],
        a.backward[at],
        a.counts,
        a.beside[at],
        a.states[at],
        a.again[at],
        a.kept,
        a.room[at],
        a.free_saved,
    )
