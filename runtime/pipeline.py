"""Runs the micro-batches of one training step through this rank's pipeline stage."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from autoplan.runtime.private import Carried, SyncedStage, run_schedule
from autoplan.runtime.zero import GradientSync, check_schedule

SCHEDULES: Mapping[str, type[PipelineScheduleSingle]] = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}


class PipelineRunner:
    """Forward and backward of all micro-batches of a step, on one stage of a pipeline or on all of the model.

    A stage is called as ``stage(*carried, **inputs)``: ``carried`` comes from the previous stage, ``inputs`` are this
    micro-batch's tensors, which every stage is given. It returns what the next stage is called with, or on the last
    stage the loss: a 0-dim tensor, divided by the token count of the whole batch. Gradients are added to what
    ``parameter.grad`` holds and reduced as ``sync`` says; the caller sets them to None between steps.

    Under 1F1B, stage i of pp holds the activations of at most ``min(M, pp - i)`` micro-batches. With fewer
    micro-batches than stages, the order is that of GPipe (all forwards, then all backwards) and every stage holds all
    M: stock 1F1B refuses, and its pairs of sends and receives would not match on NCCL.

    Args:
        stage: the module of this rank, ``apply_zero`` already done.
        sync: what ``apply_zero`` returned.
        pp_mesh: the pipeline's ranks, one axis, in stage order; None or size 1 for a model in one stage.
        device: where the stage runs. Default: the device of its first parameter, else the CPU.
        carried_in, carried_out: (shape, dtype) of each tensor received from the previous and sent to the next stage,
            for one micro-batch; none into the first stage and none out of the last. They are required: torch's way to
            infer them runs the stages once on uninitialised memory, collectives and all. Floating point ones carry
            a gradient back.
        schedule: "1F1B" or "GPipe".

    Raises:
        ValueError: an unknown schedule or one that ``sync``'s ZeRO stage forbids, a mesh of several axes, or carried
            tensors that do not fit the stage's place in the pipeline.
    """

    def __init__(
        self,
        stage: nn.Module,
        sync: GradientSync,
        pp_mesh: DeviceMesh | None = None,
        *,
        device: torch.device | None = None,
        carried_in: Sequence[Carried] = (),
        carried_out: Sequence[Carried] = (),
        schedule: str = "1F1B",
    ) -> None:
        check_schedule(sync.zero, schedule)
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule {schedule!r} is not one of {', '.join(sorted(SCHEDULES))}")
        self._module = stage
        self._sync = sync
        self._kind = SCHEDULES[schedule]
        self._stage: SyncedStage | None = None
        self._schedule: PipelineScheduleSingle | None = None
        self._num_micro_batches = 0
        if pp_mesh is not None and pp_mesh.size() > 1:
            if pp_mesh.ndim != 1:
                raise ValueError(f"the pipeline needs a mesh of one axis, this one has {pp_mesh.ndim}")
            index, count = pp_mesh.get_local_rank(), pp_mesh.size()
            if bool(carried_in) != (index > 0) or bool(carried_out) != (index < count - 1):
                raise ValueError(
                    f"stage {index} of {count} declares {len(carried_in)} tensors in and {len(carried_out)} out; "
                    "only the first takes none in and only the last gives none out"
                )
            parameter = next(stage.parameters(), None)
            default = torch.device("cpu") if parameter is None else parameter.device
            self._stage = SyncedStage(
                stage,
                index,
                count,
                device or default,
                pp_mesh.get_group(),
                sync,
                carried_in,
                carried_out,
            )

    def run(self, micro_batches: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Run one step.

        Args:
            micro_batches: for each micro-batch its named input tensors, the same shapes in all of them and the same
                number of them on every stage.

        Returns:
            On the last stage one 0-dim loss per micro-batch, in order and detached; elsewhere nothing. Their sum over
            micro-batches and data-parallel ranks is the mean loss of the batch.

        Raises:
            ValueError: no micro-batch.
            RuntimeError: from torch's pipeline, caused by whatever the stage raised; by a ValueError if its outputs
                are not the declared ``carried_out``.
        """
        if not micro_batches:
            raise ValueError("a step needs at least one micro-batch")
        if self._stage is None:
            return self._loop(micro_batches)
        if self._schedule is None or self._num_micro_batches != len(micro_batches):
            self._schedule = _make_schedule(self._stage, len(micro_batches), self._kind)
            self._num_micro_batches = len(micro_batches)
        return [loss.detach() for loss in run_schedule(self._schedule, self._stage, micro_batches)]

    def _loop(self, micro_batches: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        losses = []
        for index, inputs in enumerate(micro_batches):
            loss = _loss_of(self._module(**inputs))
            self._sync.before_backward(index, is_last=index == len(micro_batches) - 1)
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        self._sync.finish_step()
        return losses


def _make_schedule(
    stage: SyncedStage, num_micro_batches: int, kind: type[PipelineScheduleSingle]
) -> PipelineScheduleSingle:
    kind = kind if num_micro_batches >= stage.num_stages else ScheduleGPipe
    return kind(stage, num_micro_batches, loss_fn=lambda output, _: _loss_of(output), scale_grads=False)


def _loss_of(output: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    loss = output if isinstance(output, torch.Tensor) else output[0]
    if loss.dim() != 0:
        raise ValueError(f"the last stage must return a 0-dim loss, it returned shape {tuple(loss.shape)}")
    return loss
