"""What one call of a block costs on one rank, by kind of work; the parts that `price` adds up over units and stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autoplan.config.parallel import Launch, Mode, ParallelConfig, Precision
from autoplan.config.recompute import (
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
from autoplan.cost_models.profile import PHASES
from autoplan.cost_models.quantity import ZERO, Quantity, total
from autoplan.cost_models.time.host import host_op_s, host_s, slack_s, waited_s
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


@dataclass(frozen=True)
class OpTimes:
    """Seconds of the operations of one call of a block.

    `weight`: the part of `backward` that gives gradients of weights; `selective`: what selective recompute runs again;
    `host_*`: what the host needs to start them; `attention`: the part of its core, by phase; `groups`: what computing a
    group of regions again runs; `modules`, `host_modules`: what computing modules again runs. `host_recompute`: of
    groups and `selective`, where a profile has the host's part.
    """

    forward: Quantity
    backward: Quantity
    weight: Quantity
    selective: Quantity
    host_forward: Quantity = ZERO
    host_backward: Quantity = ZERO
    attention: Mapping[str, Quantity] = field(default_factory=dict)
    groups: Mapping[str, Quantity] = field(default_factory=dict)
    modules: Quantity = ZERO
    host_modules: Quantity = ZERO
    host_recompute: Mapping[str, Quantity] = field(default_factory=dict)


def op_times(workload: Workload, costs: Costs) -> dict[str, OpTimes]:
    """By block. They do not depend on dp, pp, ZeRO or the number of micro-batches: found once for many Pricers."""
    out = {}
    for name, block in workload.blocks.items():
        forward = [costs.forward_s(op) for op in block.ops]
        backward = [costs.backward_s(op) for op in block.ops]
        again = block.modules
        weight = [q * _weight_share(op) for op, q in zip(block.ops, backward, strict=True) if op_record(op.op).weights]
        out[name] = OpTimes(
            total(forward),
            total(backward),
            total(weight),
            total([costs.forward_s(block.ops[i]) for i in sorted(block.selective_ops)]),
            host_s(block, "forward", costs),
            host_s(block, "backward", costs),
            {
                phase: total([q for op, q in zip(block.ops, found, strict=True) if op_kind(op.op) is OpKind.ATTENTION])
                for phase, found in (("forward", forward), ("backward", backward))
            },
            {group: total([forward[i] for i in sorted(at)]) for group, at in block.group_ops.items()},
            ZERO
            if again is None
            else total([*(forward[i] for i in sorted(again.ops)), *map(costs.forward_s, again.beside)]),
            ZERO if again is None else host_s(block, "forward", costs, again),
            {
                name: host_s(block, "forward", costs, Recomputed(frozenset(ops)))
                for name, ops in ((SELECTIVE, block.selective_ops), *block.group_ops.items())
                if costs.measures_host
            },
        )
    return out


def _weight_share(op: OpWork) -> float:
    """Share of a product's backward that is for its weights: a half, all of it if the data needs no gradient."""
    if not any(op.inputs[i].requires_grad for i in op_record(op.op).weights):
        return 0.0
    return 0.5 if op.inputs[0].requires_grad else 1.0


