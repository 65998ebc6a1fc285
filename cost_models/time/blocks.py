"""The cost of one call of a block on one rank, by kind of work. `price` adds the parts up over units and stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoplan.config.parallel import Launch, Mode, ParallelConfig, Reruns
from autoplan.config.precision import Precision
from autoplan.config.recompute import (
    BY_OPERATION,
    FULL,
    MODULES_KIND,
    NONE,
    OFFLOAD,
    REGIONS,
    SELECTIVE,
    kinds_in,
    recompute_kind,
    region_groups,
)
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Group
from autoplan.cost_models.network.groups import mesh_groups
from autoplan.cost_models.profile import PHASES
from autoplan.cost_models.quantity import ZERO, Quantity, total
from autoplan.cost_models.time.host import adds_s, hooks_s, host_op_s, host_s, slack_s, waited_s
from autoplan.cost_models.time.pieces import Pieces, pieces_of, takes_apart
from autoplan.cost_models.time.states import StatePricer, ZeroTerms, narrow
from autoplan.cost_models.work import (
    BlockWork,
    CommWork,
    OpWork,
    Recomputed,
    Workload,
)
from autoplan.ops.record import OpKind
from autoplan.ops.table import op_kind, op_record
from autoplan.schedules.schedule import num_copies
from autoplan.streams import has_streams


@dataclass(frozen=True)
class OpTimes:
    """Seconds of the operations of one call of a block.

    Attributes:
        weight: The part of `backward` that computes gradients of weights.
        selective: The operations that selective recompute reruns.
        again, host_again: What full recompute reruns, on the device and on the host.
        host_forward, host_backward: Host time to start the operations.
        attention: The part of the attention core, by phase.
        groups: Recomputing a group of regions, by group.
        modules, host_modules: Recomputing modules, on the device and on the host.
        host_recompute: Host time of recomputing groups and `selective`, if a profile has host times.
        pieces: The products that collectives of tensor parallelism hide behind, if a compiler takes them apart.
    """

    forward: Quantity
    backward: Quantity
    weight: Quantity
    selective: Quantity
    again: Quantity
    host_forward: Quantity = ZERO
    host_backward: Quantity = ZERO
    host_again: Quantity = ZERO
    attention: Mapping[str, Quantity] = field(default_factory=dict)
    groups: Mapping[str, Quantity] = field(default_factory=dict)
    modules: Quantity = ZERO
    host_modules: Quantity = ZERO
    host_recompute: Mapping[str, Quantity] = field(default_factory=dict)
    pieces: Mapping[CommWork, Pieces] = field(default_factory=dict)


def op_times(
    workload: Workload, costs: Costs, known: dict[int, tuple[BlockWork, OpTimes]] | None = None
) -> dict[str, OpTimes]:
    """Return the operation times by block.

    They do not depend on dp, pp, ZeRO or the number of micro-batches, so many Pricers share them.

    Args:
        known: times of blocks by their id, read and added to: workloads of other degrees of experts share blocks.
    """
    known = {} if known is None else known
    for block in workload.blocks.values():
        if id(block) not in known:
            known[id(block)] = block, _block_times(block, workload, costs)
    return {name: known[id(block)][1] for name, block in workload.blocks.items()}


def _block_times(block: BlockWork, workload: Workload, costs: Costs) -> OpTimes:
    forward = [costs.forward_s(op) for op in block.ops]
    backward = [costs.backward_s(op) for op in block.ops]
    modules, full = block.modules, _reran(block, costs)
    host_forward = host_s(block, "forward", costs)
    weight = [q * _weight_share(op) for op, q in zip(block.ops, backward, strict=True) if op_record(op.op).weights]
    return OpTimes(
        total(forward),
        total(backward),
        total(weight),
        total([forward[i] for i in sorted(block.selective_ops)]),
        total(forward if full is None else [forward[i] for i in sorted(full.ops)]),
        host_forward,
        host_s(block, "backward", costs),
        host_forward if full is None else host_s(block, "forward", costs, full),
        {
            phase: total([q for op, q in zip(block.ops, found, strict=True) if op_kind(op.op) is OpKind.ATTENTION])
            for phase, found in (("forward", forward), ("backward", backward))
        },
        {group: total([forward[i] for i in sorted(at)]) for group, at in block.group_ops.items()},
        ZERO
        if modules is None
        else total([*(forward[i] for i in sorted(modules.ops)), *map(costs.forward_s, modules.beside)]),
        ZERO if modules is None else host_s(block, "forward", costs, modules),
        {
            name: host_s(block, "forward", costs, Recomputed(frozenset(ops)))
            for name, ops in ((SELECTIVE, block.selective_ops), *block.group_ops.items())
            if costs.measures_host
        },
        pieces_of(block, workload.axes, costs),
    )


def _reran(block: BlockWork, costs: Costs) -> Recomputed | None:
    """Return the part of a forward that full recompute reruns; None: all of it."""
    return block.needed if costs.options.reruns_in(costs.mode) is Reruns.NEEDED else None


def _weight_share(op: OpWork) -> float:
    """Return the share of a product's backward for its weights: a half, or all if the data needs no gradient."""
    if not any(op.inputs[i].requires_grad for i in op_record(op.op).weights):
        return 0.0
    return 0.5 if op.inputs[0].requires_grad else 1.0


