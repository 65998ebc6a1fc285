"""ZeRO stages of one pipeline stage over its data-parallel ranks.

Gradients are SUMMED over micro-batches and data-parallel ranks, never averaged: the loss of every micro-batch is
already divided by the token count of the whole batch. With dp ranks and P parameter bytes on this rank:

| stage | parameters between steps | gradients between micro-batches | communication per step of M micro-batches |
|---|---|---|---|
| 0 | P | P, this rank's sum | one all-reduce, beside the last backward where a device has streams |
| 1 | P / dp, P from the first forward to the last backward | P, this rank's sum | all-gather, reduce-scatter |
| 2 | as 1 | P / dp, the sum over ranks | all-gather, M reduce-scatters |
| 3 | P / dp, gathered block by block | P / dp, the sum over ranks | 2 M all-gathers, M reduce-scatters |

Under ZeRO 3 two kinds of blocks are gathered only M times (`Block.gathered`): the last block, whose backward directly
follows its forward, and blocks whose backward needs no parameter (an embedding).

Hybrid ZeRO (Zhao et al., PyTorch FSDP, 2023, section 3.2.2) shards over dp / R neighbours and keeps R copies of the
sharded state. The table then holds with dp / R instead of dp, plus one all-reduce of the gradients' shards over the
copies per step.

Parameters of experts under token dispatch have fewer replicas, and are sharded and reduced over those ranks only.

Stage 0 keeps plain parameters. Stages 1 to 3 apply ``fully_shard`` to each block: parameters and gradients become
DTensors sharded on one dim (`shard_placement`), so that the optimizer works on shards without knowing it. Stages 1 and
2, which hold all blocks whole anyway, gather and reduce small neighbouring blocks in one message (`messages`). Over
gloo a reduction is an exchange and a sum (`exchange`).
"""

import enum
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from autoplan.runtime.compression import Compression, Compressor
from autoplan.runtime.exchange import reduce_by_exchange
from autoplan.runtime.private import end_of_backward, same_ranks
from autoplan.runtime.shard_placement import placement, placement_apart
from autoplan.runtime.spec import ScheduleSpec
from autoplan.streams import BUCKET_BYTES, has_streams, reduces_by_exchange

# From about this size on, copying a gradient into a bucket and back costs more on a CPU than a collective for it alone.
# A GPU copies far faster than its links send.
ALONE_BYTES = 2 * 2**20


Leaf = Callable[[nn.Parameter], nn.Parameter]
"""From a parameter to the leaf after whose backward (and hooks) the parameter's gradient is complete."""


class ZeroStage(enum.IntEnum):
    """The state that data-parallel ranks shard among themselves instead of each keeping a copy."""

    NOTHING = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    PARAMETERS = 3


def reduces_beside(device_type: str) -> bool:
    """Return True if ZeRO 0 reduces gradients beside the last backward on this device type, which requires streams."""
    return has_streams(device_type)


def check_schedule(zero: ZeroStage | int, schedule: ScheduleSpec | None) -> None:
    """Refuse ZeRO 3 under a pipeline schedule with a split backward.

    There torch computes a right loss and silently wrong gradients: parameters are resharded between the backward of the
    inputs and the backward of the weights.

    Raises:
        ValueError: ZeRO 3 with a schedule that splits the backward.
    """
    if ZeroStage(zero) is ZeroStage.PARAMETERS and schedule is not None and schedule.splits_backward:
        raise ValueError(
            f"ZeRO 3 under {schedule.name}: a schedule with a split backward gives silently wrong gradients; "
            "use ZeRO 0, 1 or 2, or a schedule with a full backward such as 1F1B"
        )


