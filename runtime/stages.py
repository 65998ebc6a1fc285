"""The stages of a pipeline as torch's schedules see them, and one step of such a schedule."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from autoplan.runtime.private import RECEIVES_INTO_FRESH_BUFFERS
from autoplan.runtime.program import Block
from autoplan.runtime.split_backward import Deferred, Kept, backward_input, backward_weight, backward_whole
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
    """A PipelineStage in which ``sync`` decides when gradients are reduced. ``splits``: backwards have two parts.

    torch's schedules are given an empty module instead of the stage's own: what they do to modules that are sharded by
    ``fully_shard`` (gather whole stages, reduce at the end of the step, drop gradients; another set of it in every
    version of torch) then never applies, and all that touches parameters is here, in ``sync`` and in the hooks of the
    blocks.
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
    ) -> None:
        inputs, outputs = _examples(carried_in), _examples(carried_out)
        if index == count - 1:
            outputs = (torch.empty((), device="meta"),)  # the loss: sent nowhere, but an output must be declared
        super().__init__(nn.Module(), index, count, device, input_args=inputs, output_args=outputs, group=group)
        self._module, self._sync = module, sync
        self._carried_out = [(tuple(c[0]), c[1]) for c in carried_out]
        self._backward_chunk = -1
        self._kept = Kept() if splits else None

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of one micro-batch."""
        with self._kept.forward() if self._kept is not None else nullcontext():
            output = self._module(*args, **kwargs)
        if self.is_last:
            return output
        tensors = (output,) if isinstance(output, torch.Tensor) else tuple(output)
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        if found != self._carried_out:
            # Without this check the next stage waits for bytes that never come, or reads the wrong ones.
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
        """A full backward, or the part of it for the stage's inputs ("input") or that for its parameters ("weight")."""
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
    """What a stage hands to torch's schedules to send, activations and gradients alike: neither gloo nor NCCL sends a
    tensor that is not contiguous, and the gradient of a `cat` or an `expand` is a view.
    """
    return tuple(t if t is None else t.contiguous() for t in tensors)  # type: ignore[misc]  # contiguous keeps the type


class _LateBuffers(SyncedStage):
    """Receive buffers that live from the receive to the end of the backward, where torch allocates them for all
    micro-batches and for good.
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


def stage_class() -> type[SyncedStage]:
    """The stage for the torch that is installed."""
    return SyncedStage if RECEIVES_INTO_FRESH_BUFFERS else _LateBuffers


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
