"""Lower bounds of the memory of the fullest rank. They cost microseconds where a `MemoryModel` costs milliseconds.

Without a cut and a schedule (`terms`): all ranks of a pipeline together hold every parameter with its state, and at
some moment the activations of one micro-batch on all of their layers. The fullest rank holds at least its share.

With a cut (`cut_terms`): every rank holds the states of its units, and the activations of as many micro-batches of each
of its chunks as when it holds most of them, each unit under the recompute choice that keeps least. While a unit runs
backward it needs more, the more the less it kept: the one that runs has the choice that is best for both.

Over all cuts of one chunk per rank (`no_cut_fits`): let rank s hold w_s micro-batches, and unit u need S_u bytes of
states and A_u of activations. If all ranks fit into C bytes, then for any weights y_s > 0

    sum_s y_s C  >=  sum_s y_s (sum of S_u + w_s A_u over the units of s)  >=  sum_u min_s y_s (S_u + w_s A_u)

The weights are 1 / (S + w_s A), with S and A the sums over all units: those that are tight if all units are equal.

With one micro-batch and one stage per rank, gradients appear while activations go, and do not count; with several
stages per rank they count, and what ZeRO 1 and 2 gather counts, if all of it is there at the last moment at which a
rank holds most. With stages in both directions the
two stages of a rank may hold activations at different moments, which do not count either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from autoplan.config.offload import ACTIVATIONS
from autoplan.config.parallel import Mode, ParallelConfig, RunOptions, scatters_each
from autoplan.config.precision import Precision
from autoplan.config.recompute import FULL, NONE, SELECTIVE, Searched, recompute_kind
from autoplan.cost_models.arrays import Array
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.memory.allocator import HOST_NEED, activation_need
from autoplan.cost_models.memory.communicators import FixedMemory
from autoplan.cost_models.memory.parameters import ParameterMemory, States, stores_8_bits
from autoplan.cost_models.memory.ranks import CONTEXT
from autoplan.cost_models.memory.room import Room
from autoplan.cost_models.memory.stage_ends import Beyond, StageEnds
from autoplan.cost_models.work import ParameterKind, ParamWork, Workload
from autoplan.schedules.schedule import (
    SCHEDULES,
    HeldRow,
    actions,
    chunks_of_ranks,
    num_copies,
    ranks_of_chunks,
    settled,
)
from autoplan.units import ORDER_OF_SUMS

_CLOSE = 1 + ORDER_OF_SUMS
_STATES = ("parameters", "gathered parameters", "gradients", "optimizer")


class LeastMemory:
    """The bound of the module for one workload at many degrees.

    Args:
        on_host: layers may keep their activations on the host also where a configuration does not offload them: it is
            pinned as their recompute choice.
        last: recompute is searched, and a candidate with given cuts has to fit under the last choice of its frontier
            (`autoplan.search.interleaved_cuts`).
    """

    def __init__(
        self,
        workload: Workload,
        precision: Precision,
        cluster: Cluster,
        mode: Mode,
        options: RunOptions,
        on_host: bool = True,
        last: bool = False,
    ) -> None:
        self.precision = precision
        self.cluster = cluster
        self.megatron: bool = mode is Mode.FUSED
        self.options = options
        self.narrow: bool = stores_8_bits(cluster.device, mode, options)
        self._need = activation_need(cluster, options)
        self._fixed = FixedMemory(workload, cluster)
        by_unit = _elements(workload)
        self.elements: Counter[ParameterKind] = Counter()
        for found in by_unit:
            self.elements.update(found)
        kinds = tuple(self.elements)
        self._units = np.array([[float(found[kind]) for kind in kinds] for found in by_unit])
        # under choices of recompute, without those on the host where a configuration does not offload activations
        self._choices = {there: _Choices.of(workload, on_host or there) for there in (False, True)}
        self._last = dict(self._choices)
        if last:  # with activations on the host, the last layer to go there may need more in its backward than it frees
            self._last[False] = _Choices.last_of(workload, mode is Mode.EAGER)
        self.kept: Array = self._choices[False].least
        self.activations: int = sum(self.kept.tolist())
        self.free_saved: float = workload.free_saved
        self.moved_to_host: Array = _moved(workload)
        self._transient = np.minimum(workload.unit_transient, workload.unit_recompute_transient)
        self.ends: Beyond = StageEnds(workload, sends=not self.megatron).beyond()
        blocks = [Counter[ParameterKind]() for _ in workload.blocks]
        for mine, block in zip(blocks, workload.blocks.values(), strict=True):
            for p in block.params:
                mine[p.kind] += p.num_elements
        self._block_elements = np.array([[float(mine[kind]) for kind in kinds] for mine in blocks])
        at = {name: i for i, name in enumerate(workload.blocks)}
        distinct = {unit: k for k, unit in enumerate(dict.fromkeys(workload.units))}
        self._kinds_of_units = [[at[name] for name in unit] for unit in distinct]
        self._unit_kinds = [distinct[unit] for unit in workload.units]
        self._buffers: dict[object, tuple[float, float]] = {}
        self._states: dict[object, States] = {}
        self._keys: dict[object, tuple[object, ...]] = {}
        self._each: dict[object, Array] = {}
        self._ranks: dict[object, Array] = {}
        self._active: dict[object, Array] = {}
        self._rank_buffers: dict[object, Array] = {}
        self._unit_states: dict[object, Array] = {}
        self._host_states: dict[object, Array] = {}

    def terms(self, config: ParallelConfig, room: Room) -> Mapping[str, float]:
        """Return the bytes of the terms that have to fit into the fullest rank, at least."""
        c = config
        states, share = self._total(c), num_copies(c.schedule) / c.pp
        once = num_copies(c.schedule) == 1 and ACTIVATIONS not in c.offload
        held = self.activations / c.pp if once else 0.0
        gathered, scattered = self.least_buffers(c)
        return {
            "parameters": states.stored * share,
            "gathered parameters": states.gathered * share if self._gathers_all(c) else gathered,
            "gradients": (states.gradients * share if self._whole(c) else 0.0) + scattered,
            "optimizer": states.optimizer * share,
            "activations": held * room.bytes_of(self._need),
            CONTEXT: self.fixed_bytes(c, room),
        }

    def shortage(self, config: ParallelConfig, room: Room, cuts: Sequence[tuple[int, ...]] | None = None) -> str | None:
        """Return the largest term of a configuration that cannot fit; None if it may.

        Args:
            cuts: units per chunk, all that there are; None: any cut into one chunk per rank.
        """
        on_host = self._total(config).host * num_copies(config.schedule) / config.pp
        if on_host > room.host_bytes * _CLOSE:
            return "state on the host"
        terms = self.terms(config, room)
        if sum(terms.values()) > room.device_bytes:
            return max(terms, key=lambda name: terms[name])
        if num_copies(config.schedule) > 1:
            return None
        if cuts is None:
            single = config.virtual_stages == 1
            return "activations" if single and self.no_cut_fits(config, room) else None
        for cut in cuts:
            terms = self.cut_terms(config, room, cut)
            if sum(terms.values()) <= room.device_bytes * _CLOSE:
                return None
        return max(terms, key=lambda name: terms[name])

    def _whole(self, config: ParallelConfig, most: MostHeld | None = None) -> bool:
        """Return True if all gradients of a rank exist while it holds most activations, or at given moments."""
        c = config
        if self.megatron and c.zero_stage < 2:
            return True
        most = most or most_held(c.schedule, c.pp, c.num_micro_batches, c.virtual_stages)
        return most.meet if num_copies(c.schedule) > 1 else most.with_gradients

    def _gathers_all(self, config: ParallelConfig, most: MostHeld | None = None) -> bool:
        """Return True if a rank has gathered all of its parameters while it holds most activations, likewise."""
        c = config
        if c.zero_stage == 3 or self.megatron:
            return c.zero_stage < 3
        most = most or most_held(c.schedule, c.pp, c.num_micro_batches, c.virtual_stages)
        return most.meet if num_copies(c.schedule) > 1 else most.of_all

    def cut_terms(self, config: ParallelConfig, room: Room, chunks: Sequence[int]) -> Mapping[str, float]:
        """Return the bytes of the terms that have to fit into the fullest rank with these units per chunk, at least.

        The schedule has one copy of every stage.
        """
        c = config
        most = most_held(c.schedule, c.pp, c.num_micro_batches, c.virtual_stages)
        found = [self._terms_at(m, c, room, chunks) for m in (most, most.steady) if m is not None]
        return max(found, key=lambda terms: sum(terms.values()))

    def _terms_at(
        self, most: MostHeld, config: ParallelConfig, room: Room, chunks: Sequence[int]
    ) -> Mapping[str, float]:
        """Return the terms of `cut_terms` at the moments of `most`."""
        c = config
        key = (c.schedule, c.pp, c.virtual_stages, chunks)
        if key not in self._ranks:
            home = np.array(ranks_of_chunks(c.schedule, c.pp, c.virtual_stages))
            elements: Array = np.zeros((c.pp, self._units.shape[1]))
            np.add.at(elements, np.repeat(home, chunks), self._units)
            self._ranks[key] = elements
        states = self._ranks[key] @ self._bytes_each(c, most).T
        if c.zero_stage >= 2:
            held = c.zero_stage == 3, scatters_each(c, self.options) and self._whole(c, most)
            states[:, 1:3] += self._buffers_of_ranks(c, key) * held
        active = self._active_bytes(most, c, chunks) * room.bytes_of(self._need)
        fullest = int(np.argmax(states.sum(axis=1) + active))
        found = dict(zip(_STATES, states[fullest].tolist(), strict=True))
        fixed = self.fixed_bytes(c, room)
        return found | {"activations": float(active[fullest]), CONTEXT: fixed}

    def _buffers_of_ranks(self, config: ParallelConfig, cut: tuple[str, int, int, Sequence[int]]) -> Array:
        """Return both sizes of `least_buffers` (columns) on every rank of a cut, a key of `_ranks`."""
        key = (*cut, *self._key(config))
        if key not in self._rank_buffers:
            each = self._buffers_each(config)
            blocks = self._block_elements @ each.T
            largest = np.array([blocks[unit].max(axis=0) for unit in self._kinds_of_units])[self._unit_kinds]
            home = np.repeat(ranks_of_chunks(*cut[:3]), cut[3])
            found: Array = np.zeros((cut[1], 2))
            np.maximum.at(found, home, largest)
            found[:, 0] = np.minimum(self._ranks[cut] @ each[0], 2 * found[:, 0])
            self._rank_buffers[key] = found
        return self._rank_buffers[key]

    def _memory(self, config: ParallelConfig) -> ParameterMemory:
        return ParameterMemory(config, self.precision, self.megatron, self.options, self.narrow)

    def _buffers_each(self, config: ParallelConfig) -> Array:
        """Return the bytes per element of gathered parameters and of whole gradients (rows), by kind of parameter."""
        memory = self._memory(config)
        found = [memory.of(ParamWork("", 1, *kind)) for kind in self.elements]
        return np.array([[s.gathered for s in found], [s.whole for s in found]])

    def _active_bytes(self, most: MostHeld, config: ParallelConfig, chunks: Sequence[int]) -> Array:
        """Return by rank the activations, held and transient, at the moments of `most`."""
        c, any_cut = config, SCHEDULES[config.schedule].windows
        choices = (self._choices if any_cut else self._last)[ACTIVATIONS in c.offload]
        fewer = settled(c.schedule, c.pp, c.num_micro_batches, c.virtual_stages)
        key = (c.schedule, c.pp, c.virtual_stages, chunks, fewer, ACTIVATIONS in c.offload, most.steady is None)
        if key not in self._active:
            ends = np.cumsum(chunks)
            kept = np.diff(np.concatenate([[0.0], np.cumsum(choices.least)])[[0, *ends]])
            home = np.array(ranks_of_chunks(c.schedule, c.pp, c.virtual_stages))
            turns, firsts = np.concatenate([[False], home[1:] == home[:-1]]), ends - chunks
            crosses = np.where(turns, self.ends.turned[firsts], self.ends.received[firsts]) + self.ends.sent[ends]
            active = np.zeros(c.pp)
            np.add.at(active, home, most.held * (kept + crosses + self.free_saved))
            for rank, chunk in enumerate(most.running.tolist()):
                units = slice(ends[chunk] - chunks[chunk], ends[chunk])
                active[rank] += choices.beyond(float(most.held[chunk]), units)
            self._active[key] = active
        return self._active[key]

    def no_cut_fits(self, config: ParallelConfig, room: Room) -> bool:
        """Return True if no cut into one chunk per rank fits, whatever is recomputed."""
        c, need, choices = config, self.need_bytes(room), self._choices[ACTIVATIONS in config.offload]
        held = most_held(c.schedule, c.pp, c.num_micro_batches, 1).held
        states = self.unit_states(c)
        # a unit that makes what another one keeps, in place of what it would keep itself, counts below 0
        weights = 1.0 / np.maximum(states.sum() + need * choices.least.sum() * held + 1.0, 1.0)
        units = (weights * (states[:, None] + need * choices.least[:, None] * held)).min(axis=1)
        rest = room.device_bytes - self.fixed_bytes(c, room) - sum(self.least_buffers(c))
        beyond = np.array([choices.least_beyond(number) for number in held.tolist()])
        return bool(units.sum() > (weights * (rest - need * (self.free_saved * held + beyond))).sum() * _CLOSE)

    def unit_states(self, config: ParallelConfig) -> Array:
        """Return the bytes of parameters, gradients and optimizer state of every unit at its rank's fullest moment."""
        each = self._bytes_each(config)
        if id(each) not in self._unit_states:
            self._unit_states[id(each)] = self._units @ each.sum(axis=0)
        return self._unit_states[id(each)]

    def unit_host_states(self, config: ParallelConfig) -> Array:
        """Return the bytes of parameters, gradients and optimizer state of every unit in host memory."""
        if not config.offload:
            return np.zeros(len(self._units))
        key = self._key(config)
        if key not in self._host_states:
            memory = self._memory(config)
            each = np.array([memory.of(ParamWork("", 1, *kind)).host for kind in self.elements])
            self._host_states[key] = self._units @ each
        return self._host_states[key]

    def fullest_has(self, config: ParallelConfig) -> tuple[bool, bool]:
        """Return if a rank has whole gradients, and gathered parameters, of all its units while it holds most."""
        return self._whole(config), self._gathers_all(config)

    def least_buffers(self, config: ParallelConfig) -> tuple[float, float]:
        """Return the bytes of gathered parameters (ZeRO 3) and of gradients to be scattered (2 and 3) on any rank.

        A rank holds them at its fullest moment: those of its largest block, of parameters twice.
        """
        c = config
        if c.zero_stage < 2:
            return 0.0, 0.0
        key = self._key(c)
        if key not in self._buffers:
            blocks = self._block_elements @ self._buffers_each(c).T
            units = [blocks[unit].T for unit in self._kinds_of_units]
            twice = (min(gathered.sum(), 2 * gathered.max()) for gathered, _ in units)
            self._buffers[key] = float(min(twice)), float(min(whole.max() for _, whole in units))
        gathered, whole = self._buffers[key]
        scattered = scatters_each(c, self.options) and self._whole(c)
        return (gathered if c.zero_stage == 3 else 0.0), (whole if scattered else 0.0)

    def need_bytes(self, room: Room) -> float:
        """Return the bytes that have to fit for a byte of activations."""
        return room.bytes_of(self._need)

    def host_need_bytes(self, room: Room) -> float:
        """Return the bytes that have to fit the host for a byte of activations there."""
        return room.bytes_of(HOST_NEED)

    def fixed_bytes(self, config: ParallelConfig, room: Room) -> float:
        """Return the bytes that a process needs before it makes a tensor."""
        return room.bytes_of(self._fixed.of(config))

    @cached_property
    def least_transient(self) -> float:
        """The fewest transient bytes of a unit's backward."""
        return float(self._transient.min())

    @cached_property
    def transient_before(self) -> Array:
        """By end of a stage (how many units are before it) the transient bytes of the backward of the unit before."""
        return np.concatenate([[0.0], self._transient])

    def _bytes_each(self, config: ParallelConfig, most: MostHeld | None = None) -> Array:
        """Return the bytes per element of the terms of states (rows), by kind of parameter, at the moments of `most`.

        By default these are the moments at which the ranks hold most.
        """
        c, gathered, whole = config, self._gathers_all(config, most), self._whole(config, most)
        key = (*self._key(c), whole, gathered)
        if key not in self._each:
            memory = self._memory(c)
            found = [memory.of(ParamWork("", 1, *kind)) for kind in self.elements]
            rows = [(s.stored, s.gathered * gathered, s.gradients * whole, s.optimizer) for s in found]
            self._each[key] = np.array(rows).T
        return self._each[key]

    def _key(self, config: ParallelConfig) -> tuple[object, ...]:
        """Return the values that the bytes per element of a parameter depend on, as a key."""
        c = config
        degrees = c.dp, c.cp, c.tp, c.ep, c.etp, c.zero_stage, c.zero_replicas, num_copies(c.schedule), c.offload
        key = (*degrees, c.num_micro_batches == 1)
        if key not in self._keys:
            shares = self._memory(c).shares
            self._keys[key] = (*shares.values(), c.zero_stage, c.offload, c.num_micro_batches == 1)
        return self._keys[key]

    def _total(self, config: ParallelConfig) -> States:
        key = self._key(config)
        if key not in self._states:
            memory = self._memory(config)
            parts = (ParamWork("", n, *kind) for kind, n in self.elements.items())
            self._states[key] = States.total(map(memory.of, parts))
        return self._states[key]


