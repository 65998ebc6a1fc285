"""The loss of a step: the sum of all ranks' losses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from autoplan.runtime.mesh import AxisMesh


class TotalLoss:
    """Sums the losses of all ranks, in float64; beside the last backward where they are known before it.

    Waiting for one number costs as much as for a small gradient, since all ranks have to come to the same point. Sent
    before the last backward, it has arrived when the gradients have.

    Args:
        mesh: the mesh of the program.
        replicas: the axis of the ranks that each have a part of the batch; the stages of a pipeline are summed after it
            (all but the last add zero).
        device: where the losses are.
        dtype: the dtype of the result.
    """

    def __init__(self, mesh: AxisMesh, replicas: str, device: torch.device, dtype: torch.dtype) -> None:
        self._mesh, self._device, self._dtype = mesh, device, dtype
        self._axes = tuple(axis for axis in (replicas, "pp") if mesh.size(axis) > 1)
        self._sent: tuple[torch.Tensor, dist.Work | None] | None = None

    def send(self, losses: Sequence[torch.Tensor]) -> None:
        """Start to sum the losses of this rank's micro-batches, [] each, if they are all there are in the pipeline."""
        if len(self._axes) == 1 and self._axes[0] != "pp":
            total = self._mine(losses)
            self._sent = total, dist.all_reduce(total, group=self._mesh.group(self._axes[0]), async_op=True)

    def result(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the total, []; `losses` are those that `send` was given, if it was called."""
        if self._sent is not None:
            total, work = self._sent
            if work is not None:
                work.wait()
        else:
            total = self._mine(losses)
            for axis in self._axes:
                dist.all_reduce(total, group=self._mesh.group(axis))
        return total.to(self._dtype)

    def _mine(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        if not losses:
            return torch.zeros((), device=self._device, dtype=torch.float64)
        total = losses[0] if len(losses) == 1 else torch.stack(list(losses)).sum()
        return total.detach().to(torch.float64, copy=True)