class GradientSync:
    """Tells a pipeline stage when to reduce its gradients. This base class, for one data-parallel rank, does nothing.

    The driver of the micro-batches calls

    - ``before_backward`` right before every backward pass (of a split backward: before each part that follows the graph
      from the outputs),
    - ``after_backward`` when the weight gradients of the pass are there,
    - ``finish_step`` after the last pass.

    Afterwards every ``parameter.grad`` holds the sum over micro-batches and ranks (its shard under ZeRO 1 to 3). The
    driver's caller resets the gradients between steps. The ``grad`` of a parameter that no micro-batch uses stays None;
    the program is the same on every rank, so such a parameter is unused on all ranks.
    """

    def __init__(self, zero: ZeroStage) -> None:
        self.zero = zero

    def before_backward(self, micro_batch: int, is_last: bool) -> None:
        """Prepare for the backward pass of ``micro_batch`` (counted from 0), the last of the step if ``is_last``."""

    def after_backward(self, is_last: bool) -> None:
        """Follow a backward pass that gave weight gradients (of a split backward: its second part)."""

    def finish_step(self) -> None:
        """Complete the reductions of this step.

        Raises:
            RuntimeError: the last backward of the step was never announced.
        """

    def take_along(self, number: torch.Tensor, group: dist.ProcessGroup) -> bool:
        """Send a number of this rank, [], beside the gradients of the step whose last backward follows.

        Returns:
            True if gradients go to the ranks of `group` in a message with room for it, in a dtype that holds it.
        """
        return False

    def taken(self) -> torch.Tensor:
        """Return the numbers of all ranks, [ranks], once `finish_step` has returned. Requires `take_along`.

        Raises:
            RuntimeError: no number was taken along.
        """
        raise RuntimeError("no number was taken along with the gradients")


