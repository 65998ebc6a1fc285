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
takes at least  T + max_y [sum_u min_h (R_uh + y K_uh) + y (S - C) / w]  seconds per micro-batch, and dynamic
programmes give the least of both bounds of `autoplan.search.cuts` over all cuts, without a `Pricer`.

Schedules with few cuts are bounded cut by cut: a rank r with chunks c of known units needs at least

    max_y  sum_c sum_u min_h (R_uh + y w_c K_uh)  +  y (S_r - C_r)

seconds of recompute per micro-batch (`autoplan.search.rank_bounds`). S_r includes what crosses the ends of its chunks,
and what the last unit of the chunk that runs backward needs for a time under its choice. If choices keep H_uh bytes
on the host, where the state of the rank takes G_r of D bytes, it is for prices x of a byte there

    max_y,x  sum_c sum_u min_h (R_uh + w_c (y K_uh + x H_uh))  +  y (S_r - C_r)  +  x (G_r - D)

since the micro-batches held at one moment are no more than those that are counted on the host. Without the seconds, a
sum above 0 means that nothing fits.

The bubble of a schedule is that of a step with the least seconds of every pass, which is simulated once for all
candidates that differ in parameters only: a step never gets shorter if an action gets longer. Under 1F1B it is the
least over all cuts into whole units, by a dynamic programme.

All bounds add the traffic once per step and the update, of which some rank has at least its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoplan.config.offload import ACTIVATIONS, of_states
from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.cost_models.arrays import Array
from autoplan.cost_models.memory.least import LeastMemory, most_held
from autoplan.cost_models.memory.room import Room
from autoplan.cost_models.time.least import LeastSeconds, LeastTime
from autoplan.cost_models.time.simulation import ChunkTimes, simulate
from autoplan.schedules.schedule import SCHEDULES, actions, num_copies
from autoplan.search.cuts import step_factor
from autoplan.search.interleaved_cuts import even_cuts
from autoplan.search.rank_bounds import CutRanks, Indices, RankRows, ranks_of
from autoplan.search.state_arrays import Alike, PassTimes, prices_of
from autoplan.search.windows import between_ends, by_stage, illegal_windows, prefix
from autoplan.units import ORDER_OF_SUMS

# The first and the positions of candidates that are bounded together.
_Groups = Sequence[tuple[ParallelConfig, Indices]]

_CLOSE = 1 - ORDER_OF_SUMS
_COMPARED = 6  # steps that were simulated last, with which another one is compared
_ROUNDS = 3  # improvements of the weights


# By schedule and cut: the seconds of forwards, of both parts of backwards, and the end of their step.
Simulated = dict[object, list[tuple[Array, float]]]


