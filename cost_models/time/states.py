"""The cost of parameters: ZeRO's traffic, sums of gradients over micro-batches and ranks, the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoplan.config.parallel import Mode, ParallelConfig, scatters_each, sums_in_32_bits
from autoplan.config.precision import MASTER_BYTES, Precision
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Group
from autoplan.cost_models.profile import PHASES
from autoplan.cost_models.quantity import ZERO, Quantity, Tag, total
from autoplan.cost_models.work import BlockWork, Gathered, ParamWork
from autoplan.schedules.schedule import SCHEDULES, backward_follows, num_copies
from autoplan.streams import has_streams, reduces_by_exchange
from autoplan.units import dtype_bytes

# False: other parameters, True: parameters of experts -> the group of ranks that hold copies, over which ZeRO shards
# and gradients are reduced.
REPLICAS = {False: "replicas", True: "expert_replicas"}
# Seconds to start one copy, from C++, of a collective over a list of tensors, which makes one copy per rank: half the
# time of an operation from Python. Assumed.
_LIST_COPY_S = 5e-6
# Time of a copy from pageable memory over that from pinned memory: 4 to 6 (deepspeedai/DeepSpeed, pull request 5301).
# DeepSpeed's ZeRO 3 returns parameters so (_reassign_or_swap_out_partitioned_parameters of stage3.py, a blocking copy
# to another dtype), ZeRO 1 and 2 did until March 2024.
_PAGED = 5.0


@dataclass(frozen=True)
class MovedOnce:
    """ZeRO traffic once per step: seconds by unit, seconds of the passes that it may hide behind, and their share.

    `hides`: 0 to 1, the part of the passes that hides something.
    """

    moved: Sequence[float]
    computed: Sequence[float]
    hides: float


@dataclass(frozen=True)
class ZeroTerms:
    """The seconds that ZeRO adds to a block.

    Attributes:
        forward, backward: Exposed, in every forward and backward.
        first, last: Exposed, in the first forward and the last backward.
        gather_once, reduce_once: Traffic once per step, nothing hidden.
        hidden_recompute: Traffic that hides behind recomputing the block.
    """

    forward: Quantity
    backward: Quantity
    first: Quantity
    last: Quantity
    gather_once: Quantity
    reduce_once: Quantity
    hidden_recompute: Quantity = ZERO


def narrow(block: BlockWork) -> bool:
    """Return True if its products take 8 or 4 bits."""
    return any(op.matmul_dtype is not None for op in block.ops)


def _in_8_bits(block: BlockWork) -> bool:
    """Return True if its products take 8 bits: parameters of products in 4 bits are stored and gathered in 16."""
    return any(op.matmul_dtype is not None and op.matmul_dtype.startswith("float8") for op in block.ops)


def reduced_beside(config: ParallelConfig, costs: Costs) -> bool:
    """Return True if ZeRO 0 reduces gradients during the backward.

    Megatron's --overlap-grad-reduce without a distributed optimizer, torch's DistributedDataParallel, emitted programs
    (`runtime.zero.apply_zero`) do. A split backward gives the gradients of weights too late for it.
    """
    if config.zero_stage or not costs.options.overlap_zero:
        return False
    return has_streams(costs.cluster.device_type) and not SCHEDULES[config.schedule].split_backward


def _shown(moved: Quantity, hiding: Quantity, contention: float) -> Quantity:
    """Return the cost of traffic behind computing: the exposed part, and a share of the hidden part."""
    exposed = moved.less(hiding)
    return exposed + moved.beyond(exposed) * contention


class StatePricer:
    """The prices of the parameters of blocks at given degrees.

    Attributes:
        overlap: The share of compute behind which traffic on a stream of its own hides.
        hides: The same for ZeRO's traffic; 0 if it has no stream of its own.
        contention: The share of hidden traffic by which compute slows down.
        block_contention: The same for what ZeRO 3 sends of every block in every pass.
        reduces_beside: True if ZeRO 0 reduces gradients during the backward.
        reduction: The collective that sends the gradients of ZeRO 1 to 3.
        scatters: True if every backward of ZeRO 2 and 3 reduces gradients; False if the last one alone does.
        host_sums: True if the sums of gradients are on the host (`RunOptions.host_sums`).
    """

    def __init__(self, config: ParallelConfig, costs: Costs, precision: Precision, groups: Mapping[str, Group]) -> None:
        self.config = config
        self.costs = costs
        self.precision = precision
        self.groups = groups
        given, c = costs.overlap_fraction(), costs.constants
        streams = has_streams(costs.cluster.device_type)
        self.overlap: float = c.overlap if given is None else given
        self.by_tensor: bool = costs.options.zero_by_tensor and config.zero_stage == 3
        self.hides: float = 0.0 if self.by_tensor else self.overlap
        self.contention: float = c.contention if costs.profile is None and streams else 0.0
        by_block = costs.profile is None and streams and config.zero_stage == 3
        self.block_contention: float = c.block_contention if by_block else self.contention
        self.reduces_beside: bool = reduced_beside(config, costs)
        self.reduction = "all_to_all" if reduces_by_exchange(costs.cluster.device_type) else "reduce_scatter"
        self.scatters: bool = scatters_each(config, costs.options)
        self.host_sums: bool = costs.options.host_sums and bool(config.offload) and config.zero_stage > 0
        if (costs.options.whole_sums or costs.options.all_reduced) and config.zero_stage == 1:
            self.reduction = "all_reduce"

    @cached_property
    def holds_once(self) -> bool:
        """True if a rank holds a parameter once that several blocks use.

        Stages hold a copy each, and so do blocks of `fully_shard` (`runtime.zero`).
        """
        shards = any(self.share(expert) > 1 for expert in REPLICAS)
        return self.config.pp == 1 and (not shards or self.costs.mode is Mode.FUSED)

    @cached_property
    def moves_once(self) -> bool:
        """True if it is gathered and reduced once, too. ZeRO 3 does so with every block that uses it."""
        return self.holds_once and self.config.zero_stage < 3

    def share(self, expert: bool) -> int:
        """Return the number of ranks that ZeRO shards a parameter over; 1 if it does not."""
        return self.groups[REPLICAS[expert]].size if self.config.zero_stage else 1

    def sharded(self, block: BlockWork) -> Iterator[tuple[str, int, list[ParamWork]]]:
        """Yield (group that holds copies, its number of ranks, parameters) for the parameters that ZeRO shards."""
        for expert, name in REPLICAS.items():
            mine = [p for p in self._moved_params(block) if p.expert is expert]
            ranks = self.share(expert)
            if ranks > 1 and mine:
                yield name, ranks, mine

    def terms(
        self, block: BlockWork, forward: Quantity, backward: Quantity, again: Quantity, sent: Quantity
    ) -> ZeroTerms:
        """Return the seconds that ZeRO adds to a block.

        Args:
            forward, backward: Seconds of its operations.
            again: Those of the operations that full recompute reruns.
            sent: Seconds of the collectives in its backward, beside which ZeRO's traffic may run too.
        """
        stage = self.config.zero_stage
        gather, reduce, sharded = self._zero(block)
        across = self._across_replicas(block)
        hooks = {p: self.costs.fixed_s(f"zero_block_{p}_s") if sharded else ZERO for p in PHASES}
        waited = self.costs.wait_s(forward.mid) if sharded else ZERO
        gathering = self._beside(gather, forward) + waited
        one, two = ((self.costs.wait_s(backward.mid / n, n) if reduce.mid else ZERO) for n in (1, 2))
        reduce += self.summed_on_host(block)
        gather_once = gather if stage in (1, 2) else ZERO
        in_last = stage > 0 and not self.scatters
        reduce_once = (reduce if in_last else ZERO) + across
        last = self.beside(reduce_once, backward, self.hides) + (one if in_last else ZERO)
        reduce = ZERO if in_last else reduce
        if stage < 3:
            behind = backward if self.costs.options.overlap_zero else ZERO
            reducing = self._beside(reduce, behind) + one if self.scatters else ZERO
            first = gathering if stage else ZERO
            return ZeroTerms(
                hooks["forward"], reducing + hooks["backward"], first, last if stage else ZERO, gather_once, reduce_once
            )
        # ZeRO has a stream of its own: traffic hides behind all work of a backward, including recomputing the block
        behind = backward + sent
        moved = (gather if self.gathers_again(block) else ZERO) + reduce
        wait = ZERO if not moved.mid else two if moved.mid > reduce.mid > 0 else one
        both = self._beside(moved, behind) + wait
        beside = self._beside(moved, behind + again) + wait
        hidden = both.beyond(beside)
        return ZeroTerms(
            gathering + hooks["forward"], both + hooks["backward"], ZERO, last, gather_once, reduce_once, hidden
        )

    def _zero(self, block: BlockWork) -> tuple[Quantity, Quantity, bool]:
        """Return the seconds of gathers and of reduce-scatters of a block, and whether ZeRO shards it."""
        gather, reduce = [], []
        for name, ranks, mine in self.sharded(block):
            size = self.gathered_bytes(mine)
            if self.costs.options.narrow_gather and _in_8_bits(block):
                size /= 2
            trained = [p for p in mine if p.trainable]
            grads = self.reduced_bytes(trained)
            gather.append(self._moved_s("all_gather", size, mine, name))
            gather.append(self.costs.zero_copy_s("gather", size, len(mine), ranks))
            if grads:
                reduce.append(self._moved_s(self.reduction, grads, trained, name))
                reduce.append(self.costs.zero_copy_s("reduce", grads, len(trained), ranks))
            # the stream that gathers copies shards from the host, the stream that reduces copies them back
            # (torch.distributed.fsdp._fully_shard: FSDPParam.all_gather_inputs, foreach_reduce)
            there = [p for p in mine if self._by_policy(p)]
            if there:
                held = [dtype_bytes(p.dtype) if self.host_sums else self._shown_bytes(p) for p in there]
                shard = sum(p.num_elements * size for p, size in zip(there, held, strict=True)) / ranks
                gather.append(self.costs.host_copy_s(shard))
                back = sum(p.num_elements * self._shown_bytes(p) for p in there if p.trainable) / ranks
                reduce.append(ZERO if self.host_sums else self.costs.host_copy_s(back))
        return total(gather), total(reduce), bool(gather)

    def traffic_s(self, block: BlockWork) -> tuple[float, float]:
        """Return the seconds of one gather and of one reduction of a block over its replicas, nothing hidden."""
        gather, reduce, _ = self._zero(block)
        return gather.mid, (reduce + self.summed_on_host(block) + self.all_reduces(block)).mid

    def across_s(self, block: BlockWork) -> float:
        """Return the seconds of summing gradient shards over replicas (hybrid ZeRO)."""
        return self._across_replicas(block).mid

    def _moved_s(self, kind: str, size: float, params: Sequence[ParamWork], name: str) -> Quantity:
        """Return the seconds of one collective of `size` bytes for all parameters, or of one per parameter.

        A collective per parameter includes the copies between its buffer and a tensor per rank.
        """
        group = self.groups[name]
        if not self.by_tensor:
            return self.costs.collective_s(kind, size, group)
        whole = sum(p.num_elements for p in params)
        copies = Quantity.spread(group.size * _LIST_COPY_S, 0.5, Tag.ASSUMED)
        return total([self.costs.collective_s(kind, size * p.num_elements / whole, group) + copies for p in params])

    def _beside(self, moved: Quantity, computed: Quantity) -> Quantity:
        """Return the cost of a block's traffic of ZeRO beside compute, in every pass."""
        return _shown(moved, computed * self.hides, self.block_contention)

    def beside(self, moved: Quantity, computed: Quantity, share: float) -> Quantity:
        """Return the cost of other traffic behind a `share` of compute."""
        return _shown(moved, computed * share, self.contention)

    def gathers_again(self, block: BlockWork) -> bool:
        """Return True if ZeRO 3 gathers the parameters for the backward, too. Megatron gathers all of them."""
        if block.gathered is Gathered.TWICE or self.costs.mode is Mode.FUSED:
            return True
        return block.gathered is Gathered.LAST and not backward_follows(self.config.schedule, self.config.pp)

    def _across_replicas(self, block: BlockWork) -> Quantity:
        """Return the seconds of summing gradient shards over replicas (hybrid ZeRO), in the last backward of a step."""
        out = [ZERO]
        for expert in REPLICAS:
            mine = [p for p in self._moved_params(block) if p.trainable and p.expert is expert]
            size = sum(p.num_elements * self.grad_bytes(p.dtype) for p in mine) / self.share(expert)
            if size and self.groups["zero_replicas"].size > 1:
                out.append(self.costs.collective_s("all_reduce", size, self.groups["zero_replicas"]))
        return total(out)

    def reduced(self, block: BlockWork) -> dict[str, float]:
        """Return the bytes of gradients that ZeRO 0 reduces, by group."""
        out = {}
        for expert, name in REPLICAS.items():
            if self.config.zero_stage == 0 and self.groups[name].size > 1:
                mine = [p for p in self._moved_params(block) if p.trainable and p.expert is expert]
                out[name] = sum(p.num_elements * self.grad_bytes(p.dtype) for p in mine)
        return {name: size for name, size in out.items() if size}

    def all_reduces(self, block: BlockWork) -> Quantity:
        """Return the seconds of ZeRO 0's all-reduces during the backward; ZERO if they run at the end of the step."""
        sizes = self.reduced(block).items() if self.reduces_beside else ()
        return total([ZERO, *(self.costs.collective_s("all_reduce", size, self.groups[name]) for name, size in sizes)])

    def _by_policy(self, p: ParamWork) -> bool:
        """Return True if `fully_shard` keeps the parameter and its gradient on the host."""
        return "parameters" in self.config.offload and self.share(p.expert) > 1

    def _shown_bytes(self, p: ParamWork) -> float:
        """Return the bytes per element of the parameter that the optimizer updates: a float32 master, or itself."""
        master = self.precision.has_masters and p.dtype == self.precision.compute and p.trainable
        return MASTER_BYTES if master else p.width

    def moved(self, block: BlockWork) -> Quantity:
        """Return the seconds of copying gradient shards to the host and parameters back, once per step, nothing hidden.

        See `runtime.offload`. A master without shards is copied back in 16 bits: it is rounded on the host. So is any
        in DeepSpeed (`RunOptions.host_sums`), whose gradients are widened before they go to the host.
        """
        if not self.config.offload:
            return ZERO
        size = 0.0
        for p in self.updated(block):
            share, shown = self.share(p.expert), self._shown_bytes(p)
            if self.host_sums:
                paged = _PAGED if self.config.zero_stage == 3 else 1.0
                back = 0.0 if self._by_policy(p) else dtype_bytes(p.dtype) * paged
                size += p.num_elements / share * (shown + back)
            elif not self._by_policy(p):
                back = shown if share > 1 else dtype_bytes(p.dtype)
                size += p.num_elements / share * (shown + back)
        return self.costs.host_copy_s(size)

    @cached_property
    def host_sum_copies(self) -> float:
        """The copies between device and host of a sum of gradients in every reduction, averaged over micro-batches.

        ZeRO 3 has the gradients of the only micro-batch there and back, too. ZeRO 2 fetches no sum in the first
        micro-batch, and has none where there is only one; ZeRO 1 reduces once per step.
        """
        if not self.host_sums:
            return 0.0
        m, stage = self.config.num_micro_batches // num_copies(self.config.schedule), self.config.zero_stage
        return 2.0 if stage == 3 or (m > 1 and stage == 1) else 2.0 - 1.0 / m if m > 1 else 0.0

    def summed_on_host(self, block: BlockWork) -> Quantity:
        """Return the seconds of copying the block's sums of gradients between device and host in every reduction."""
        if not self.host_sum_copies:
            return ZERO
        trained = [p for p in self._moved_params(block) if p.trainable]
        size = sum(p.num_elements * self.grad_bytes(p.dtype) / self.share(p.expert) for p in trained)
        return self.costs.host_copy_s(size * self.host_sum_copies)

    def accumulate(self, block: BlockWork) -> Quantity:
        """Return the seconds of adding gradients in every micro-batch but the first, averaged over all.

        Whole gradients are added, or shards if every backward reduces (ZeRO 2 and 3).
        """
        m = self.config.num_micro_batches // num_copies(self.config.schedule)
        return ZERO if m == 1 else self.added(block) * ((m - 1) / m)

    def added(self, block: BlockWork) -> Quantity:
        """Return the seconds of adding the gradients of one micro-batch to those before."""
        out = []
        for p in block.params:
            if p.trainable:
                share = self.share(p.expert) if self.scatters else 1
                out.append(self.costs.accumulate_s(p.num_elements / share, *self.added_dtypes(p)))
        return total(out)

    def optimizer(self, block: BlockWork) -> Quantity:
        """Return the seconds of the AdamW update of the block's parameters."""
        out, updated = [], self.updated(block)
        for expert in REPLICAS:
            by_dtype: dict[str, float] = {}
            for p in updated:
                if p.expert is expert:
                    by_dtype[p.dtype] = by_dtype.get(p.dtype, 0.0) + p.num_elements / self.share(expert)
            update = self.costs.host_optimizer_s if self.config.offload else self.costs.optimizer_s
            out += [update(n, dtype, self._state_bytes(dtype)) for dtype, n in by_dtype.items()]
        out += [self.costs.fixed_s(self.tensor_name(p)) for p in updated]
        return total(out)

    def updated(self, block: BlockWork) -> list[ParamWork]:
        """Return the trained parameters of the block, without those that the rank updates with an earlier block."""
        return [p for p in block.params if p.trainable and not (p.again and self.holds_once)]

    def _moved_params(self, block: BlockWork) -> list[ParamWork]:
        """Return the parameters of the block that are gathered, or whose gradients are reduced, with it."""
        return [p for p in block.params if not (p.again and self.moves_once)]

    def tensor_name(self, p: ParamWork) -> str:
        """Return the name of the overhead of a parameter in the optimizer."""
        return "zero_optimizer_tensor_s" if self.share(p.expert) > 1 else "optimizer_tensor_s"

    @staticmethod
    def gathered_bytes(params: Sequence[ParamWork]) -> float:
        """Return the bytes of the gathered parameters."""
        return float(sum(p.num_elements * p.width for p in params))

    def reduced_bytes(self, params: Sequence[ParamWork]) -> float:
        """Return the bytes of the gradients of trained parameters."""
        wide = MASTER_BYTES if self.costs.options.wide_sums else 0
        return sum(p.num_elements * max(wide, self.grad_bytes(p.dtype)) for p in params)

    def grad_bytes(self, dtype: str) -> float:
        """Return the bytes per element of the gradient of a parameter in `dtype`."""
        return dtype_bytes(dtype) if self.precision.grad_bytes is None else self.precision.grad_bytes

    def added_dtypes(self, p: ParamWork) -> tuple[str, str]:
        """Return the dtypes of a sum of gradients and of what is added to it: that of a backward, or reduced shards."""
        of_sum = self.grad_dtype(p.dtype)
        if self.scatters:
            return of_sum, of_sum
        return "float32" if sums_in_32_bits(self.config, self.costs.options) else of_sum, p.dtype

    def grad_dtype(self, dtype: str) -> str:
        """Return the dtype of the gradient of a parameter in `dtype`."""
        return dtype if self.grad_bytes(dtype) == dtype_bytes(dtype) else "float32"

    def _state_bytes(self, dtype: str) -> float:
        return 2.0 * dtype_bytes(dtype) if self.precision.state_bytes is None else self.precision.state_bytes