def mesh_groups(config: ParallelConfig, axes: Sequence[tuple[str, int]]) -> dict[str, Group]:
    """Rank groups of every axis: pp, dp, cp and tp, major to minor; ep and etp fold into dp * cp * tp. `batch`: the
    ranks of one stage that share a micro-batch.

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
        "batch": Group(dp * cp, tp),
        "replicas": _replicas(dp * cp // config.zero_replicas, tp, config),
        "zero_replicas": Group(config.zero_replicas, tp * cp * dp // config.zero_replicas),
        "etp": Group(etp, 1),
        "ep": Group(config.ep, etp),
        "expert_replicas": _replicas(
            max(1, dp * cp * tp // (config.ep * etp * config.zero_replicas)), config.ep * etp, config
        ),
    }
    stride = 1
    for name, size in reversed(axes):
        out[name] = Group(size, stride)
        stride *= size
    return out


def _replicas(size: int, stride: int, config: ParallelConfig) -> Group:
    """Ranks with the same parameters: those of one stage, and where two ranks of a pipeline hold it (DualPipe) both's.

    The two stages are priced as neighbours; a pair alone as the one farthest apart, first and last rank.
    """
    copies = num_copies(config.schedule)
    if copies > 1 and size == 1:
        return Group(copies, (config.pp - 1) * config.dp * config.cp * config.tp)
    return Group(size * copies, stride)


@dataclass(frozen=True)
class BlockCost:
    """Seconds of one call of a block on one rank and micro-batch, by kind of work.

    `comm`: collectives inside the block by (family of their axis: tp, cp, ep or dp; phase); `reduced_bytes`: gradients
    that ZeRO 0 reduces at the end of the step, by group.
    """

    forward: Quantity
    backward: Quantity
    weight: Quantity  # the part of `backward` that may wait
    comm: Mapping[tuple[str, str], Quantity]
    accumulate: Quantity  # adding a gradient to what earlier micro-batches left, spread over all of them
    selective: Quantity  # computing the attention core again
    zero_forward: Quantity  # exposed gathers of ZeRO 3
    zero_backward: Quantity  # exposed gathers and reductions in every backward (ZeRO 2 and 3)
    zero_first: Quantity  # exposed gather in the first forward (ZeRO 1 and 2)
    zero_last: Quantity  # exposed reduction in the last backward (ZeRO 1), and sum over replicas of the shards
    per_step: Quantity  # reductions that wait until the end of the step
    optimizer: Quantity
    reduced_bytes: Mapping[str, float]
    waited: Mapping[str, Quantity]  # for the host to start kernels, by phase
    waited_once: Quantity  # for it to start what ZeRO 1 and 2 move once per step
    slack: Mapping[str, Quantity]  # how long the host is idle, by phase, and in the update ("optimizer")
    waited_split: Quantity  # for it to walk over the graph where the backward is in two parts
    again: Quantity  # its forward once more, in a backward
    hidden_recompute: Quantity  # of what ZeRO 3 moves in a backward, what hides behind computing the block again
    gather: Quantity  # of ZeRO 1 and 2, once per step, whole
    reduce: Quantity  # of ZeRO 1 (0, if beside the backward), and over replicas of the shards: once per step, whole
    groups: Mapping[str, Quantity] = field(default_factory=dict)  # computing a group of regions again
    modules: Quantity = ZERO  # computing modules again
    offload: Quantity = ZERO  # what it keeps to the host and back, nothing hidden
    moved: Quantity = ZERO  # gradients to an optimizer on the host, and what it wrote back, once per step

    def comm_s(self, phase: str) -> Quantity:
        """All collectives inside the block in one phase."""
        return total([q for (_, when), q in self.comm.items() if when == phase])

    @property
    def forward_s(self) -> Quantity:
        """A forward with everything that is in every forward."""
        return self.forward + self.comm_s("forward") + self.zero_forward + self.waited["forward"]

    @property
    def backward_s(self) -> Quantity:
        """A backward with everything that is in every backward."""
        return self.backward + self.comm_s("backward") + self.zero_backward + self.accumulate + self.waited["backward"]

    @property
    def recompute_s(self) -> Quantity:
        """Its forward once more, parameters at hand, less what it hides."""
        return self.again.beyond(self.hidden_recompute)

    def repeated(self, how: str) -> Quantity:
        """What a choice of recompute adds to a backward."""
        return _ADDED[recompute_kind(how).name](self, how)


# Seconds that a kind of recompute adds to the backward of a block.
_ADDED: Mapping[str, Callable[[BlockCost, str], Quantity]] = {
    NONE: lambda b, how: ZERO,
    SELECTIVE: lambda b, how: b.selective,
    FULL: lambda b, how: b.recompute_s,
    OFFLOAD: lambda b, how: b.offload,
    REGIONS: lambda b, how: total([b.groups[g] for g in region_groups(how) if g in b.groups]),
    MODULES_KIND: lambda b, how: b.modules,
}


@dataclass(frozen=True)
class _HostSide:
    """Seconds of the host for one block, and of the device meanwhile.

    Attributes:
        needs: of the host in every forward and backward. busy: of the device.
        once: of the host in the first forward and the last backward of a step beyond that.
        update: of the host in the update of the block's parameters.
    """

    launch: Launch
    needs: Mapping[str, Quantity]
    busy: Mapping[str, Quantity]
    once: Mapping[str, Quantity]
    update: Quantity

    def waited(self, phase: str) -> Quantity:
        """How long the device waits for the host."""
        return waited_s(self.needs[phase], self.busy[phase], self.launch)

    def adds(self, phase: str, host: Quantity, device: Quantity = ZERO) -> Quantity:
        """What the host, and the device, add to a phase that do this beside the rest of it."""
        after = device + waited_s(self.needs[phase] + host, self.busy[phase] + device, self.launch)
        return after.beyond(self.waited(phase))


class BlockPricer:
    """Prices of the blocks of one workload at given degrees."""

    def __init__(
        self,
        workload: Workload,
        config: ParallelConfig,
        costs: Costs,
        precision: Precision,
        activations: bool = False,
    ) -> None:
        self.config, self.costs, self.precision = config, costs, precision
        self.activations = activations or OFFLOAD in kinds_in(config.recompute)
        self.groups = mesh_groups(config, workload.axes)
        self.families = {name: "tp" for name, _ in workload.axes} | {"cp": "cp", "ep": "ep", "dp": "dp", "batch": "dp"}
        self.hidden = {"tp": costs.constants.tp_hidden, "ep": costs.constants.ep_hidden}
        self.states = StatePricer(config, costs, precision, self.groups)

    def cost(self, block: BlockWork, times: OpTimes) -> BlockCost:
        """Of one call."""
        comm, per_step = self._comm(block, times)
        sent = {phase: total([q for (_, when), q in comm.items() if when == phase]) for phase in PHASES}
        zero = self.states.terms(block, times.forward, times.backward, sent["backward"])
        accumulate, optimizer = self.states.accumulate(block), self.states.optimizer(block)
        host = self._host_side(block, times, sent, zero, accumulate)
        again = times.forward + sent["forward"]

        def repeated(name: str, seconds: Quantity) -> Quantity:
            """What operations that run again add to a backward, which is there beside them."""
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
            again=host.adds("backward", times.host_forward, again)
            if self.costs.measures_host
            else again + host.waited("forward"),
            hidden_recompute=zero.hidden_recompute,
            gather=zero.gather_once,
            reduce=zero.reduce_once + self.states.all_reduces(block),
            groups={group: repeated(group, seconds) for group, seconds in self._groups(times, comm).items()},
            modules=self._modules(block, times, host),
            offload=self._offload(block),
            moved=self.states.moved(block),
        )

    # -- collectives inside the block --------------------------------------------------------------------------------

    def _comm(self, block: BlockWork, times: OpTimes) -> tuple[dict[tuple[str, str], Quantity], Quantity]:
        """Collectives inside the block by (family, phase), as far as nothing hides them; and those once per step."""
        computed = {"forward": times.forward.mid, "backward": times.backward.mid}
        comms = [c for c in block.comms if self._is_sent(c)]
        inside = {phase: sum(c.phase == phase and c.per != "step" for c in comms) for phase in PHASES}
        plain: dict[tuple[str, str], Quantity] = {}
        parts: dict[tuple[str, str], Quantity] = {}  # among some of the ranks of cp
        rings: dict[tuple[str, int], Quantity] = {}  # by phase and steps of attention that they run beside
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
            else:
                table, family = (plain, self.families.get(c.axis, "tp")) if c.part is None else (parts, "cp")
                table[family, c.phase] = table.get((family, c.phase), ZERO) + seconds + waited
        out = {key: self._exposed(*key, seconds, times) for key, seconds in plain.items()}
        for (phase, ranks), seconds in rings.items():  # of c steps of attention c - 1 hide what comes next
            hidden = times.attention.get(phase, ZERO) * ((ranks - 1) / ranks)
            parts["cp", phase] = parts.get(("cp", phase), ZERO) + seconds.less(hidden)
        for key, seconds in parts.items():
            out[key] = out.get(key, ZERO) + seconds
        return out, per_step

    def _is_sent(self, c: CommWork) -> bool:
        """True if there is more than one rank to send to."""
        return c.part is not None or self.groups[c.axis].size > 1

    def _sent_s(self, block: BlockWork, c: CommWork) -> Quantity:
        """Seconds of a collective by itself."""
        return self.costs.collective_s(c.kind, c.num_bytes * self._sent_share(block, c), self._group(c), c.top_k)

    def _exposed(self, family: str, phase: str, seconds: Quantity, times: OpTimes) -> Quantity:
        """What of a family's collectives in a phase computing does not hide."""
        if family not in self.costs.options.overlap:
            return seconds
        if family == "cp":  # every step of the ring behind attention on what the step before brought
            ring = (self.config.cp - 1) / self.config.cp
            return seconds.less(times.attention.get(phase, ZERO) * ring)
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
        """What the host does for the block. `sent`: its collectives by phase."""
        busy = {"forward": times.forward + sent["forward"], "backward": times.backward + sent["backward"]}
        if self.costs.measures_host:  # all that the device does; what is fitted was fitted without
            busy["forward"] += zero.forward
            busy["backward"] = busy["backward"] + zero.backward + accumulate
        needs = {"forward": times.host_forward, "backward": times.host_backward}
        once = dict.fromkeys(PHASES, ZERO)
        launch = self.costs.options.launch
        if not self.costs.measures_host or launch is Launch.FULL_GRAPHS:
            return _HostSide(launch, needs, busy, once, ZERO)
        for every, phase, seconds in self._host_terms(block):
            (needs if every else once)[phase] += seconds
        trained = (p for p in block.params if p.trainable)
        update = [self.costs.host_fixed_s(self.states.tensor_name(p)) for p in trained]
        return _HostSide(launch, needs, busy, once, total(update))

    def _host_terms(self, block: BlockWork) -> Iterator[tuple[bool, str, Quantity]]:
        """What the runtime adds to operations where a profile measured it: whether in every micro-batch (else once per
        step), in which phase, seconds of the host."""
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
                yield stage >= 2, "backward", reduce
        m = self.config.num_micro_batches // num_copies(self.config.schedule)
        for p in block.params if m > 1 else ():
            if p.trainable:
                work = self.costs.accumulate_work(p.num_elements, self.states.grad_dtype(p.dtype))
                yield True, "backward", host_op_s(work, "forward", self.costs) * ((m - 1) / m)

    def _group(self, c: CommWork) -> Group:
        """The ranks of a collective; of a message, those two neighbours of the ring that are farthest apart."""
        if c.part is None:
            return self.groups[c.axis]
        ranks, stride = c.part[0], c.part[1] * self.groups[c.axis].stride
        if c.kind != "send_recv":
            return Group(ranks, stride)
        apart = (ranks - 1) * stride  # from the last one to the first; groups are aligned
        level, below = self.costs.cluster.shared_level(0, apart)
        if below == 1:  # in one unit of the innermost level: as any two neighbours
            return Group(2, stride)
        return Group(2, apart if level is self.costs.cluster.levels[-1] else below)

    @staticmethod
    def _groups(times: OpTimes, comm: Mapping[tuple[str, str], Quantity]) -> dict[str, Quantity]:
        """Attention over a cut sequence gathers its keys and values again."""
        gathers = {"attention": comm.get(("cp", "forward"), ZERO)}
        return {group: seconds + gathers.get(group, ZERO) for group, seconds in times.groups.items()}

    def _modules(self, block: BlockWork, times: OpTimes, host: _HostSide) -> Quantity:
        """What they compute and send again, and what starting that adds to waiting for the host in the backward."""
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

    def _offload(self, block: BlockWork) -> Quantity:
        """To the host in the forward and back in the backward, at its link; nothing hides behind computing."""
        return self.costs.host_copy_s(2 * block.offloaded_bytes) if self.activations else ZERO

    def _sent_share(self, block: BlockWork, comm: CommWork) -> float:
        """Of the bytes of a collective, what is sent: Transformer Engine gathers what 8-bit products take in 8 bits."""
        if comm.kind != "all_gather" or self.families.get(comm.axis) != "tp" or self.costs.mode is not Mode.FUSED:
            return 1.0
        return 0.5 if narrow(block) else 1.0
