"""Cuts of candidates with several pipeline stages per rank or a split backward: one cut each, priced exactly.

The cut is even by time, or the fastest of a few even ones (`even_cuts`). Every rank recomputes the least number of
layers that fits, taken in turn from its stages, first ones first. So a candidate is one plan, and its step one event
simulation. The bound that needs neither memory nor a simulation is

    max over ranks r of   m T_r + W_r

(m micro-batches; T_r forward and backward of one on all stages of r; W_r what r waits for, see
`autoplan.search.rank_paths`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from autoplan.config.recompute import FULL, RecomputeMix
from autoplan.cost_models.memory.ranks import RankMemory
from autoplan.cost_models.memory.room import Room
from autoplan.cost_models.time.price import Pricer, ranges_of
from autoplan.cost_models.time.simulation import AfterPipeline, step_of
from autoplan.schedules.schedule import SCHEDULES, chunks_of_ranks
from autoplan.search.cuts import (
    Cut,
    Cutter,
    Shortage,
    alike_numbers,
    device_bytes,
    fits_device,
    fits_host,
    shortage_of,
    worst_of,
)
from autoplan.search.rank_paths import PassSeconds, rank_paths
from autoplan.search.windows import between_ends, by_stage, prefix
from autoplan.units import ORDER_OF_SUMS

_CLOSE = 1 - ORDER_OF_SUMS


@lru_cache(maxsize=4096)  # candidates that differ in ZeRO or micro-batches share cuts
def even_cut(seconds: tuple[float, ...], num_chunks: int) -> tuple[int, ...]:
    """Return units per chunk, each at least one, with the least sum of squared times of chunks."""
    if len(seconds) == num_chunks:
        return (1,) * num_chunks
    windows = between_ends(prefix(np.array(seconds))) ** 2
    windows[_empty(len(windows))] = np.inf
    squares = by_stage(windows, num_chunks)  # chunk k, from its unit k + a to its unit k + b
    at = np.arange(squares.shape[1])
    least = np.where(at == at[-1], 0.0, np.inf)
    nexts = []
    for each in squares[::-1]:  # last chunk first
        through = each + least
        nexts.append(through.argmin(axis=1))
        least = through[at, nexts[-1]]
    out, first = [], 0
    for step in reversed(nexts):
        last = int(step[first])
        out.append(last + 1 - first)
        first = last
    return tuple(out)


@lru_cache(maxsize=256)
def _empty(count: int) -> NDArray[np.bool_]:
    """Return True at i and j where no unit is in i .. j - 1."""
    out = np.tri(count, dtype=bool)
    out.setflags(write=False)
    return out


@lru_cache(maxsize=4096)
def even_cuts(seconds: tuple[float, ...], pp: int, virtual_stages: int) -> tuple[tuple[int, ...], ...]:
    """Return candidates for units per chunk, each at least one: the most even cut by time, and up to two more.

    The two more exist if units remain after equal chunks. A round is the set of chunks that the ranks run at the same
    time (chunks k pp to k pp + pp - 1); it lasts as long as its longest chunk. The two put the remaining units into few
    rounds, the last or the first ones: spread over all rounds, as in the most even cut, they make every round longer. A
    simulation decides which is fastest.
    """
    chunks, n = pp * virtual_stages, len(seconds)
    full, rest = divmod(n % chunks, pp)
    found = [even_cut(seconds, chunks)]
    for late in (True, False) if full or rest else ():
        order = list(range(virtual_stages))[:: -1 if late else 1]  # rounds in the order in which they get more
        sizes = [n // chunks * pp] * virtual_stages
        for k in order[:full]:
            sizes[k] += pp
        if rest:
            sizes[order[full]] += rest
        ends = np.cumsum(sizes).tolist()
        parts = [even_cut(seconds[end - size : end], pp) for end, size in zip(ends, sizes, strict=True)]
        found.append(tuple(count for part in parts for count in part))
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class LeastPass:
    """Seconds of a forward and a backward of one micro-batch that pp, dp and ZeRO do not change.

    Attributes:
        kinds: of every unit.
        passes: the seconds by kind.
    """

    kinds: tuple[int, ...]
    passes: PassSeconds

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """Both passes together, by unit."""
        both = (self.passes.forward + self.passes.backward).tolist()
        return tuple(both[kind] for kind in self.kinds)

    @cached_property
    def forward_share(self) -> float:
        """The largest share that the forward of a unit has of its seconds."""
        both = zip(self.passes.forward.tolist(), self.passes.backward.tolist(), strict=True)
        return max((f / (f + b) for f, b in both if f + b), default=1.0)

    @cached_property
    def total_s(self) -> float:
        """The whole model."""
        return sum(self.seconds)


def fastest(
    cuts: Sequence[tuple[int, ...]],
    step_s: Callable[[tuple[int, ...]], float],
    least_s: Callable[[tuple[int, ...]], float] = lambda cut: 0.0,
) -> tuple[int, ...]:
    """Return the cut with the shortest step; a single cut is not simulated.

    Args:
        least_s: a lower bound of the step; what it excludes is not simulated either.
    """
    if len(cuts) == 1:
        return cuts[0]
    best, found = cuts[0], step_s(cuts[0])
    for cut in cuts[1:]:
        if least_s(cut) < found and (step := step_s(cut)) < found:
            best, found = cut, step
    return best


@dataclass(frozen=True)
class _Choices:
    """The steps along the recompute frontier for the chunks of a rank, fewest first: taken in turn from its chunks.

    Attributes:
        highest: the most steps of every chunk; empty if they are pinned.
        pinned: the pinned steps of every chunk.
    """

    highest: tuple[int, ...]
    pinned: tuple[int, ...] = ()

    @cached_property
    def most(self) -> int:
        """The number of the last choice."""
        return sum(self.highest)

    @property
    def last(self) -> tuple[int, ...]:
        """The numbers of the last choice and of the one before, if there is one.

        Bytes fall from choice to choice, but the last step may need more in a backward than it frees.
        """
        return (self.most, self.most - 1) if self.most else (0,)

    def of(self, number: int) -> tuple[int, ...]:
        """Return the steps of every chunk after `number` steps in all."""
        if not self.highest:
            return self.pinned
        if number >= self.most:
            return self.highest
        low, high = 0, max(self.highest)  # full rounds, in which every chunk that is not at its most takes a step
        while low < high:
            rounds = (low + high + 1) // 2
            if sum([min(rounds, most) for most in self.highest]) <= number:
                low = rounds
            else:
                high = rounds - 1
        left = number - sum([min(low, most) for most in self.highest])
        out = []
        for most in self.highest:
            again = left > 0 and most > low
            left -= again
            out.append(min(low, most) + again)
        return tuple(out)


def _first_true(last: int, near: int, holds: Callable[[int], bool]) -> int | None:
    """Return the first of the numbers 0 .. last that holds, None if none does; whatever follows it holds, too.

    Args:
        near: where to look first.
    """
    low, high, at, step = 0, last + 1, min(near, last), 1  # below `low` none holds, from `high` on all do
    if holds(at):
        high = at
        while low < high:
            at = max(low, high - step)
            if not holds(at):
                low = at + 1
                break
            high, step = at, 2 * step
    else:
        low = at + 1
        while low < high:
            at = min(high - 1, low + step - 1)
            if holds(at):
                high = at
                break
            low, step = at + 1, 2 * step
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low if low <= last else None


_NOTHING = Cut(None, (), math.inf, math.inf, True)


class ChunkCutter:
    """The cut of one candidate.

    Args:
        plain: cutter of the same degrees under 1F1B with one stage per rank.
        schedule, virtual_stages: schedule and stages per rank of the candidate.
        least: the seconds by which cuts are even. ZeRO and the number of micro-batches do not change them, so that the
            bound of many candidates at once speaks of the same cuts (autoplan.search.group_bounds).
        recompute: pinned recompute, as for Cutter.
        stages: pinned units per stage, or None.
        kept: the cutter of the same degrees without offload, if a search tries offload. With unlimited memory it is no
            slower, and its fastest cut is taken.
    """

    def __init__(
        self,
        plain: Cutter,
        schedule: str,
        virtual_stages: int,
        least: LeastPass,
        recompute: str | Mapping[str, str] | None = None,
        stages: tuple[int, ...] | None = None,
        kept: ChunkCutter | None = None,
    ) -> None:
        self.plain = plain
        self.room: Room = plain.room
        self.fixed = recompute
        self.schedule = schedule
        self.virtual_stages = virtual_stages
        base = plain.pricer
        self.pp: int = base.config.pp
        self.m: int = base.config.num_micro_batches
        self.chunks_of: tuple[tuple[int, ...], ...] = chunks_of_ranks(schedule, self.pp, virtual_stages)
        self.kept = kept
        self.cuts: tuple[tuple[int, ...], ...] = (
            (stages,) if stages else even_cuts(least.seconds, self.pp, virtual_stages)
        )
        self._found: Cut | None = None
        # the least recompute that fits the device does not fit the host; so for activations alone, whatever is added
        self._host_binds = self._host_lacks = False
        self._free_s: float | None = None
        self._lacking: tuple[int, tuple[int, ...]] | None = None  # a rank that lacks memory, of the first cut
        self._ranges: dict[tuple[int, ...], list[range]] = {}
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], _Choices] = {}
        self._steps: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}

    @cached_property
    def pricer(self) -> Pricer:
        """Prices at the candidate's degrees and schedule."""
        return self.plain.pricer.under(self.schedule, self.virtual_stages)

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """The cut that is fastest with unlimited memory."""
        if self.kept is not None:
            return self.kept.chunks
        return fastest(self.cuts, lambda cut: self._step_s(cut, (0,) * len(cut)), self._quick_bound_s)

    def _step_s(self, cut: tuple[int, ...], recompute: tuple[int, ...]) -> float:
        """Return the simulated step; each is simulated once."""
        if (cut, recompute) not in self._steps:
            self._steps[cut, recompute] = self.pricer.step_s(cut, recompute)
        return self._steps[cut, recompute]

    def quick_bound_s(self) -> float:
        """Return a lower bound on the step time that ignores memory (see the module)."""
        return min(self._quick_bound_s(cut) for cut in self.cuts)

    def _quick_bound_s(self, cut: tuple[int, ...]) -> float:
        kinds = self.plain.pricer.workload.unit_kinds
        paths = rank_paths(self.schedule, self.pp, self.virtual_stages, self.m, cut, kinds)
        each, waits = paths.seconds(self.plain.passes)
        return float((self.m * each + waits).max()) * _CLOSE + self.plain.after_s

    def bound_s(self, cutoff_s: float = math.inf) -> float:
        """Return the step time in seconds, inf if nothing fits; from `cutoff_s` on perhaps only a lower bound of it."""
        if self._found is None and self.kept is not None and self.kept.free_bound_s() >= cutoff_s:
            return self.kept.free_bound_s()
        if self._found is None and self.kept is None and not self._may_fit_at(self._seldom_fit):
            self._found = _NOTHING
        if self._found is None and cutoff_s < math.inf:
            free = self.free_bound_s()
            if free >= cutoff_s:
                return free
        return self.search().step_s

    def search(self, cutoff_s: float = math.inf, max_evaluated: int = 1) -> Cut:
        """Return the plan, if it fits and is below `cutoff_s`."""
        if self._found is None:
            recompute = self._least_recompute()
            if recompute is None:
                self._found = _NOTHING
            else:
                step = self._step_s(self.chunks, recompute)
                self._found = Cut(self.chunks, recompute, step, step, True)
        found = self._found
        if found.step_s < cutoff_s or found.chunks is None:
            return found
        return Cut(None, (), math.inf, found.step_s, True)

    def less_on_host_s(self) -> float:
        """Return a lower bound of the step with less state on the host, and activations there as here; 0 if unknown.

        No less is recomputed then, so no action is shorter but for gradients of weights: those of a recomputed layer
        come with the others. Moving the state takes what it does not take here or without offload. From ZeRO 2 on
        passes move it, too.
        """
        found, kept = self._found, self.kept
        if found is None or found.chunks is None or kept is None or self._host_binds:
            return 0.0
        mine, other = self.pricer, kept.pricer
        if mine.config.zero_stage > 1 or (mine.forward, mine.backward) != (other.forward, other.backward):
            return 0.0
        times = mine.chunk_times(found.chunks, found.recompute, "mid")
        if SCHEDULES[self.schedule].split_backward:
            times = [replace(t, backward_s=t.backward_s - t.weight_s, weight_s=0.0, split_extra_s=0.0) for t in times]
        ranges = self._ranges_of(found.chunks)
        units = [[u for k in chunks for u in ranges[k]] for chunks in self.chunks_of]
        after = [[p.after_pipeline(some, "mid") for p in (mine, other)] for some in units]
        least = [AfterPipeline(*map(min, *both)) for both in after]
        return step_of(mine.timeline(found.chunks, times, "mid").rank_end_s, least, mine.fixed_s)

    def binds(self, limit_s: float) -> bool:
        """Return False if the candidate fits without recompute beyond the pinned one (see `Cutter.binds`)."""
        found = self.search()
        return found.chunks is None or (self.fixed is None and any(found.recompute))

    def free_bound_s(self) -> float:
        """Return the step time with unlimited memory, which offloading cannot beat either."""
        if self.kept is not None:
            return self.kept.free_bound_s()
        if self._free_s is None:
            costs, split = self.pricer.costs, SCHEDULES[self.schedule].split_backward
            walks = costs.overhead_s("split_layer_s") or costs.host_fixed_s("split_layer_s").mid
            if split and walks:  # recomputed layers do not have it
                self._free_s = self.quick_bound_s()
            else:
                self._free_s = self._step_s(self.chunks, self._pinned())
        return self._free_s

    @property
    def known_free_s(self) -> float:
        """The step time with unlimited memory, if it was simulated; else 0."""
        return (self.kept.known_free_s if self.kept is not None else self._free_s) or 0.0

    def _pinned(self) -> tuple[int, ...]:
        """Return the pinned steps along the recompute frontier of every chunk; zeros if recompute is searched."""
        out = [0] * len(self.chunks)
        for mine in self.chunks_of:
            for k, count in zip(mine, self._choices(mine, self.chunks).of(0), strict=True):
                out[k] = count
        return tuple(out)

    def _least_recompute(self) -> tuple[int, ...] | None:
        """Return recomputed layers per chunk: on every rank the least number that fits; None if none does.

        The more is recomputed, the less is kept. A rank mostly needs as much as the one before: the search starts there
        and moves away in steps that double.
        """
        if self.plain.mix is not RecomputeMix.ANY and self.fixed is None:
            return self._least_alike()
        out, cut = [0] * len(self.chunks), self.chunks
        near: int | None = None
        for rank, mine in enumerate(self.chunks_of):
            choices = self._choices(mine, cut)
            least = self._least_of(rank, choices, cut, near)
            if least is None:
                return None
            for k, count in zip(mine, choices.of(least), strict=True):
                out[k] = count
            near = least
        return tuple(out)

    def _least_alike(self) -> tuple[int, ...] | None:
        """Return recomputed layers per chunk: the least number that fits on every rank, in chunks that have as many."""
        cut = self.chunks
        ranges, height = self._ranges_of(cut), self.pricer.frontier.height
        most = [height(units) for units in ranges]
        for number in alike_numbers(self.plain.mix, 0, max(most)):
            steps = [min(number, each) for each in most]
            on_device = all(fits_device(self.pricer, self.room, rank, ranges, steps) for rank in range(self.pp))
            if on_device and all(fits_host(self.pricer, self.room, rank, ranges, steps) for rank in range(self.pp)):
                return tuple(steps)
            self._host_binds |= on_device
        return None

    def _least_of(self, rank: int, choices: _Choices, cut: tuple[int, ...], near: int | None = None) -> int | None:
        """Return the fewest steps with which a rank fits its device and the host; None if it does not.

        Args:
            near: where to look first; None: as bytes without and with the most recompute suggest.
        """
        near = self._guess(rank, choices, cut) if near is None else near
        fits = functools.partial(self._fits, rank, choices, cut)
        least = _first_true(choices.most, near, fits)
        if least is None and fits(choices.last[-1]):
            least = _first_true(choices.last[-1], near, fits)
        while least is not None and not self._fits_host(rank, choices, cut, least):
            self._host_binds = True
            if least == choices.most or (self.fixed is None and self.pricer.frontier.stays_on_host):
                tried, p = self._tried(rank, choices.of(least), cut), self.pricer
                _, activations = p.memory.host_bytes(rank, *tried, p.pinned_recompute, self.room.guard)
                self._host_lacks = activations > self.room.host_bytes and p.config.zero_stage < 3
                return None
            least += 1  # recomputed activations are not on the host
        return least

    def _guess(self, rank: int, choices: _Choices, cut: tuple[int, ...]) -> int:
        """Return about how many steps a rank needs to fit its device, if every step frees as much."""

        def lacks(number: int) -> float:
            tried = self._tried(rank, choices.of(number), cut)
            return device_bytes(self.pricer, self.room, rank, *tried) - self.room.device_bytes

        if not choices.most or (without := lacks(0)) <= 0 or (least := lacks(choices.most)) >= without:
            return 0
        return math.ceil(min(1.0, without / (without - least)) * choices.most)

    def _fits(self, rank: int, choices: _Choices, cut: tuple[int, ...], number: int) -> bool:
        """Return True if a rank fits its device after `number` steps."""
        return fits_device(self.pricer, self.room, rank, *self._tried(rank, choices.of(number), cut))

    def _fits_host(self, rank: int, choices: _Choices, cut: tuple[int, ...], number: int) -> bool:
        """Return True if a rank fits the host after `number` steps."""
        return fits_host(self.pricer, self.room, rank, *self._tried(rank, choices.of(number), cut))

    def lacks_with_less_on_host(self, found: Shortage) -> str | None:
        """Return the term that does not fit with less of the state on the host either; None if that may fit.

        With less there no less has to be recomputed. So if no cut fits the device, whatever is recomputed, or if the
        activations alone do not fit the host, they do not then. (ZeRO 3 on the host may change which choice is next.)

        Args:
            found: how far this candidate is from fitting.
        """
        if self._host_lacks:
            return found.term
        return None if self._may_fit else found.on_device

    @cached_property
    def _may_fit(self) -> bool:
        """False if none of the cuts fits, whatever is recomputed; no step is simulated for it."""
        return self._may_fit_at(sorted(range(self.pp), key=lambda r: (r not in self._seldom_fit, r)))

    @property
    def _seldom_fit(self) -> tuple[int, ...]:
        """The ranks that most often lack memory."""
        return tuple(dict.fromkeys((0, self.pp // 2, self.pp - 1)))

    def _may_fit_at(self, ranks: Sequence[int]) -> bool:
        """Return False if under each of the cuts one of these ranks does not fit, whatever is recomputed."""
        cuts = self.cuts if self.kept is None else (self.chunks,)
        for cut in cuts:
            lacking = next((rank for rank in ranks if not self._with_most(rank, cut)), None)
            if lacking is None:
                return True
            self._lacking = self._lacking or (lacking, cut)
        return False

    def _with_most(self, rank: int, cut: tuple[int, ...]) -> bool:
        """Return True if a rank fits with the most recompute, or with a step less (`_Choices.last`)."""
        choices = self._choices(self.chunks_of[rank], cut)
        return any(self._fits(rank, choices, cut, number) for number in choices.last)

    def _choices(self, mine: Sequence[int], cut: tuple[int, ...]) -> _Choices:
        """Return the steps along the recompute frontier for the chunks of a rank."""
        key = tuple(mine), cut
        found = self._known.get(key)
        if found is None:
            ranges, height = self._ranges_of(cut), self.pricer.frontier.height
            most = tuple([height(ranges[k]) for k in mine])  # the chunk's layers if recompute is not searched
            if self.fixed is None:
                found = _Choices(most)
            elif self.fixed == FULL:
                found = _Choices((), most)
            else:
                again = self.pricer.pinned_recompute
                found = _Choices((), tuple(sum(u in again for u in ranges[k]) for k in mine))
            self._known[key] = found
        return found

    def _ranges_of(self, cut: tuple[int, ...]) -> list[range]:
        """Return `ranges_of` a cut, made once."""
        found = self._ranges.get(cut)
        if found is None:
            found = self._ranges[cut] = ranges_of(cut)
        return found

    def _tried(self, rank: int, counts: Sequence[int], cut: tuple[int, ...]) -> tuple[list[range], list[int]]:
        """Return the units of every chunk of a cut, and the steps of every chunk with `counts` on those of a rank."""
        tried = [0] * len(cut)
        for k, count in zip(self.chunks_of[rank], counts, strict=True):
            tried[k] = count
        return self._ranges_of(cut), tried

    def _memory(self, rank: int, counts: Sequence[int], cut: tuple[int, ...]) -> RankMemory:
        return self.pricer.memory.rank(rank, *self._tried(rank, counts, cut), self.pricer.pinned_recompute)

    def shortage(self) -> Shortage:
        """Return how far the most even cut is from fitting with the most recompute.

        It is the shortage of the rank that lacks most, of those that fit under no choice, if there are some.
        """
        cut, ranks = self.cuts[0], range(self.pp)
        short = [r for r in ranks if self._least_of(r, self._choices(self.chunks_of[r], cut), cut) is None]
        return worst_of([self._shortage(rank, cut) for rank in short or ranks])

    def any_shortage(self) -> Shortage:
        """Return the shortage of one rank, perhaps not the largest."""
        if self._lacking is not None and not self._may_fit:
            return self._shortage(*self._lacking)
        cut = self.cuts[0]
        for rank, mine in enumerate(self.chunks_of):
            if self._least_of(rank, self._choices(mine, cut), cut) is None:
                return self._shortage(rank, cut)
        return self.shortage()

    def _shortage(self, rank: int, cut: tuple[int, ...]) -> Shortage:
        choices = self._choices(self.chunks_of[rank], cut)
        return shortage_of(rank, [self._memory(rank, choices.of(choices.most), cut)], self.room)