@dataclass(frozen=True)
class BlockCost:
    """Seconds of one call of a block on one rank and micro-batch, by kind of work.

    `comm`: collectives inside the block by (family of their axis: tp, cp, ep or dp; phase). `reduced_bytes`: bytes of
    gradients that ZeRO 0 reduces at the end of the step, by group.
    """

    forward: Quantity
    backward: Quantity
    weight: Quantity  # the part of `backward` that can be delayed
    comm: Mapping[tuple[str, str], Quantity]
    accumulate: Quantity  # adding a gradient to the sum over earlier micro-batches, averaged over all micro-batches
    selective: Quantity  # recomputing the attention core
    zero_forward: Quantity  # exposed gathers of ZeRO 3
    zero_backward: Quantity  # exposed gathers and reductions in every backward (ZeRO 2 and 3)
    zero_first: Quantity  # exposed gather in the first forward (ZeRO 1 and 2)
    zero_last: Quantity  # exposed reduction in the last backward (ZeRO 1), and sum of shards over their replicas
    per_step: Quantity  # reductions at the end of the step
    optimizer: Quantity
    reduced_bytes: Mapping[str, float]
    waited: Mapping[str, Quantity]  # waiting for the host to start kernels, by phase
    waited_once: Quantity  # waiting for it to start the traffic of ZeRO 1 and 2, once per step
    slack: Mapping[str, Quantity]  # idle time of the host, by phase, and in the update ("optimizer")
    waited_split: Quantity  # waiting for it to walk over the graph in a split backward
    again: Quantity  # recomputing its forward, in a backward
    hidden_recompute: Quantity  # traffic of ZeRO 3 in a backward that hides behind recomputing the block
    gather: Quantity  # gathers of ZeRO 1 and 2: once per step, nothing hidden
    # reductions of ZeRO 1 (ZeRO 0: if beside the backward) and over replicas of the shards: once per step, nothing
    # hidden
    reduce: Quantity
    groups: Mapping[str, Quantity] = field(default_factory=dict)  # recomputing a group of regions
    modules: Quantity = ZERO  # recomputing modules
    offload: Quantity = ZERO  # its activations to the host and back, where computing does not hide them
    moved: Quantity = ZERO  # gradients to an optimizer on the host, and updated parameters back, once per step

    def comm_s(self, phase: str) -> Quantity:
        """Return the seconds of all collectives inside the block in one phase."""
        return total([q for (_, when), q in self.comm.items() if when == phase])

    @property
    def forward_s(self) -> Quantity:
        """The seconds of a forward, with all costs that every forward has."""
        return self.forward + self.comm_s("forward") + self.zero_forward + self.waited["forward"]

    @property
    def backward_s(self) -> Quantity:
        """The seconds of a backward, with all costs that every backward has."""
        return self.backward + self.comm_s("backward") + self.zero_backward + self.accumulate + self.waited["backward"]

    @property
    def recompute_s(self) -> Quantity:
        """The seconds of recomputing its forward with parameters at hand, less the traffic of ZeRO 3 that it hides."""
        return self.again.beyond(self.hidden_recompute)

    def repeated(self, how: str) -> Quantity:
        """Return the seconds that a recompute choice adds to a backward."""
        return _ADDED[recompute_kind(how).name](self, how)