@dataclass(frozen=True)
class MostHeld:
    """The moments at which the ranks hold most micro-batches.

    Attributes:
        held: by chunk the micro-batches held when its rank holds most. With one chunk per rank those that it holds
            after its first backward, if it has another one.
        running: by rank the chunk that runs at that moment.
        of_all: at that moment every rank holds a micro-batch of each of its chunks,
        with_gradients: and has gradients of all of them.
        meet: at some moment every rank with several chunks has gradients of all of them and goes on with each.
        steady: the moments at which ranks hold most while all of this is so; None if there are none, or if it is so at
            these moments already.
    """

    held: Array
    running: NDArray[np.int64]
    of_all: bool
    with_gradients: bool
    meet: bool
    steady: MostHeld | None = None


def most_held(schedule: str, num_stages: int, num_micro_batches: int, virtual_stages: int) -> MostHeld:
    """Return the moments at which the ranks of a pipeline hold most, with several chunks the last such moments."""
    fewer = settled(schedule, num_stages, num_micro_batches, virtual_stages)
    return _most_held(schedule, num_stages, fewer, virtual_stages)


@lru_cache(maxsize=4096)
def _most_held(schedule: str, num_stages: int, num_micro_batches: int, virtual_stages: int) -> MostHeld:
    """Return `most_held` by the actions of all these micro-batches."""
    table = actions(schedule, num_stages, num_micro_batches, virtual_stages)
    homes = chunks_of_ranks(schedule, num_stages, virtual_stages)
    moments = [_Moments(num_stages, sum(map(len, homes))) for _ in range(2)]
    of_all, with_gradients, meet = True, num_micro_batches > 1, True
    for rank, mine in enumerate(homes):
        if len(mine) == 1:
            first, later = table.flights[rank]
            for each in moments:
                each.add(rank, mine[0], {mine[0]: later or first})
            continue
        row = table.held[rank]
        now = row.held(np.ones(sum(map(len, homes))))
        at = len(now) - 1 - int(np.argmax(now[::-1]))
        here = moments[0].at(rank, row, at)
        last_first = max(span.first_end for span in row.spans.values())
        until = min(span.last_end for span in row.spans.values())
        of_all &= bool((here[list(mine)] > 0).all())
        with_gradients &= of_all and last_first < at
        meet &= last_first < until
        if meet:
            moments[1].at(rank, row, last_first + 1 + int(np.argmax(now[last_first + 1 : until + 1])))
    most = MostHeld(moments[0].held, moments[0].running, of_all, with_gradients, meet)
    if with_gradients or not meet or num_micro_batches == 1:
        return most
    return replace(most, steady=MostHeld(moments[1].held, moments[1].running, True, True, True))


