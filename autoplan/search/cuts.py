"""Where to cut the pipeline and what to recompute: exact for one candidate, given its prices.

The step never gets shorter if an action gets longer. So for a given cut, the best choice on every stage is the least
recompute that fits. Cuts are searched depth first, from the first stage to the last, by the bound

    max over stages s of   m T_s + E_s + sum over stages i < s of T_i

(m micro-batches; T_s forward, backward, the least recompute that can fit, and the stage's wait for its receives; E_s
the seconds once per step on that stage). It is a lower bound of the event simulation, see `lower_bound_1f1b`
(tests/schedule_bounds.py). From right to left it is V_s = max(m T_s + E_s, T_s + V_{s+1}), so a dynamic programme gives
its minimum over all ways to cut the rest. A second bound, stronger with few micro-batches, is

    max over stages s of   sum of all T_i + (m - 1) T_s - (w_s - 1) f_s

(f_s forward, w_s forwards before the first backward): the D_s of `bound_1f1b`, with the least sum that any cut has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoplan.config.recompute import FULL, NONE, SELECTIVE
from autoplan.cost_models.arrays import Array
from autoplan.cost_models.memory.ranks import RankMemory
from autoplan.cost_models.memory.room import Room
from autoplan.cost_models.time.price import Pricer, ranges_of

_CLOSE = 1e-9  # relative: equal within rounding
_BISECTED = 1e-3  # relative: precision of the bound
_MOST_LEVELS = 8  # recompute levels examined for a shortage
_MOST_CHECKED = 200  # stages whose memory `Cutter.binds` examines one by one


@dataclass(frozen=True)
class Cut:
    """The best cut found, and a bound that no cut of this candidate beats.

    Attributes:
        chunks: units per stage; None if no cut fits (or beats the cutoff).
    """

    chunks: tuple[int, ...] | None
    recompute: tuple[int, ...]
    step_s: float
    bound_s: float
    exact: bool


@dataclass(frozen=True)
class Shortage:
    """Why nothing fits: the stage that lacks most, its largest memory term, and the bytes it needs.

    Attributes:
        on_host: the memory of the host is too small, not that of the device.
    """

    stage: int
    term: str
    needed_bytes: float
    available_bytes: float
    on_host: bool = False


class Cutter:
    """Cuts of one candidate.

    Args:
        pricer: prices at the candidate's degrees (no virtual stages).
        recompute: pinned recompute: one choice for all layers, or by names of units' calls; None: searched, as steps of
            each stage along the recompute frontier of the pricer.
        stages: pinned units per stage, or None.
        room: the memory that a rank may take.
    """

    def __init__(
        self,
        pricer: Pricer,
        room: Room,
        recompute: str | Mapping[str, str] | None = None,
        stages: tuple[int, ...] | None = None,
    ) -> None:
        self.pricer, self.room, self.pinned = pricer, room, stages
        self.pp, self.m = pricer.config.pp, pricer.config.num_micro_batches
        self.num_units = pricer.num_units
        self.fixed = recompute
        action = pricer.costs.overhead_s("pipeline_action_s") if self.pp > 1 else 0.0
        self.stage_s = pricer.free_forward.mid + 2 * action  # on every stage and micro-batch
        self.time = _prefix(np.array(pricer.forward) + np.array(pricer.backward) + self._selective())
        self.after_s = pricer.fixed_s + max(max(pricer.optimizer), sum(pricer.optimizer) / self.pp)
        self._built = False

    def quick_bound_s(self) -> float:
        """Return a lower bound on the step time that ignores memory and legal cuts (see `_spread`)."""
        total = float(self.time[-1]) + self.pp * self.stage_s
        return _spread(total, self.pp, self.m) + self.after_s

    def _build(self) -> None:
        """Compute the windows of every stage, which the quick bound does not need."""
        if self._built:
            return
        self._built, pricer, recompute = True, self.pricer, self.fixed
        layers = pricer.workload.layers
        self.layer_count = np.concatenate([[0], np.cumsum(layers)])
        # per rung of the frontier, prefix sums over units of steps, of bytes freed and of seconds
        rungs = pricer.frontier.rungs if recompute is None else ()
        self.steps = [np.concatenate([[0], np.cumsum([c is not None for c in r.choices])]) for r in rungs]
        self.gains = [_prefix(np.array(r.freed_bytes)) for r in rungs]
        self.costs = [_prefix(np.array(r.recompute_s)) for r in rungs]
        self.recompute_s = _prefix(np.array(pricer.recompute_s))
        self._i, self._j = np.meshgrid(np.arange(self.num_units + 1), np.arange(self.num_units + 1), indexing="ij")
        memory = pricer.memory
        # only the last unit's: before an earlier unit runs its backward, later ones are freed
        least = np.minimum(memory.transient, memory.recompute_transient)
        self._transient = np.concatenate([[0.0], least])[self._j]
        self._forward = _prefix(np.array(pricer.forward))
        n = self.num_units
        i, j = self._i, self._j

        def window(values: Sequence[float]) -> Array:
            sums = _prefix(np.array(values))
            out: Array = sums[j] - sums[i]
            return out

        cuts = np.array([0.0, *memory.cuts, 0.0])
        state = window(memory.stored) + window(memory.states) + self.room.bytes_of(memory.fixed)
        gathered, self._grads = window(memory.gathered), window(memory.grads)
        self._on_host = window(memory.hosted)
        for tied in memory.tied:  # a stage with both units holds the parameter once
            both, once = (i <= tied.first) & (j > tied.last), tied.states
            state, gathered = state - both * (once.stored + once.optimizer), gathered - both * once.gathered
            self._grads = self._grads - both * once.gradients
            self._on_host = self._on_host - both * once.host
        if not (memory.sharded and pricer.config.zero_stage == 3):
            state = state + gathered
        self._state = state
        self._held = window(memory.saved) + pricer.workload.free_saved + cuts[i] + cuts[j]
        if pricer.workload.shared:
            self._held = self._held + np.array(
                [[memory.held_once(a, b) if a < b else 0.0 for b in range(n + 1)] for a in range(n + 1)]
            )
        freed = zip(memory.saved, memory.kept, pricer.workload.layers, strict=True)
        self._gain = _prefix(np.array([s - k if layer else 0.0 for s, k, layer in freed]))
        self._legal = (j > i) & (i <= n)
        self._once_s = self._moved_once()
        self._free: list[Array] = []  # T of every stage with unlimited memory
        self._known: dict[tuple[int, int, int], int | None] = {}
        self._reach: list[NDArray[np.int64]] = []
        self._each = [self._window(s) for s in range(self.pp)]
        self._least_sum = float(self._least_rest(self._each, np.add)[0][0])  # of all T_s, over all cuts
        self._waits = [self._waiting(s) for s in range(self.pp)]

    def _moved_once(self) -> Array:
        """Return the seconds of ZeRO's transfers once per step that nothing hides, by stage (as in `Pricer.step_s`)."""
        pricer, i, j = self.pricer, self._i, self._j
        if pricer.chained:
            sums = _prefix(np.array(pricer.first) + np.array(pricer.last))
            return np.maximum(sums[j] - sums[i], 0.0)
        out = np.zeros(i.shape)
        for once in pricer.once_s:
            sizes, hidden = _prefix(np.array(once.moved)), _prefix(np.array(once.computed)) * once.hides
            most = np.zeros(i.shape)
            for first in range(self.num_units):
                most[first, first + 1 :] = np.maximum.accumulate(np.array(once.moved[first:]))
            shown = np.maximum((sizes[j] - sizes[i]) - (hidden[j] - hidden[i]), most)
            out += shown + pricer.contention * (sizes[j] - sizes[i] - shown)
        return np.where(j > i, out, 0.0)

    def _selective(self) -> Array:
        p = self.pricer
        if p.config.recompute != SELECTIVE:
            return np.zeros(self.num_units)
        return np.array([sum(p.blocks[b].selective.mid for b in unit) for unit in p.workload.units])

    # -- bounds -----------------------------------------------------------------------------------------------------

    def _least_rest(self, terms: Sequence[Array], joined: Callable[[Array, Array], Array]) -> list[Array]:
        """Return per stage s and unit i the least over all ways to cut units i .. into the stages s ..

        It is the shortest path in a graph of units by stages. Arrays, because it has an edge for every pair of units.

        Args:
            terms: of each stage with units i .. j - 1.
            joined: the term of a stage together with the least of the stages behind it.
        """
        out = [np.where(np.arange(self.num_units + 1) == self.num_units, 0.0, math.inf)]
        for term in reversed(terms):
            out.append(joined(term, out[-1][None, :]).min(axis=1))
        return out[::-1]

    def _run(self, each: Array, rest: Array) -> Array:
        return np.maximum(self.m * each + self._once_s, each + rest)

    def _window(self, stage: int) -> Array:
        """Return T[i, j] of a stage with units i .. j - 1; inf if they cannot fit."""
        n, memory = self.num_units, self.pricer.memory
        legal = self._legal & (self._i >= stage) & (self._j <= n - (self.pp - 1 - stage))
        if self.pinned is not None:
            start = sum(self.pinned[:stage])
            legal &= (self._i == start) & (self._j == start + self.pinned[stage])
        if stage == 0:
            legal &= self._i == 0
        if stage == self.pp - 1:
            legal &= self._j == n
        at = np.nonzero(legal)  # from here on, arrays over these windows only
        i, j = at
        held, gain, state, grads = self._held[at], self._gain, self._state[at], self._grads[at]
        fits = self._on_host[at] <= self.room.host_bytes * (1 + _CLOSE)
        # bytes that a micro-batch may hold: the first backward allocates gradients, later ones reuse them
        first, later = memory.flights[stage]
        share = self.room.bytes_of(memory.per_byte)
        room = self.room.device_bytes - state - share * self._transient[at]
        most = room / (share * first)
        if later:
            most = np.minimum(most, (room - grads) / (share * later))
        if memory.buckets:
            sent = np.minimum(float(memory.buckets), grads)
            fits &= state + grads + sent <= self.room.device_bytes * (1 + _CLOSE)
        if self.fixed is None:
            added, steps, missing = self._down(i, j, np.maximum(0.0, held - most) * (1 - _CLOSE))
            fits &= missing <= 0
            reach = np.zeros(legal.shape, dtype=np.int64)
            reach[at] = steps
            self._reach.append(reach)
        elif self.fixed == FULL:
            fits &= held - (gain[j] - gain[i]) <= most + _CLOSE * self.room.device_bytes
            added = self.recompute_s[j] - self.recompute_s[i]
        else:
            freed, repeated = self._freed(), self._repeated()
            keep = held - freed[j] + freed[i]
            fits &= keep <= most + _CLOSE * self.room.device_bytes
            added = repeated[j] - repeated[i]
        each = self.time[j] - self.time[i] + self.stage_s + self._received(stage)[i] + self._sent(stage)[j]
        free, out = np.full(legal.shape, math.inf), np.full(legal.shape, math.inf)
        free[at] = each if self.fixed is None else each + added  # with unlimited memory
        self._free.append(free)
        out[at] = np.where(fits, each + added, math.inf)
        return out

    def _down(self, i: NDArray[np.int64], j: NDArray[np.int64], short: Array) -> tuple[Array, NDArray[np.int64], Array]:
        """Return for windows the least seconds and frontier steps that free `short` bytes, and what is missing.

        Args:
            i, j: units i .. j - 1 of every window, at least one.
        """
        added, steps = np.zeros(i.shape), np.zeros(i.shape, dtype=np.int64)
        lacks = np.flatnonzero(short > 0)
        for count, gain, seconds in zip(self.steps, self.gains, self.costs, strict=True):
            if not lacks.size:
                break
            first, need = i[lacks], short[lacks]
            start = gain[first]
            reach = np.minimum(np.maximum(np.searchsorted(gain, start + need), first), j[lacks])
            added[lacks] += seconds[reach] - seconds[first]
            steps[lacks] += count[reach] - count[first]
            need = need - (gain[reach] - start)
            short[lacks] = need
            lacks = lacks[need > 0]
        return added, steps, short

    def _received(self, stage: int) -> Array:
        """Return the seconds of a receive from the stage before, by the first unit of this one."""
        return np.array([0.0, *(self.pricer.hops[stage - 1] if stage else [0.0] * (self.num_units - 1)), 0.0])

    def _sent(self, stage: int) -> Array:
        """Return the seconds of a receive of a gradient from the stage after, by the first unit of that one."""
        last = stage == self.pp - 1
        return np.array([0.0, *([0.0] * (self.num_units - 1) if last else self.pricer.hops[stage]), 0.0])

    def _waiting(self, stage: int) -> Array:
        """Return D[i, j] of a stage (see the module)."""
        warm = self.pricer.memory.flights[stage][0]
        at = np.nonzero(np.isfinite(self._each[stage]))
        i, j = at
        action = self.stage_s  # an upper bound of the forward's share
        forward = self._forward[j] - self._forward[i] + self._received(stage)[i] + action
        least = self._least_sum if math.isfinite(self._least_sum) else 0.0
        out = np.full(self._i.shape, math.inf)
        out[at] = least + (self.m - 1) * self._each[stage][at] - (warm - 1) * forward
        return out

    def _freed(self) -> Array:
        """Return the prefix sums of the bytes that a pinned mapping frees."""
        m, p = self.pricer.memory, self.pricer
        return _prefix(
            np.array([m.saved[u] - m.kept_bytes(u, p.pinned_recompute.get(u, NONE)) for u in range(self.num_units)])
        )

    def _repeated(self) -> Array:
        p = self.pricer
        seconds = [
            p.repeated_s(u, p.pinned_recompute[u]) if u in p.pinned_recompute else 0.0 for u in range(self.num_units)
        ]
        return _prefix(np.array(seconds))

    def rest(self, below_s: float = math.inf) -> tuple[list[Array], list[Array]]:
        """Return per stage s and unit i the least of both bounds over all ways to cut units i .. into the stages s ..

        The first bound counts from the start of stage s, the second is that of the whole step.

        Args:
            below_s: use only cuts whose second bound is below this, without the seconds after the pipeline.
        """
        self._build()
        each, waits = self._each, self._waits
        if below_s < math.inf:
            each = [np.where(wait < below_s, mine, math.inf) for wait, mine in zip(waits, each, strict=True)]
        return self._least_rest(each, self._run), self._least_rest(waits, np.maximum)

    def bound_s(self, cutoff_s: float = math.inf) -> float:
        """Return a lower bound on the step time of every cut that fits; inf if none fits.

        It is the least step that both bounds allow for the same cut, by bisection, or `cutoff_s` if that is less.
        """
        runs, waits = self.rest()
        low = max(float(runs[0][0]), float(waits[0][0]))
        if low == math.inf or self.pp == 1:
            return low + self.after_s

        def impossible(step_s: float) -> bool:
            return float(self.rest(step_s)[0][0][0]) >= step_s

        cutoff = cutoff_s - self.after_s
        if low < cutoff < math.inf and impossible(cutoff):
            return cutoff_s
        step, high = _BISECTED, min(cutoff, 2.0 * low)
        while high - low > step * low and low < high:
            middle = (low + high) / 2
            if impossible(middle):
                low = middle
            else:
                high = middle
        return low + self.after_s

    def binds(self, limit_s: float) -> bool:
        """Return False if memory does not change any plan below `limit_s`.

        Then every stage of every cut that may give such a plan fits without recompute beyond the pinned one, and
        offloading, which is never faster, gives no better plan. A plan whose step is below the limit has only stages
        with m T_s + E_s below it.
        """
        self._build()
        short = [self.m * each + self._once_s + self.after_s < limit_s for each in self._free]
        before, after = [np.arange(self.num_units + 1) == 0], [np.arange(self.num_units + 1) == self.num_units]
        for allowed in short:
            before.append((before[-1][:, None] & allowed).any(axis=0))
        for allowed in reversed(short):
            after.append((allowed & after[-1][None, :]).any(axis=1))
        after.reverse()
        relevant = [allowed & before[s][:, None] & after[s + 1][None, :] for s, allowed in enumerate(short)]
        if sum(int(r.sum()) for r in relevant) > _MOST_CHECKED:
            return True
        least = [self._least_of(s, range(int(i), int(j))) for s, r in enumerate(relevant) for i, j in np.argwhere(r)]
        return any(n is None or (n > 0 and self.fixed is None) for n in least)

    def free_bound_s(self) -> float:
        """Return the bound of `bound_s` with unlimited memory, which offloading cannot beat either."""
        self._build()
        return float(self._least_rest(self._free, self._run)[0][0]) + self.after_s

    def lacks_device_memory(self) -> bool:
        """Return True if a candidate fails only because of device memory, given that the bound says that nothing fits.

        The bound assumes the most bytes that any recompute choice frees, so with fewer choices nothing fits either. (A
        single cut may: activations fetched from the host take more room than recomputed ones.)
        """
        self._build()
        return float(self._on_host.max()) <= self.room.host_bytes

    def _even(self) -> tuple[int, ...]:
        """Return the cut with the shortest longest stage, from which the search starts, with the one of least bound."""
        best = self._least_rest(self._each, np.maximum)
        chunks, at = [], 0
        for s in range(self.pp):
            j = int(np.argmin(np.maximum(self._each[s][at], best[s + 1])))
            chunks.append(j - at)
            at = j
        return tuple(chunks)

    # -- search -----------------------------------------------------------------------------------------------------

    def search(self, cutoff_s: float = math.inf, max_evaluated: int = 10_000) -> Cut:
        """Return the best cut below `cutoff_s`."""
        root = self.bound_s(cutoff_s)
        best: tuple[float, tuple[int, ...], tuple[int, ...]] | None = None
        limit, open_bound, evaluated = cutoff_s, math.inf, 0
        if root < limit * (1 - _CLOSE):
            best, evaluated = self._climb(self._even(), limit, max_evaluated // 2)
            limit = best[0] if best is not None else limit
        runs, waits = self.rest(limit - self.after_s)  # from here on only better cuts matter
        # bound, stage, first unit, chunks so far, largest term so far, sum of T so far
        stack: list[tuple[float, int, int, tuple[int, ...], float, float]] = [(root, 0, 0, (), 0.0, 0.0)]
        while stack:
            bound, stage, at, chunks, most, before = stack.pop()
            if bound >= limit * (1 - _CLOSE):
                continue
            if evaluated >= max_evaluated:
                open_bound = min(open_bound, bound)
                continue
            if stage == self.pp:
                evaluated += 1
                recompute = self.least_recompute(chunks)
                if recompute is not None:
                    step = self._step_s(chunks, recompute)
                    if step < limit:
                        limit, best = step, (step, chunks, recompute)
                continue
            each, once = self._each[stage][at], self._once_s[at]
            own = np.maximum(before + self.m * each + once, self._waits[stage][at])
            reach = np.maximum(most, np.maximum(own, before + each + runs[stage + 1]))
            reach = np.maximum(reach, waits[stage + 1]) + self.after_s
            open_to = np.flatnonzero(reach < limit * (1 - _CLOSE))
            for j in open_to[np.argsort(-reach[open_to], kind="stable")]:  # the best is popped first
                done, sums = max(most, float(own[j])), before + float(each[j])
                stack.append((float(reach[j]), stage + 1, int(j), (*chunks, int(j) - at), done, sums))
        if best is None:
            return Cut(None, (), math.inf, min(open_bound, max(root, cutoff_s)), open_bound == math.inf)
        bound = min(best[0], max(root, open_bound))
        return Cut(best[1], best[2], best[0], bound, open_bound == math.inf)

    def _climb(
        self, chunks: tuple[int, ...], limit: float, max_evaluated: int
    ) -> tuple[tuple[float, tuple[int, ...], tuple[int, ...]] | None, int]:
        """Move one unit between neighbours, from `chunks` on, while the step gets shorter."""
        best: tuple[float, tuple[int, ...], tuple[int, ...]] | None = None
        evaluated, tried = 0, set()
        queue = [chunks]
        while queue and evaluated <= max_evaluated:
            chunks = queue.pop(0)
            if chunks in tried:
                continue
            tried.add(chunks)
            recompute = self.least_recompute(chunks)
            if recompute is None:
                continue
            evaluated += 1
            step = self._step_s(chunks, recompute)
            if step < limit * (1 - _CLOSE):
                limit, best, queue = step, (step, chunks, recompute), []
                if self.pinned is None:
                    for s in range(self.pp - 1):
                        for move in (1, -1):
                            near = list(chunks)
                            near[s], near[s + 1] = near[s] + move, near[s + 1] - move
                            if min(near) >= 1:
                                queue.append(tuple(near))
        return best, evaluated

    def _step_s(self, chunks: tuple[int, ...], recompute: tuple[int, ...]) -> float:
        return self.pricer.step_s(chunks, recompute)

    def least_recompute(self, chunks: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return frontier steps per stage: the fewest that fit, or the pinned ones; None if the cut does not fit."""
        out = []
        for s, units in enumerate(ranges_of(chunks)):
            count = self._least_of(s, units)
            if count is None:
                return None
            out.append(count)
        return tuple(out)

    def _least_of(self, stage: int, units: range) -> int | None:
        key = (stage, units.start, units.stop)
        if key not in self._known:
            self._known[key] = self._least(stage, units)
        return self._known[key]

    def _least(self, stage: int, units: range) -> int | None:
        layers = int(self.layer_count[units.stop] - self.layer_count[units.start])
        counts = self._counts(units, layers)
        if self.fixed is None:  # the bound excludes fewer
            counts = counts[int(self._reach[stage][units.start, units.stop]) :]
        return next((n for n in counts if self.room.fits(self._memory(stage, units, n))), None)

    def _memory(self, stage: int, units: range, count: int) -> RankMemory:
        """Return the memory of one stage."""
        ranges = [range(0, 0)] * self.pp
        tried = [0] * self.pp
        ranges[stage], tried[stage] = units, count
        return self.pricer.memory.rank(stage, ranges, tried, self.pricer.pinned_recompute)

    def _counts(self, units: range, layers: int) -> list[int]:
        if self.fixed is None:
            return list(range(self.pricer.frontier.height(units) + 1))
        if self.fixed == FULL:
            return [layers]
        return [0]

    def shortage(self) -> Shortage:
        """Return how far the most even cut with the least memory (the most recompute) is from fitting."""
        self._build()
        chunks = self.pinned or tuple(
            (s + 1) * self.num_units // self.pp - s * self.num_units // self.pp for s in range(self.pp)
        )
        ranges = ranges_of(chunks)
        found = []
        for s, units in enumerate(ranges):
            layers = int(self.layer_count[units.stop] - self.layer_count[units.start])
            counts = self._counts(units, layers)
            some = {*counts[:: 1 + len(counts) // _MOST_LEVELS], counts[-1]}  # the last one nearly always needs least
            options = [self._memory(s, units, count) for count in sorted(some)]
            found.append(shortage_of(s, options, self.room))
        return worst_of(found)

    any_shortage = shortage


def _spread(total_s: float, num_stages: int, num_micro_batches: int) -> float:
    """Return the least of `max_s (m T_s + sum_{i<s} T_i)` over all ways to spread `total_s` over stages.

    All terms are equal at the optimum: T_s = T_{s-1} (m - 1) / m, so T_0 m (1 - ((m - 1) / m)^p) is the total.
    """
    ratio = 1.0 - 1.0 / num_micro_batches
    return total_s / (1.0 - ratio**num_stages)


def shortage_of(rank: int, options: Sequence[RankMemory], room: Room) -> Shortage:
    """Return what a rank lacks: host memory if one of the options fits the device, else device memory."""
    fitting = [m for m in options if room.fits_device(m)]
    if fitting and not any(map(room.fits_host, fitting)):
        host = min((m.host for m in fitting), key=room.total_bytes)
        term = max(host, key=lambda k: host[k].mid)
        return Shortage(rank, f"{term} on the host", room.total_bytes(host), room.host_bytes, on_host=True)
    terms = min((m.terms for m in options), key=room.total_bytes)
    return Shortage(rank, max(terms, key=lambda k: terms[k].mid), room.total_bytes(terms), room.device_bytes)


def worst_of(found: Sequence[Shortage]) -> Shortage:
    """Return the shortage with the least available relative to the need."""
    if not found:
        raise ValueError("a pipeline has at least one stage")
    return max(found, key=lambda s: s.needed_bytes / s.available_bytes)


def _prefix(values: Array) -> Array:
    return np.concatenate([[0.0], np.cumsum(values)])