class _AllReduce(GradientSync):
    """ZeRO 0: gradients accumulate locally, and are all-reduced in buckets once per step, per group of replicas.

    On a device with streams every bucket is reduced beside the last backward as soon as its gradients are there, in the
    order of the buckets (the same on all ranks); so are the copies into the bucket and back. On a CPU all buckets are
    reduced after the last backward, which needs the threads and links itself.
    """

    def __init__(
        self,
        stage: nn.Module,
        group: dist.ProcessGroup | None,
        bucket_bytes: int,
        apart: Sequence[nn.Parameter] = (),
        apart_group: dist.ProcessGroup | None = None,
        compression: Compression | None = None,
        beside: Leaf | None = None,
    ) -> None:
        super().__init__(ZeroStage.NOTHING)
        # In backward order: the gradient written last is read first and may still be in a cache.
        parameters = [p for p in reversed(list(stage.parameters())) if p.requires_grad]
        self._replicas = replicas = _by_replicas(parameters, group, apart, apart_group)
        self._bucket_bytes = bucket_bytes
        self.compressors = [Compressor(compression, g) for g, _ in replicas if compression is not None]
        device = parameters[0].device if parameters else torch.device("meta")
        alone = min(ALONE_BYTES, bucket_bytes) if device.type == "cpu" else None
        self._buckets = [(g, bucket) for g, mine in replicas for bucket in buckets(mine, bucket_bytes, alone)]
        self._lane = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._open: list[set[int]] = []  # per bucket: parameters without a complete gradient
        self._next = 0  # the first bucket whose reduction has not started
        self._beside = beside is not None and compression is None
        self._pending: list[tuple[dist.Work, torch.Tensor, list[nn.Parameter]]] = []
        self._carrier = None if self._beside or self.compressors or group is None else self._smallest(group)
        self._carried: torch.Tensor | None = None
        if beside is not None and self._beside:
            for index, (_, bucket) in enumerate(self._buckets):
                for p in bucket:
                    beside(p).register_post_accumulate_grad_hook(self._arrival(index, p))  # type: ignore[no-untyped-call]

    def _smallest(self, group: dist.ProcessGroup) -> int | None:
        """Return the bucket of the group with the fewest bytes, if it is small enough to be copied once more."""
        sizes = {i: sum(p.nbytes for p in mine) for i, (over, mine) in enumerate(self._buckets) if over is group}
        least = min(sizes, key=sizes.__getitem__, default=None)
        return least if least is not None and sizes[least] < ALONE_BYTES else None

    def take_along(self, number: torch.Tensor, group: dist.ProcessGroup) -> bool:
        if self._carrier is None or self._buckets[self._carrier][0] is not group:
            return False
        dtype = self._buckets[self._carrier][1][0].dtype
        if torch.promote_types(dtype, number.dtype) != dtype:
            return False
        # Each rank has a place of its own, and adds zeros to the others': no number is rounded.
        self._carried = torch.zeros(group.size(), dtype=dtype, device=number.device)
        self._carried[group.rank()] = number
        return True

    def taken(self) -> torch.Tensor:
        if self._carried is None:
            return super().taken()
        numbers, self._carried = self._carried, None
        return numbers

    def _arrival(self, index: int, p: nn.Parameter) -> Callable[[torch.Tensor], None]:
        def arrived(_: torch.Tensor) -> None:
            if not self._open:
                return  # not the last backward
            if id(p) not in self._open[index]:
                raise RuntimeError("a gradient arrived twice in one backward; its sum over ranks would lack a part")
            self._open[index].remove(id(p))
            while self._next < len(self._open) and not self._open[self._next]:
                self._start(self._next)

        return arrived

    def before_backward(self, micro_batch: int, is_last: bool) -> None:
        self._open = [{id(p) for p in bucket} for _, bucket in self._buckets] if is_last and self._beside else []
        self._pending, self._next = [], 0  # left by an interrupted step

    def finish_step(self) -> None:
        if self.compressors:
            for compressor, (_, parameters) in zip(self.compressors, self._replicas, strict=True):
                gradients = [p.grad for p in parameters if p.grad is not None]
                compressor.reduce(buckets(gradients, self._bucket_bytes))
            return
        while self._next < len(self._buckets):  # all buckets, or those with unused parameters
            self._start(self._next)
            if len(self._pending) == 2:
                # Two in flight: one is sent while the next is filled. More would only hold memory.
                _hand_out(*self._pending.pop(0))
        for entry in self._pending:
            _hand_out(*entry)
        if self._lane is not None:
            torch.cuda.current_stream(self._lane.device).wait_stream(self._lane)
        self._pending, self._open, self._next = [], [], 0

    def _start(self, index: int) -> None:
        """Start to reduce the gradients of a bucket that exist; the same gradients exist on all ranks."""
        self._next = index + 1
        group, parameters = self._buckets[index]
        there = [p for p in parameters if p.grad is not None]
        gradients = [p.grad for p in there if p.grad is not None]
        if index == self._carrier and self._carried is not None:
            work, flat = _all_reduce([*gradients, self._carried], group)
            self._carried = flat[-group.size() :]
            self._pending.append((work, flat, there))
            return
        if not gradients:
            return
        if self._lane is None:
            self._pending.append((*_all_reduce(gradients, group), there))
            return
        # The optimizer waits for the lane, so that no gradient is freed before the lane is done with it.
        self._lane.wait_stream(torch.cuda.current_stream(self._lane.device))
        with torch.cuda.stream(self._lane):
            _unpack(*_all_reduce(gradients, group), gradients)  # this makes the lane wait, not the host


def _by_replicas(
    parameters: Sequence[nn.Parameter],
    group: dist.ProcessGroup | None,
    apart: Sequence[nn.Parameter],
    apart_group: dist.ProcessGroup | None,
) -> list[tuple[dist.ProcessGroup, list[nn.Parameter]]]:
    """Return the parameters by the ranks that hold copies of them; those that no other rank holds are left out."""
    others = {id(p) for p in apart}
    usual = [p for p in parameters if id(p) not in others]
    rest = [p for p in parameters if id(p) in others]
    return [(found, mine) for found, mine in ((group, usual), (apart_group, rest)) if found is not None]


