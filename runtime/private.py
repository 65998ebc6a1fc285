"""Every use of a private PyTorch API by the runtime: which one, why, and the version it was tried on.

| API | why | tried on |
|---|---|---|
| PipelineStage.backward_maybe_with_nosync | FSDP is told never to reduce or reshard before the end of the step, which makes ZeRO 2 and 3 hold whole gradients and ZeRO 3 whole parameters | 2.13.0 |
| PipelineStage.perform_reduce_grad | would run FSDP's reductions again at the end of the step | 2.13.0 |
| PipelineStage._setup_forward_recv_info, _setup_backward_recv_info, get_fwd_recv_ops, get_bwd_recv_ops, backward_one_chunk, args_recv_info, grad_recv_info | receive buffers are allocated for all micro-batches for good; here they live from the receive to the backward | 2.13.0 |
| PipelineStage.forward_maybe_with_nosync | sends need contiguous tensors of the declared shapes | 2.13.0 |
| pipelining._backward.stage_backward | the body of a full backward, used by backward_maybe_with_nosync | 2.13.0 |
| Tensor._post_accumulate_grad_hooks, Tensor._is_view (in split_backward.py) | a split backward writes .grad itself and calls what would follow; views cannot be detached in place | 2.13.0 |
| _PipelineScheduleRuntime._prepare_schedule_with_comms, pipeline_order_with_comms, _assert_unsharded | schedules of several stages gather and reshard whole stages by actions of their own; here every block's hooks do, as in the other schedules | 2.13.0 |
| fully_shard.state, _state_ctx.all_states, _fsdp_param_groups, post_backward, _root_post_backward_final_callback (in zero.py) | the reductions of a split backward, whose weight gradients come after FSDP's hooks have run (what PipelineStage.perform_reduce_grad does) | 2.13.0 |
| _PipelineSchedule._step_microbatches, stage.has_backward, stage.clear_runtime_states | step() cuts one batch along dim 0; here every micro-batch brings its own keyword arguments | 2.13.0 |
| fsdp._fully_shard._fsdp_common.FSDPMeshInfo, ShardPlacementResult (in zero.py) | experts that tokens travel to have fewer replicas than the rest of their block: a mesh of their own in shard_placement_fn | 2.13.0 |
| DeviceMesh._concatenate (in zero.py) | hybrid ZeRO's mesh of replicas and shards, made of two axes of one mesh | 2.13.0 |
| aten._scaled_dot_product_flash_attention, ..._for_cpu, and their backwards (in ring.py) | a part of a ring needs the log-sum-exp, which scaled_dot_product_attention does not return | 2.13.0 |
| _c10d_functional.all_reduce, all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single, wait_tensor (in loss.py, convert.py) | the Python wrappers return an asynchronous tensor subclass | 2.13.0 |
| _C._current_graph_task_id, autograd.graph._engine_run_backward (in convert.py, autoplan/verify/wide.py) | counted collectives are told apart by forward, backward and recompute; a backward under a TorchFunctionMode, which torch.autograd.backward leaves | 2.13.0 |
| UntypedStorage._cdata (in recompute.py) | tells views of an argument from values of their own | 2.13.0 |
| nn.Module._parameters (in precision.py, model.py, params.py, capture/cast.py) | a parameter is exchanged for its 16-bit copy in place, without registering it anew | 2.13.0 |
| distributed_c10d._get_default_store | the store in which a failing rank leaves its reason | 2.13.0 |
| distributed_c10d.default_pg_timeout, default_pg_nccl_timeout, _set_pg_timeout | groups of a DeviceMesh take torch's default timeout (gloo: 30 minutes), not that of the default group; gloo's sends and receives keep the one their group was made with | 2.13.0 |
| distributed_c10d._abort_process_group | closes the connections of a failing rank at once, so that its peers do not wait for the timeout | 2.13.0 |

A torch upgrade reads this table first; tests/test_pipeline.py, test_zero.py, test_failure.py, test_context.py, test_convert.py, test_recompute.py,
test_precision.py and test_hybrid_zero.py cover each row.
"""  # noqa: E501

import functools
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Store
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import (
    RESHARD,
    UNSHARD,
    PipelineScheduleMulti,
    PipelineScheduleSingle,
)

from autoplan.runtime.program import Block
from autoplan.runtime.split_backward import Deferred, Kept, backward_input, backward_weight
from autoplan.runtime.zero import GradientSync

# Shape and dtype of one tensor that crosses from a stage to the next; False behind them: no gradient comes back.
Carried = tuple[Sequence[int], torch.dtype] | tuple[Sequence[int], torch.dtype, bool]


def _examples(carried: Sequence[Carried]) -> tuple[torch.Tensor, ...]:
    """Stand-ins without memory, as PipelineStage wants them. Floating point tensors carry a gradient back."""
    return tuple(
        torch.empty(tuple(c[0]), dtype=c[1], device="meta", requires_grad=c[1].is_floating_point and c[2:] != (False,))
        for c in carried
    )