_SENT_AGAIN = ("all_gather", "all_reduce")  # of a forward: by operation, other collectives are kept


def _of_groups(b: BlockCost, how: str) -> Quantity:
    return total([b.groups[g] for g in region_groups(how) if g in b.groups])


# Seconds that each kind of recompute adds to the backward of a block.
_ADDED: Mapping[str, Callable[[BlockCost, str], Quantity]] = {
    NONE: lambda b, how: ZERO,
    SELECTIVE: lambda b, how: b.selective,
    FULL: lambda b, how: b.recompute_s,
    OFFLOAD: lambda b, how: b.offload,
    BY_OPERATION: lambda b, how: _of_groups(b, how),
    REGIONS: lambda b, how: _of_groups(b, how),
    MODULES_KIND: lambda b, how: b.modules,
}


@dataclass(frozen=True)
class _HostSide:
    """Host seconds of one block, and device seconds meanwhile.

    Attributes:
        needs: Host seconds in every forward and backward.
        busy: Device seconds in every forward and backward.
        once: Additional host seconds in the first forward and the last backward of a step.
        update: Host seconds in the update of the block's parameters.
    """

    launch: Launch
    needs: Mapping[str, Quantity]
    busy: Mapping[str, Quantity]
    once: Mapping[str, Quantity]
    update: Quantity

    def waited(self, phase: str) -> Quantity:
        """Return how long the device waits for the host."""
        return waited_s(self.needs[phase], self.busy[phase], self.launch)

    def adds(self, phase: str, host: Quantity, device: Quantity = ZERO) -> Quantity:
        """Return the seconds that additional work of the host and the device adds to a phase."""
        after = device + waited_s(self.needs[phase] + host, self.busy[phase] + device, self.launch)
        return after.beyond(self.waited(phase))