def _all_reduce(gradients: list[torch.Tensor], group: dist.ProcessGroup) -> tuple[dist.Work, torch.Tensor]:
    if len(gradients) == 1 and gradients[0].is_contiguous():
        flat = gradients[0]  # reduced in place, without a copy
    else:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    work = dist.all_reduce(flat, op=dist.ReduceOp.SUM, group=group, async_op=True)
    assert work is not None  # async_op=True
    return work, flat


def _hand_out(work: dist.Work, flat: torch.Tensor, parameters: list[nn.Parameter]) -> None:
    """Give each parameter its part of a reduced bucket as its gradient, without a copy.

    Not beside computing: a stream may still read the gradients that are freed here.
    """
    work.wait()
    if not parameters or parameters[0].grad is flat:
        return
    sizes = [p.numel() for p in parameters]
    parts = torch.split(flat, [*sizes, flat.numel() - sum(sizes)])  # behind the gradients: numbers taken along
    for p, part in zip(parameters, parts, strict=False):
        p.grad = part.view(p.shape)


def _unpack(work: dist.Work, flat: torch.Tensor, bucket: list[torch.Tensor]) -> None:
    work.wait()
    if bucket[0] is flat:
        return
    parts = torch.split(flat, [gradient.numel() for gradient in bucket])
    for gradient, part in zip(bucket, parts, strict=True):
        gradient.copy_(part.view(gradient.shape))


_T = TypeVar("_T", bound=torch.Tensor)


def buckets(tensors: Sequence[_T], limit_bytes: int, alone_bytes: int | None = None) -> list[list[_T]]:
    """Group ``tensors``, in order, into buckets of one dtype and at most ``limit_bytes``.

    A larger tensor gets a bucket of its own. So does a tensor of at least ``alone_bytes``, ahead of the bucket being
    filled.
    """
    open_buckets: dict[torch.dtype, tuple[list[_T], int]] = {}
    done: list[list[_T]] = []
    for tensor in tensors:
        if alone_bytes is not None and tensor.nbytes >= alone_bytes:
            done.append([tensor])
            continue
        bucket, size = open_buckets.get(tensor.dtype, ([], 0))
        if bucket and size + tensor.nbytes > limit_bytes:
            done.append(bucket)
            bucket, size = [], 0
        bucket.append(tensor)
        open_buckets[tensor.dtype] = (bucket, size + tensor.nbytes)
    return done + [bucket for bucket, _ in open_buckets.values()]


class _Sharded(GradientSync):
    """ZeRO 1 to 3: ``fully_shard`` reduces inside the backward pass; this class selects the passes."""

    def __init__(self, stage: FSDPModule, zero: ZeroStage) -> None:
        super().__init__(zero)
        self._stage = stage
        self._reduced = False

    def before_backward(self, micro_batch: int, is_last: bool) -> None:
        self._stage.set_is_last_backward(is_last)
        self._stage.set_reshard_after_backward(is_last or self.zero is ZeroStage.PARAMETERS)
        self._stage.set_requires_gradient_sync(is_last or self.zero >= ZeroStage.GRADIENTS)
        self._stage.set_requires_all_reduce(is_last)  # over the copies of hybrid ZeRO
        self._reduced = is_last

    def finish_step(self) -> None:
        if not self._reduced:
            raise RuntimeError("finish_step without a backward announced as the last: gradients are not reduced")
        self._reduced = False


class _ShardedSplit(_Sharded):
    """ZeRO 1 and 2 under a split backward: FSDP's hooks run before there are weight gradients, so they reduce nothing.

    Their work is done after each weight gradient pass (ZeRO 2) or after the last one (ZeRO 1).
    """

    def before_backward(self, micro_batch: int, is_last: bool) -> None:
        self._stage.set_is_last_backward(False)
        self._stage.set_reshard_after_backward(False)
        self._stage.set_requires_gradient_sync(False)

    def after_backward(self, is_last: bool) -> None:
        self._stage.set_is_last_backward(is_last)
        self._stage.set_reshard_after_backward(is_last)
        self._stage.set_requires_gradient_sync(is_last or self.zero >= ZeroStage.GRADIENTS)
        self._stage.set_requires_all_reduce(is_last)
        # Private torch API (see private.py): as PipelineStage.perform_reduce_grad, which would always reshard. Where
        # nothing is reduced, 16-bit gradients are added to float32 gradients.
        root: Any = fully_shard.state(self._stage)  # type: ignore[attr-defined]
        for state in root._state_ctx.all_states:
            for group in state._fsdp_param_groups:
                _even_out(group, is_last)
                group.post_backward()
        end_of_backward(root)
        self._reduced = is_last


