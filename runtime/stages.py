"""The pipeline stages that torch's schedules run, and one step of such a schedule."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from autoplan.runtime.alone import Vote
from autoplan.runtime.private import RECEIVES_INTO_FRESH_BUFFERS
from autoplan.runtime.program import Block
from autoplan.runtime.split_backward import Deferred, Kept, backward_input, backward_weight, backward_whole
from autoplan.runtime.zero import GradientSync


class Carried(NamedTuple):
    """One tensor sent from a stage to the next. A gradient comes back if it is of floating point and requires one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True


def _examples(carried: Sequence[Carried]) -> tuple[torch.Tensor, ...]:
    """Return stand-ins without memory, as PipelineStage needs them."""
    return tuple(
        torch.empty(c.shape, dtype=c.dtype, device="meta", requires_grad=c.requires_grad and c.dtype.is_floating_point)
        for c in carried
    )


class SyncedStage(PipelineStage):
    """A PipelineStage in which ``sync`` decides when gradients are reduced. ``splits``: backwards have two parts.
    ``vote``: what the stages would say of how shapes become known; None: they vote.

    torch's schedules get an empty module instead of the stage's own. They would otherwise treat modules sharded by
    ``fully_shard`` specially (gather whole stages, reduce at the end of the step, drop gradients), differently in every
    version of torch. Everything that touches parameters is here, in ``sync`` and in the hooks of the blocks.
    """

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
        vote: Vote | None = None,
    ) -> None:
        inputs, outputs = _examples(carried_in), _examples(carried_out)
        if index == count - 1:
            outputs = (torch.empty((), device="meta"),)  # the loss: it is not sent, but an output must be declared
        super().__init__(nn.Module(), index, count, device, input_args=inputs, output_args=outputs, group=group)
        self._module, self._sync = module, sync
        self._carried_out = [(c.shape, c.dtype) for c in carried_out]
        self._backward_chunk = -1
        self._kept = Kept() if splits else None
        self._vote = vote

    def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> Any:
        return super()._warmup_forward_vote(*args, **kwargs) if self._vote is None else self._vote

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> Any:
        return super()._warmup_backward_result(*args, **kwargs) if self._vote is None else self._vote

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of one micro-batch."""
        with self._kept.forward() if self._kept is not None else nullcontext():
            output = self._module(*args, **kwargs)
        if self.is_last:
            return output
        tensors = (output,) if isinstance(output, torch.Tensor) else tuple(output)
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        if found != self._carried_out:
            # Without this check the next stage would wait for bytes that never come, or read the wrong ones.
            raise ValueError(f"stage {self.stage_index} returned {found}, its declared outputs are {self._carried_out}")
        return _sendable(tensors)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._backward_chunk = bwd_chunk_id
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._backward_chunk = bwd_chunk_id
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], list[Any] | None]:
        """Run a full backward, or its part for the stage's inputs ("input") or for its parameters ("weight")."""
        if backward_type == "weight":
            backward_weight(bwd_kwargs["param_groups"])
            self._sync.after_backward(last_backward)
            return (), None
        self._sync.before_backward(self._backward_chunk, last_backward)
        outputs, gradients, inputs = (bwd_kwargs[k] for k in ("stage_output", "output_grads", "input_values"))
        outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        if backward_type == "input":
            for_inputs, deferred = self._backward_input(outputs, gradients, inputs)
            return _sendable(for_inputs), deferred
        for_inputs = backward_whole(outputs, gradients, inputs)
        self._sync.after_backward(last_backward)
        return _sendable(for_inputs), None

    def _backward_input(
        self, outputs: Any, gradients: Any, inputs: Any
    ) -> tuple[tuple[torch.Tensor | None, ...], list[Deferred]]:
        whole = [m for m in self._module.modules() if isinstance(m, Block) and m.whole_backward]
        at_once = [p for block in whole for p in block.parameters()]
        found = backward_input(outputs, gradients, inputs, self._module.parameters(), at_once, self._kept)
        for block in whole:
            block.let_go()
        return found

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if grad_scale_factor != 1:
            raise ValueError("gradients are summed, never averaged: the schedule needs scale_grads=False")
        self._sync.finish_step()


_T = TypeVar("_T", bound=torch.Tensor | None)


def _sendable(tensors: Iterable[_T]) -> tuple[_T, ...]:
    """Return the tensors contiguous, as torch's schedules need them to send activations and gradients.

    Neither gloo nor NCCL sends a tensor that is not contiguous, and the gradient of a `cat` or an `expand` is a view.
    """
    return tuple(t if t is None else t.contiguous() for t in tensors)  # type: ignore[misc]  # contiguous keeps the type


class _LateBuffers(SyncedStage):
    """A stage whose receive buffers live only from the receive to the end of the backward.

    torch allocates them for all micro-batches and never frees them.
    """

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
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        for info in (*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id]):
            info.buffer = None


def _without_buffers(infos: tuple[Any, ...], count: int) -> dict[int, tuple[Any, ...]]:
    """Return ``count`` copies of the receive infos of one micro-batch, without memory."""
    return {
        chunk: tuple(
            type(info)(info.input_name, info.source, None, info.tensor_meta, is_root_arg=info.is_root_arg)
            for info in infos
        )
        for chunk in range(count)
    }


def _allocate(infos: tuple[Any, ...], device: torch.device) -> None:
    for info in infos:
        # Without metadata it is a tensor without gradient: nothing comes back.
        if not info.is_root_arg and info.tensor_meta is not None:
            info.buffer = torch.empty(info.tensor_meta.shape, dtype=info.tensor_meta.dtype, device=device)


def stage_class() -> type[SyncedStage]:
    """Return the stage class for the installed torch."""
    return SyncedStage if RECEIVES_INTO_FRESH_BUFFERS else _LateBuffers


def run_schedule(
    schedule: PipelineScheduleSingle | PipelineScheduleMulti,
    stages: Sequence[SyncedStage],
    micro_batches: Sequence[Mapping[str, torch.Tensor]],
) -> list[torch.Tensor]:
    """Run one step with each micro-batch's tensors as keyword arguments of the stages.

    Returns:
        The losses, on the rank that holds the last stage.
    """
    for stage in stages:
        stage.has_backward = True
        stage.clear_runtime_states()
    losses: list[torch.Tensor] = []
    targets = [None] * len(micro_batches)  # indexed and passed to the loss function, which ignores them
    schedule._step_microbatches(
        kwarg_mbs=[dict(inputs) for inputs in micro_batches], target_mbs=targets, losses=losses, return_outputs=False
    )
    return losses
