"""The runner that takes the micro-batches of one training step through this rank's pipeline stages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from autoplan.runtime.alone import Vote
from autoplan.runtime.spec import ScheduleSpec
from autoplan.runtime.stages import Carried, SyncedStage, run_schedule, stage_class
from autoplan.runtime.zero import GradientSync, check_schedule

TorchSchedule = PipelineScheduleSingle | PipelineScheduleMulti


@dataclass(frozen=True)
class PipelineStagePart:
    """One stage of the pipeline that this rank holds; with virtual stages a rank holds several.

    Attributes:
        index: its place in the model, counted over the whole pipeline.
        module: called as ``module(*carried, **inputs)``, after ``apply_zero``.
        sync: the GradientSync that ``apply_zero`` returned for it.
        carried_in, carried_out: each tensor received from the previous stage and sent to the next, for one
            micro-batch; none into the first stage and none out of the last. They are required: torch infers them by
            running the stages once on uninitialised memory, with all collectives.
    """

    index: int
    module: nn.Module
    sync: GradientSync
    carried_in: tuple[Carried, ...] = ()
    carried_out: tuple[Carried, ...] = ()


class PipelineRunner:
    """Forward and backward of all micro-batches of a step, on this rank's stages of a pipeline or on the whole model.

    A stage is called as ``stage(*carried, **inputs)``: ``carried`` comes from the previous stage, ``inputs`` are this
    micro-batch's tensors, which every stage gets. It returns the next stage's ``carried``, or on the last stage the
    loss: a 0-dim tensor, divided by the token count of the whole batch. Gradients are added to ``parameter.grad`` and
    reduced as each stage's ``sync`` says; the caller sets them to None between steps.

    Under 1F1B, stage i of pp holds the activations of at most ``min(M, pp - i)`` micro-batches. With fewer
    micro-batches than stages, the order is GPipe's (all forwards, then all backwards) and every stage holds all M:
    stock 1F1B refuses this case, and its pairs of sends and receives would not match on NCCL.

    Args:
        stages: stages of this rank, in model order, as placed by the schedule (`ProgramSpec.stage_ranks`).
        pp_mesh: the pipeline's ranks, one axis; None or size 1 for a model in one stage.
        num_stages: stages of the whole pipeline. Default: one per rank.
        device: where the stages run. Default: the device of the first parameter, else the CPU.
        schedule: schedule of a pipeline of several ranks; None for a model in one stage.
        vote: the outcome of the stages' vote on how shapes become known; None: they vote.

    Raises:
        ValueError: no schedule, a schedule that torch does not have or that a ZeRO stage forbids, a mesh of several
            axes, or carried tensors that do not fit a stage's place in the pipeline.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStagePart],
        pp_mesh: DeviceMesh | None = None,
        *,
        num_stages: int | None = None,
        device: torch.device | None = None,
        schedule: ScheduleSpec | None = None,
        vote: Vote | None = None,
    ) -> None:
        self._parts = tuple(stages)
        for part in stages:
            check_schedule(part.sync.zero, schedule)
        self._kind = None if schedule is None else class_of(schedule)
        self._stages: list[SyncedStage] = []
        self._schedule: TorchSchedule | None = None
        self._num_micro_batches = 0
        if pp_mesh is not None and pp_mesh.size() > 1:
            if pp_mesh.ndim != 1:
                raise ValueError(f"the pipeline needs a mesh of one axis, this one has {pp_mesh.ndim}")
            if schedule is None:
                raise ValueError(f"a pipeline of {pp_mesh.size()} ranks needs a schedule")
            count = num_stages or pp_mesh.size()
            parameter = next((p for part in stages for p in part.module.parameters()), None)
            default = torch.device("cpu") if parameter is None else parameter.device
            for part in stages:
                _check_place(part, count)
                self._stages.append(
                    stage_class()(
                        part.module,
                        part.index,
                        count,
                        device or default,
                        pp_mesh.get_group(),
                        part.sync,
                        part.carried_in,
                        part.carried_out,
                        splits=schedule.splits_backward,
                        vote=vote,
                    )
                )

    def run(
        self,
        micro_batches: Sequence[Mapping[str, torch.Tensor]],
        after_forwards: Callable[[list[torch.Tensor]], None] | None = None,
    ) -> list[torch.Tensor]:
        """Run one step.

        Args:
            micro_batches: the named input tensors of each micro-batch, with the same shapes in all micro-batches and
                the same number of micro-batches on every stage.
            after_forwards: of a model in one stage, called with the losses before the last backward.

        Returns:
            On the rank of the last stage one 0-dim loss per micro-batch, in order and detached; elsewhere nothing.
            Their sum over micro-batches and data-parallel ranks is the mean loss of the batch.

        Raises:
            ValueError: no micro-batch, or a number of them that the schedule does not take.
            RuntimeError: from torch's pipeline, caused by the exception of a stage; by a ValueError if the stage's
                outputs are not the declared ``carried_out``.
        """
        if not micro_batches:
            raise ValueError("a step needs at least one micro-batch")
        if not self._stages or self._kind is None:
            return self._loop(micro_batches, after_forwards)
        if self._schedule is None or self._num_micro_batches != len(micro_batches):
            self._schedule = _make_schedule(self._stages, len(micro_batches), self._kind)
            self._num_micro_batches = len(micro_batches)
        return [loss.detach() for loss in run_schedule(self._schedule, self._stages, micro_batches)]

    def _loop(
        self,
        micro_batches: Sequence[Mapping[str, torch.Tensor]],
        after_forwards: Callable[[list[torch.Tensor]], None] | None,
    ) -> list[torch.Tensor]:
        (part,) = self._parts
        losses = []
        for index, inputs in enumerate(micro_batches):
            loss = _loss_of(part.module(**inputs))
            losses.append(loss.detach())
            is_last = index == len(micro_batches) - 1
            if is_last and after_forwards is not None:
                after_forwards(losses)
            part.sync.before_backward(index, is_last=is_last)
            torch.autograd.backward(loss)
        part.sync.finish_step()
        return losses