class SyncedStage(PipelineStage):
    """A PipelineStage in which ``sync`` decides when gradients are reduced. ``splits``: backwards have two parts."""

    def __init__(
        self,
        module: nn.Module,
        index: int,
        count: int,
        device: torch.device,
        group: dist.ProcessGroup,
        sync: GradientSync,
        carried_in: Sequence[Carried],
        carried_out: Sequence[Carried],
        splits: bool = False,
    ) -> None:
        inputs, outputs = _examples(carried_in), _examples(carried_out)
        if index == count - 1:
            outputs = (torch.empty((), device="meta"),)  # the loss: sent nowhere, but an output must be declared
        super().__init__(module, index, count, device, input_args=inputs, output_args=outputs, group=group)
        self._sync = sync
        self._carried_out = [(tuple(c[0]), c[1]) for c in carried_out]
        self._backward_chunk = -1
        self._kept = Kept() if splits else None

    # Receive buffers live from the receive to the end of the backward.

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(1, has_backward)
        self.args_recv_info = _without_buffers(self.args_recv_info[0], num_microbatches)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(1)
        self.chunks = num_microbatches
        self.grad_recv_info = _without_buffers(self.grad_recv_info[0], num_microbatches)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        _allocate(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        _allocate(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._backward_chunk = bwd_chunk_id
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        for info in (*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id]):
            info.buffer = None

    # The module's own calls.

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with self._kept.forward() if self._kept is not None else nullcontext():
            output = self.submod(*args, **kwargs)
        if self.is_last:
            return output
        tensors = (output,) if isinstance(output, torch.Tensor) else tuple(output)
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        if found != self._carried_out:
            # Without this check the next stage waits for bytes that never come, or reads the wrong ones.
            raise ValueError(f"stage {self.stage_index} returned {found}, its declared outputs are {self._carried_out}")
        return tuple(tensor.contiguous() for tensor in tensors)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._backward_chunk = bwd_chunk_id
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], list[Any] | None]:
        """A full backward, or the part of it for the stage's inputs ("input") or that for its parameters ("weight")."""
        if backward_type == "weight":
            backward_weight(bwd_kwargs["param_groups"])
            self._sync.after_backward(last_backward)
            return (), None
        self._sync.before_backward(self._backward_chunk, last_backward)
        outputs, gradients, inputs = (bwd_kwargs[k] for k in ("stage_output", "output_grads", "input_values"))
        if backward_type == "input":
            return self._backward_input(outputs, gradients, inputs)
        for_inputs = stage_backward(outputs, gradients, inputs)
        self._sync.after_backward(last_backward)
        return for_inputs, None

    def _backward_input(
        self, outputs: Any, gradients: Any, inputs: Any
    ) -> tuple[tuple[torch.Tensor | None, ...], list[Deferred]]:
        whole = [m for m in self.submod.modules() if isinstance(m, Block) and m.whole_backward]
        at_once = [p for block in whole for p in block.parameters()]
        found = backward_input(outputs, gradients, inputs, self.submod.parameters(), at_once, self._kept)
        for block in whole:
            block.let_go()
        return found

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if grad_scale_factor != 1:
            raise ValueError("gradients are summed, never averaged: the schedule needs scale_grads=False")
        self._sync.finish_step()


def _without_buffers(infos: tuple[Any, ...], count: int) -> dict[int, tuple[Any, ...]]:
    """``count`` copies of the descriptions of what one micro-batch receives, none with memory yet."""
    return {
        chunk: tuple(
            type(info)(info.input_name, info.source, None, info.tensor_meta, is_root_arg=info.is_root_arg)
            for info in infos
        )
        for chunk in range(count)
    }


def _allocate(infos: tuple[Any, ...], device: torch.device) -> None:
    for info in infos:
        # No metadata: a tensor without gradient, nothing comes back.
        if not info.is_root_arg and info.tensor_meta is not None:
            info.buffer = torch.empty(info.tensor_meta.shape, dtype=info.tensor_meta.dtype, device=device)


class _ByBlock:
    """For schedules of several stages per rank: parameters are gathered block by block, by the hooks of the blocks."""

    def _prepare_schedule_with_comms(self, actions: Any, *args: Any, **kwargs: Any) -> None:
        super()._prepare_schedule_with_comms(actions, *args, **kwargs)  # type: ignore[misc]  # of the schedule
        self.pipeline_order_with_comms = {
            rank: [a for a in row if a.computation_type not in (UNSHARD, RESHARD)]
            for rank, row in self.pipeline_order_with_comms.items()  # type: ignore[has-type]
        }

    def _assert_unsharded(self, stage: PipelineStage) -> None:
        """What stage computes is gathered by its hooks."""


@functools.cache
def by_block(kind: type[PipelineScheduleMulti]) -> type[PipelineScheduleMulti]:
    """The schedule without torch's gathering of whole stages (at most three at a time are kept, under ZeRO 1 too)."""
    return cast(type[PipelineScheduleMulti], type(f"{kind.__name__}ByBlock", (_ByBlock, kind), {}))


def run_schedule(
    schedule: PipelineScheduleSingle | PipelineScheduleMulti,
    stages: Sequence[SyncedStage],
    micro_batches: Sequence[Mapping[str, torch.Tensor]],
) -> list[torch.Tensor]:
    """Run one step with each micro-batch's tensors as keyword arguments of the stages; the losses where the last is."""
    for stage in stages:
        stage.has_backward = True
        stage.clear_runtime_states()
    losses: list[torch.Tensor] = []
    targets = [None] * len(micro_batches)  # indexed and handed to the loss function, which takes none
    schedule._step_microbatches(
        kwarg_mbs=[dict(inputs) for inputs in micro_batches], target_mbs=targets, losses=losses, return_outputs=False
    )
    return losses


def default_store() -> Store:
    """The key-value store that the default process group was made with."""
    store = dist.distributed_c10d._get_default_store()
    assert isinstance(store, Store)
    return store


def set_timeout(timeout: timedelta) -> None:
    """Set the timeout of collectives in the default process group and in every group made from now on."""
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(dist.distributed_c10d, name, timeout)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Set timeout is now only supported")
        dist.distributed_c10d._set_pg_timeout(timeout)


def abort_process_groups() -> None:
    """Close this rank's connections without waiting for anybody. No collective works in this process afterwards."""
    dist.distributed_c10d._abort_process_group()
