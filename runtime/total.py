"""The loss of a step: the sum of all ranks' losses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from autoplan.runtime.mesh import AxisMesh
from autoplan.runtime.zero import GradientSync


class TotalLoss:
    """Sums the losses of all ranks, in float64; with the gradients or beside the last backward, if known before it.

    Waiting for one number costs as much as for a small gradient, since all ranks have to come to the same point. Sent
    before the last backward, it has arrived when the gradients have. Where gradients go in one message after the
    backward (ZeRO 0 on a CPU), it goes in that message.

    Args:
        mesh: the mesh of the program.
        replicas: the axis of the ranks that each have a part of the batch; the stages of a pipeline are summed after it
            (all but the last add zero).
        device: where the losses are.
        dtype: the dtype of the result.
        sync: reduces the gradients of this rank's only stage; None: there are several, or no gradients.
    """

    def __init__(
        self,
        mesh: AxisMesh,
        replicas: str,
        device: torch.device,
        dtype: torch.dtype,
        sync: GradientSync | None = None,
    ) -> None:
        self._mesh, self._device, self._dtype, self._sync = mesh, device, dtype, sync
        self._rides = False
        self._axes = tuple(axis for axis in (replicas, "pp") if mesh.size(axis) > 1)
        self._sent: tuple[torch.Tensor, dist.Work | None] | None = None

    def send(self, losses: Sequence[torch.Tensor]) -> None:
        """Start to sum the losses of this rank's micro-batches, [] each, if they are all there are in the pipeline."""
        if len(self._axes) == 1 and self._axes[0] != "pp":
            group, own = self._mesh.group(self._axes[0]), self._own(losses)
            self._rides = self._sync is not None and self._sync.take_along(own, group)
            if not self._rides:
                total = own.to(torch.float64, copy=True)
                self._sent = total, dist.all_reduce(total, group=group, async_op=True)

    def result(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the total, []; `losses` are those that `send` was given, if it was called."""
        if self._rides and self._sync is not None:
            total = self._sync.taken().to(torch.float64).sum()
        elif self._sent is not None:
            total, work = self._sent
            if work is not None:
                work.wait()
        elif not self._axes:
            total = self._own(losses)
        else:
            total = self._own(losses).to(torch.float64, copy=True)
            for axis in self._axes:
                dist.all_reduce(total, group=self._mesh.group(axis))
        return total.to(self._dtype)

    def _own(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of this rank's losses, in their dtype."""
        if not losses:
            return torch.zeros((), device=self._device, dtype=torch.float64)
        return (losses[0] if len(losses) == 1 else torch.stack(list(losses)).sum()).detach()