class _Moments:
    """One moment of every rank: the micro-batches held of every chunk, and the chunk of every rank that runs."""

    def __init__(self, num_ranks: int, num_chunks: int) -> None:
        self.held, self.running = np.zeros(num_chunks), np.zeros(num_ranks, dtype=np.int64)

    def add(self, rank: int, running: int, held: Mapping[int, float]) -> None:
        """Take the moment of a rank."""
        self.running[rank] = running
        for chunk, count in held.items():
            self.held[chunk] += count

    def at(self, rank: int, row: HeldRow, action: int) -> Array:
        """Take the moment of an action of a rank; return what it holds of every chunk."""
        here = np.zeros(len(self.held))
        np.add.at(here, row.chunks[: action + 1], row.begins[: action + 1])
        np.subtract.at(here, row.chunks[:action], row.ends[:action])
        self.held += here
        self.running[rank] = row.chunks[action]
        return here


def _elements(workload: Workload) -> list[Counter[ParameterKind]]:
    """Return the elements of the parameters of each unit by kind; those that several units use count in the first."""
    w = workload
    found = [Counter[ParameterKind]() for _ in w.units]
    for mine, unit in zip(found, w.units, strict=True):
        for name in unit:
            for p in w.blocks[name].params:
                mine[p.kind] += p.num_elements
    for p, last in ((t.param, t.last) for t in w.tied):
        found[last][p.kind] -= p.num_elements
    return found


