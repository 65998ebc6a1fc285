"""The windows of a pipeline: for every stage and every range of units that it may hold, its seconds, if they fit.

They are the arrays that `Cutter` searches cuts in: T of a stage with units i .. j - 1, with the least recompute that
fits, and the bounds over all ways to cut what is left (autoplan.search.cuts). They may take megabytes per candidate,
which a cutter gives up when its candidate is decided.

Every stage has at least one unit. So of n units, stage s of p begins at one of the n - p + 1 units s .. s + n - p, and
ends behind one of them. Arrays by stage count units from there: [s, a, b] is stage s with units s + a .. s + b. The
stage behind it begins at unit s + b + 1, its own b-th.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from autoplan.config.recompute import FULL, NONE, SELECTIVE
from autoplan.cost_models.arrays import Array
from autoplan.cost_models.memory.room import Room
from autoplan.cost_models.time.price import Pricer

CLOSE = 1e-9  # relative: equal within rounding


class Windows:
    """The windows of one candidate.

    Args:
        pricer, room, recompute, stages: as for `Cutter`.
        time: prefix sums over units of the seconds of a forward and a backward.
        stage_s: seconds that every stage takes besides for each micro-batch.
        below_s: only cuts with a step below this matter, without the seconds after the pipeline. The memory of stages
            that none of them has is not looked at: most, where the limit is near the best step.

    Attributes:
        each, free: T of every stage, with the memory there is and with unlimited memory; inf where units do not fit, of
            `each` also where no cut below the limit has the stage.
        waits: D of every stage (see `autoplan.search.cuts`).
        once_s: seconds once per step of every stage.
        reach: by stage the least steps on the recompute frontier with which units may fit, if recompute is searched.
        most_on_host: the most bytes on the host of any window.
    """

    def __init__(
        self,
        pricer: Pricer,
        room: Room,
        recompute: str | Mapping[str, str] | None,
        stages: tuple[int, ...] | None,
        time: Array,
        stage_s: float,
        below_s: float = math.inf,
    ) -> None:
        self.below_s = below_s
        self.pricer = pricer
        self.room = room
        self.fixed = recompute
        self.pinned = stages
        self.time = time
        self.stage_s = stage_s
        self.pp: int = pricer.config.pp
        self.m: int = pricer.config.num_micro_batches
        self.num_units: int = pricer.num_units
        # per rung of the frontier, prefix sums over units of steps, of bytes freed and of seconds
        rungs = pricer.frontier.rungs if recompute is None else ()
        self.steps: list[NDArray[np.int64]] = [
            np.concatenate([[0], np.cumsum([c is not None for c in r.choices])]) for r in rungs
        ]
        self.gains: list[Array] = [prefix(np.array(r.freed_bytes)) for r in rungs]
        self.costs: list[Array] = [prefix(np.array(r.recompute_s)) for r in rungs]
        self.recompute_s: Array = prefix(np.array(pricer.recompute_s))
        self._i, self._j = _ends(self.num_units)
        memory = pricer.memory
        # only the last unit's: before an earlier unit runs its backward, later ones are freed
        least = np.minimum(memory.transient, memory.recompute_transient)
        self._transient: Array = np.concatenate([[0.0], least])
        self._forward = prefix(np.array(pricer.forward))
        n = self.num_units
        i, j = self._i, self._j

        def window(values: Sequence[float]) -> Array:
            return between_ends(prefix(np.array(values)))

        ends = memory.ends.beyond(self._choices())
        state = window(memory.stored) + window(memory.states) + self.room.bytes_of(memory.fixed)
        gathered, self._grads = window(memory.gathered), window(memory.grads)
        self._on_host = window(memory.hosted)
        for tied in memory.tied:  # a stage with both units holds the parameter once
            both, once = (i <= tied.first) & (j > tied.last), tied.states
            state, gathered = state - both * (once.stored + once.optimizer), gathered - both * once.gathered
            self._grads = self._grads - both * once.gradients
            self._on_host = self._on_host - both * once.host
        self.most_on_host: float = float(self._on_host.max())
        if not (memory.sharded and pricer.config.zero_stage == 3):
            state = state + gathered
        self._state = state
        self._held = window(memory.saved) + pricer.workload.free_saved + ends.received[:, None] + ends.sent[None, :]
        if pricer.workload.shared:
            self._held = self._held + np.array(
                [[memory.held_once(a, b) if a < b else 0.0 for b in range(n + 1)] for a in range(n + 1)]
            )
        freed = zip(memory.saved, memory.kept, pricer.workload.layers, strict=True)
        self._gain = prefix(np.array([s - k if layer else 0.0 for s, k, layer in freed]))
        self.once_s: Array = by_stage(self._moved_once(), self.pp)
        self.free: Array = self._free()

    @classmethod
    def joined(cls, parts: Sequence[Windows], part_of: Sequence[int]) -> Windows:
        """Return the windows of a pipeline whose stages are priced by different parts, such as pools of devices.

        Args:
            parts: windows of the same cuts, each with other prices or memory.
            part_of: the part of every stage.
        """
        out, stages = copy.copy(parts[0]), list(enumerate(part_of))
        out.each, out.free = (np.array([getattr(parts[p], name)[s] for s, p in stages]) for name in ("each", "free"))
        out.once_s = np.minimum.reduce([part.once_s for part in parts])
        out._least_sum = float(out.least_rest(out.each, np.add)[0][0])
        out.waits = np.array([parts[p].waits[s] + (out._least_added - parts[p]._least_added) for s, p in stages])
        return out

    # With unlimited memory a candidate needs none of this.

    @cached_property
    def each(self) -> Array:
        """T of every stage with the memory there is."""
        return self._limited[0]

    @cached_property
    def reach(self) -> NDArray[np.int64]:
        """The least steps on the recompute frontier with which a stage may fit."""
        return self._limited[1]

    @cached_property
    def waits(self) -> Array:
        """D of every stage."""
        return self._waiting(*self._active)

    @cached_property
    def _limited(self) -> tuple[Array, NDArray[np.int64]]:
        return self._seconds(*self._active)

    @cached_property
    def _least_sum(self) -> float:
        """The least sum of all T over all cuts."""
        return float(self.least_rest(self.each, np.add)[0][0])

    @property
    def _least_added(self) -> float:
        """The least sum of all T as D adds it; 0 if nothing fits."""
        return self._least_sum if math.isfinite(self._least_sum) else 0.0

    def _moved_once(self) -> Array:
        """Return the seconds of ZeRO's transfers once per step that nothing hides, by stage (as in `Pricer.step_s`)."""
        pricer, i, j = self.pricer, self._i, self._j
        if pricer.chained:
            return np.maximum(between_ends(prefix(np.array(pricer.first) + np.array(pricer.last))), 0.0)
        out = np.zeros((self.num_units + 1, self.num_units + 1))
        for once in pricer.once_s:
            sizes = between_ends(prefix(np.array(once.moved)))
            hidden = between_ends(prefix(np.array(once.computed)) * once.hides)
            later = np.where(i < j, np.concatenate([[0.0], once.moved])[None, :], 0.0)
            shown = np.maximum(sizes - hidden, np.maximum.accumulate(later, axis=1))
            out += shown + pricer.contention * (sizes - shown)
        return np.where(j > i, out, 0.0)

    def least_rest(self, terms: Array, joined: Callable[[Array, Array], Array] = np.maximum) -> list[Array]:
        """Return per stage s and a the least over all ways to cut units s + a .. into the stages s ..

        It is the shortest path in a graph of units by stages. Arrays, because it has an edge for every pair of units.

        Args:
            terms: of every stage.
            joined: the term of a stage together with the least of the stages behind it.
        """
        out = [self._end()]
        for term in terms[::-1]:
            out.append(joined(term, out[-1][None, :]).min(axis=1))
        return out[::-1]

    def _end(self) -> Array:
        """Return what is behind the last stage: 0 behind the last unit."""
        out = np.full(self.num_units - self.pp + 1, math.inf)
        out[-1] = 0.0
        return out

    def runs(self, each: Array) -> list[Array]:
        """Return per stage s and a the least seconds of a step that stages of `each` and those behind them allow."""
        out = [self._end()]
        for own, term in zip((self.m * each + self.once_s)[::-1], each[::-1], strict=True):
            out.append(np.maximum(own, term + out[-1][None, :]).min(axis=1))
        return out[::-1]

    def _free(self) -> Array:
        """Return T of every stage with unlimited memory: with the recompute that is pinned."""
        between = between_ends(self.time) + self.stage_s
        if self.fixed is not None:
            between = between + between_ends(self.recompute_s if self.fixed == FULL else self._repeated())
        received, sent_back = (np.array([of(stage) for stage in range(self.pp)]) for of in (self._received, self._sent))
        at = _first_units(self.num_units, self.pp)
        seconds: Array = by_stage(between, self.pp) + np.take_along_axis(received, at, axis=1)[:, :, None]
        seconds += np.take_along_axis(sent_back, at + 1, axis=1)[:, None, :]
        seconds[illegal_windows(self.num_units, self.pp, self.pinned)] = math.inf
        return seconds

    @cached_property
    def _active(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return stage s and positions a, b of every window that a cut below the limit may have."""
        some = self.m * self.free + self.once_s < self.below_s * (1 + CLOSE)
        if self.below_s < math.inf:
            some = self.between(some)
        s, a, b = np.nonzero(some)
        return s, a, b

    def between(self, some: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return those of some windows from which, with others of them, whole cuts can be made."""
        at = np.arange(self.num_units - self.pp + 1)
        before, after = [at == 0], [at == at[-1]]
        for allowed in some:
            before.append((before[-1][:, None] & allowed).any(axis=0))
        for allowed in some[::-1]:
            after.append((allowed & after[-1][None, :]).any(axis=1))
        after.reverse()
        out: NDArray[np.bool_] = some & np.array(before[:-1])[:, :, None] & np.array(after[1:])[:, None, :]
        return out

    def _seconds(
        self, s: NDArray[np.int64], a: NDArray[np.int64], b: NDArray[np.int64]
    ) -> tuple[Array, NDArray[np.int64]]:
        """Return `each` and `reach` from the windows of all stages, as one array over all of them."""
        memory, i, j = self.pricer.memory, s + a, s + b + 1
        at = i * (self.num_units + 1) + j
        held, state, grads, on_host = (x.ravel()[at] for x in (self._held, self._state, self._grads, self._on_host))
        fits = on_host <= self.room.host_bytes * (1 + CLOSE)
        # bytes that a micro-batch may hold: the first backward allocates gradients, later ones reuse them
        first, later = np.array(memory.flights, dtype=float)[s].T
        share = self.room.bytes_of(memory.per_byte)
        room = self.room.device_bytes - state - share * self._transient[j]
        most = room / (share * first)
        most = np.where(later > 0, np.minimum(most, (room - grads) / (share * np.maximum(later, 1.0))), most)
        if memory.buckets:
            sent = np.minimum(float(memory.buckets), grads)
            fits &= state + grads + sent <= self.room.device_bytes * (1 + CLOSE)
        seconds = self.free[s, a, b]
        reach = np.zeros(self.free.shape if self.fixed is None else (0,), dtype=np.int64)
        if self.fixed is None:
            added, steps, missing = self._down(i, j, np.maximum(0.0, held - most) * (1 - CLOSE))
            fits &= missing <= 0
            reach[s, a, b], seconds = steps, seconds + added
        elif self.fixed == FULL:
            fits &= held - (self._gain[j] - self._gain[i]) <= most + CLOSE * self.room.device_bytes
        else:
            freed = self._freed()
            keep = held - freed[j] + freed[i]
            fits &= keep <= most + CLOSE * self.room.device_bytes
        each = np.full(self.free.shape, math.inf)
        each[s, a, b] = np.where(fits, seconds, math.inf)
        return each, reach

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

    def _waiting(self, s: NDArray[np.int64], a: NDArray[np.int64], b: NDArray[np.int64]) -> Array:
        """Return D of every stage (see `autoplan.search.cuts`); inf where T is."""
        each = self.each[s, a, b]
        fits = np.isfinite(each)
        s, a, b, each = s[fits], a[fits], b[fits], each[fits]
        warm = np.array([first for first, _ in self.pricer.memory.flights])[s]
        received = np.array([self._received(stage) for stage in range(self.pp)])
        action = self.stage_s  # an upper bound of the forward's share
        forward = self._forward[s + b + 1] - self._forward[s + a] + received[s, s + a] + action
        out = np.full(self.each.shape, math.inf)
        out[s, a, b] = self._least_added + (self.m - 1) * each - (warm - 1) * forward
        return out

    def _choices(self) -> list[str] | None:
        """Return the pinned recompute choice of every unit; None if it is searched."""
        layers, pinned = self.pricer.workload.layers, self.pricer.pinned_recompute
        if self.fixed is None:
            return None
        if self.fixed == FULL:
            return [FULL if layer else NONE for layer in layers]
        plain = SELECTIVE if self.pricer.config.recompute == SELECTIVE else NONE
        return [pinned.get(u, plain) for u in range(len(layers))]

    def _freed(self) -> Array:
        """Return the prefix sums of the bytes that a pinned mapping frees."""
        m, p = self.pricer.memory, self.pricer
        return prefix(
            np.array([m.saved[u] - m.kept_bytes(u, p.pinned_recompute.get(u, NONE)) for u in range(self.num_units)])
        )

    def _repeated(self) -> Array:
        p = self.pricer
        seconds = [
            p.repeated_s(u, p.pinned_recompute[u]) if u in p.pinned_recompute else 0.0 for u in range(self.num_units)
        ]
        return prefix(np.array(seconds))

    def rest(self, below_s: float = math.inf) -> tuple[list[Array], list[Array]]:
        """Return per stage s and a the least of both bounds over all ways to cut units s + a .. into the stages s ..

        The first bound counts from the start of stage s, the second is that of the whole step.

        Args:
            below_s: use only cuts whose second bound is below this, without the seconds after the pipeline.
        """
        return self.runs(self._below(below_s)), self.least_rest(self.waits)

    def lower_bound_s(self) -> float:
        """Return the stronger of both bounds of the whole pipeline; inf if no cut fits."""
        runs, waits = self.rest()
        return max(float(runs[0][0]), float(waits[0][0]))

    def least_s(self, below_s: float) -> float:
        """Return the first bound of the whole pipeline in `rest`."""
        return float(self.runs(self._below(below_s))[0][0])

    def _below(self, below_s: float) -> Array:
        """Return T of the windows whose second bound is below this; inf for others."""
        if below_s == math.inf:
            return self.each
        return np.where(self.waits < below_s, self.each, math.inf)

    def even(self) -> tuple[int, ...]:
        """Return the cut with the shortest longest stage, from which the search starts, with the one of least bound."""
        best = self.least_rest(self.each)
        chunks, at = [], 0
        for s in range(self.pp):
            last = int(np.argmin(np.maximum(self.each[s][at], best[s + 1])))
            chunks.append(last + 1 - at)
            at = last
        return tuple(chunks)


@lru_cache(maxsize=64)  # candidates that differ in anything else share them
def illegal_windows(num_units: int, num_stages: int, pinned: tuple[int, ...] | None) -> NDArray[np.bool_]:
    """Return by stage, a and b whether no cut has the window of units s + a .. s + b."""
    at, s = np.arange(num_units - num_stages + 1), np.arange(num_stages)[:, None, None]
    legal = np.repeat((at[None, :] >= at[:, None])[None], num_stages, axis=0)
    if pinned is not None:
        ends = np.cumsum(pinned)[:, None, None]
        legal &= (at[None, None, :] + s + 1 == ends) & (at[None, :, None] + s == ends - np.array(pinned)[:, None, None])
    legal[0, 1:] = False
    legal[-1, :, :-1] = False
    out: NDArray[np.bool_] = ~legal
    out.setflags(write=False)
    return out


@lru_cache(maxsize=64)
def _ends(num_units: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return i and j of every window of units i .. j - 1."""
    i, j = np.meshgrid(np.arange(num_units + 1), np.arange(num_units + 1), indexing="ij")
    for each in (i, j):
        each.setflags(write=False)
    return i, j


@lru_cache(maxsize=64)
def _first_units(num_units: int, num_stages: int) -> NDArray[np.int64]:
    """Return the unit s + a by stage and a."""
    out: NDArray[np.int64] = np.arange(num_stages)[:, None] + np.arange(num_units - num_stages + 1)[None, :]
    out.setflags(write=False)
    return out


def between_ends(sums: Array) -> Array:
    """Return sums over units i .. j - 1 by i and j, from prefix sums."""
    return sums[None, :] - sums[:, None]


def by_stage(windows: Array, num_stages: int) -> Array:
    """Return a view of an array by i and j (units i .. j - 1) by stage s, a and b (units s + a .. s + b)."""
    count = len(windows) - num_stages
    row, column = windows.strides
    shape, strides = (num_stages, count, count), (row + column, row, column)
    return as_strided(windows[:, 1:], shape=shape, strides=strides, writeable=False)


def prefix(values: Array) -> Array:
    """Return prefix sums: of n values n + 1 sums, from 0 on."""
    return np.concatenate([[0.0], np.cumsum(values)])
