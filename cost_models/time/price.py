"""The time and memory of one plan. This is the only evaluator: search, command line and experiments call it.

    pricer = Pricer(workload, config, costs)          # prices of every block at these degrees, found once
    pricer.step_s(chunks, recompute)                  # seconds of one step, fast: for a search
    estimated(pricer, chunks, recompute) -> Estimate  # with intervals, memory by stage and term (`breakdown`)

`chunks` is the number of units (layers) of each stage, or of each virtual stage in model order. `recompute` is the
number of steps of each chunk on the recompute frontier: with `full` alone, the layers that are recomputed. The step is
the event simulation of the schedule's actions. A rank's time per action is the sum of its operations, of the
collectives inside blocks (never hidden: the next operation waits for them) and of the exposed traffic of data
parallelism. `Costs` prices each of these.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.config.precision import Precision, precision_of
from autoplan.config.recompute import FULL, NONE, SELECTIVE, Searched, recompute_kind
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Group
from autoplan.cost_models.hardware.parts import ASSUMED, Device
from autoplan.cost_models.memory.ranks import MemoryModel
from autoplan.cost_models.memory.recompute_frontier import RecomputeChoice, RecomputeFrontier
from autoplan.cost_models.quantity import ZERO, Quantity, Tag, total
from autoplan.cost_models.time.blocks import BlockCost, BlockPricer, OpTimes, op_times
from autoplan.cost_models.time.hops import boundaries, hop_groups
from autoplan.cost_models.time.simulation import AfterPipeline, ChunkTimes, Timeline, simulate, step_of
from autoplan.cost_models.time.states import MovedOnce, StatePricer
from autoplan.cost_models.time.table import Table
from autoplan.cost_models.time.tied import tied_sums_s
from autoplan.cost_models.work import TiedParam, Workload
from autoplan.schedules.schedule import actions, backward_follows, chunks_of_ranks, num_copies
from autoplan.streams import BUCKET_BYTES, has_streams

# Relative error of a step beyond its parts, either way. With a profile: 37 to 40 of 40 measured plans lie within their
# interval (experiments/plans/plan_accuracy.py). From the catalog, for a device without published timings: assumed.
_MODEL_ERROR, UNPROFILED_ERROR = 0.05, 0.15


def ranges_of(chunks: Sequence[int]) -> list[range]:
    """Return the units of every chunk, from the number of units in each."""
    return [range(end - count, end) for count, end in zip(chunks, itertools.accumulate(chunks), strict=True)]


class Pricer:
    """The prices of one workload at given degrees; every chunk is a sum over its units.

    Args:
        workload: The work of one rank at `config`'s tp, cp and ep, and micro-batch size.
        config: Its degrees, ZeRO stage, schedule and number of micro-batches are used, but not its stages.
        times: `op_times` of this workload, if known.
        searched: True to search recompute over every choice that the workload knows, not only layers in full.
        activations: True to also search offloading activations to the host.
        alike: True to search one choice for all layers or the first ones: full, or with `activations` offload.
    """

    def __init__(
        self,
        workload: Workload,
        config: ParallelConfig,
        costs: Costs,
        precision: Precision | None = None,
        times: Mapping[str, OpTimes] | None = None,
        searched: bool = False,
        activations: bool = False,
        alike: bool = False,
    ) -> None:
        times = op_times(workload, costs) if times is None else times
        self._given = times, searched, activations, alike
        self.workload = workload
        self.config = config
        self.costs = costs
        self.precision: Precision = precision or precision_of("native")
        prices = BlockPricer(workload, config, costs, self.precision, activations)
        self.groups: dict[str, Group] = prices.groups
        self.device: Device = costs.cluster.device
        self._reduces_beside = prices.states.reduces_beside
        self.blocks: dict[str, BlockCost] = {n: prices.cost(b, times[n]) for n, b in workload.blocks.items()}
        self.num_units: int = len(workload.units)
        # measured constants of a step of the runtime; a step does not include clipping
        self.fixed_s: float = costs.overhead_s("step_s") + costs.overhead_s("optimizer_step_s")
        self.fixed_s += (config.num_micro_batches - 1) * costs.overhead_s("micro_batch_s")
        self.action_s: float = costs.overhead_s("pipeline_action_s") if config.pp > 1 else 0.0
        # host time of a pass over a chunk beside its blocks, if it was measured separately
        each = costs.host_fixed_s("pipeline_action_s") if config.pp > 1 else costs.host_fixed_s("micro_batch_s") * 0.5
        self.host_pass_s: float = each.mid
        self.host_update_s: float = costs.host_fixed_s("optimizer_step_s").mid
        # ZeRO's gather in the first forward and its reduction in the last backward delay the next stage if the stage's
        # own thread runs them (gloo). On GPUs they have a stream of their own: all ranks gather at the same time, and
        # sends upstream do not wait for reductions, so a step pays for one rank's traffic only.
        self.chained: bool = not has_streams(costs.cluster.device_type)
        self.pinned_recompute: dict[int, str] = self._pinned_recompute()
        self.free_forward: Quantity = total([self.blocks[name].forward_s for name in workload.free])
        self._tables = {"mid": Table(workload, self.blocks, "mid")}
        self.contention: float = prices.states.contention
        # share of compute that hides traffic once per step
        self.hides_once: float = prices.states.hides if costs.options.overlap_zero else 0.0
        self.runs: int = config.num_micro_batches // num_copies(config.schedule)  # micro-batches per chunk of a rank
        self._sends: dict[tuple[Group, str], list[float]] = {}
        # by units of the same kinds, in the same order
        self._times: dict[object, ChunkTimes] = {}
        self._after: dict[object, AfterPipeline] = {}
        self._sent: dict[str, list[list[float] | None]] = {}  # after each unit, by boundary between chunks

    # What only some candidates of a search are asked for is made when it is.

    @cached_property
    def memory(self) -> MemoryModel:
        """The memory of ranks, with the recompute frontier."""
        costs = self.costs
        out = MemoryModel(self.workload, self.config, self.precision, costs.cluster, costs.mode, costs.options)
        out.frontier = self._frontier(out)
        return out

    @property
    def frontier(self) -> RecomputeFrontier:
        """The recompute frontier."""
        return self.memory.frontier

    @property
    def forward(self) -> list[float]:
        """The seconds of a forward of every unit."""
        return self._tables["mid"].forward

    @property
    def backward(self) -> list[float]:
        """The seconds of a backward of every unit."""
        return self._tables["mid"].backward

    @property
    def weight(self) -> list[float]:
        """The seconds of a backward of every unit that compute gradients of weights."""
        return self._tables["mid"].weight

    @property
    def recompute_s(self) -> list[float]:
        """The seconds of recomputing the layers of every unit in full."""
        return self._tables["mid"].recompute_s

    @property
    def first(self) -> list[float]:
        """The seconds of ZeRO in the first forward of every unit."""
        return self._tables["mid"].first

    @property
    def last(self) -> list[float]:
        """The seconds of ZeRO in the last backward of every unit."""
        return self._tables["mid"].last

    @property
    def optimizer(self) -> list[float]:
        """The seconds of the update of every unit."""
        return self._tables["mid"].optimizer

    @cached_property
    def once_s(self) -> tuple[MovedOnce, ...]:
        """The traffic once per step."""
        return self._once(self._tables["mid"])

    @cached_property
    def _reduced(self) -> dict[str, list[float]]:
        """The bytes of gradients of every unit that ZeRO 0 reduces after the last backward, by group."""
        units = [[self.blocks[name] for name in unit] for unit in self.workload.units]
        groups = sorted({g for b in self.blocks.values() for g in b.reduced_bytes})
        return {g: [sum(b.reduced_bytes.get(g, 0.0) for b in u) for u in units] for g in groups}

    @cached_property
    def _hop_groups(self) -> list[Group]:
        return hop_groups(self.costs.cluster, self.config.pp, self.groups["pp"].stride)

    @cached_property
    def hops(self) -> list[list[float]]:
        """The seconds of a send after each unit, by the pipeline rank that sends."""
        return [self._send_s(group, "mid") for group in self._hop_groups]

    @cached_property
    def chunks_of(self) -> tuple[tuple[int, ...], ...]:
        """The chunks of every rank."""
        c = self.config
        return chunks_of_ranks(c.schedule, c.pp, c.virtual_stages)

    @cached_property
    def boundary_groups(self) -> list[Group | None]:
        """The ranks that send at each boundary between chunks; None where both chunks are of one rank."""
        return boundaries(self.config, self._hop_groups)

    def under(self, schedule: str, virtual_stages: int) -> Pricer:
        """Return a Pricer for another schedule with as many copies of a stage. It shares the costs of operations."""
        if num_copies(schedule) != num_copies(self.config.schedule):
            raise ValueError(f"{schedule} and {self.config.schedule} differ in the copies of a stage")
        config = replace(self.config, schedule=schedule, virtual_stages=virtual_stages)
        beside = StatePricer(config, self.costs, self.precision, self.groups).reduces_beside
        follows = {backward_follows(name, config.pp) for name in (schedule, self.config.schedule)}
        if beside is not self._reduces_beside or (config.zero_stage == 3 and len(follows) > 1):
            return Pricer(self.workload, config, self.costs, self.precision, *self._given)  # blocks cost something else
        out = copy.copy(self)
        out.config = config
        out.memory = self.memory.under(schedule, virtual_stages)
        out._times, out._after, out._sent = {}, {}, {}
        for name in ("chunks_of", "boundary_groups", "_tied_s"):  # made anew for this schedule
            out.__dict__.pop(name, None)
        return out

    @property
    def peak_flops(self) -> float:
        """The peak FLOP/s of one device in the dtype of products; if it is only assumed, the most that was measured."""
        dtype = self.precision.products or self.workload.main_dtype
        known = self.costs.profile.product_flops if self.costs.profile and self.device.source == ASSUMED else {}
        return known.get(dtype) or self.device.flops(dtype)

    def _table(self, which: str) -> Table:
        if which not in self._tables:
            self._tables[which] = Table(self.workload, self.blocks, which)
        return self._tables[which]

    # -- sends ------------------------------------------------------------------------------------------------------

    def hop_s(self, rank: int, unit: int, which: str) -> float:
        """Return the seconds of sending what crosses after a unit, from a pipeline rank to the next."""
        return self._send_s(self._hop_groups[rank], which)[unit]

    def _send_s(self, group: Group, which: str) -> list[float]:
        """Return the seconds of sending the activations that cross after each unit."""
        if (group, which) not in self._sends:
            costs, sizes, tp = self.costs, self.workload.cut_bytes, self.groups["tp"]
            self._sends[group, which] = [getattr(costs.sent_s(n, group, tp), which) for n in sizes]
        return self._sends[group, which]

    # -- one plan ---------------------------------------------------------------------------------------------------

    def step_s(self, chunks: Sequence[int], recompute: Sequence[int], which: str = "mid") -> float:
        """Return the seconds of one step in one scenario (`low`, `mid`, `high`)."""
        timeline = self.timeline(chunks, self.chunk_times(chunks, recompute, which), which)
        after = [self.after_pipeline(units, which) for units in self.rank_units(chunks)]
        return step_of(timeline.rank_end_s, after, self.fixed_s)

    def after_pipeline(self, units: Sequence[int], which: str) -> AfterPipeline:
        """Return the seconds after the last pipeline action of a rank with these units."""
        kinds = self.workload.unit_kinds
        key = tuple([kinds[u] for u in units]), tuple(t for t, _ in self._tied_sums(units)), which
        if key not in self._after:
            table = self._table(which)
            self._after[key] = AfterPipeline(
                self._reductions_s(units, which),
                0.0 if self.chained else self.moved_once_s(units, which),
                sum(table.optimizer[u] for u in units) + self._update_wait_s(units, table),
            )
        return self._after[key]

    def _pass_wait_s(self, units: Sequence[int], table: Table, phase: str) -> float:
        """Return the host seconds of a pass over a chunk that its blocks do not hide."""
        return max(0.0, self.host_pass_s - table.slack(units, phase)) if self.host_pass_s else 0.0

    def _update_wait_s(self, units: Sequence[int], table: Table) -> float:
        """Return the exposed host seconds of a call of `optimizer.step()`, which directly follows the last backward."""
        slack = table.slack(units, "backward", "optimizer") if self.host_update_s else 0.0
        return max(0.0, self.host_update_s - slack)

    def waits_s(self, chunks: Sequence[range]) -> Quantity:
        """Return the exposed host time that belongs to no block, over a step of a rank with these chunks."""
        table = self._tables["mid"]
        passes = sum(self._pass_wait_s(units, table, phase) for units in chunks for phase in ("forward", "backward"))
        seconds = self.runs * passes + self._update_wait_s([u for units in chunks for u in units], table)
        return Quantity.spread(seconds, 0.0, Tag.MEASURED) if seconds else ZERO

    def moved_once_s(self, units: Sequence[int], which: str) -> float:
        """Return the exposed seconds of the traffic of ZeRO 1 and 2 that moves once per step.

        Gathers hide behind the forwards before the last chunk's first forward, reductions behind the backwards after
        the first chunk's last backward: with v chunks per rank these are a round of micro-batches in the other v - 1
        chunks, and one micro-batch of its own. The traffic of the first or last unit has nothing to hide behind.
        """
        c = self.config
        v, behind = c.virtual_stages, min(c.pp, c.num_micro_batches)
        window = ((v - 1) * behind + 1) / v
        exposed = 0.0
        for once in self._once(self._table(which)):
            sizes = [once.moved[u] for u in units]
            hidden = once.hides * window * sum(once.computed[u] for u in units)
            shown = max(sum(sizes) - hidden, max(sizes))
            exposed += shown + self.contention * (sum(sizes) - shown)
        return exposed

    def _once(self, table: Table) -> tuple[MovedOnce, ...]:
        gathers = self.hides_once if self.costs.options.overlap_gather else 0.0
        return (
            MovedOnce(table.gather, table.forward, gathers),
            MovedOnce(table.reduce, table.backward, self.hides_once),
        )

    def chunk_times(self, chunks: Sequence[int], recompute: Sequence[int], which: str) -> list[ChunkTimes]:
        """Return the durations of every chunk in one scenario (`low`, `mid`, `high`)."""
        kinds, known, out = self.workload.unit_kinds, self._times, list[ChunkTimes]()
        for units, again in zip(ranges_of(chunks), recompute, strict=True):
            # a frontier has the same choices for units of the same kinds; those of single units are pinned
            key = units if self.pinned_recompute else kinds[units.start : units.stop], again, which
            if key not in known:
                known[key] = self.times_of(units, again, which)
            out.append(known[key])
        return out

    def times_of(self, units: range, again: int, which: str) -> ChunkTimes:
        """Return the durations of the chunk of these units. `again`: its steps on the recompute frontier."""
        table = self._table(which)
        fixed = getattr(self.free_forward, which) + self.action_s
        split = self.costs.overhead_s("split_layer_s")
        how = self.recomputed(units, again)
        repeated = sum(table.repeated(u, name) for u, name in how.items())
        if self.config.recompute == SELECTIVE:
            repeated += sum(table.selective[u] for u in units)
        whole, mine = self.whole_backwards(units, how), slice(units.start, units.stop)
        return ChunkTimes(
            sum(table.forward[mine]) + fixed + self._pass_wait_s(units, table, "forward"),
            sum(table.backward[mine]) + repeated + self.action_s + self._pass_wait_s(units, table, "backward"),
            max(0.0, sum(table.weight[mine]) - sum(table.weight_of_layers[u] for u in whole)),
            sum(table.first[mine]) if self.chained else 0.0,
            sum(table.last[mine]) if self.chained else 0.0,
            split * sum(self.workload.layers[u] for u in units if u not in whole)
            + sum(table.waited_split[u] for u in units if u not in whole),
        )

    def whole_backwards(self, units: Sequence[int], again: Collection[int]) -> Collection[int]:
        """Return the units whose layers a split schedule does not split (`Block.whole_backward` of the runtime)."""
        selective = self.config.recompute == SELECTIVE
        return units if selective or self.costs.mode is Mode.COMPILED else again

    def layer_blocks(self, unit: int) -> list[BlockCost]:
        """Return the costs of the layers of a unit, to which recompute applies."""
        marked = zip(self.workload.units[unit], self.workload.is_layer[unit], strict=True)
        return [self.blocks[name] for name, layer in marked if layer]

    def _pinned_recompute(self) -> dict[int, str]:
        """Return the pinned recompute choice of each unit, from a mapping by call or one choice for all layers.

        Choices of calls that are not layers are not priced. `selective` for all layers is not such a pin (it is `saved`
        of the memory model), nor is `full` (all steps of the recompute frontier).
        """
        pinned, w = self.config.recompute, self.workload
        if isinstance(pinned, tuple) or pinned in (NONE, SELECTIVE, FULL):
            return {}
        out = {}
        for u, (calls, marked) in enumerate(zip(w.unit_calls, w.is_layer, strict=True)):
            layers = [c for c, layer in zip(calls, marked, strict=True) if layer]
            found = [pinned if isinstance(pinned, str) else pinned.get(c, NONE) for c in layers]
            how = next((name for name in found if name != NONE), NONE)
            how = w.recompute_of(u, how)
            if how:
                out[u] = how
        return out

    def _frontier(self, memory: MemoryModel) -> RecomputeFrontier:
        """Return the recompute frontier: layers in full, or with `searched` all choices, by kind of layer."""
        (_, searched, activations, alike), w, table = self._given, self.workload, self._tables["mid"]
        freed = [a - b for a, b in zip(memory.saved, memory.kept, strict=True)]
        if not activations and (alike or not searched):
            return RecomputeFrontier.full_only(w.layers, freed, self.recompute_s)
        looked_at = {
            Searched.ALWAYS: not alike,
            Searched.BY_OPERATION: searched and not alike,
            Searched.OFFLOADING: activations,
            Searched.NEVER: False,
        }
        known: dict[object, list[RecomputeChoice]] = {}  # equal units share the list
        options = []
        for u, kind in enumerate(w.kept_kinds):
            key = kind, memory.saved[u], memory.kept[u]
            if key not in known:
                known[key] = [
                    RecomputeChoice(how, memory.saved[u] - memory.kept_bytes(u, how), table.repeated(u, how))
                    for how in w.recompute_choices(u)
                    if looked_at[recompute_kind(how).searched]
                ]
            options.append(known[key])
        return RecomputeFrontier.one(options) if alike else RecomputeFrontier.of(options, w.layer_kinds)

    def repeated_s(self, unit: int, how: str) -> float:
        """Return the seconds that a recompute choice adds to the backward of a unit."""
        return self._tables["mid"].repeated(unit, how)

    def recomputed(self, units: Sequence[int], level: int) -> dict[int, str]:
        """Return the recompute choices in a chunk: pinned, or after `level` steps on the recompute frontier."""
        if self.pinned_recompute:
            return {u: self.pinned_recompute[u] for u in units if u in self.pinned_recompute}
        return self.frontier.choices(units, level)

    def timeline(
        self, chunks: Sequence[int], times: list[ChunkTimes], which: str, *, events: bool = False, sends: bool = True
    ) -> Timeline:
        """Return the timeline of a step with these durations of chunks."""
        c = self.config
        table = actions(c.schedule, c.pp, c.num_micro_batches, c.virtual_stages)
        cuts = [r.stop - 1 for r in ranges_of(chunks)[:-1]]
        if which not in self._sent:
            self._sent[which] = [
                None if group is None else self._send_s(group, which) for group in self.boundary_groups
            ]
        sent = zip(cuts, self._sent[which], strict=True)
        lag = [each[u] if sends and each is not None else 0.0 for u, each in sent]
        return simulate(table, times, lag, lag, transfer=self.costs.transfer(c), events=events)

    def rank_units(self, chunks: Sequence[int]) -> list[list[int]]:
        """Return the units of every pipeline rank, over all of its chunks."""
        ranges = ranges_of(chunks)
        return [[u for k in mine for u in ranges[k]] for mine in self.chunks_of]

    def blocks_of(self, units: Sequence[int]) -> list[BlockCost]:
        """Return the costs of all calls of blocks in these units."""
        return [self.blocks[b] for u in units for b in self.workload.units[u]]

    def _buckets(self, units: Sequence[int]) -> Iterator[tuple[str, float, int]]:
        """Yield (group, bucket size in bytes, number of buckets) of the gradients reduced after the last backward.

        Megatron's gradient buffer is one bucket if it is not reduced during the backward
        (core/distributed/distributed_data_parallel.py).
        """
        for group, sizes in self._reduced.items():
            size = sum(sizes[u] for u in units)
            if size:
                count = 1 if self.costs.mode is Mode.FUSED else math.ceil(size / BUCKET_BYTES)
                yield group, size / count, count

    def _reductions_s(self, units: Sequence[int], which: str) -> float:
        """Return the seconds of the reductions at the end of the step, and of the host's costs once per step."""
        table = self._table(which)
        once = sum(table.per_step[u] for u in units) + sum(table.waited_once[u] for u in units)
        return once + sum(float(getattr(q, which)) for q in self.all_reduces(units))

    def all_reduces(self, units: Sequence[int]) -> list[Quantity]:
        """Return the all-reduces of gradients after the last backward, with measured copies into buffers and back."""
        copy = self.costs.fixed_s("all_reduce_byte_s")
        out = [
            (self.costs.collective_s("all_reduce", size, self.groups[group]) + copy * size) * count
            for group, size, count in self._buckets(units)
        ]
        if out:  # the ranks meet for the first time in the step
            computed = sum(self.forward[u] + self.backward[u] for u in units)
            out.append(self.costs.wait_s(self.runs * computed))
        return out + [seconds for _, seconds in self._tied_sums(units)]

    def _tied_sums(self, units: Sequence[int]) -> list[tuple[int, Quantity]]:
        """Return the sums of gradients of tied parameters of a rank with these units, with another rank, by number."""
        return [(n, s) for n, (t, s) in enumerate(self._tied_s) if (t.first in units) is not (t.last in units)]

    @cached_property
    def _tied_s(self) -> list[tuple[TiedParam, Quantity]]:
        return tied_sums_s(self.workload, self.config, self.costs, self.memory.parameters)