class BlockPricer:
    """The prices of the blocks of one workload at given degrees."""

    def __init__(
        self,
        workload: Workload,
        config: ParallelConfig,
        costs: Costs,
        precision: Precision,
        activations: bool = False,
    ) -> None:
        self.config = config
        self.costs = costs
        self.precision = precision
        self.activations: bool = activations or OFFLOAD in kinds_in(config.recompute)
        self.groups: dict[str, Group] = mesh_groups(config, workload.axes)
        self.families: dict[str, str] = {name: "tp" for name, _ in workload.axes} | {
            "cp": "cp",
            "ep": "ep",
            "dp": "dp",
            "batch": "dp",
        }
        self.hidden: dict[str, float] = {"tp": costs.constants.tp_hidden}
        self.states: StatePricer = StatePricer(config, costs, precision, self.groups)

    def cost(self, block: BlockWork, times: OpTimes) -> BlockCost:
        """Return the cost of one call of a block."""
        comm, per_step = self._comm(block, times)
        sent = {phase: total([q for (_, when), q in comm.items() if when == phase]) for phase in PHASES}
        again = self._reran_s(block, times, sent["forward"])
        zero = self.states.terms(block, times.forward, times.backward, times.again, sent["backward"])
        accumulate, optimizer = self.states.accumulate(block), self.states.optimizer(block)
        hooks = self._hooks(block)
        host = self._host_side(block, times, sent, zero, accumulate)

        def repeated(name: str, seconds: Quantity) -> Quantity:
            """Return the seconds that rerun operations add to a backward, in which they run beside its other work."""
            return host.adds("backward", times.host_recompute[name], seconds) if times.host_recompute else seconds

        return BlockCost(
            forward=times.forward,
            backward=times.backward,
            weight=times.weight,
            comm=comm,
            accumulate=accumulate,
            selective=repeated(SELECTIVE, times.selective),
            zero_forward=zero.forward,
            zero_backward=zero.backward,
            zero_first=zero.first,
            zero_last=zero.last,
            per_step=per_step,
            optimizer=optimizer + waited_s(host.update, optimizer, host.launch),
            reduced_bytes={} if self.states.reduces_beside else self.states.reduced(block),
            waited={phase: host.waited(phase) for phase in PHASES},
            waited_once=total([host.adds(phase, host.once[phase]) for phase in PHASES if host.once[phase].mid]),
            slack={phase: slack_s(host.needs[phase], host.busy[phase], host.launch) for phase in PHASES}
            | {"optimizer": slack_s(host.update, optimizer, host.launch)},
            waited_split=host.adds("backward", self.costs.host_fixed_s("split_layer_s")),
            again=host.adds("backward", times.host_again + hooks, again)
            if self.costs.measures_host or hooks.mid
            else again + waited_s(times.host_again, again, host.launch),
            hidden_recompute=zero.hidden_recompute,
            gather=zero.gather_once,
            reduce=zero.reduce_once + self.states.all_reduces(block),
            groups={group: repeated(group, seconds) for group, seconds in self._groups(block, times, comm).items()},
            modules=self._modules(block, times, host),
            offload=self._offload(block, times, sent),
            moved=self.states.moved(block),
        )

    def least_s(self, block: BlockWork, times: OpTimes) -> tuple[float, float]:
        """Return the expected seconds of a forward and of a backward that pp, dp and ZeRO do not change.

        These are the operations, and the collectives over tp, cp and ep if the block has no others in a pass.
        """
        found = {"forward": times.forward.mid, "backward": times.backward.mid}
        if not self._couples(block):
            for (_, phase), sent in self._comm(block, times)[0].items():
                found[phase] += sent.mid
        return found["forward"], found["backward"]

    def _couples(self, block: BlockWork) -> bool:
        """Return True if collectives of its passes depend on dp."""
        return any(self.families.get(c.axis, "tp") == "dp" for c in block.comms if c.per != "step")

    def least_again_s(self, block: BlockWork, times: OpTimes, forward_s: float) -> float:
        """Return the expected seconds of full recompute as `least_s` does, with those of `waited_s`.

        0 if the host's times are measured: recompute may hide behind waiting for the host.

        Args:
            forward_s: those of a whole forward.
        """
        if self.costs.measures_host:
            return 0.0
        if _reran(block, self.costs) is None:
            return forward_s
        again = times.again if self._couples(block) else self._reran_s(block, times, ZERO)
        return (again + waited_s(times.host_again, again, self.costs.options.launch)).mid

    def _reran_s(self, block: BlockWork, times: OpTimes, sent: Quantity) -> Quantity:
        """Return the seconds of full recompute on the device. `sent`: the collectives of a whole forward."""
        full = _reran(block, self.costs)
        if full is None:
            return times.again + sent
        comm, _ = self._comm(block, times, full.comms)
        return times.again + total(list(comm.values()))

    def waited_s(self, block: BlockWork, times: OpTimes) -> tuple[float, float]:
        """Return the expected seconds that the host adds to a forward and a backward, if its times are not measured."""
        comm, _ = self._comm(block, times)
        sent = {phase: total([q for (_, when), q in comm.items() if when == phase]) for phase in PHASES}
        launch = self.costs.options.launch
        forward = waited_s(times.host_forward, times.forward + sent["forward"], launch)
        return forward.mid, waited_s(times.host_backward, times.backward + sent["backward"], launch).mid

    # -- collectives inside the block --------------------------------------------------------------------------------

    def _comm(
        self, block: BlockWork, times: OpTimes, rerun: Sequence[CommWork] | None = None
    ) -> tuple[dict[tuple[str, str], Quantity], Quantity]:
        """Return the exposed collectives inside the block by (family, phase), and the collectives once per step.

        `rerun`: those of a recompute instead.
        """
        if rerun is not None:
            times = replace(times, forward=times.again)
        computed = {"forward": times.forward.mid, "backward": times.backward.mid}
        comms = [c for c in (block.comms if rerun is None else rerun) if self._is_sent(c)]
        inside = {phase: sum(c.phase == phase and c.per != "step" for c in comms) for phase in PHASES}
        plain: dict[tuple[str, str], Quantity] = {}
        parts: dict[tuple[str, str], Quantity] = {}  # over a part of the ranks of cp, or behind pieces of products
        rings: dict[tuple[str, int], Quantity] = {}  # by phase and number of attention steps that they run beside
        per_step = ZERO
        for c in comms:
            seconds = self._sent_s(block, c)
            if c.per == "step":
                per_step += seconds
                continue
            waited = self.costs.wait_s(computed[c.phase] / inside[c.phase])
            if c.behind_attention:
                ring = c.phase, c.behind_attention
                rings[ring] = rings.get(ring, ZERO) + seconds + waited
            elif times.pieces and c in times.pieces:
                key = self.families.get(c.axis, "tp"), c.phase
                parts[key] = parts.get(key, ZERO) + times.pieces[c].shown_s(seconds, self.hidden["tp"]) + waited
            else:
                table, family = (plain, self.families.get(c.axis, "tp")) if c.part is None else (parts, "cp")
                table[family, c.phase] = table.get((family, c.phase), ZERO) + seconds + waited
        out = {key: self._exposed(*key, seconds, times) for key, seconds in plain.items()}
        # of c steps of attention, c - 1 hide the transfer of the next keys
        for (phase, ranks), seconds in rings.items():
            hidden = times.attention.get(phase, ZERO) * ((ranks - 1) / ranks)
            parts["cp", phase] = parts.get(("cp", phase), ZERO) + seconds.less(hidden)
        for key, seconds in parts.items():
            out[key] = out.get(key, ZERO) + seconds
        return out, per_step

    def _is_sent(self, c: CommWork) -> bool:
        """Return True if there is more than one rank to send to."""
        return c.part is not None or self.groups[c.axis].size > 1

    def _sent_s(self, block: BlockWork, c: CommWork) -> Quantity:
        """Return the seconds of a collective alone."""
        return self.costs.collective_s(c.kind, c.num_bytes * self._sent_share(block, c), self._group(c), c.routing)

    def _exposed(self, family: str, phase: str, seconds: Quantity, times: OpTimes) -> Quantity:
        """Return the part of a family's collectives in a phase that compute does not hide."""
        if family not in self.costs.options.overlap or (family == "tp" and takes_apart(self.costs)):
            return seconds
        if family == "cp":  # every step of the ring but the first computes attention on keys of the step before
            ring = (self.config.cp - 1) / self.config.cp
            return seconds.less(times.attention.get(phase, ZERO) * ring)
        if family == "ep":  # beside the computing of another micro-batch, which it slows down
            computed = times.forward if phase == "forward" else times.backward
            # DualPipe always has a forward beside a backward (DeepSeek-V3, arXiv 2412.19437, section 3.2.1)
            share = 1.0 if num_copies(self.config.schedule) > 1 else self.costs.constants.ep_hidden
            exposed = seconds.less(computed * share)
            return exposed + seconds.beyond(exposed) * self.costs.constants.contention
        return seconds.less(seconds * self.hidden.get(family, 0.0))

    # -- ZeRO ---------------------------------------------------------------------------------------------------------

    def _host_side(
        self,
        block: BlockWork,
        times: OpTimes,
        sent: Mapping[str, Quantity],
        zero: ZeroTerms,
        accumulate: Quantity,
    ) -> _HostSide:
        """Return the host's side of the block. `sent`: its collectives by phase."""
        busy = {"forward": times.forward + sent["forward"], "backward": times.backward + sent["backward"]}
        hooks = self._hooks(block)
        if self.costs.measures_host or hooks.mid:  # all work of the device; other constants were fitted without it
            busy["forward"] += zero.forward
            busy["backward"] = busy["backward"] + zero.backward + accumulate
        adds = adds_s(block, self._num_summed, self.costs)
        needs = {"forward": times.host_forward + hooks, "backward": times.host_backward + adds + hooks}
        once = dict.fromkeys(PHASES, ZERO)
        launch = self.costs.options.launch
        if not self.costs.measures_host or launch is Launch.FULL_GRAPHS:
            return _HostSide(launch, needs, busy, once, ZERO)
        for every, phase, seconds in self._host_terms(block):
            (needs if every else once)[phase] += seconds
        update = [self.costs.host_fixed_s(self.states.tensor_name(p)) for p in self.states.updated(block)]
        return _HostSide(launch, needs, busy, once, total(update))

    def _hooks(self, block: BlockWork) -> Quantity:
        """Return the host seconds of ZeRO 3's hooks in a pass."""
        return hooks_s(block, self.config.num_shards, self.costs) if self.config.zero_stage == 3 else ZERO

    @property
    def _num_summed(self) -> int:
        """The micro-batches whose gradients a chunk sums."""
        return self.config.num_micro_batches // num_copies(self.config.schedule)

    def _host_terms(self, block: BlockWork) -> Iterator[tuple[bool, str, Quantity]]:
        """Yield (in every micro-batch or once per step, phase, host seconds) of the runtime's measured costs."""
        stage = self.config.zero_stage
        for _, _, mine in self.states.sharded(block):
            for phase in PHASES:
                yield True, phase, self.costs.host_fixed_s(f"zero_block_{phase}_s")
            gather = self.costs.zero_host_s("gather", len(mine), self.states.gathered_bytes(mine))
            yield stage == 3, "forward", gather
            if stage == 3 and self.states.gathers_again(block):
                yield True, "backward", gather
            trained = [p for p in mine if p.trainable]
            if trained:
                reduce = self.costs.zero_host_s("reduce", len(trained), self.states.reduced_bytes(trained))
                yield self.states.scatters, "backward", reduce
        m = self._num_summed
        for p in block.params if m > 1 else ():
            if p.trainable:
                work = self.costs.accumulate_work(p.num_elements, *self.states.added_dtypes(p))
                yield True, "backward", host_op_s(work, "forward", self.costs) * ((m - 1) / m)

    def _group(self, c: CommWork) -> Group:
        """Return the ranks of a collective; for a message, the two neighbours of the ring that are farthest apart."""
        if c.part is None:
            return self.groups[c.axis]
        ranks, stride = c.part[0], c.part[1] * self.groups[c.axis].stride
        if c.kind != "send_recv":
            return Group(ranks, stride)
        apart = (ranks - 1) * stride  # from the last rank to the first; groups are aligned
        level, below = self.costs.cluster.shared_level(0, apart)
        if below == 1:  # all ranks in one unit of the innermost level: any two neighbours
            return Group(2, stride)
        return Group(2, apart if level is self.costs.cluster.levels[-1] else below)

    def _groups(
        self, block: BlockWork, times: OpTimes, comm: Mapping[tuple[str, str], Quantity]
    ) -> dict[str, Quantity]:
        """Return the seconds of recomputing each group; attention over a sharded sequence includes its gathers, and
        recompute by operation gathers and sums what it does not keep."""
        sent = {"attention": comm.get(("cp", "forward"), ZERO)}
        if BY_OPERATION in kinds_in(self.config.recompute):
            again = [c for c in block.comms if c.phase == "forward" and c.kind in _SENT_AGAIN and c.per != "step"]
            sent[BY_OPERATION] = total(list(self._comm(block, times, again)[0].values()))
        return {group: seconds + sent.get(group, ZERO) for group, seconds in times.groups.items()}

    def _modules(self, block: BlockWork, times: OpTimes, host: _HostSide) -> Quantity:
        """Return the seconds of recomputing modules: compute, collectives, and waiting for the host in the backward."""
        if block.modules is None:
            return ZERO
        sent = [ZERO]
        for c in block.modules.comms:
            if self._is_sent(c):
                seconds = self._sent_s(block, c)
                family = self.families.get(c.axis, "tp")
                hidden = self.hidden.get(family, 0.0) if family in self.costs.options.overlap else 0.0
                sent.append(seconds.less(seconds * hidden))
        return host.adds("backward", times.host_modules, times.modules + total(sent))

    def _offload(self, block: BlockWork, times: OpTimes, sent: Mapping[str, Quantity]) -> Quantity:
        """Return the seconds of copying activations to the host and, in the backward, back, as far as they show.

        Where a device has streams, copies run beside the block's pass (`runtime.side_stream`), one block ahead. They
        slow computing down no more than ZeRO's traffic does: copy engines take no multiprocessors.
        """
        if not self.activations:
            return ZERO
        copy = self.costs.host_copy_s(block.offloaded_bytes)
        if not has_streams(self.costs.cluster.device_type):
            return copy * 2.0
        computed = {"forward": times.forward, "backward": times.backward}
        return total([self.states.beside(copy, computed[phase] + sent[phase], self.states.overlap) for phase in PHASES])

    def _sent_share(self, block: BlockWork, comm: CommWork) -> float:
        """Return the share of a collective's bytes that is sent.

        Transformer Engine gathers operands of 8-bit products in 8 bits.
        """
        if comm.kind != "all_gather" or self.families.get(comm.axis) != "tp" or self.costs.mode is not Mode.FUSED:
            return 1.0
        return 0.5 if narrow(block) else 1.0