@dataclass(frozen=True)
class _States:
    """Bytes of parameters and all that belongs to them.

    Attributes:
        device, host: by kind of unit, at the fullest moment of a rank.
        buffers: on any rank (`LeastMemory.least_buffers`).
    """

    device: Array
    host: Array
    buffers: float


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
        self._moments: dict[object, tuple[bool, bool]] = {}
        self._known_states: dict[object, _States] = {}
        self._known_fixed: dict[object, float] = {}

    def of(self, members: Sequence[ParallelConfig], room: Room, below_s: float = np.inf) -> list[tuple[float, float]]:
        """Return for every candidate the bound with unlimited memory, and with the memory there is.

        Args:
            below_s: bounds that are not below it are not made stronger.
        """
        groups = _alike(members)
        found = [self.time.of(_on_device(c)) for c in members]
        passes = self._passes(members, found)
        ranked = self._ranked(members, groups, passes)
        free = self._free_s(groups, passes, ranked)
        if below_s < np.inf:
            for first, at in groups:
                if (free[at] < below_s).any():
                    beside = passes.beside[at]
                    free[at] = np.maximum(free[at], self._unloaded_s(first, below_s - float(beside.max())) + beside)
        looked = (free < below_s).tolist()
        kinds = [(c.offload,) for c in members]
        bounds = np.maximum(free, self._fitting_s(members, kinds, found, looked, ranked, room, below_s))
        return [(least * _CLOSE, bound * _CLOSE) for least, bound in zip(free.tolist(), bounds.tolist(), strict=True)]

    def offloaded_s(
        self,
        members: Sequence[ParallelConfig],
        kinds: Sequence[Sequence[tuple[str, ...]]],
        room: Room,
        below_s: float = np.inf,
    ) -> list[float]:
        """Return for every candidate a bound with the memory there is, under whichever of its kinds of offload.

        They are bounded together: as fast as without, and with the least memory that any of them leaves on the device,
        and the least state that any of them has on the host.

        Args:
            below_s: as for `of`.
        """
        found = [self.time.of(c) for c in members]
        ranked = self._ranked(members, _alike(members), self._passes(members, found))
        bounds = self._fitting_s(members, kinds, found, [bool(mine) for mine in kinds], ranked, room, below_s)
        out: list[float] = (bounds * _CLOSE).tolist()
        return out

    def _passes(self, members: Sequence[ParallelConfig], found: Sequence[LeastSeconds]) -> PassTimes:
        split = [SCHEDULES[c.schedule].split_backward for c in members]
        return PassTimes(
            np.array([each.forward for each in found]),
            np.array([each.backward for each in found]),
            np.array(
                [self.time.inputs(c) if s else each.backward for c, s, each in zip(members, split, found, strict=True)]
            ),
            self.time.counts,
            np.array([(each.once + each.update) / c.pp for c, each in zip(members, found, strict=True)]),
        )

    def _ranked(self, members: Sequence[ParallelConfig], groups: _Groups, a: PassTimes) -> list[RankRows]:
        """Return the ranks of all cuts of candidates whose schedule has few, by their number of chunks per rank."""
        kinds, found = self.time.workload.unit_kinds, dict[int, list[tuple[Indices, CutRanks]]]()
        for first, rows in groups:
            if num_copies(first.schedule) == 1 and not SCHEDULES[first.schedule].windows:
                some = [(rows, ranks_of(first, cut, kinds)) for cut in self._cuts(first)]
                found.setdefault(first.virtual_stages, []).extend(some)
        num = np.array([float(c.num_micro_batches) for c in members])
        return [RankRows(cuts, a, num) for cuts in found.values()]

    def _arrays(
        self,
        members: Sequence[ParallelConfig],
        found: Sequence[LeastSeconds],
        room: Room,
        kinds: Sequence[Sequence[tuple[str, ...]]],
    ) -> Alike:
        """Return the arrays of candidates. `kinds`: of each, the kinds of offload of which any may be chosen.

        Either all of them may keep activations on the host, or none may.
        """
        t, memory, copies = self.time, self.memory, len(members)
        need = memory.need_bytes(room)
        on_host = any(ACTIVATIONS in kind for mine in kinds for kind in mine)
        again = np.repeat(t.again[None], copies, axis=0)
        again[:, 1] = [each.whole for each in found]
        kept = t.kept if on_host else np.where(t.on_host[:, None], np.inf, t.kept)
        moved, host_need, held_back = np.zeros(kept.shape), memory.host_need_bytes(room), t.transient
        if on_host and not self.fixed and room.host_bytes < np.inf:
            size = t.least_by_kind(memory.moved_to_host)
            moved = np.where(np.isinf(kept), 0.0, t.on_host[:, None] * size)
        if self.fixed:  # which choice is not known here: the least bytes, for nothing
            kept = t.least_by_kind(memory.kept)[None]
            moved, again = np.zeros(kept.shape), np.zeros((copies, *kept.shape))
            held_back = t.transient.min(axis=0)[None]
        again = np.where(np.isinf(kept), np.inf, again)
        states = [self._states(c, tuple(mine)) for c, mine in zip(members, kinds, strict=True)]
        fixed = np.array([self._fixed(c, room) for c in members])
        buffers = np.array([each.buffers for each in states])
        passes = self._passes(members, found)
        prices, both = prices_of((passes.forward + passes.backward) @ passes.counts, passes.counts, again, kept, moved)
        return Alike(
            passes.forward,
            passes.backward,
            passes.inputs,
            passes.counts,
            passes.beside,
            np.array([each.device for each in states]) / need,
            again,
            kept,
            held_back,
            (room.device_bytes - fixed - buffers) / need,
            memory.free_saved,
            moved,
            np.array([each.host for each in states]) / host_need,
            np.full(copies, room.host_bytes / host_need if moved.any() else 0.0),
            prices,
            both,
        )

    def _states(self, c: ParallelConfig, kinds: tuple[tuple[str, ...], ...]) -> _States:
        """Return the states of a candidate, the least with any of these kinds of offload."""
        point = c.schedule, c.pp, c.virtual_stages, c.num_micro_batches, c.zero_stage
        moments = self._moments.get(point)
        if moments is None:
            moments = self._moments[point] = self.memory.fullest_has(c)
        key = c.dp, c.zero_stage, c.zero_replicas, kinds, c.num_micro_batches == 1, moments, num_copies(c.schedule)
        found = self._known_states.get(key)
        if found is None:
            each, memory, by_kind = {*map(of_states, kinds)}, self.memory, self.time.least_by_kind
            some = [c.but(offload=offload) for offload in each]
            found = self._known_states[key] = _States(
                np.minimum.reduce([by_kind(memory.unit_states(one)) for one in some]),
                np.minimum.reduce([by_kind(memory.unit_host_states(one)) for one in some]),
                min(sum(memory.least_buffers(one)) for one in some),
            )
        return found

    def _fixed(self, c: ParallelConfig, room: Room) -> float:
        key = c.schedule, c.pp, c.virtual_stages, c.dp, c.zero_replicas, room
        found = self._known_fixed.get(key)
        if found is None:
            found = self._known_fixed[key] = self.memory.fixed_bytes(c, room)
        return found

    # -- unlimited memory ---------------------------------------------------------------------------------------------

    def _free_s(self, groups: _Groups, a: PassTimes, ranked: Sequence[RankRows]) -> Array:
        bound, total = np.zeros(len(a.beside)), (a.forward + a.backward) @ a.counts
        for c, at in groups:
            m = c.num_micro_batches
            bound[at] = m * total[at] / c.pp
            if SCHEDULES[c.schedule].windows:
                both = (a.forward + a.backward)[at]
                shares = np.divide(a.forward[at], both, out=np.zeros_like(both), where=both > 0).max(axis=1)
                bound[at] = total[at] * [step_factor(c.pp, m, share) for share in shares.tolist()]
        for rows in ranked:
            bound[rows.rows] = np.maximum(bound, rows.fastest(rows.seconds))[rows.rows]
        out: Array = bound + a.beside
        return out

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
        """Return the bound of the module over all cuts into stages of whole units, without memory."""
        key = c.pp, c.num_micro_batches, num_copies(c.schedule)
        if key not in self._bubbles:
            forward, backward, _ = self.time.passes(c)
            first, both = (between_ends(prefix(by[self.time.kinds])) for by in (forward, forward + backward))
            both[np.tri(len(both), dtype=bool)] = np.inf  # a stage has at least one unit
            each, own = by_stage(both, c.pp), by_stage(first, c.pp)
            self._bubbles[key] = _least_of_cuts(each, own, c.num_micro_batches)
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

    # -- the memory there is ------------------------------------------------------------------------------------------

    def _fitting_s(
        self,
        members: Sequence[ParallelConfig],
        kinds: Sequence[Sequence[tuple[str, ...]]],
        found: Sequence[LeastSeconds],
        looked: Sequence[bool],
        ranked: Sequence[RankRows],
        room: Room,
        below_s: float,
    ) -> Array:
        """Return the bounds of candidates that are looked at; 0 for others, and with two copies of stages.

        Args:
            kinds: of each, the kinds of offload of which any may be chosen.
        """
        out, crosses = np.zeros(len(members)), self.memory.ends
        for there in (False, True):
            some = [
                i
                for i, (c, mine) in enumerate(zip(members, kinds, strict=True))
                if looked[i] and num_copies(c.schedule) == 1 and any(ACTIVATIONS in kind for kind in mine) == there
            ]
            if not some:
                continue
            mine = [members[i] for i in some]
            arrays = self._arrays(mine, [found[i] for i in some], room, [kinds[i] for i in some])
            for c, at in _alike(mine):
                if SCHEDULES[c.schedule].windows:
                    out[np.array(some)[at]] = self._one_stage_s(c, arrays.rows(at), below_s)
            row = np.full(len(members), -1)
            row[some] = np.arange(len(some))
            for ranks in ranked:
                rows = ranks.rows[row[ranks.rows] >= 0]
                if len(rows):
                    fitting = ranks.fastest(ranks.fitting_s(arrays, row, below_s, crosses))
                    out[rows] = fitting[rows] + arrays.beside[row[rows]]
        return out

    def _one_stage_s(self, c: ParallelConfig, a: Alike, below_s: float) -> Array:
        """Return the bounds of alike candidates with one stage per rank and any cut."""
        found = self._any_cut_s(c, a) + a.beside
        if below_s < np.inf and 1 < c.pp <= len(self.time.kinds):
            for row in np.flatnonzero(found < below_s).tolist():
                limit = below_s - float(a.beside[row])
                found[row] = max(found[row], self._whole_units_that_fit_s(c, a, row, limit) + a.beside[row])
        return found

    def _any_cut_s(self, c: ParallelConfig, a: Alike) -> Array:
        """Return the bound over all cuts into one stage per rank."""
        held = most_held(c.schedule, c.pp, c.num_micro_batches, 1).held
        room = a.room[:, None] - self.memory.least_transient - a.free_saved * held
        seconds, states = a.forward + a.backward, a.states @ a.counts
        total = (seconds @ a.counts)[:, None]
        prices = a.prices
        # least seconds of recompute and the bytes' price, by candidate and price, of the whole model
        whole = a.least(prices[:, :, None]) @ a.counts
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
            inside = a.least(price[:, :, None]) + seconds[:, None, :] + (price / held)[:, :, None] * a.states[:, None]
            bound = (weights[:, :, None] * inside).min(axis=1) @ a.counts - (weights * price * room / held).sum(axis=1)
            best = np.maximum(best, bound / shares)
            share = 1.0 / (total + again)
            share /= share.sum(axis=1, keepdims=True)
        return best

    def _whole_units_that_fit_s(self, c: ParallelConfig, a: Alike, row: int, below_s: float) -> float:
        """Return the bound of the module over all cuts into whole units; inf if none fits.

        It is not made stronger from `below_s` on. T_s has the least seconds of recompute with which stage s fits,
        whatever the choices of its units are. While its last unit runs backward, no other one is freed yet.
        """
        pp, m, kinds = c.pp, c.num_micro_batches, self.time.kinds
        held = most_held(c.schedule, pp, m, 1).held

        def windows(by_kind: Array) -> Array:
            return by_stage(between_ends(prefix(by_kind[kinds])), pp)

        lacks = windows(a.states[row]) - (a.room[row] - a.free_saved * held)[:, None, None]  # without activations
        lacks = lacks / held[:, None, None]
        crosses, transient = self.memory.ends, self.memory.transient_before
        # a stage holds what it receives and sends, too
        lacks = lacks + by_stage(crosses.received[:, None] + crosses.sent[None, :], pp)
        lacks += by_stage(np.tile(transient, (len(transient), 1)), pp) / held[:, None, None]
        again = np.zeros(lacks.shape)
        one = a.rows(np.array([row]))
        prices = one.prices[0]
        for price, least in zip(prices[1:], one.least(prices[None, 1:, None])[0], strict=True):
            np.maximum(again, windows(least) + price * lacks, out=again)
        each = windows(a.forward[row] + a.backward[row]) + again
        each[illegal_windows(len(kinds), pp, None) | (windows(a.kept.min(axis=0)) * _CLOSE + lacks > 0)] = np.inf
        return _least_of_cuts(each, windows(a.forward[row]), m, below_s)