def _even_out(group: Any, is_last: bool) -> None:
    """Let the gradients that an FSDP group is about to reduce be those of the same parameters in every pass, in one
    dtype.

    Gradients of some blocks arrive before those of others (`whole_backward`), so that a pass may have a part of a
    group's or, the last one, none. FSDP packs what is there. Hybrid ZeRO adds the packed shards of several passes up
    and reduces the sum over the copies in the last: they must be of the same parameters, and the last must have some.
    Gradients that arrived first were cast for the sum already.
    """
    params = [p for p in group.fsdp_params if p.sharded_param.requires_grad and hasattr(p, "_unsharded_param")]
    there = [p for p in params if p.unsharded_param.grad is not None or p.unsharded_accumulated_grad is not None]
    if group._is_hsdp and group.reduce_grads and (there or is_last):
        for p in params:
            if p not in there:
                p.unsharded_param.grad = torch.zeros_like(p.unsharded_param)
    if any(p.unsharded_accumulated_grad is not None for p in there):
        for p in params:
            p.accumulate_unsharded_grad_if_needed()
            p.to_accumulated_grad_if_needed()


def apply_zero(
    stage: nn.Module,
    mesh: DeviceMesh,
    zero: ZeroStage | int,
    *,
    schedule: ScheduleSpec | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    apart: Sequence[nn.Parameter] = (),
    apart_mesh: DeviceMesh | None = None,
    policies: Mapping[str, MixedPrecisionPolicy] | None = None,
    compression: Compression | None = None,
    offload: bool = False,
    beside: Leaf | None = None,
    fill: Callable[[str], None] = lambda block: None,
) -> GradientSync:
    """Apply a ZeRO stage to a generated pipeline stage, in place.

    Args:
        stage: has ``stage.blocks``, an nn.ModuleDict in execution order that holds every parameter of the stage.
        mesh: the data-parallel ranks, one axis. With size 1 the stage stays untouched, whatever ``zero`` says. Two axes
            (ZeRO 1 to 3): the copies of the sharded state, and the ranks it is sharded over.
        zero: 0 to 3, see the table of this module.
        schedule: the pipeline schedule that the stage will run under; None: it is the whole model.
        bucket_bytes: largest flat buffer of the all-reduce of ZeRO 0, in bytes, and largest message of several blocks
            under ZeRO 1 and 2.
        apart: parameters with fewer replicas (experts under token dispatch).
        apart_mesh: the ranks that hold replicas of ``apart``.
        policies: mixed precision by block (ZeRO 1 to 3); other blocks compute in the dtype of their parameters.
        compression: compression of the all-reduce of ZeRO 0.
        offload: True to keep shards of parameters and gradients on the host (ZeRO 1 to 3 over several ranks).
        beside: to reduce beside the last backward (ZeRO 0, unless the backward is split): the function from a parameter
            to its leaf (`Leaf`). None: reduce after it.
        fill: called with the name of each block before it is sharded (ZeRO 1 to 3), so that only one block is whole at
            a time.

    Returns:
        The GradientSync that the driver of the micro-batches calls around every backward pass.

    Raises:
        ValueError: ZeRO 3 with a split backward, a mesh of several axes, a parameter outside the blocks or shared by
            two blocks, a block with trainable parameters of several dtypes or with a 0-dim parameter (ZeRO 1 to 3), or
            `offload` where nothing is sharded.
    """
    zero = ZeroStage(zero)
    splits = schedule is not None and schedule.splits_backward
    check_schedule(zero, schedule)
    _check_mesh(mesh, zero, compression, offload)
    blocks = _blocks_of(stage)
    if apart_mesh is not None and same_ranks(apart_mesh, mesh):
        apart, apart_mesh = (), None  # the same ranks: FSDP wants one mesh for them
    several = bool(apart) and apart_mesh is not None and apart_mesh.size() > 1
    if mesh.size() == 1 and not several:
        return GradientSync(zero)
    if zero is ZeroStage.NOTHING:
        group = apart_mesh.get_group() if several and apart_mesh is not None else None
        # In a split backward, the weight gradients of one micro-batch may follow the input gradients of the last one.
        beside = None if splits else beside
        usual = mesh.get_group() if mesh.size() > 1 else None
        return _AllReduce(stage, usual, bucket_bytes, apart, group, compression, beside)
    _check_shardable(blocks)
    root = _shard(stage, blocks, mesh, zero, apart, apart_mesh, policies or {}, offload, fill, bucket_bytes)
    return (_ShardedSplit if splits else _Sharded)(root, zero)


