"""Forward passes alone, through this rank's stages of a pipeline.

The stages of a pipeline run in waves: in wave w, stage i runs micro-batch w - i, if there is one, and every result goes
to the next stage before the next wave begins. So all stages work at the same time, whichever rank holds them (one stage
or several), and a wave's sends and receives are one batch, which no backend can deadlock on. Micro-batches may have
different sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from autoplan.runtime.mesh import AxisMesh
from autoplan.runtime.spec import ProgramSpec
from autoplan.runtime.stage_inputs import MicroBatch, StageInputs


class Waves:
    """Runs micro-batches forward.

    Args:
        spec, mesh: the program and its mesh.
        stages: this rank's modules by stage index; called as ``stage(*carried, **inputs)``.
        inputs: knows the shapes of what travels between stages.
        device: where the stages run.
    """

    def __init__(
        self,
        spec: ProgramSpec,
        mesh: AxisMesh,
        stages: Mapping[int, nn.Module],
        inputs: StageInputs,
        device: torch.device,
    ) -> None:
        self._spec, self._stages, self._inputs, self._device = spec, stages, inputs, device
        self._count = len(spec.stages)
        pipeline = self._count > 1 and mesh.size("pp") > 1
        self._group = mesh.group("pp") if pipeline else None
        self._me = mesh.coordinate("pp") if pipeline else 0

    def run(
        self, micro_batches: Sequence[MicroBatch], after: Callable[[int, MicroBatch], None] | None = None
    ) -> list[torch.Tensor]:
        """Return the loss of every micro-batch on the rank of the last stage, nothing elsewhere; no gradients.

        `after` is called with the index of a stage and a micro-batch once the stage has run on it. ZeRO's gathered
        parameters are freed at the end, since an optimizer may change the shards next.
        """
        losses: list[torch.Tensor] = []
        arrived: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}  # by stage and micro-batch
        for wave in range(len(micro_batches) + self._count - 1):
            made: dict[int, tuple[torch.Tensor, ...]] = {}
            running = [i for i in range(self._count) if 0 <= wave - i < len(micro_batches)]
            for index in running:
                if index in self._stages:
                    inputs = micro_batches[wave - index]
                    out = self._stages[index](*arrived.pop((index, wave - index), ()), **inputs)
                    made[index] = (out,) if isinstance(out, torch.Tensor) else tuple(out)
                    if after is not None:
                        after(index, inputs)
            if self._count - 1 in made:
                losses.append(made.pop(self._count - 1)[0].detach())
            handed = [i for i in running if i < self._count - 1]
            arrived |= {(i + 1, wave - i): out for i, out in self._exchange(handed, wave, made, micro_batches).items()}
        for stage in self._stages.values():
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return losses

    def _exchange(
        self,
        handed: Sequence[int],
        wave: int,
        made: Mapping[int, tuple[torch.Tensor, ...]],
        micro_batches: Sequence[MicroBatch],
    ) -> dict[int, tuple[torch.Tensor, ...]]:
        """Send what this rank's stages made in a wave, and return what others made for them, by the stage that did."""
        here: dict[int, tuple[torch.Tensor, ...]] = {}
        operations: list[dist.P2POp] = []
        for index in handed:  # in the same order on all ranks, so that messages between two of them match
            source, target = self._spec.rank_of(index), self._spec.rank_of(index + 1)
            if source == target == self._me:
                here[index] = made[index]
            elif source == self._me:
                operations += [self._operation(dist.isend, t.contiguous(), target) for t in made[index]]
            elif target == self._me:
                carried = self._inputs.carried(self._spec.stages[index].carried_out, micro_batches[wave - index])
                here[index] = tuple(torch.empty(c.shape, dtype=c.dtype, device=self._device) for c in carried)
                operations += [self._operation(dist.irecv, t, source) for t in here[index]]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return here

    def _operation(self, kind: Callable[..., dist.Work | None], tensor: torch.Tensor, rank: int) -> dist.P2POp:
        if self._group is None:
            raise RuntimeError("the program has stages on other ranks, but its mesh has no pipeline of several ranks")
        return dist.P2POp(kind, tensor, dist.get_global_rank(self._group, rank), self._group)


def only_trains(spec: ProgramSpec) -> str | None:
    """Return why a program cannot evaluate; None if it can."""
    updated = [b.name for stage in spec.stages for b in stage.buffers if b.updated]
    if spec.evaluation is not None or not (updated or spec.no_evaluation):
        return None
    what = f"updates {updated[0]!r} in its forward" if updated else "computes something else than in evaluation"
    why = spec.no_evaluation or "the program was made without its evaluation: make it again"
    return f"{spec.model} {what} while it trains, and the program has only that: {why}; evaluate pm.to_module() instead"


def evaluation_key(num_steps: int, num_evaluations: int) -> int:
    """Return what random draws of an evaluation are keyed by in place of the step: no step of a training has it.

    An evaluation draws the same after a checkpoint was loaded, and changes nothing that a training draws.

    Args:
        num_steps: steps of the training so far.
        num_evaluations: evaluations since the last one.
    """
    return num_steps + ((num_evaluations + 1) << _STEP_BITS)


_STEP_BITS = 40  # a training has fewer steps than 2**40


@contextmanager
def evaluating(stages: Iterable[nn.Module]) -> Iterator[None]:
    """Let stages and their blocks compute what the module does in evaluation, where that is something else."""
    changed: list[tuple[dict[str, Any], str]] = []
    try:
        for module in (module for stage in stages for module in stage.modules()):
            for name, instead in _IN_EVALUATION.items():
                method = getattr(module, instead, None)
                if method is not None:
                    vars(module)[name] = method
                    changed.append((vars(module), name))
        yield
    finally:
        for attributes, name in changed:
            del attributes[name]


# methods of emitted classes, and those that evaluate in their place (autoplan.codegen.program)
_IN_EVALUATION = {"forward": "evaluate", "count": "count_evaluated"}
