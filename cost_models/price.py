"""price: the time and memory of one plan. The ONE evaluator: search, command line and experiments call it.

    pricer = Pricer(workload, config, costs)          # prices of one layer class at these degrees, found once
    pricer.step_s(chunks, recompute)                  # seconds of one step, fast: what a search asks
    pricer.estimate(chunks, recompute) -> Estimate    # the same with intervals, memory by stage and term, breakdown

`chunks` says how many units (layers) each stage holds, per virtual stage in model order; `recompute` how many of the
layers of each chunk are computed again in the backward. The step is the event simulation of the schedule's actions; a
rank's time per action is the sum of its operations, of the collectives inside blocks (never hidden: the next operation
waits for them) and of what data parallelism exposes. What each of these costs is `Costs`' business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoplan.cost_models.cluster import Group
from autoplan.cost_models.config import ParallelConfig, Precision, precision_of
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.memory import MemoryModel
from autoplan.cost_models.quantity import ZERO, Quantity, Tag, total
from autoplan.cost_models.schedule import ChunkTimes, Event, Timeline, Transfer, actions, simulate
from autoplan.cost_models.units import dtype_bytes
from autoplan.cost_models.work import BlockWork, Workload

# torch.distributed.pipelining posts a receive when it needs it; both ends wait for the transfer
TRANSFER = Transfer.RECEIVER
_BUCKET_BYTES = 25 * 2**20  # of the gradient all-reduce of ZeRO 0 (autoplan.runtime.zero)


@dataclass(frozen=True)
class BlockCost:
    """Seconds of one call of a block on one rank and micro-batch, by kind of work."""

    forward: Quantity
    backward: Quantity
    forward_comm: Quantity
    backward_comm: Quantity
    selective: Quantity  # computing the attention core again
    zero_forward: Quantity  # exposed gathers of ZeRO 3
    zero_backward: Quantity  # exposed gathers and reductions in every backward (ZeRO 2 and 3)
    zero_first: Quantity  # exposed gather in the first forward (ZeRO 1 and 2)
    zero_last: Quantity  # exposed reduction in the last backward (ZeRO 1)
    per_step: Quantity  # reductions that wait until the end of the step
    optimizer: Quantity
    reduced_bytes: float  # gradients that ZeRO 0 reduces at the end


@dataclass(frozen=True)
class StageEstimate:
    """One pipeline rank: its units (one range per chunk), what a micro-batch costs it, and its memory by term."""

    index: int
    num_layers: int
    num_recomputed: int
    forward_s: Quantity
    backward_s: Quantity
    in_flight: int
    memory: Mapping[str, Quantity]  # bytes by term

    @property
    def memory_bytes(self) -> Quantity:
        """Sum of all terms."""
        return total(list(self.memory.values()))


@dataclass(frozen=True)
class Estimate:
    """Time and memory of one plan. `breakdown` adds up to the step: seconds of the busiest rank by term."""

    step_time_s: Quantity
    breakdown: Mapping[str, Quantity]
    stages: tuple[StageEstimate, ...]
    tokens_per_step: float
    tokens_per_s: float
    tokens_per_s_per_device: float
    mfu: float
    memory_capacity_bytes: float
    events: tuple[Event, ...] = field(default=(), repr=False)

    @property
    def peak_memory_bytes(self) -> Quantity:
        """Of the fullest stage."""
        return max((s.memory_bytes for s in self.stages), key=lambda q: q.mid)

    @property
    def fits(self) -> bool:
        """True if every stage's expected memory is within the device's."""
        return self.peak_memory_bytes.mid <= self.memory_capacity_bytes


@dataclass(frozen=True)
class OpTimes:
    """Seconds of the operations of one call of a block, forward and backward, and of those of selective recompute."""

    forward: Quantity
    backward: Quantity
    selective: Quantity


def op_times(workload: Workload, costs: Costs) -> dict[str, OpTimes]:
    """By block. They do not depend on dp, pp, ZeRO or the number of micro-batches: found once for many Pricers."""
    return {
        name: OpTimes(
            total([costs.forward_s(op) for op in block.ops]),
            total([costs.backward_s(op) for op in block.ops]),
            total([costs.forward_s(block.ops[i]) for i in sorted(block.selective_ops)]),
        )
        for name, block in workload.blocks.items()
    }


def mesh_groups(config: ParallelConfig, axes: Sequence[tuple[str, int]]) -> dict[str, Group]:
    """Rank groups of every axis: pp, dp, cp and tp, major to minor; ep and etp fold into dp * cp * tp.

    Args:
        axes: the sub-axes that tp is made of, major to minor.
    """
    tp, cp, dp = config.tp, config.cp, config.dp
    etp = config.tp if config.etp is None else config.etp
    out = {
        "tp": Group(tp, 1),
        "cp": Group(cp, tp),
        "dp": Group(dp, tp * cp),
        "pp": Group(config.pp, tp * cp * dp),
        "replicas": Group(dp * cp, tp),
        "etp": Group(etp, 1),
        "ep": Group(config.ep, etp),
        "expert_replicas": Group(max(1, dp * cp * tp // (config.ep * etp)), config.ep * etp),
    }
    stride = 1
    for name, size in reversed(axes):
        out[name] = Group(size, stride)
        stride *= size
    return out


class Pricer:
    """Prices of one workload at given degrees; every chunk is a sum over its units.

    Args:
        workload: of one rank at `config`'s tp, cp and ep, and micro-batch size.
        config: its degrees, ZeRO stage, schedule and number of micro-batches are used, not its stages or recompute.
        times: `op_times` of this workload, if known.
    """

    def __init__(
        self,
        workload: Workload,
        config: ParallelConfig,
        costs: Costs,
        precision: Precision | None = None,
        times: Mapping[str, OpTimes] | None = None,
    ) -> None:
        self.times = op_times(workload, costs) if times is None else times
        self.workload, self.config, self.costs = workload, config, costs
        self.precision = precision or precision_of("native")
        self.groups = mesh_groups(config, workload.axes)
        self.hop = Group(2, self.groups["pp"].stride) if config.pp > 1 else Group(1)
        self.device = costs.cluster.device
        self.blocks = {name: self._block(block) for name, block in workload.blocks.items()}
        self.memory = MemoryModel(workload, config, self.precision, costs.cluster)
        self.num_units = len(workload.units)
        # measured constants of a step of the runtime; clipping is not part of the step
        self.fixed_s = costs.overhead_s("step_s") + costs.overhead_s("optimizer_step_s")
        self.fixed_s += (config.num_micro_batches - 1) * costs.overhead_s("micro_batch_s")
        self.pinned_again = self._pinned_again()
        free = [self.blocks[name] for name in workload.free]
        self.free_forward = total([b.forward + b.forward_comm for b in free])
        names = [[self.blocks[b] for b in unit] for unit in workload.units]
        self.forward = [sum(b.forward.mid + b.forward_comm.mid + b.zero_forward.mid for b in u) for u in names]
        self.backward = [sum(b.backward.mid + b.backward_comm.mid + b.zero_backward.mid for b in u) for u in names]
        self.again = [sum(b.forward.mid + b.forward_comm.mid for b in self.layer_blocks(u)) for u in range(len(names))]
        self.first = [sum(b.zero_first.mid for b in u) for u in names]
        self.last = [sum(b.zero_last.mid for b in u) for u in names]
        self.optimizer = [sum(b.optimizer.mid for b in u) for u in names]
        self.send = [self._send(size) for size in workload.cut_bytes]

    # -- one block --------------------------------------------------------------------------------------------------

    def _block(self, block: BlockWork) -> BlockCost:
        costs = self.costs
        forward, backward = self.times[block.name].forward, self.times[block.name].backward
        comm = {("forward", "micro_batch"): ZERO, ("backward", "micro_batch"): ZERO, ("backward", "step"): ZERO}
        for c in block.comms:
            comm[c.phase, c.per] += costs.collective_s(c.kind, c.num_bytes, self.groups[c.axis])
        gather, reduce = self._zero_s(block)
        zero = self.config.zero_stage if self.groups["dp"].size > 1 and any(p.trainable for p in block.params) else 0
        hides = self.device.overlap_fraction
        over = {p: Quantity.spread(costs.overhead_s(f"zero_block_{p}_s"), 0.0, Tag.MEASURED) for p in _PHASES}
        hidden_gather = gather.less(forward * hides)
        hidden_reduce = reduce.less(backward * hides)
        both = (gather + reduce).less(backward * hides)
        reduced = 0.0
        if zero == 0 and self.groups["replicas"].size > 1:
            reduced = sum(p.num_elements * self._grad_bytes(p.dtype) for p in block.params if p.trainable)
        return BlockCost(
            forward=forward,
            backward=backward,
            forward_comm=comm["forward", "micro_batch"],
            backward_comm=comm["backward", "micro_batch"],
            selective=self.times[block.name].selective,
            zero_forward=(hidden_gather if zero == 3 else ZERO) + (over["forward"] if zero else ZERO),
            zero_backward=(both if zero == 3 else hidden_reduce if zero == 2 else ZERO)
            + (over["backward"] if zero else ZERO),
            zero_first=hidden_gather if zero in (1, 2) else ZERO,
            zero_last=hidden_reduce if zero == 1 else ZERO,
            per_step=comm["backward", "step"],
            optimizer=self._optimizer(block),
            reduced_bytes=reduced,
        )

    def _grad_bytes(self, dtype: str) -> float:
        return dtype_bytes(dtype) if self.precision.grad_bytes is None else self.precision.grad_bytes

    def _state_bytes(self, dtype: str) -> float:
        return 2.0 * dtype_bytes(dtype) if self.precision.state_bytes is None else self.precision.state_bytes

    def _zero_s(self, block: BlockWork) -> tuple[Quantity, Quantity]:
        """Gathering the block's parameters over its replicas, and reducing and scattering their gradients."""
        gather, reduce = [], []
        for expert, name in ((False, "replicas"), (True, "expert_replicas")):
            mine = [p for p in block.params if p.expert is expert]
            size = sum(p.num_elements * dtype_bytes(p.dtype) for p in mine)
            grads = sum(p.num_elements * self._grad_bytes(p.dtype) for p in mine if p.trainable)
            gather.append(self.costs.collective_s("all_gather", size, self.groups[name]))
            reduce.append(self.costs.collective_s("reduce_scatter", grads, self.groups[name]))
        return total(gather), total(reduce)

    def _optimizer(self, block: BlockWork) -> Quantity:
        out = []
        for expert, name in ((False, "replicas"), (True, "expert_replicas")):
            share = self.groups[name].size if self.config.zero_stage and self.groups["dp"].size > 1 else 1
            by_dtype: dict[str, float] = {}
            for p in block.params:
                if p.trainable and p.expert is expert:
                    by_dtype[p.dtype] = by_dtype.get(p.dtype, 0.0) + p.num_elements / share
            out += [self.costs.optimizer_s(n, dtype, self._state_bytes(dtype)) for dtype, n in by_dtype.items()]
        tensors = sum(p.trainable for p in block.params)
        out.append(Quantity.spread(tensors * self.costs.overhead_s("optimizer_tensor_s"), 0.0, Tag.MEASURED))
        return total(out)

    def _send(self, num_bytes: float) -> float:
        return self.costs.collective_s("send_recv", num_bytes, self.hop).mid

    # -- one plan ---------------------------------------------------------------------------------------------------

    def step_s(self, chunks: Sequence[int], recompute: Sequence[int]) -> float:
        """Expected seconds of one step."""
        return self._step(chunks, recompute, "mid")[0]

    def _ranges(self, chunks: Sequence[int]) -> list[range]:
        out, at = [], 0
        for count in chunks:
            out.append(range(at, at + count))
            at += count
        return out

    def chunk_times(self, chunks: Sequence[int], recompute: Sequence[int], which: str) -> list[ChunkTimes]:
        """Durations of every chunk in one scenario (`low`, `mid`, `high`)."""
        out = []
        action = self.costs.overhead_s("pipeline_action_s") if self.config.pp > 1 else 0.0
        free = getattr(self.free_forward, which)
        for units, again in zip(self._ranges(chunks), recompute, strict=True):
            if which == "mid":
                forward, backward = sum(self.forward[u] for u in units), sum(self.backward[u] for u in units)
                first, last = sum(self.first[u] for u in units), sum(self.last[u] for u in units)
                repeated = sum(self.again[u] for u in self.recomputed(units, again))
            else:
                blocks = [self.blocks[b] for u in units for b in self.workload.units[u]]
                forward = sum(getattr(b.forward + b.forward_comm + b.zero_forward, which) for b in blocks)
                backward = sum(getattr(b.backward + b.backward_comm + b.zero_backward, which) for b in blocks)
                first, last = (
                    sum(getattr(b.zero_first, which) for b in blocks),
                    sum(getattr(b.zero_last, which) for b in blocks),
                )
                repeated = sum(
                    getattr(b.forward + b.forward_comm, which)
                    for u in self.recomputed(units, again)
                    for b in self.layer_blocks(u)
                )
            if self.config.recompute == "selective":
                repeated += sum(getattr(self.blocks[b].selective, which) for u in units for b in self.workload.units[u])
            out.append(ChunkTimes(forward + free + action, backward + repeated + action, 0.0, first, last))
        return out

    def layer_blocks(self, unit: int) -> list[BlockCost]:
        """Costs of the layers of a unit: what recompute applies to."""
        marked = zip(self.workload.units[unit], self.workload.is_layer[unit], strict=True)
        return [self.blocks[name] for name, layer in marked if layer]

    def _pinned_again(self) -> frozenset[int]:
        """Units that a mapping from call to recompute names; what it says of calls that are no layers is not priced."""
        if not isinstance(self.config.recompute, Mapping):
            return frozenset()
        named = {call for call, value in self.config.recompute.items() if value == "full"}
        units = zip(self.workload.unit_calls, self.workload.layers, strict=True)
        return frozenset(u for u, (calls, layer) in enumerate(units) if layer and named & set(calls))

    def recomputed(self, units: Sequence[int], count: int) -> list[int]:
        """Which units of a chunk are computed again: its first `count` layers, or those that are pinned."""
        if self.pinned_again:
            return [u for u in units if u in self.pinned_again]
        return [u for u in units if self.workload.layers[u]][:count]

    def _timeline(
        self, chunks: Sequence[int], times: list[ChunkTimes], which: str, *, events: bool = False, sends: bool = True
    ) -> Timeline:
        c = self.config
        table = actions(c.schedule, c.pp, c.num_micro_batches, c.virtual_stages)
        cuts = [r.stop - 1 for r in self._ranges(chunks)[:-1]]
        if which == "mid":
            lag = [self.send[u] if sends else 0.0 for u in cuts]
        else:
            sizes = [self.workload.cut_bytes[u] for u in cuts]
            lag = [getattr(self.costs.collective_s("send_recv", n, self.hop), which) for n in sizes]
        return simulate(table, times, lag, lag, transfer=TRANSFER, events=events)

    def _rank_units(self, chunks: Sequence[int]) -> list[list[int]]:
        """Units of every pipeline rank, over all of its chunks."""
        ranges = self._ranges(chunks)
        return [[u for r in ranges[rank :: self.config.pp] for u in r] for rank in range(self.config.pp)]

    def _after(self, chunks: Sequence[int], which: str) -> tuple[list[float], list[float]]:
        """Per rank: reductions after its last backward, and the optimizer."""
        reductions, updates = [], []
        for units in self._rank_units(chunks):
            blocks = [self.blocks[b] for u in units for b in self.workload.units[u]]
            size = sum(b.reduced_bytes for b in blocks)
            seconds = sum(getattr(b.per_step, which) for b in blocks)
            if size:
                buckets = math.ceil(size / _BUCKET_BYTES)
                one = self.costs.collective_s("all_reduce", size / buckets, self.groups["replicas"])
                seconds += buckets * getattr(one, which)
            reductions.append(seconds)
            if which == "mid":
                updates.append(sum(self.optimizer[u] for u in units))
            else:
                updates.append(sum(getattr(b.optimizer, which) for b in blocks))
        return reductions, updates

    def _step(self, chunks: Sequence[int], recompute: Sequence[int], which: str) -> tuple[float, Timeline]:
        times = self.chunk_times(chunks, recompute, which)
        timeline = self._timeline(chunks, times, which, events=False)
        reductions, updates = self._after(chunks, which)
        ends = [end + r for end, r in zip(timeline.rank_end_s, reductions, strict=True)]
        return max(ends) + max(updates) + self.fixed_s, timeline

    def estimate(self, chunks: Sequence[int], recompute: Sequence[int], *, events: bool = False) -> Estimate:
        """Everything about one plan. `recompute`: layers per chunk that are computed again in full."""
        low, mid, high = (self._step(chunks, recompute, which)[0] for which in ("low", "mid", "high"))
        blocks = [self.blocks[b] for unit in self.workload.units for b in unit]
        tags = [b.forward.tag for b in blocks] + [b.forward_comm.tag for b in blocks if b.forward_comm.high]
        step = Quantity(min(low, mid), mid, max(mid, high), max(tags))
        c, w = self.config, self.workload
        tokens = w.tokens * c.num_micro_batches * c.dp
        flops = w.model_flops * c.num_micro_batches * c.dp
        peak = self.device.flops(self.precision.matmul or self.precision.compute or _main_dtype(w)) * c.num_devices
        times = self.chunk_times(chunks, recompute, "mid")
        timeline = self._timeline(chunks, times, "mid", events=True)
        stages = []
        ranges = self._ranges(chunks)
        held = self.memory.stages(ranges, recompute, self.pinned_again)
        for rank, units in enumerate(self._rank_units(chunks)):
            mine = range(rank, len(chunks), c.pp)
            f = sum(times[k].forward_s for k in mine)
            b = sum(times[k].backward_s for k in mine)
            stages.append(
                StageEstimate(
                    index=rank,
                    num_layers=len(units),
                    num_recomputed=sum(recompute[k] for k in mine),
                    forward_s=Quantity(f * low / mid, f, f * high / mid, step.tag),
                    backward_s=Quantity(b * low / mid, b, b * high / mid, step.tag),
                    in_flight=held[rank].in_flight,
                    memory=held[rank].terms,
                )
            )
        return Estimate(
            step_time_s=step,
            breakdown=self._breakdown(chunks, recompute, times, step),
            stages=tuple(stages),
            tokens_per_step=tokens,
            tokens_per_s=tokens / mid,
            tokens_per_s_per_device=tokens / mid / c.num_devices,
            mfu=flops / mid / peak,
            memory_capacity_bytes=float(self.device.memory_bytes),
            events=timeline.events if events else (),
        )

    def _breakdown(
        self, chunks: Sequence[int], recompute: Sequence[int], times: list[ChunkTimes], step: Quantity
    ) -> dict[str, Quantity]:
        """Where the step goes, on the rank that computes longest. What no other term explains is the bubble."""
        c = self.config
        timeline = self._timeline(chunks, times, "mid", sends=True)
        unsent = self._timeline(chunks, times, "mid", sends=False)
        reductions, updates = self._after(chunks, "mid")
        rank = max(range(c.pp), key=lambda r: timeline.busy_s[r])
        units = self._rank_units(chunks)[rank]
        blocks = [self.blocks[b] for u in units for b in self.workload.units[u]]
        m = c.num_micro_batches
        ranges = self._ranges(chunks)
        again = [u for k in range(rank, len(chunks), c.pp) for u in self.recomputed(ranges[k], recompute[k])]
        out: dict[str, Quantity] = {}
        out["compute"] = (total([b.forward + b.backward for b in blocks]) + self.free_forward) * m
        repeated = [b for u in again for b in self.layer_blocks(u)]
        out["recompute"] = total([b.forward + b.forward_comm for b in repeated]) * m
        if c.recompute == "selective":
            out["recompute"] += total([b.selective for b in blocks]) * m
        inside = total([b.forward_comm + b.backward_comm for b in blocks]) * m
        out["tp_comm"] = inside
        zero = total([b.zero_forward + b.zero_backward for b in blocks]) * m
        zero += total([b.zero_first + b.zero_last for b in blocks])
        out["dp_comm"] = zero + Quantity.spread(reductions[rank], 0.0, zero.tag)
        out["pp_comm"] = Quantity.spread(max(0.0, timeline.end_s - unsent.end_s), 0.0, step.tag)
        out["optimizer"] = Quantity.spread(max(updates), 0.0, step.tag)
        fixed = self.fixed_s
        if c.pp > 1:
            fixed += 2 * m * c.virtual_stages * self.costs.overhead_s("pipeline_action_s")
        out["overhead"] = Quantity.spread(fixed, 0.0, Tag.MEASURED)
        rest = step.mid - sum(q.mid for q in out.values())
        out["bubble"] = Quantity.spread(max(0.0, rest), 0.0, step.tag)
        return {k: q for k, q in out.items() if q.mid > 0 or k in ("compute", "bubble")}


_PHASES = ("forward", "backward")


def _main_dtype(workload: Workload) -> str:
    """The dtype most parameters have."""
    counts: dict[str, int] = {}
    for unit in workload.units:
        for name in unit:
            for p in workload.blocks[name].params:
                counts[p.dtype] = counts.get(p.dtype, 0) + p.num_elements
    return max(counts, key=lambda d: counts[d]) if counts else "float32"
