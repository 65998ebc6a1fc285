"""Memory of every pipeline rank, by term. Activations come from the captured graph (tensors that autograd saves).

P: parameter bytes on a rank (after tp and ep). L: bytes of the largest block. G, O: bytes of the gradients and of the
optimizer state. n: data-parallel ranks.

| ZeRO | parameters | gathered parameters | gradients | optimizer |
|---|---|---|---|---|
| 0 | P | - | G | O |
| 1 | P / n | P, from the first forward to the last backward | G | O / n |
| 2 | P / n | P | G / n + one block's | O / n |
| 3 | P / n | 2 L: two blocks (one in use, one on its way) | G / n + one block's | O / n |

autoplan.runtime.zero works like this; Rajbhandari et al., ZeRO, 2020, keep P instead of P / n + P under 1 and 2.

With 16-bit parameters (autoplan.runtime.precision) fully_shard stores and shards the float32 master, 4 bytes per
element, from which 16 bits are gathered, and gradients become float32 shards. Without shards the 16-bit copy is stored
beside the master. Megatron's distributed optimizer keeps 16-bit parameters beside sharded masters.

`Mode.FUSED` follows Megatron-LM: P under ZeRO 0 to 2; gradients in one buffer that exists from the start and is reduced
in place (core/distributed/param_and_grad_buffer.py). Since products add to that buffer themselves, placeholder tensors,
which nothing writes to, stand for the gradients of weights, one for each shape in a layer (`get_dummy_wgrad` of
Transformer Engine's pytorch/module/base.py).

With `offload` of the optimizer its state is on the host, with a copy of parameters and gradients as the optimizer takes
them; float32 masters without shards are only there. With `offload` of the parameters the shards of parameters and
gradients are only on the host.

Between the two parts of a split backward a micro-batch counts as after its forward, but for the logits of the last
unit: their gradient waits, and the logarithms of the loss are freed (`Workload.last_spent`).

Hybrid ZeRO (`zero_replicas`) replaces n by n / zero_replicas. Parameters of experts are sharded over their own
replicas. Activations are held for every micro-batch in flight, which the schedule's actions count. A schedule in both
directions (DualPipe) has two stages on every rank, and each stage on two ranks: twice the parameters and gradients, and
twice as many replicas to shard over. The memory of a rank is that of its fullest moment:

| moment | micro-batches held | gradients |
|---|---|---|
| first backward of a chunk | all whose forward ran before it | of the layers it has passed, and of earlier chunks |
| its end, where it scatters | the others | as shards, and of the first layer or embedding whole, with what is sent |
| a later backward | all in flight | of all chunks that have run backward; sharded after a chunk's last (ZeRO 1) |
| the last backward (ZeRO 1, one chunk) | one | whole, of the layers it has passed sharded, and the copy that is sent |
| reduction at the end of the step (ZeRO 0) | none | all, and the buffers they are sent from |
| optimizer step | none | all, in float32 (ZeRO 0, 16-bit gradients) |
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from types import MappingProxyType

import numpy as np

from autoplan.config.parallel import Mode, ParallelConfig, RunOptions
from autoplan.config.precision import MASTER_BYTES, Precision
from autoplan.config.recompute import FULL, NONE, SELECTIVE, recompute_kind
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.memory.allocator import ACTIVATION_SPREAD, activation_need, fragmentation_of
from autoplan.cost_models.memory.communicators import FixedMemory
from autoplan.cost_models.memory.moments import Held, Moment, RankStates, Rows, TiedStates, most_of
from autoplan.cost_models.memory.parameters import NO_STATES, ParameterMemory, States, stores_8_bits
from autoplan.cost_models.memory.recompute_frontier import RecomputeFrontier
from autoplan.cost_models.memory.stage_ends import StageEnds
from autoplan.cost_models.quantity import Quantity, Tag
from autoplan.cost_models.work import BlockWork, Workload
from autoplan.ops.table import op_record
from autoplan.schedules.schedule import ActionLists, HeldRow, actions, chunks_of_ranks, flights, num_copies, waits
from autoplan.streams import BUCKET_BYTES
from autoplan.units import dtype_bytes

_PLAIN = RunOptions()
_HALF_BYTES = 2
NOTHING: Mapping[int, str] = MappingProxyType({})
FIRST, LATER, REDUCTION, UPDATE = "first backward", "backward", "reduction", "optimizer step"
# Terms without a tensor of the program, which `torch.cuda.max_memory_allocated` does not count.
NOT_ALLOCATED = CONTEXT, FRAGMENTATION = "context and communicators", "fragmentation"


@dataclass(frozen=True)
class RankMemory:
    """One pipeline rank at its fullest moment: bytes by term.

    `in_flight`: the most micro-batches it holds at one time, over all its chunks. `host`: bytes in host memory, by
    term.
    """

    terms: dict[str, Quantity]
    in_flight: int
    moment: str
    host: dict[str, Quantity] = field(default_factory=dict)


class MemoryModel:
    """The memory of any split of a workload into chunks, at the degrees of `config`."""

    def __init__(
        self,
        workload: Workload,
        config: ParallelConfig,
        precision: Precision,
        cluster: Cluster,
        mode: Mode = Mode.EAGER,
        options: RunOptions = _PLAIN,
    ) -> None:
        self.workload = workload
        self.config = config
        self.precision = precision
        self.cluster = cluster
        self.megatron: bool = mode is Mode.FUSED
        c = config
        self.copies: int = num_copies(c.schedule)
        self.parameters: ParameterMemory = ParameterMemory(
            c, precision, self.megatron, options, stores_8_bits(cluster.device, mode, options)
        )
        shares = self.parameters.shares
        self.sharded: bool = c.zero_stage > 0 and max(shares.values()) > 1
        self._placeheld: dict[frozenset[str], float] = {}
        self._known_states: dict[tuple[range, ...], RankStates] = {}
        self._known_held: dict[tuple[RecomputeFrontier, range, int, bool], Held] = {}
        self._sum_states()
        self._sum_activations()
        self.tied: tuple[TiedStates, ...] = self._tied_states()
        self._fixed = FixedMemory(workload, cluster)
        self._schedule()
        self.fragmentation: Quantity = fragmentation_of(cluster, options)
        self.per_byte: Quantity = activation_need(cluster, options)
        joins = options.expandable_segments
        self._bucket: int = (options.zero_bucket or 0) if not joins and self.sharded and c.zero_stage == 1 else 0
        reduced = c.zero_stage == 0 and max(shares.values()) > 1
        # the optimizer takes gradients as wide as its parameters: sums in 16 bits are copied once more
        grad_bytes = self.precision.grad_bytes or MASTER_BYTES
        widens = self.precision.has_masters and grad_bytes < MASTER_BYTES and not self.megatron
        self.widened: float = MASTER_BYTES / grad_bytes if widens else 0.0
        self.buckets = 2 * BUCKET_BYTES if reduced and not self.megatron else 0

    def _sum_states(self) -> None:
        """Sum the bytes of parameters, gradients and optimizer state by unit."""
        w = self.workload
        each = {name: [*map(self.parameters.of, block.params)] for name, block in w.blocks.items()}
        blocks = {name: States.total([NO_STATES, *mine]) for name, mine in each.items()}
        tensors = {name: max((s.whole for s in mine), default=0.0) for name, mine in each.items()}
        totals = {unit: States.total(map(blocks.__getitem__, unit)) for unit in dict.fromkeys(w.units)}
        sums = [totals[unit] for unit in w.units]
        self.stored: list[float] = [u.stored for u in sums]
        self.gathered: list[float] = [u.gathered for u in sums]
        self.grads: list[float] = [u.gradients for u in sums]
        self.states: list[float] = [u.optimizer for u in sums]
        self.first_grads: list[float] = [u.first for u in sums]
        self.hosted: list[float] = [u.host for u in sums]
        self.reduced: list[float] = [u.reduced for u in sums]
        self.largest: list[float] = self._most({name: states.gathered for name, states in blocks.items()})
        self.largest_grad: list[float] = self._most({name: states.whole for name, states in blocks.items()})
        self.largest_tensor: list[float] = self._most(tensors)

    def _most(self, sizes: Mapping[str, float]) -> list[float]:
        """Return the largest of the sizes of blocks by unit."""
        most = {unit: max(map(sizes.__getitem__, unit), default=0.0) for unit in dict.fromkeys(self.workload.units)}
        return [most[unit] for unit in self.workload.units]

    def _sum_activations(self) -> None:
        """Collect the activations that the forward leaves for the backward, by unit."""
        w = self.workload
        self.offloaded: list[float] = [
            sum(w.blocks[b].offloaded_bytes for b, layer in zip(unit, marks, strict=True) if layer)
            for unit, marks in zip(w.units, w.is_layer, strict=True)
        ]
        self.saved: tuple[float, ...] = w.unit_selective if self.config.recompute == SELECTIVE else w.unit_saved
        self.kept: tuple[float, ...] = w.unit_kept
        self._kept_by_kind = {NONE: self.saved, SELECTIVE: w.unit_selective, FULL: self.kept}
        self._plain = SELECTIVE if self.config.recompute == SELECTIVE else NONE
        self.ends: StageEnds = StageEnds(w, sends=not self.megatron)
        self.transient: tuple[float, ...] = w.unit_transient
        self.recompute_transient: tuple[float, ...] = w.unit_recompute_transient

    @cached_property
    def frontier(self) -> RecomputeFrontier:
        """The recompute frontier: layers in full, if no other one is set."""
        freed = [a - b for a, b in zip(self.saved, self.kept, strict=True)]
        return RecomputeFrontier.full_only(self.workload.layers, freed, [0.0] * len(freed))

    def _schedule(self) -> None:
        c = self.config
        self.chunks_of: tuple[tuple[int, ...], ...] = chunks_of_ranks(c.schedule, c.pp, c.virtual_stages)
        # micro-batches held in the first backward, and the most afterwards
        self.flights: tuple[tuple[int, int], ...] = flights(c.schedule, c.pp, c.num_micro_batches, c.virtual_stages)
        self.fixed: Quantity = self._fixed.of(c)
        self._waits = waits(c.schedule, c.pp, c.num_micro_batches, c.virtual_stages)
        self._known_rows: dict[tuple[int, tuple[range, ...]], Rows] = {}

    @property
    def _table(self) -> ActionLists:
        c = self.config
        return actions(c.schedule, c.pp, c.num_micro_batches, c.virtual_stages)

    @property
    def has_gradient_buffer(self) -> bool:
        """True if all gradients exist from the start, in Megatron's buffer."""
        return self.megatron and self.config.zero_stage < 2

    @property
    def _reduces_last(self) -> bool:
        """True if ZeRO reduces gradients in the last backward alone."""
        return self.config.zero_stage > 0 and not self.parameters.scatters

    def under(self, schedule: str, virtual_stages: int) -> MemoryModel:
        """Return the memory model under another schedule with as many copies."""
        out = copy.copy(self)
        out.config = replace(self.config, schedule=schedule, virtual_stages=virtual_stages)
        out._schedule()
        return out

    def _tied_states(self) -> tuple[TiedStates, ...]:
        """Return the parameters that several units use and a stage holds once.

        Under ZeRO 1 to 3 every block of `fully_shard` has parameters of its own (runtime.zero): two copies.
        """
        if self.sharded and not self.megatron:
            return ()
        return tuple(TiedStates(t.first, t.last, self.parameters.of(t.param)) for t in self.workload.tied)

    def held_once(self, start: int, stop: int) -> float:
        """Return the bytes of activations shared by several units, in a stage of units start .. stop - 1."""
        return sum(v.num_bytes for v in self.workload.shared if v.held(start, stop, sent=not self.megatron))

    def counted_twice(self, units: Sequence[int]) -> States:
        """Return the states of parameters that several units of a stage use, which it holds once (`runtime.tied`)."""
        shared = [t.states for t in self.tied if t.first in units and t.last in units]
        return States.total(shared) if shared else NO_STATES

    def stages(
        self, chunks: Sequence[range], recompute: Sequence[int], pinned: Mapping[int, str] = NOTHING
    ) -> list[RankMemory]:
        """Return the memory of every pipeline rank.

        Args:
            chunks: The units of every chunk, in model order.
            recompute: The steps of each chunk on the recompute frontier; by default, the number of its first layers
                that are recomputed in full.
            pinned: The recompute choice of units, which replaces `recompute`.
        """
        return [self.rank(r, chunks, recompute, pinned) for r in range(self.config.pp)]

    def kept_bytes(self, unit: int, how: str) -> float:
        """Return the bytes that a unit keeps under a recompute choice."""
        kept = self._kept_by_kind.get(how)
        return self.workload.unit_choices[unit][how] if kept is None else kept[unit]

    def kept_in(self, units: range, unit: int, how: str) -> float:
        """Return `kept_bytes` of a unit, without what its stage of `units` holds at its ends."""
        named = self._plain if how == NONE else how
        return self.kept_bytes(unit, how) - self.ends.kept_twice(unit, named, units.start, units.stop)

    def _chunk(self, units: range, again: Mapping[int, str], received: bool) -> Held:
        w, start, stop = self.workload, units.start, units.stop
        held = w.free_saved + self.ends.held(start, stop, received)
        held += self.held_once(start, stop) if units else 0.0
        running = []
        for u in units:
            how = again.get(u, NONE)
            kept, saved = self.kept_bytes(u, how), w.unit_saved[u]
            if u in (start, stop - 1):
                kept, saved = self.kept_in(units, u, how), saved - self.ends.kept_twice(u, NONE, start, stop)
            held += kept
            inside = (t for t in w.tied if t.param.trainable and start <= t.first <= u < t.last < stop)
            # copies of `fully_shard` (`_tied_states`) each give their gradient away at once
            waiting = 0 if self.sharded and not self.megatron else sum(t.num_bytes for t in inside)
            # while a unit's backward runs, later units have freed their activations
            back = max(0.0, saved - kept)  # recomputed by regions
            running.append((held, (self.recompute_transient[u] if how == FULL else self.transient[u] + back) + waiting))
        most = max(held + transient for held, transient in running) - held if running else 0.0
        return Held(held, tuple(running), most)

    def rank(
        self, rank: int, chunks: Sequence[range], recompute: Sequence[int], pinned: Mapping[int, str] = NOTHING
    ) -> RankMemory:
        """Return the memory of one pipeline rank by term; arguments as for `stages`."""
        mine = self.chunks_of[rank]
        states, fullest = self._fullest(rank, chunks, recompute, pinned)
        exact = {
            "parameters": states.parameters,
            "gathered parameters": states.gathered if fullest.gathered is None else fullest.gathered,
            "gradients": fullest.gradients,
            "optimizer": states.optimizer,
            "communication buffers": fullest.buffers,
            "placeholders of gradients": states.placeholders,
        }
        terms = {name: Quantity(size, size, size, Tag.EXACT) for name, size in exact.items() if size}
        terms["activations"] = Quantity.spread(fullest.held, ACTIVATION_SPREAD, Tag.FITTED)
        terms["transient"] = Quantity.spread(fullest.transient, ACTIVATION_SPREAD, Tag.FITTED)
        if self.fixed.mid:
            terms[CONTEXT] = self.fixed
            own = self.own_segments(states, chunks, mine)
            terms[FRAGMENTATION] = self.fragmentation * (fullest.held + fullest.transient) + Quantity.spread(
                own, 0.0, Tag.EXACT
            )
        in_flight = max(self.flights[rank])
        return RankMemory(terms, in_flight, fullest.name, self._host(chunks, mine, recompute, pinned, in_flight))

    def device_bytes(
        self, rank: int, chunks: Sequence[range], recompute: Sequence[int], pinned: Mapping[int, str], guard: float
    ) -> float:
        """Return the sum of the terms of `rank`, each at `guard` of the way from its middle to its high end.

        A search asks for it thousands of times, so no term is made: the sum is the same to the last digit.
        """
        states, fullest = self._fullest(rank, chunks, recompute, pinned)
        gathered = states.gathered if fullest.gathered is None else fullest.gathered
        sum_bytes = states.parameters + gathered + fullest.gradients + states.optimizer + fullest.buffers
        sum_bytes += states.placeholders
        for size in (fullest.held, fullest.transient):
            sum_bytes += size + guard * (size * (1 + ACTIVATION_SPREAD) - size)
        if self.fixed.mid:
            sum_bytes += self.fixed.mid + guard * (self.fixed.high - self.fixed.mid)
            size, parts = fullest.held + fullest.transient, self.fragmentation
            own = self.own_segments(states, chunks, self.chunks_of[rank])
            sum_bytes += parts.mid * size + own + guard * (parts.high * size - parts.mid * size)
        return sum_bytes

    def own_segments(self, states: RankStates, chunks: Sequence[range], mine: Sequence[int]) -> float:
        """Return the bytes of buffers of the end of a step that are larger than what activations leave free.

        torch's allocator keeps freed segments as large as they were asked for and joins none. DeepSpeed's ZeRO 1
        (runtime/zero/stage_1_and_2.py) reduces and gathers in buckets, and copies the gradients of its shard into one
        tensor of 16 bits and one of 32. Its BF16_Optimizer copies each gradient into 32 bits, and gathers in buckets.
        """
        if not self._bucket:
            return 0.0
        bucket = self._bucket * _HALF_BYTES
        if self.parameters.whole_sums:
            units = [u for k in mine for u in chunks[k]]
            return bucket + max(self.largest_tensor[u] for u in units) * MASTER_BYTES / (MASTER_BYTES + _HALF_BYTES)
        shard = states.optimizer / (self.precision.state_bytes or MASTER_BYTES)
        return 2 * bucket + shard * (_HALF_BYTES + MASTER_BYTES)

    def host_bytes(
        self, rank: int, chunks: Sequence[range], recompute: Sequence[int], pinned: Mapping[int, str], guard: float
    ) -> tuple[float, float]:
        """Return both terms in host memory, of states and of activations, as `device_bytes`."""
        state, most = self._on_host(chunks, self.chunks_of[rank], recompute, pinned)
        size = most * max(self.flights[rank]) if most else 0.0
        return state, size + guard * (size * (1 + ACTIVATION_SPREAD) - size)

    def _fullest(
        self, rank: int, chunks: Sequence[range], recompute: Sequence[int], pinned: Mapping[int, str]
    ) -> tuple[RankStates, Moment]:
        """Return the fullest moment of a rank, and the bytes that are the same at all of its moments."""
        mine = self.chunks_of[rank]
        states = self._rank_states(tuple(chunks[k] for k in mine))
        several = self.copies > 1
        held = {k: self._held(chunks[k], recompute[k], pinned, several or k - 1 not in mine) for k in mine}
        gathered = states.gathered
        return states, max(self._moments(rank, chunks, held, states), key=lambda m: m.num_bytes(gathered))

    def _held(self, units: range, level: int, pinned: Mapping[int, str], received: bool) -> Held:
        """Return the activations of a chunk. `received`: its input is not the output of a chunk of the same rank."""
        if pinned:
            return self._chunk(units, pinned, received)
        key = self.frontier, units, level, received
        found = self._known_held.get(key)
        if found is None:
            found = self._known_held[key] = self._chunk(units, self.frontier.choices(units, level), received)
        return found

    def _rank_states(self, mine: tuple[range, ...]) -> RankStates:
        """Return the memory of a rank with these chunks that recompute does not change."""
        found = self._known_states.get(mine)
        if found is None:
            units = [u for chunk in mine for u in chunk]
            twice = States.total([NO_STATES, *map(self.counted_twice, mine)])
            gathered = sum(self.gathered[u] for u in units) - twice.gathered
            if self.config.zero_stage == 3:
                gathered = min(gathered, 2 * max(self.largest[u] for u in units))
            found = self._known_states[mine] = RankStates(
                sum(self.grads[u] for u in units) - twice.gradients,
                gathered,
                sum(self.stored[u] for u in units) - twice.stored,
                sum(self.states[u] for u in units) - twice.optimizer,
                self._placeholders(units) if self.megatron else 0.0,
                max(self.largest_grad[u] for u in units) if self.parameters.scatters else 0.0,
            )
        return found

    def _moments(self, rank: int, chunks: Sequence[range], held: dict[int, Held], states: RankStates) -> list[Moment]:
        """Return the moments of a step at which a rank may be fullest."""
        grads, reducing = states.grads, states.reducing
        if len(held) > 1:
            moments = self._of_several(rank, chunks, held, grads, reducing)
        else:
            ((chunk, only),) = held.items()
            (first, later), spent = self._waits[rank], self.workload.last_spent * (chunk == len(chunks) - 1)
            if self.has_gradient_buffer:
                moments = [Moment(FIRST, grads, most_of(first, only.one, spent), only.transient)]
            else:
                moments = self._first_backward(chunks[chunk], most_of(first, only.one, spent, others=True), only)
            if later:
                moments.append(Moment(LATER, grads + reducing, most_of(later, only.one, spent), only.transient))
            if later and self.sharded and self._reduces_last and not self.has_gradient_buffer:
                moments.append(self._last_backward(chunks[chunk], only))
        if self.widened and self.config.zero_stage == 0:
            moments.append(Moment(UPDATE, self.widened * grads, 0.0, 0.0))
        if self.buckets:
            moments.append(Moment(REDUCTION, grads, 0.0, 0.0, min(self.buckets, grads)))
        return moments

    def _host(
        self,
        chunks: Sequence[range],
        mine: Sequence[int],
        recompute: Sequence[int],
        pinned: Mapping[int, str],
        in_flight: int,
    ) -> dict[str, Quantity]:
        """Return the bytes of a rank in host memory by term.

        With several chunks, activations count as if all micro-batches in flight were of the chunk with most.
        """
        state, most = self._on_host(chunks, mine, recompute, pinned)
        out = {"state": Quantity(state, state, state, Tag.EXACT)} if state else {}
        if most:
            out["activations"] = Quantity.spread(most * in_flight, ACTIVATION_SPREAD, Tag.FITTED)
        return out

    def _on_host(
        self, chunks: Sequence[range], mine: Sequence[int], recompute: Sequence[int], pinned: Mapping[int, str]
    ) -> tuple[float, float]:
        """Return the bytes of a rank's state on the host, and of the activations of its chunk with most there."""
        units = [u for k in mine for u in chunks[k]]
        state = sum(self.hosted[u] for u in units) - sum(self.counted_twice(chunks[k]).host for k in mine)
        most = 0.0
        if not pinned and not self.frontier.holds_on_host:
            return state, most
        for k in mine:
            again = pinned or self.frontier.choices(chunks[k], recompute[k])
            if any(recompute_kind(how).on_host for how in {*again.values()}):
                there = (self.offloaded[u] for u in chunks[k] if recompute_kind(again.get(u, NONE)).on_host)
                most = max(most, sum(there))
        return state, most

    def _placeholders(self, units: Iterable[int]) -> float:
        """Return the bytes of placeholders for gradients of weights: per shape, as many as a layer has weights."""
        names = frozenset(name for u in units for name in self.workload.units[u])
        if names not in self._placeheld:
            most: Counter[tuple[tuple[int, ...], str]] = Counter()
            for name in names:
                most |= Counter(_weights(self.workload.blocks[name]))
            size = sum(count * prod(shape) * dtype_bytes(dtype) for (shape, dtype), count in most.items())
            self._placeheld[names] = float(size)
        return self._placeheld[names]

    def _of_several(
        self, rank: int, chunks: Sequence[range], held: Mapping[int, Held], most_grads: float, scattered: float
    ) -> list[Moment]:
        """Return the moments of a rank with several chunks.

        Args:
            most_grads: bytes of all its gradients.
            scattered: bytes of the largest gradient that is reduced and not kept whole.
        """
        one = np.zeros((2, max(held) + 1))
        for k, h in held.items():
            one[:, k] = h.one, h.transient
        row = self._table.held[rank]
        now, transient = row.held(one[0]), one[1][row.chunks]
        spent = self.workload.last_spent if len(chunks) - 1 in held else 0.0
        now = now - spent * row.waiting(len(chunks) - 1) if spent else now
        rows = self._rows(rank, row, tuple(chunks[k] for k in held), most_grads, scattered)
        grads, reducing, gathered = rows.grads, rows.reducing, rows.gathered
        by_chunk = self.config.zero_stage in (1, 2) and not self.megatron
        total = now + transient + grads + reducing + (gathered if by_chunk else 0.0)
        most = int(np.argmax(total))
        out = [
            Moment(
                LATER,
                float(grads[most] + reducing[most]),
                float(now[most]),
                float(transient[most]),
                gathered=float(gathered[most]) if by_chunk else None,
            )
        ]
        if self.has_gradient_buffer:
            return out
        for k, at in row.spans.items():
            i = at.first_end
            if total[i] + rows.more[k] < total[most]:
                continue
            out += self._first_backward(
                chunks[k],
                float(now[i]) - held[k].one + (spent if k == len(chunks) - 1 and row.halves[i] else 0.0),
                held[k],
                float(grads[i]),
                float(reducing[i]),
                float(gathered[i]) if by_chunk else None,
            )
        return out

    def _rows(self, rank: int, row: HeldRow, mine: tuple[range, ...], most_grads: float, scattered: float) -> Rows:
        """Return the bytes of parameters and gradients during every action of a rank with these chunks.

        What ZeRO 1 and 2 gather of a chunk is there from its first forward to its last backward, and its gradients
        from its first backward on, those of ZeRO 1 as shards after its last. Megatron's buffers of ZeRO 0 to 2 (of
        gradients: 0 and 1) always exist.
        """
        if (rank, mine) in self._known_rows:
            return self._known_rows[rank, mine]
        spans, units = row.spans, dict(zip(self.chunks_of[rank], mine, strict=True))
        grads, gathered = (np.zeros(len(row.chunks) + 1) for _ in range(2))
        for k, at in spans.items():
            whole, left = (sum(each[u] for u in units[k]) for each in (self.grads, self.reduced))
            grads[at.first_end + 1] += whole
            grads[at.last_end + 1] += left - whole
            size = sum(self.gathered[u] for u in units[k])
            gathered[at.first_forward] += size
            gathered[at.last_end + 1] -= size
        grads = np.minimum(np.cumsum(grads)[:-1], most_grads)
        gathered = np.cumsum(gathered)[:-1]
        reducing = np.where(np.arange(len(grads)) > min(at.first_end for at in spans.values()), scattered, 0.0)
        if self.has_gradient_buffer:
            grads[:] = most_grads
        more = {k: sum(self.first_grads[u] for u in units[k]) for k in spans}
        if self.config.zero_stage:
            more = {k: n + max(self.largest_grad[u] + 2 * self.largest[u] for u in units[k]) for k, n in more.items()}
        return self._known_rows.setdefault((rank, mine), Rows(grads, reducing, gathered, more))

    def _first_backward(
        self,
        units: Sequence[int],
        waiting: float,
        chunk: Held,
        gradients: float = 0.0,
        reducing: float = 0.0,
        gathered: float | None = None,
    ) -> list[Moment]:
        """Return the moments of the first backward of a chunk: one per unit, and its end if ZeRO scatters gradients.

        While a unit runs backward, later units have left their gradients and freed their activations. At the end the
        gradient of an embedding is there with the copy of it that is sent.

        Args:
            waiting: bytes of other micro-batches and chunks.
            gradients, reducing: bytes of those of other chunks.
            gathered: as for `Moment`.
        """
        out, stage, scattered = [], self.config.zero_stage, reducing
        scatters = self.parameters.scatters or (stage > 0 and self.config.num_micro_batches == 1)
        for u, (held, transient) in zip(reversed(units), reversed(chunk.running), strict=True):
            out.append(Moment(FIRST, gradients + scattered, waiting + held, transient, 0.0, gathered))
            if scatters and u == units[0]:
                sent = max(reducing, self.largest_grad[u]) + self.largest[u]
                there = self.largest[u] if gathered is None else gathered
                out.append(Moment(FIRST, gradients + sent, waiting, 0.0, 0.0, there))
            gradients += self.first_grads[u]
            if scatters:  # the whole gradient of a unit is there until that of the one before it is scattered
                scattered = max(reducing, self.largest_grad[u])
        return out

    def _last_backward(self, units: range, chunk: Held) -> Moment:
        """Return the fullest moment of the last backward, if it alone scatters what was summed before.

        When a unit has run backward, its parameters are freed and its whole gradient, a sum, is copied into what is
        sent; then it is freed, but for the last tensor, which a loop in torch (`foreach_reduce`) still names while the
        shard is made.
        """
        grads, gathered = sum(self.grads[u] for u in units), sum(self.gathered[u] for u in units)
        keeps, moments = self.config.zero_stage < 3, []  # ZeRO 3 has gathered as much as at any other time
        for u, (held, _) in zip(reversed(units), reversed(chunk.running), strict=True):
            whole, shard = self.grads[u], self.reduced[u]
            alone = len(self.workload.units[u]) == 1  # else its first layers have not run backward yet
            left = held - self.kept_in(units, u, NONE) if alone else held
            sent = self.largest_grad[u] + max(0.0, shard + self.largest_tensor[u] - whole)
            there = gathered - self.largest[u] if keeps else None
            moments.append(Moment(LATER, grads + sent, left, 0.0, gathered=there))
            grads += shard - whole
            gathered -= self.gathered[u]
        return max(moments, key=lambda m: m.num_bytes(0.0))


def _weights(block: BlockWork) -> Iterable[tuple[tuple[int, ...], str]]:
    """Yield shapes and dtypes of the trained weights of products. Experts have one shape each."""
    for op in block.ops:
        trained = [op.inputs[i] for i in op_record(op.op).weights if op.inputs[i].requires_grad]
        yield from ((t.shape[-2:], t.dtype) for t in trained)