def _check_mesh(mesh: DeviceMesh, zero: ZeroStage, compression: Compression | None, offload: bool) -> None:
    hybrid = mesh.ndim == 2 and zero is not ZeroStage.NOTHING
    if mesh.ndim != 1 and not hybrid:
        raise ValueError(f"ZeRO {zero:d} needs a mesh of one axis, this one has {mesh.ndim}: {mesh.mesh_dim_names}")
    if hybrid and mesh.size(1) == 1:
        raise ValueError(f"hybrid ZeRO needs several ranks to shard over ({mesh})")
    if compression is not None and zero is not ZeroStage.NOTHING:
        raise ValueError(f"gradients are compressed in the all-reduce of ZeRO 0 only, not with ZeRO {zero:d}")
    if offload and (zero is ZeroStage.NOTHING or mesh.size() == 1):
        raise ValueError(f"parameters on the host need ZeRO 1 to 3 over several ranks, not {zero:d} over {mesh.size()}")


def _shard(
    stage: nn.Module,
    blocks: Mapping[str, nn.Module],
    mesh: DeviceMesh,
    zero: ZeroStage,
    apart: Sequence[nn.Parameter],
    apart_mesh: DeviceMesh | None,
    policies: Mapping[str, MixedPrecisionPolicy],
    offload: bool,
    fill: Callable[[str], None],
    bucket_bytes: int,
) -> FSDPModule:
    """Apply `fully_shard` to every block of a stage and to the stage itself; arguments as for `apply_zero`."""
    alone = set(apart) if apart_mesh is None or apart_mesh.size() == 1 else set()  # no ranks to shard them over
    place = placement(mesh) if apart_mesh is None or alone or not apart else placement_apart(mesh, apart, apart_mesh)
    # torch pins memory through an accelerator's driver; a CPU has none
    policy = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    usual = MixedPrecisionPolicy(cast_forward_inputs=False)
    policy_of = {name: policies.get(name, usual) for name in blocks}
    for block in blocks.values():
        _may_return_views(block)
    for names in messages(blocks, policy_of, 0 if zero is ZeroStage.PARAMETERS else bucket_bytes):
        first = blocks[names[0]]
        gathered = getattr(first, "gathered", "again") if zero is ZeroStage.PARAMETERS else "keep"
        for name in names:
            fill(name)
        fully_shard(
            [blocks[name] for name in names] if len(names) > 1 else first,
            mp_policy=policy_of[names[0]],
            mesh=mesh,
            reshard_after_forward=gathered != "keep",
            shard_placement_fn=place,
            ignored_params=alone,
            offload_policy=policy,
        )
        if isinstance(first, FSDPModule) and gathered == "drop":
            first.set_unshard_in_backward(False)
    # The stage itself too, although it owns no parameter: it is the root, whose streams and switches all blocks share.
    reshard = zero is ZeroStage.PARAMETERS
    root = fully_shard(stage, mesh=mesh, reshard_after_forward=reshard, ignored_params=alone, offload_policy=policy)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Without this a factor of 1 becomes PREMUL_SUM, which gloo refuses and NCCL spends a multiplication on.
            module.set_force_sum_reduction_for_comms(True)
    if reduces_by_exchange(mesh.device_type):
        reduce_by_exchange(stage)
    _prefetch_in_block_order(list(blocks.values()))
    return root


