"""What one call of a block costs on one rank, by kind of work; the parts that `price` adds up over units and stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoplan.config.parallel import MASTER_BYTES, Launch, Mode, ParallelConfig, Precision
from autoplan.config.recompute import groups_of, modules_of
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Group
from autoplan.cost_models.quantity import ZERO, Quantity, Tag, total
from autoplan.cost_models.time.host import host_op_s, host_s, slack_s, waited_s
from autoplan.cost_models.work import (
    Again,
    BlockWork,
    CommWork,
    Gathered,
    OpWork,
    ParamWork,
    Workload,
)
from autoplan.ops.record import OpKind
from autoplan.ops.table import op_kind, op_record
from autoplan.schedules.schedule import backward_follows, num_copies
from autoplan.units import dtype_bytes

# Parameters by who holds a copy of them: the groups that ZeRO shards over and gradients are reduced over.
REPLICAS = {False: "replicas", True: "expert_replicas"}
# Seconds to start one of the copies that a collective of a list of tensors makes, one per rank, from C++: half of what
# an operation from Python takes. Assumed.
_LIST_COPY_S = 5e-6
SELECTIVE = "selective"


@dataclass(frozen=True)
class OpTimes:
    """Seconds of the operations of one call of a block.

    `weight`: the part of `backward` that gives gradients of weights; `selective`: what selective recompute runs again;
    `host_*`: what the host needs to start them; `attention`: the part of its core, by phase; `groups`: what computing a
    group of regions again runs; `modules`, `host_modules`: what computing modules again runs. `host_again`: of groups
    and `selective`, where a profile has the host's part.
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
    host_again: Mapping[str, Quantity] = field(default_factory=dict)


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
                name: host_s(block, "forward", costs, Again(frozenset(ops)))
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
    hidden_again: Quantity  # of what ZeRO 3 moves in a backward, what hides behind computing the block again
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
    def again_s(self) -> Quantity:
        """Its forward once more, parameters at hand, less what it hides."""
        return _beyond(self.again, self.hidden_again)

    def repeated(self, how: str) -> Quantity:
        """What a choice of recompute adds to a backward."""
        if how == "full":
            return self.again_s
        if how == SELECTIVE:
            return self.selective
        if how == "offload":
            return self.offload
        if modules_of(how):
            return self.modules
        return total([self.groups[g] for g in groups_of(how) if g in self.groups])


def _beyond(whole: Quantity, part: Quantity) -> Quantity:
    """What is left of `whole` without `part`, each in its own scenario, never below 0."""
    low, mid, high = (max(0.0, getattr(whole, w) - getattr(part, w)) for w in ("low", "mid", "high"))
    return Quantity(min(low, mid), mid, max(mid, high), whole.tag)


