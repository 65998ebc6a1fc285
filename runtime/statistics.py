"""Running statistics of batch norm: buffers that every forward updates, alike on all ranks."""

from __future__ import annotations

from typing import Any

import spmd_types
import torch
from spmd_types import R, rules


def running_statistics(
    mean: torch.Tensor,
    variance: torch.Tensor,
    running_mean: torch.Tensor,
    running_variance: torch.Tensor,
    num_batches: torch.Tensor | None = None,
    *,
    momentum: float | None,
    number: int,
) -> torch.Tensor:
    """Update the running statistics in place as ``nn.BatchNorm2d`` does. A recomputed forward updates nothing.

    Args:
        mean, variance: [C], of the whole micro-batch.
        running_mean, running_variance, num_batches: the buffers, the same on every rank.
        momentum: weight of this micro-batch; None: every batch counts alike.
        number: elements per channel that the statistics are of; the running variance is the unbiased one.

    Returns:
        The number of batches so far, or 0 without a counter.

    Raises:
        ValueError: statistics of one element, which has no variance.
    """
    if number < 2:
        raise ValueError(f"batch norm in training mode needs more than {number} element per channel in a micro-batch")
    out: torch.Tensor = _Update.apply(  # type: ignore[no-untyped-call]
        mean, variance, running_mean, running_variance, num_batches, momentum, number
    )
    return out


class _Update(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mean: torch.Tensor,
        variance: torch.Tensor,
        running_mean: torch.Tensor,
        running_variance: torch.Tensor,
        num_batches: torch.Tensor | None,
        momentum: float | None,
        number: int,
    ) -> torch.Tensor:
        none = torch.zeros((), dtype=mean.dtype, device=mean.device)
        if torch._C._current_graph_task_id() != -1:  # inside a backward: this forward is a recompute
            return none
        weight: float | torch.Tensor = 0.0 if momentum is None else momentum
        if num_batches is not None:
            num_batches.add_(1)
            weight = num_batches.to(running_mean.dtype).reciprocal() if momentum is None else momentum
        for running, value in ((running_mean, mean), (running_variance, variance * (number / (number - 1)))):
            running.add_((value.to(running.dtype) - running) * weight)
        return none

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:
        return (None,) * 7

    @staticmethod
    def spmd_typecheck(
        *,
        mean: torch.Tensor,
        variance: torch.Tensor,
        running_mean: torch.Tensor,
        running_variance: torch.Tensor,
        num_batches: torch.Tensor | None,
    ) -> Any:
        for value in (mean, variance):
            for key, kind in spmd_types.get_local_type(value).items():
                if kind not in (R, spmd_types.I):
                    raise spmd_types.SpmdTypeError(
                        f"running_statistics: statistics are {kind} on {key}; every rank needs those of all channels"
                    )
        for read in (variance, running_mean, running_variance, num_batches):
            if read is not None:
                rules.ignore(read)  # what is returned does not depend on it
        return rules.einsum("c->", mean)