def _check_place(part: PipelineStagePart, count: int) -> None:
    if bool(part.carried_in) != (part.index > 0) or bool(part.carried_out) != (part.index < count - 1):
        raise ValueError(
            f"stage {part.index} of {count} declares {len(part.carried_in)} tensors in and {len(part.carried_out)} "
            "out; only the first takes none in and only the last gives none out"
        )


def class_of(schedule: ScheduleSpec) -> type[TorchSchedule]:
    """Return torch's class of a schedule. Raises ValueError if this torch has none of that name."""
    kind = getattr(pipelining, schedule.torch_class, None)
    if not (isinstance(kind, type) and issubclass(kind, (PipelineScheduleSingle, PipelineScheduleMulti))):
        known = ", ".join(name for name in pipelining.__all__ if name.startswith("Schedule"))
        raise ValueError(f"schedule {schedule.name!r}: torch has no class {schedule.torch_class!r}; it has {known}")
    return kind


def _make_schedule(stages: list[SyncedStage], num_micro_batches: int, kind: type[TorchSchedule]) -> TorchSchedule:
    def loss_of(output: torch.Tensor | Sequence[torch.Tensor], _: object) -> torch.Tensor:
        return _loss_of(output)

    if issubclass(kind, PipelineScheduleMulti):
        return kind(list(stages), num_micro_batches, loss_fn=loss_of, scale_grads=False)
    (stage,) = stages
    if issubclass(kind, pipelining.Schedule1F1B) and num_micro_batches < stage.num_stages:
        kind = pipelining.ScheduleGPipe
    return kind(stage, num_micro_batches, loss_fn=loss_of, scale_grads=False)


def _loss_of(output: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    loss = output if isinstance(output, torch.Tensor) else output[0]
    if loss.dim() != 0:
        raise ValueError(f"the last stage must return a 0-dim loss, it returned shape {tuple(loss.shape)}")
    return loss