def _narrow(block: BlockWork) -> bool:
    """True if its products take 8 or 4 bits."""
    return any(op.matmul_dtype is not None for op in block.ops)


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
        pinned = config.recompute
        how = tuple(pinned.values()) if isinstance(pinned, Mapping) else (pinned,)
        self.activations = activations or "offload" in how
        self.groups = mesh_groups(config, workload.axes)
        self.families = {name: "tp" for name, _ in workload.axes} | {"cp": "cp", "ep": "ep", "dp": "dp", "batch": "dp"}
        given, c = costs.overlap_fraction(), costs.constants
        self.hides = c.overlap if given is None else given
        self.by_tensor = costs.options.zero_by_tensor and config.zero_stage == 3
        if self.by_tensor:
            self.hides = 0.0
        self.contention = c.contention if costs.profile is None and costs.cluster.device_type != "cpu" else 0.0
        self.hidden = {"tp": c.tp_hidden, "ep": c.ep_hidden}
        # Megatron's --overlap-grad-reduce without a distributed optimizer; emitted programs where there are streams.
        # What others ran op by op is priced as reduced after the backward.
        emitted = costs.mode is Mode.FUSED or costs.profile is not None
        beside = emitted and costs.options.overlap_zero and costs.cluster.device_type != "cpu"
        self.reduces_beside = beside and config.zero_stage == 0

    def cost(self, block: BlockWork, times: OpTimes) -> BlockCost:
        """Of one call."""
        comm: dict[tuple[str, str], Quantity] = {}
        per_step = ZERO
        computed = {"forward": times.forward.mid, "backward": times.backward.mid}
        comms = [c for c in block.comms if c.part is not None or self.groups[c.axis].size > 1]
        inside = {phase: sum(c.phase == phase and c.per != "step" for c in comms) for phase in computed}
        rings: dict[tuple[str, int], Quantity] = {}
        shown: dict[str, Quantity] = {}
        for c in comms:
            size = c.num_bytes * self._sent_share(block, c)
            seconds = self.costs.collective_s(c.kind, size, self._group(c), c.top_k)
            if c.per == "step":
                per_step += seconds
            elif c.behind_attention:
                steps = c.phase, c.behind_attention
                waited = self.costs.wait_s(computed[c.phase] / inside[c.phase])
                rings[steps] = rings.get(steps, ZERO) + seconds + waited
            elif c.part is not None:
                waited = self.costs.wait_s(computed[c.phase] / inside[c.phase])
                shown[c.phase] = shown.get(c.phase, ZERO) + seconds + waited
            else:
                key = self.families.get(c.axis, "tp"), c.phase
                waited = self.costs.wait_s(computed[c.phase] / inside[c.phase])
                comm[key] = comm.get(key, ZERO) + seconds + waited
        for (family, phase), seconds in comm.items():
            if family not in self.costs.options.overlap:
                continue
            if family == "cp":  # every step of the ring behind attention on what the step before brought
                ring = (self.config.cp - 1) / self.config.cp
                comm[family, phase] = seconds.less(times.attention.get(phase, ZERO) * ring)
            else:
                comm[family, phase] = seconds.less(seconds * self.hidden.get(family, 0.0))
        for (phase, ranks), seconds in rings.items():  # of c steps of attention c - 1 hide what comes next
            hidden = times.attention.get(phase, ZERO) * ((ranks - 1) / ranks)
            shown[phase] = shown.get(phase, ZERO) + seconds.less(hidden)
        for phase, seconds in shown.items():
            comm["cp", phase] = comm.get(("cp", phase), ZERO) + seconds
        gather, reduce, sharded = self._zero(block)
        across, stage = self._across_replicas(block), self.config.zero_stage
        hooks = {p: self.costs.fixed_s(f"zero_block_{p}_s") if sharded else ZERO for p in _PHASES}
        waits = (
            {n: self.costs.wait_s(computed["backward"] / n, n) for n in (1, 2)} if reduce.mid else {1: ZERO, 2: ZERO}
        )
        waited = self.costs.wait_s(computed["forward"]) if sharded else ZERO
        hidden_gather = self._beside(gather, times.forward) + waited
        hidden_reduce = self._beside(reduce, times.backward) + waits[1]
        hidden_last = self._beside((reduce if stage == 1 else ZERO) + across, times.backward)
        hidden_last += waits[1] if stage == 1 else ZERO
        # a stream of its own: traffic hides behind all that a backward does, computing the block again included
        behind = times.backward + total([q for (_, when), q in comm.items() if when == "backward"])
        moved = (gather if self._gathers_again(block) else ZERO) + reduce
        wait = waits[2 if moved.mid > reduce.mid else 1]
        both = self._beside(moved, behind) + wait
        beside = self._beside(moved, behind + times.forward) + wait
        zero = {
            "forward": (hidden_gather if stage == 3 else ZERO) + hooks["forward"],
            "backward": (both if stage == 3 else hidden_reduce if stage == 2 else ZERO) + hooks["backward"],
        }
        accumulate, optimizer = self._accumulate(block), self._optimizer(block)
        busy = {
            phase: ops + total([q for (_, when), q in comm.items() if when == phase])
            for phase, ops in (("forward", times.forward), ("backward", times.backward))
        }
        hosts, once, update = self._hosts(block, times)
        if self.costs.measures_host:  # all that the device does; what is fitted was fitted without
            busy = {"forward": busy["forward"] + zero["forward"],
                    "backward": busy["backward"] + zero["backward"] + accumulate}  # fmt: skip
        launch = self.costs.options.launch
        launched = {phase: waited_s(hosts[phase], busy[phase], launch) for phase in _PHASES}
        slack = {phase: slack_s(hosts[phase], busy[phase], launch) for phase in _PHASES}

        def more(phase: str, host: Quantity, device: Quantity = ZERO) -> Quantity:
            """What the host, and the device, add to a phase that do this beside the rest of it."""
            after = device + waited_s(hosts[phase] + host, busy[phase] + device, launch)
            return _beyond(after, launched[phase])

        computed_again = times.forward + total([q for (_, when), q in comm.items() if when == "forward"])
        if self.costs.measures_host:
            again = more("backward", times.host_forward, computed_again)
        else:
            again = computed_again + launched["forward"]
        return BlockCost(
            forward=times.forward,
            backward=times.backward,
            weight=times.weight,
            comm=comm,
            accumulate=accumulate,
            selective=more("backward", times.host_again[SELECTIVE], times.selective)
            if times.host_again
            else times.selective,
            zero_forward=zero["forward"],
            zero_backward=zero["backward"],
            zero_first=hidden_gather if stage in (1, 2) else ZERO,
            zero_last=hidden_last if stage else ZERO,
            per_step=per_step,
            optimizer=optimizer + waited_s(update, optimizer, launch),
            reduced_bytes={} if self.reduces_beside else self._reduced(block),
            waited=launched,
            waited_once=total([more(phase, once[phase]) for phase in _PHASES if once[phase].mid]),
            slack={**slack, "optimizer": slack_s(update, optimizer, launch)},
            waited_split=more("backward", self.costs.host_fixed_s("split_layer_s")),
            again=again,
            hidden_again=_beyond(both, beside) if stage == 3 else ZERO,
            gather=gather if stage in (1, 2) else ZERO,
            reduce=(reduce if stage == 1 else ZERO) + across + self._all_reduces(block),
            groups={
                group: more("backward", times.host_again[group], seconds) if times.host_again else seconds
                for group, seconds in self._groups(times, comm).items()
            },
            modules=self._modules(block, times, busy["backward"], hosts["backward"]),
            offload=self._offload(block),
            moved=self._moved(block),
        )

    def _beside(self, moved: Quantity, computed: Quantity) -> Quantity:
        """What traffic beside computing costs: what the computing does not hide, and a share of what it does."""
        exposed = moved.less(computed * self.hides)
        return exposed + _beyond(moved, exposed) * self.contention

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

    def _hosts(self, block: BlockWork, times: OpTimes) -> tuple[dict[str, Quantity], dict[str, Quantity], Quantity]:
        """Seconds of the host in every forward and backward, in the first and last of a step beyond that, and in the
        update. What the runtime adds to operations is there where a profile measured it."""
        every = {"forward": times.host_forward, "backward": times.host_backward}
        once = dict.fromkeys(_PHASES, ZERO)
        stage, m = self.config.zero_stage, self.config.num_micro_batches // num_copies(self.config.schedule)
        if not self.costs.measures_host or self.costs.options.launch is Launch.FULL_GRAPHS:
            return every, once, ZERO
        for expert in REPLICAS:
            mine = [p for p in block.params if p.expert is expert]
            if self._share(expert) == 1 or not mine:
                continue
            for phase in _PHASES:
                every[phase] += self.costs.host_fixed_s(f"zero_block_{phase}_s")
            size = float(sum(p.num_elements * dtype_bytes(p.dtype) for p in mine))
            gather = self.costs.zero_host_s("gather", len(mine), size)
            trained = [p for p in mine if p.trainable]
            grads = sum(p.num_elements * self._grad_bytes(p.dtype) for p in trained)
            reduce = self.costs.zero_host_s("reduce", len(trained), grads) if trained else ZERO
            if stage == 3:
                every["forward"] += gather
                every["backward"] += gather if self._gathers_again(block) else ZERO
            else:
                once["forward"] += gather
            (every if stage >= 2 else once)["backward"] += reduce
        trained = [p for p in block.params if p.trainable]
        for p in trained if m > 1 else ():
            work = self.costs.accumulate_work(p.num_elements, self._grad_dtype(p.dtype))
            every["backward"] += host_op_s(work, "forward", self.costs) * ((m - 1) / m)
        update = [self.costs.host_fixed_s(self._tensor_name(p)) for p in trained]
        return every, once, total(update)

    def _tensor_name(self, p: ParamWork) -> str:
        """The constant of a parameter in the optimizer."""
        return "zero_optimizer_tensor_s" if self._share(p.expert) > 1 else "optimizer_tensor_s"

    def _modules(self, block: BlockWork, times: OpTimes, busy: Quantity, host: Quantity) -> Quantity:
        """What they compute and send again, and what starting that adds to waiting for the host in the backward."""
        if block.modules is None:
            return ZERO
        sent = [ZERO]
        for c in block.modules.comms:
            if c.part is not None or self.groups[c.axis].size > 1:
                size = c.num_bytes * self._sent_share(block, c)
                seconds = self.costs.collective_s(c.kind, size, self._group(c), c.top_k)
                family = self.families.get(c.axis, "tp")
                hidden = self.hidden.get(family, 0.0) if family in self.costs.options.overlap else 0.0
                sent.append(seconds.less(seconds * hidden))
        device = times.modules + total(sent)
        launch = self.costs.options.launch
        waited = waited_s(host + times.host_modules, busy + device, launch)
        return _beyond(device + waited, waited_s(host, busy, launch))

    def _offload(self, block: BlockWork) -> Quantity:
        """To the host in the forward and back in the backward, at its link; nothing hides behind computing."""
        return self.costs.host_copy_s(2 * block.offloaded_bytes) if self.activations else ZERO

    def _by_policy(self, p: ParamWork) -> bool:
        """True if `fully_shard` has the parameter and its gradient on the host."""
        return "parameters" in self.config.offload and self._share(p.expert) > 1

    def _shown_bytes(self, p: ParamWork) -> float:
        """Per element of what the optimizer is given: a float32 master, or the parameter."""
        master = self.precision.has_masters and p.dtype == self.precision.compute and p.trainable
        return MASTER_BYTES if master else dtype_bytes(p.dtype)

    def _moved(self, block: BlockWork) -> Quantity:
        """Shards of gradients to the host and of parameters back, once per step, beside nothing (runtime.offload).

        A master without shards is copied in 16 bits: it is rounded on the host.
        """
        if not self.config.offload:
            return ZERO
        size = 0.0
        for p in block.params:
            if p.trainable and not self._by_policy(p):
                share, shown = self._share(p.expert), self._shown_bytes(p)
                back = shown if share > 1 else dtype_bytes(p.dtype)
                size += p.num_elements / share * (shown + back)
        return self.costs.host_copy_s(size)

    def _sent_share(self, block: BlockWork, comm: CommWork) -> float:
        """Of the bytes of a collective, what is sent: Transformer Engine gathers what 8-bit products take in 8 bits."""
        if comm.kind != "all_gather" or self.families.get(comm.axis) != "tp" or self.costs.mode is not Mode.FUSED:
            return 1.0
        return 0.5 if _narrow(block) else 1.0

    def _grad_bytes(self, dtype: str) -> float:
        return dtype_bytes(dtype) if self.precision.grad_bytes is None else self.precision.grad_bytes

    def _grad_dtype(self, dtype: str) -> str:
        return dtype if self._grad_bytes(dtype) == dtype_bytes(dtype) else "float32"

    def _state_bytes(self, dtype: str) -> float:
        return 2.0 * dtype_bytes(dtype) if self.precision.state_bytes is None else self.precision.state_bytes

    def _share(self, expert: bool) -> int:
        """Ranks that ZeRO shards a parameter over; 1: it does not."""
        return self.groups[REPLICAS[expert]].size if self.config.zero_stage else 1

    def _zero(self, block: BlockWork) -> tuple[Quantity, Quantity, bool]:
        """Gathering the block's parameters over their replicas, reducing and scattering their gradients, and whether
        there is anything to gather."""
        gather, reduce = [], []
        for expert, name in REPLICAS.items():
            mine = [p for p in block.params if p.expert is expert]
            ranks = self._share(expert)
            if ranks == 1 or not mine:
                continue
            size = float(sum(p.num_elements * dtype_bytes(p.dtype) for p in mine))
            if self.costs.options.narrow_gather and _narrow(block):
                size /= 2
            grads = sum(p.num_elements * self._grad_bytes(p.dtype) for p in mine if p.trainable)
            gather.append(self._moved_s("all_gather", size, mine, name))
            gather.append(self.costs.zero_copy_s("gather", size, len(mine), ranks))
            if grads:
                reduce.append(self._moved_s("reduce_scatter", grads, [p for p in mine if p.trainable], name))
                reduce.append(self.costs.zero_copy_s("reduce", grads, sum(p.trainable for p in mine), ranks))
            # shards come from the host in the stream that gathers, and go there in the one that reduces
            # (torch.distributed.fsdp._fully_shard: FSDPParam.all_gather_inputs, foreach_reduce)
            there = [p for p in mine if self._by_policy(p)]
            if there:
                shard = sum(p.num_elements * self._shown_bytes(p) for p in there) / ranks
                gather.append(self.costs.host_copy_s(shard))
                back = sum(p.num_elements * self._shown_bytes(p) for p in there if p.trainable) / ranks
                reduce.append(self.costs.host_copy_s(back))
        return total(gather), total(reduce), bool(gather)

    def _moved_s(self, kind: str, size: float, params: Sequence[ParamWork], name: str) -> Quantity:
        """One collective of `size` bytes for all of a block's parameters, or one for each, with the copies between the
        collective's buffer and a tensor per rank."""
        group = self.groups[name]
        if not self.by_tensor:
            return self.costs.collective_s(kind, size, group)
        whole = sum(p.num_elements for p in params)
        copies = Quantity.spread(group.size * _LIST_COPY_S, 0.5, Tag.ASSUMED)
        return total([self.costs.collective_s(kind, size * p.num_elements / whole, group) + copies for p in params])

    def _gathers_again(self, block: BlockWork) -> bool:
        """True if ZeRO 3 gathers the parameters for the backward, too. By hand, all are."""
        if block.gathered is Gathered.AGAIN or self.costs.mode is Mode.FUSED:
            return True
        return block.gathered is Gathered.LAST and not backward_follows(self.config.schedule, self.config.pp)

    def _across_replicas(self, block: BlockWork) -> Quantity:
        """Summing the gradients' shards over their replicas (hybrid ZeRO), in the last backward of the step."""
        out = [ZERO]
        for expert in REPLICAS:
            mine = [p for p in block.params if p.trainable and p.expert is expert]
            size = sum(p.num_elements * self._grad_bytes(p.dtype) for p in mine) / self._share(expert)
            if size and self.groups["zero_replicas"].size > 1:
                out.append(self.costs.collective_s("all_reduce", size, self.groups["zero_replicas"]))
        return total(out)

    def _reduced(self, block: BlockWork) -> dict[str, float]:
        out = {}
        for expert, name in REPLICAS.items():
            if self.config.zero_stage == 0 and self.groups[name].size > 1:
                mine = [p for p in block.params if p.trainable and p.expert is expert]
                out[name] = sum(p.num_elements * self._grad_bytes(p.dtype) for p in mine)
        return {name: size for name, size in out.items() if size}

    def _all_reduces(self, block: BlockWork) -> Quantity:
        """Gradients that ZeRO 0 reduces beside the backward; else it does so at the end of the step."""
        sizes = self._reduced(block).items() if self.reduces_beside else ()
        return total([ZERO, *(self.costs.collective_s("all_reduce", size, self.groups[name]) for name, size in sizes)])

    def _accumulate(self, block: BlockWork) -> Quantity:
        """Every micro-batch but the first adds to gradients that are there: whole ones, or shards if every backward
        reduces (ZeRO 2 and 3)."""
        m = self.config.num_micro_batches // num_copies(self.config.schedule)
        if m == 1:
            return ZERO
        out = []
        for p in block.params:
            if p.trainable:
                share = self._share(p.expert) if self.config.zero_stage >= 2 else 1
                out.append(self.costs.accumulate_s(p.num_elements / share, self._grad_dtype(p.dtype)))
        return total(out) * ((m - 1) / m)

    def _optimizer(self, block: BlockWork) -> Quantity:
        out = []
        for expert in REPLICAS:
            by_dtype: dict[str, float] = {}
            for p in block.params:
                if p.trainable and p.expert is expert:
                    by_dtype[p.dtype] = by_dtype.get(p.dtype, 0.0) + p.num_elements / self._share(expert)
            update = self.costs.host_optimizer_s if self.config.offload else self.costs.optimizer_s
            out += [update(n, dtype, self._state_bytes(dtype)) for dtype, n in by_dtype.items()]
        for p in block.params:
            if p.trainable:
                out.append(self.costs.fixed_s(self._tensor_name(p)))
        return total(out)


_PHASES = ("forward", "backward")