def _least_of_cuts(each: Array, forward: Array, num_micro_batches: int, below_s: float = np.inf) -> float:
    """Return a bound of the steps of all cuts: the least of  max_s (m T_s + sum_{i<s} T_i), and that of  max_s D_s.

    D_s (see `autoplan.search.cuts`) has the least sum of all T that any cut has. With fewer micro-batches than stages
    all forwards come first, and it is  sum of all T_i + (m - 1) T_s.

    Args:
        each, forward: T of every stage (rows) and range of units, and the part of its forward.
        below_s: from this on the second bound is not looked at.
    """
    pp, m = len(each), num_micro_batches
    behind = np.where(np.arange(each.shape[1]) == each.shape[1] - 1, 0.0, np.inf)
    runs = added = waits = behind
    for mine in each[::-1]:  # the last stage first
        runs = np.maximum(m * mine, mine + runs).min(axis=1)
    if m == 1 or not runs[0] < below_s:
        return float(runs[0])
    for mine in each[::-1]:
        added = (mine + added).min(axis=1)
    for s in reversed(range(pp)):
        early = pp - s - 1 if m >= pp else 0  # forwards of others before the first backward
        waits = np.maximum((m - 1) * each[s] - early * forward[s], waits).min(axis=1)
    return float(max(runs[0], added[0] + waits[0]))


def _weights(wanted: Array, num_micro_batches: int) -> tuple[Array, Array]:
    """Return by candidate a_i for the z >= 0 whose a_i are as `wanted`, as near as can be, and the sum of z."""
    m = float(num_micro_batches)
    out, behind = np.zeros_like(wanted), np.zeros(len(wanted))
    for i in reversed(range(wanted.shape[1])):
        z = np.maximum(0.0, (wanted[:, i] - behind) / m)
        out[:, i] = m * z + behind
        behind = behind + z
    return out, behind


def _alike(members: Sequence[ParallelConfig]) -> _Groups:
    """Return the first and the positions of candidates that differ only in the sharding of parameters."""
    found: dict[object, list[int]] = {}
    for i, c in enumerate(members):
        key = c.schedule, c.pp, c.virtual_stages, c.num_micro_batches, c.stages, ACTIVATIONS in c.offload
        found.setdefault(key, []).append(i)
    return [(members[at[0]], np.array(at)) for at in found.values()]


def _on_device(c: ParallelConfig) -> ParallelConfig:
    """Return a candidate with activations on the device: they are a choice of recompute here."""
    return c.but(offload=of_states(c.offload)) if c.offload else c