def _may_return_views(block: nn.Module) -> None:
    """Leave out FSDP's warning that modules of this class return views, which an in-place operation would break.

    Emitted text changes no tensor that a block returned or was given (the capture makes such operations new tensors),
    and users, who cannot change that text, could do nothing about it. Other modules of the process keep the warning.
    """
    name = re.escape(f"FSDP{type(block).__name__}")
    warnings.filterwarnings("ignore", rf"FSDP2-wrapped module \((.*, )?{name}(, .*)?\) returned a view", UserWarning)


def messages(
    blocks: Mapping[str, nn.Module], policies: Mapping[str, MixedPrecisionPolicy], limit_bytes: int
) -> Iterator[list[str]]:
    """Yield the names of neighbouring blocks that `fully_shard` gathers and reduces together, at most so many bytes.

    A larger block is alone. Blocks of several policies or dtypes are apart, since a message has one buffer.
    """
    group: list[str] = []
    size, kind = 0, None
    for name, block in blocks.items():
        mine = sum(p.nbytes for p in block.parameters())
        its = policies[name], {p.dtype for p in block.parameters() if p.requires_grad}
        if group and (size + mine > limit_bytes or its != kind):
            yield group
            group, size = [], 0
        group, size, kind = [*group, name], size + mine, its
    if group:
        yield group


def _prefetch_in_block_order(blocks: list[nn.Module]) -> None:
    """Let the backward pass gather block i-1 during block i.

    The default follows the order of past forwards, which under 1F1B belong to a later micro-batch: at block 0 it would
    gather the last block, which this backward has finished with. Naming a target turns the default off. Block 0 names
    itself, because gathering a gathered block does nothing.
    """
    sharded = [block for block in blocks if isinstance(block, FSDPModule)]
    for previous, block in zip([sharded[0], *sharded], sharded, strict=False):
        block.set_modules_to_backward_prefetch([previous])


def _blocks_of(stage: nn.Module) -> dict[str, nn.Module]:
    blocks = getattr(stage, "blocks", None)
    if not isinstance(blocks, nn.ModuleDict) or not blocks:
        raise ValueError(f"{type(stage).__name__}.blocks must be a non-empty nn.ModuleDict")
    inside = {id(parameter) for parameter in blocks.parameters()}
    outside = [name for name, parameter in stage.named_parameters() if id(parameter) not in inside]
    if outside:
        raise ValueError(f"parameters outside {type(stage).__name__}.blocks: {', '.join(outside)}")
    return dict(blocks.items())


def _check_shardable(blocks: dict[str, nn.Module]) -> None:
    owner: dict[int, str] = {}
    for name, block in blocks.items():
        dtypes = {parameter.dtype for parameter in block.parameters() if parameter.requires_grad}
        if len(dtypes) > 1:
            raise ValueError(
                f"block {name!r} has trainable parameters of several dtypes ({', '.join(sorted(map(str, dtypes)))}): "
                "fully_shard reduces a block in one buffer; give each dtype its own block or use ZeRO 0"
            )
        for parameter_name, parameter in block.named_parameters():
            if parameter.dim() == 0:
                raise ValueError(
                    f"parameter {parameter_name!r} of block {name!r} has no dim to shard: emit it as one element"
                )
            first = owner.setdefault(id(parameter), name)
            if first != name:
                raise ValueError(
                    f"parameter {parameter_name!r} of block {name!r} is shared with block {first!r}: ZeRO 1 to 3 need "
                    "both uses in one block, or ZeRO 0"
                )