def _moved(workload: Workload) -> Array:
    """Return the bytes of a micro-batch that each unit keeps on the host, if all of its layers keep theirs there."""
    w = workload
    sizes = {name: block.offloaded_bytes for name, block in w.blocks.items()}
    units = zip(w.units, w.is_layer, strict=True)
    return np.array([sum(sizes[b] for b, layer in zip(*unit, strict=True) if layer) for unit in units])


def _names(workload: Workload, on_host: bool) -> list[str]:
    """Return the names of recompute choices. `on_host`: with those that keep activations on the host."""
    w = workload
    others = {how: None for each in w.unit_choices for how in each if on_host or not recompute_kind(how).on_host}
    return [NONE, SELECTIVE, *others, FULL]


@dataclass(frozen=True)
class _Choices:
    """Bytes that units keep of a micro-batch, and need in their backward, by recompute choice (rows) and unit.

    Choices that a unit does not have keep infinitely much. Of the last unit those count that wait between two parts of
    a backward, under all schedules.
    """

    kept: Array
    transient: Array

    @staticmethod
    def of(workload: Workload, on_host: bool) -> _Choices:
        """Return the choices of a workload. `on_host`: with those that keep activations on the host."""
        w = workload
        named = [[each.get(how, np.inf) for each in w.unit_choices] for how in _names(w, on_host)[2:-1]]
        kept = np.array([w.unit_saved, w.unit_selective, *named, w.unit_kept])
        # what was kept and is not comes back before the backward (`MemoryModel`); in full recompute it is measured
        transient = np.array(w.unit_transient) + np.maximum(0.0, np.array(w.unit_saved) - kept)
        transient[-1] = w.unit_recompute_transient
        kept[:, -1] = np.maximum(0.0, kept[:, -1] - w.last_spent)
        return _Choices(kept, transient)

    @staticmethod
    def last_of(workload: Workload, by_operation: bool) -> _Choices:
        """Return the last choice of every unit on the recompute frontier, which frees most, as the only one.

        Args:
            by_operation: groups of regions are searched, not only layers in full.
        """
        looked_at = {Searched.ALWAYS: True, Searched.BY_OPERATION: by_operation}
        every, names = _Choices.of(workload, on_host=False), _names(workload, on_host=False)
        some = [k for k, how in enumerate(names) if how == NONE or looked_at.get(recompute_kind(how).searched)]
        kept, transient = every.kept[some], every.transient[some]
        least = kept.min(axis=0)
        return _Choices(least[None], np.where(kept == least, transient, np.inf).min(axis=0)[None])

    @cached_property
    def least(self) -> Array:
        """The fewest bytes kept, by unit."""
        out: Array = self.kept.min(axis=0)
        return out

    @cached_property
    def _known(self) -> dict[float, Array]:
        return {}

    def _beyond(self, held: float) -> Array:
        """Return the bytes that each unit needs beyond the least of `held` micro-batches, under its best choice."""
        found = self._known.get(held)
        if found is None:
            both = np.where(np.isinf(self.kept), np.inf, held * self.kept + self.transient).min(axis=0)
            found = self._known[held] = both - held * self.least
        return found

    def beyond(self, held: float, units: slice) -> float:
        """Return the bytes that a chunk needs beyond the least of `held` micro-batches while one of its units runs.

        While a unit runs backward, later units have freed their activations of one micro-batch.
        """
        later = np.concatenate([self.least[units][::-1].cumsum()[::-1][1:], [0.0]])
        return float((self._beyond(held)[units] - later).max())

    def least_beyond(self, held: float) -> float:
        """Return the least of `beyond` over all chunks."""
        return float(self._beyond(held).min())
