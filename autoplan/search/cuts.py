"""Cuts of the pipeline and recompute of each stage: exact for one candidate, given its prices.

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

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from autoplan.config.recompute import FULL, SELECTIVE, RecomputeMix
from autoplan.cost_models.arrays import Array
from autoplan.cost_models.memory.ranks import RankMemory
from autoplan.cost_models.memory.room import Room
from autoplan.cost_models.time.price import Pricer, ranges_of
from autoplan.search.rank_paths import PassSeconds
from autoplan.search.windows import CLOSE, Windows, prefix

_BISECTED = 1e-3  # relative: precision of the bound
_MOST_LEVELS = 8  # recompute levels examined for a shortage
_MOST_CHECKED = 200  # stages whose memory `Cutter.binds` examines one by one
_BEYOND = 1.06  # times the cutoff: how far bounds are exact, so that they may exceed it by more than the gap asked for


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
        on_device: the largest term on the device.
    """

    stage: int
    term: str
    needed_bytes: float
    available_bytes: float
    on_host: bool = False
    on_device: str = ""


class Cutter:
    """Cuts of one candidate.

    Args:
        pricer: prices at the candidate's degrees (no virtual stages).
        recompute: pinned recompute: one choice for all layers, or by names of units' calls; None: searched, as steps of
            each stage along the recompute frontier of the pricer.
        stages: pinned units per stage, or None.
        room: the memory that a rank may take.
        mix: how the recompute that is searched may differ between layers.
    """

    def __init__(
        self,
        pricer: Pricer,
        room: Room,
        recompute: str | Mapping[str, str] | None = None,
        stages: tuple[int, ...] | None = None,
        mix: RecomputeMix = RecomputeMix.ANY,
    ) -> None:
        self.pricer = pricer
        self.mix = mix
        self.room = room
        self.pinned = stages
        self.pp: int = pricer.config.pp
        self.m: int = pricer.config.num_micro_batches
        self.num_units: int = pricer.num_units
        self.fixed = recompute
        action = pricer.costs.overhead_s("pipeline_action_s") if self.pp > 1 else 0.0
        # on every chunk and micro-batch, of a forward and of a backward
        self.chunk_s: tuple[float, float] = pricer.free_forward.mid + action, action
        self.stage_s: float = sum(self.chunk_s)
        self.time: Array = prefix(np.array(pricer.forward) + np.array(pricer.backward) + self._selective())
        self.after_s: float = pricer.fixed_s + max(max(pricer.optimizer), sum(pricer.optimizer) / self.pp)
        self.layer_count: NDArray[np.int64] = np.concatenate([[0], np.cumsum(pricer.workload.layers)])
        self._known: dict[tuple[int, int, int], int | None] = {}
        self._free_s: float | None = None
        self._binding: tuple[float, bool] | None = None  # the last answer of `binds`, with its limit
        self._below_s = math.inf  # only cuts with a step below this matter to `windows`

    @cached_property
    def passes(self) -> PassSeconds:
        """The seconds of forwards and backwards by kind of unit, and those that every chunk adds."""
        p = self.pricer
        first = [p.workload.unit_kinds.index(kind) for kind in range(max(p.workload.unit_kinds) + 1)]
        forward, backward, weight = (np.array(each)[first] for each in (p.forward, p.backward, p.weight))
        return PassSeconds(forward, backward, np.maximum(0.0, backward - weight), self.chunk_s)

    @cached_property
    def windows(self) -> Windows:
        """The arrays of all stages, which the quick bound does not need."""
        below_s = self._below_s - self.after_s
        return Windows(self.pricer, self.room, self.fixed, self.pinned, self.time, self.stage_s, below_s)

    def _look_below(self, step_s: float) -> Windows:
        """Return windows that hold every cut with a step below this."""
        if step_s > self._below_s or "windows" not in self.__dict__:
            self.forget()
            self._below_s = step_s if self.pp > 1 else math.inf
        return self.windows

    def forget(self) -> None:
        """Free the arrays, which take megabytes; they are made again if they are needed."""
        self.__dict__.pop("windows", None)

    def quick_bound_s(self) -> float:
        """Return a lower bound on the step time that ignores memory and legal cuts (see `step_factor`)."""
        total = float(self.time[-1]) + self.pp * self.stage_s
        return total * step_factor(self.pp, self.m) + self.after_s

    def _selective(self) -> Array:
        p = self.pricer
        if p.config.recompute != SELECTIVE:
            return np.zeros(self.num_units)
        return np.array([sum(p.blocks[b].selective.mid for b in unit) for unit in p.workload.units])

    # -- bounds -----------------------------------------------------------------------------------------------------

    def bound_s(self, cutoff_s: float = math.inf) -> float:
        """Return a lower bound on the step time of every cut that fits; inf if none fits.

        It is the least step that both bounds allow for the same cut, by bisection, or `cutoff_s` if that is less. A
        candidate that is not below the cutoff is seldom asked again, and frees its arrays.
        """
        bound = self._bound_s(cutoff_s)
        if bound >= cutoff_s:
            self.free_bound_s()
            self.forget()
        return bound

    def _bound_s(self, cutoff_s: float) -> float:
        windows = self._look_below(_BEYOND * cutoff_s)
        low = windows.lower_bound_s()
        if low == math.inf and windows.below_s < math.inf:  # nothing fits, or nothing below the limit
            if self.free_bound_s() >= windows.below_s + self.after_s:
                return windows.below_s + self.after_s
            windows = self._look_below(math.inf)
            low = windows.lower_bound_s()
        if low == math.inf or self.pp == 1:
            return low + self.after_s
        if low >= windows.below_s:
            return windows.below_s + self.after_s

        def impossible(step_s: float) -> bool:
            return windows.least_s(step_s) >= step_s

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
        if self._binding is None or self._binding[0] != limit_s:
            self._binding = limit_s, self._binds(limit_s)
        return self._binding[1]

    def _binds(self, limit_s: float) -> bool:
        windows = self._look_below(limit_s)
        relevant = windows.between(self.m * windows.free + windows.once_s + self.after_s < limit_s)
        if int(relevant.sum()) > _MOST_CHECKED:
            return True
        least = [self._least_of(s, range(s + a, s + b + 1)) for s, a, b in np.argwhere(relevant).tolist()]
        return any(n is None or (n > 0 and self.fixed is None) for n in least)

    def free_bound_s(self) -> float:
        """Return the bound of `bound_s` with unlimited memory, which offloading cannot beat either."""
        if self._free_s is None:
            windows = self.windows
            self._free_s = float(windows.runs(windows.free)[0][0]) + self.after_s
        return self._free_s

    def lacks_with_less_on_host(self, found: Shortage) -> str | None:
        """Return the term that does not fit with less on the host either; None if that may fit.

        A candidate of which the bound says that nothing fits, and not for the host, does not: the bound assumes the
        most bytes that any recompute choice frees, so with fewer choices nothing fits either. (A single cut may:
        activations fetched from the host take more room than recomputed ones.)

        Args:
            found: how far this candidate is from fitting.
        """
        return found.on_device if self.windows.most_on_host <= self.room.host_bytes else None

    # -- search -----------------------------------------------------------------------------------------------------

    def search(self, cutoff_s: float = math.inf, max_evaluated: int = 10_000) -> Cut:
        """Return the best cut below `cutoff_s`."""
        root, windows = self._bound_s(cutoff_s), self._look_below(cutoff_s)
        best: tuple[float, tuple[int, ...], tuple[int, ...]] | None = None
        limit, open_bound, evaluated = cutoff_s, math.inf, 0
        if root < limit * (1 - CLOSE):
            best, evaluated = self._climb(windows.even(), limit, max_evaluated // 2)
            limit = best[0] if best is not None else limit
        runs, waits = windows.rest(limit - self.after_s)  # from here on only better cuts matter
        # bound, stage, its first unit (as in `windows`), chunks so far, largest term so far, sum of T so far
        stack: list[tuple[float, int, int, tuple[int, ...], float, float]] = [(root, 0, 0, (), 0.0, 0.0)]
        while stack:
            bound, stage, at, chunks, most, before = stack.pop()
            if bound >= limit * (1 - CLOSE):
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
            each, once = windows.each[stage][at], windows.once_s[stage][at]
            own = np.maximum(before + self.m * each + once, windows.waits[stage][at])
            reach = np.maximum(most, np.maximum(own, before + each + runs[stage + 1]))
            reach = np.maximum(reach, waits[stage + 1]) + self.after_s
            open_to = np.flatnonzero(reach < limit * (1 - CLOSE))
            for b in open_to[np.argsort(-reach[open_to], kind="stable")]:  # the best is popped first
                done, sums = max(most, float(own[b])), before + float(each[b])
                stack.append((float(reach[b]), stage + 1, int(b), (*chunks, int(b) + 1 - at), done, sums))
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
            if step < limit * (1 - CLOSE):
                limit, best = step, (step, chunks, recompute)
                queue = list(_neighbours(chunks)) if self.pinned is None else []
        return best, evaluated

    def _step_s(self, chunks: tuple[int, ...], recompute: tuple[int, ...]) -> float:
        return self.pricer.step_s(chunks, recompute)

    def least_recompute(self, chunks: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return frontier steps per stage: the fewest that fit, or the pinned ones; None if the cut does not fit.

        The bounds take the fewest of each stage, which a mix for all stages may exceed.
        """
        out: list[int] = []
        for s, units in enumerate(ranges_of(chunks)):
            count = self._least_of(s, units)
            if count is None:
                return None
            out.append(count)
        if self.mix is RecomputeMix.ANY or self.fixed is not None or not any(out):
            return tuple(out)
        return self._least_alike(ranges_of(chunks), max(out))

    def _least_alike(self, ranges: Sequence[range], least: int) -> tuple[int, ...] | None:
        """Return the fewest steps, at least `least`, that fit on every stage that has as many, and else all of its."""
        most = [self._counts(units, self._num_layers(units))[-1] for units in ranges]
        for number in alike_numbers(self.mix, least, max(most)):
            out = [min(number, each) for each in most]
            if all(self._fits(s, units, out[s]) for s, units in enumerate(ranges)):
                return tuple(out)
        return None

    def _least_of(self, stage: int, units: range) -> int | None:
        key = (stage, units.start, units.stop)
        if key not in self._known:
            self._known[key] = self._least(stage, units)
        return self._known[key]

    def _least(self, stage: int, units: range) -> int | None:
        counts = self._counts(units, self._num_layers(units))
        if self.fixed is None:  # the bound excludes fewer
            counts = counts[int(self.windows.reach[stage][units.start - stage, units.stop - 1 - stage]) :]
        return next((n for n in counts if self._fits(stage, units, n)), None)

    def _tried(self, stage: int, units: range, count: int) -> tuple[list[range], list[int]]:
        """Return a cut of which only one stage is given, with its steps of recompute."""
        ranges = [range(0, 0)] * self.pp
        tried = [0] * self.pp
        ranges[stage], tried[stage] = units, count
        return ranges, tried

    def _fits(self, stage: int, units: range, count: int) -> bool:
        """Return True if one stage fits the device and the host."""
        tried = self._tried(stage, units, count)
        return fits_device(self.pricer, self.room, stage, *tried) and fits_host(self.pricer, self.room, stage, *tried)

    def memory_of(self, stage: int, units: range, count: int) -> RankMemory:
        """Return the memory of one stage."""
        return self.pricer.memory.rank(stage, *self._tried(stage, units, count), self.pricer.pinned_recompute)

    def _counts(self, units: range, layers: int) -> list[int]:
        if self.fixed is None:
            return list(range(self.pricer.frontier.height(units) + 1))
        if self.fixed == FULL:
            return [layers]
        return [0]

    def _num_layers(self, units: range) -> int:
        return int(self.layer_count[units.stop] - self.layer_count[units.start])

    def peak_bytes(self, chunks: tuple[int, ...]) -> float:
        """Return the bytes that the fullest rank of a cut needs on its device, with the most recompute."""
        most = [(s, u, self._counts(u, self._num_layers(u))[-1]) for s, u in enumerate(ranges_of(chunks))]
        return max(device_bytes(self.pricer, self.room, stage, *self._tried(stage, u, n)) for stage, u, n in most)

    def _most_even(self) -> tuple[int, ...]:
        """Return the pinned cut, or the one with most equal numbers of units."""
        n, pp = self.num_units, self.pp
        return self.pinned or tuple((s + 1) * n // pp - s * n // pp for s in range(pp))

    def shortage(self) -> Shortage:
        """Return how far the most even cut with the least memory (the most recompute) is from fitting.

        It is the shortage of the stage that lacks most, of those that fit under no choice, if there are some.
        """
        stages = list(enumerate(ranges_of(self._most_even())))
        short = [(s, units) for s, units in stages if self._least_of(s, units) is None]
        return worst_of([self._shortage(s, units) for s, units in short or stages])

    def _shortage(self, stage: int, units: range) -> Shortage:
        """Return what a stage lacks, over some of its choices: the last one, which nearly always needs least, and the
        first that fits the device, which needs the host most.
        """
        counts = self._counts(units, self._num_layers(units))
        some = {*counts[:: 1 + len(counts) // _MOST_LEVELS], counts[-1]}
        tried = (n for n in counts if fits_device(self.pricer, self.room, stage, *self._tried(stage, units, n)))
        some |= {*itertools.islice(tried, 1)}
        return shortage_of(stage, [self.memory_of(stage, units, count) for count in sorted(some)], self.room)

    def any_shortage(self) -> Shortage:
        """Return the shortage of one stage of the most even cut, perhaps not the largest."""
        for s, units in enumerate(ranges_of(self._most_even())):
            memory = self.memory_of(s, units, self._counts(units, self._num_layers(units))[-1])
            if not self.room.fits(memory):
                found = shortage_of(s, [memory], self.room)
                # a choice that keeps less on the host may fit
                if not found.on_host or self._least_of(s, units) is None:
                    return found
        return self.shortage()


def _neighbours(cut: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the cuts that move one unit between two neighbouring stages."""
    for s in range(len(cut) - 1):
        for move in (1, -1):
            near = list(cut)
            near[s], near[s + 1] = near[s] + move, near[s + 1] - move
            if min(near) >= 1:
                yield tuple(near)


def alike_numbers(mix: RecomputeMix, least: int, most: int) -> Sequence[int]:
    """Return the numbers of first layers per stage that a stack can recompute, from `least` to `most`, ascending."""
    if mix is RecomputeMix.UNIFORM:
        return [n for n in dict.fromkeys((0, most)) if n >= least]
    return range(least, most + 1)


@lru_cache(maxsize=1 << 14)  # candidates that differ in the sharding of parameters have the same
def step_factor(num_stages: int, num_micro_batches: int, forward_share: float = 1.0) -> float:
    """Return how often the seconds T of a micro-batch on the whole model fit into any step, whatever the cut is.

    The schedule is 1F1B, or GPipe, which is never faster. With p stages it is the larger of two bounds:

    - The least of max_s (m T_s + sum_{i<s} T_i). All terms are equal at the optimum: T_s = T_{s-1} (m - 1) / m, so
      T_0 m (1 - ((m - 1) / m)^p) is T.
    - The least of max_s D_s (see the module): T + (m - 1) T_s - (w_s - 1) f_s >= T + c_s T_s, where w_s = p - s, and
      c_s = m - 1 - (w_s - 1) f with f the largest share of forwards. They are equal where T_s is as 1 / c_s.

    With fewer micro-batches than stages all forwards come first: on the stage with the longest forward, then all
    backwards on that with the longest one. That takes T + (m - 1) (max f_s + max b_s) >= T + (m - 1) T / p.

    Args:
        forward_share: the largest share that the forward of a unit has of its seconds. 1: not known.
    """
    p, m = num_stages, num_micro_batches
    if m < p:
        return 1.0 + (m - 1) / p
    room = [m - 1 - waiting * forward_share for waiting in range(p)]
    chain = 1.0 + 1.0 / sum(1.0 / c for c in room) if min(room) > 0 else 1.0
    return max(1.0 / (1.0 - (1.0 - 1.0 / m) ** p), chain)


def device_bytes(pricer: Pricer, room: Room, rank: int, ranges: Sequence[range], steps: Sequence[int]) -> float:
    """Return the bytes of a rank that have to fit, given the units of every chunk and their steps of recompute."""
    return pricer.memory.device_bytes(rank, ranges, steps, pricer.pinned_recompute, room.guard)


def fits_device(pricer: Pricer, room: Room, rank: int, ranges: Sequence[range], steps: Sequence[int]) -> bool:
    """Return True if a rank fits its device, likewise."""
    return device_bytes(pricer, room, rank, ranges, steps) <= room.device_bytes


def fits_host(pricer: Pricer, room: Room, rank: int, ranges: Sequence[range], steps: Sequence[int]) -> bool:
    """Return True if a rank fits its share of the host, likewise."""
    return sum(pricer.memory.host_bytes(rank, ranges, steps, pricer.pinned_recompute, room.guard)) <= room.host_bytes


def shortage_of(rank: int, options: Sequence[RankMemory], room: Room) -> Shortage:
    """Return what a rank lacks: host memory if one of the options fits the device, else device memory."""
    terms = min((m.terms for m in options), key=room.total_bytes)
    largest = max(terms, key=lambda k: terms[k].mid)
    fitting = [m for m in options if room.fits_device(m)]
    if fitting and not any(map(room.fits_host, fitting)):
        host = min((m.host for m in fitting), key=room.total_bytes)
        term = f"{max(host, key=lambda k: host[k].mid)} on the host"
        return Shortage(rank, term, room.total_bytes(host), room.host_bytes, True, largest)
    return Shortage(rank, largest, room.total_bytes(terms), room.device_bytes, False, largest)


def worst_of(found: Sequence[Shortage]) -> Shortage:
    """Return the shortage with the least available relative to the need."""
    if not found:
        raise ValueError("a pipeline has at least one stage")
    return max(found, key=lambda s: s.needed_bytes / s.available_bytes)
