"""Buffers that every training forward updates, alike on all ranks: a new value, running statistics of batch norm."""

from __future__ import annotations

from typing import Any

import spmd_types
import torch
from spmd_types import R, rules
from torch import nn


def _recomputes() -> bool:
    """Return True inside a backward, where a forward that runs is a recompute."""
    return torch._C._current_graph_task_id() != -1


def update_buffer(value: torch.Tensor, held: torch.Tensor, module: nn.Module, name: str) -> torch.Tensor:
    """Give a buffer of a module a copy of `value`, a new tensor, and return it. A recomputed forward updates nothing.

    The old tensor stays as it is: earlier micro-batches may still need it, for their backward or their recompute.

    Args:
        value: in the shape of the buffer, the same on every rank.
        held: the buffer before the forward.
    """
    if _recomputes():
        return held
    out: torch.Tensor = _Copy.apply(value, held)  # type: ignore[no-untyped-call]
    module._buffers[name] = out
    return out


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(held).copy_(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        return None, None

    @staticmethod
    def spmd_typecheck(*, value: torch.Tensor, held: torch.Tensor) -> Any:
        _same_everywhere("update_buffer: its new value is", value)
        rules.ignore(held)
        labels = "abcdefghij"[: value.ndim]
        return rules.einsum(f"{labels}->{labels}", value)


def _same_everywhere(what: str, value: torch.Tensor) -> None:
    for key, kind in spmd_types.get_local_type(value).items():
        if kind not in (R, spmd_types.I):
            raise spmd_types.SpmdTypeError(f"{what} {kind} on {key}; every rank needs all of it")


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
        if _recomputes():
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
            _same_everywhere("running_statistics: statistics are", value)
        for read in (variance, running_mean, running_variance, num_batches):
            if read is not None:
                rules.ignore(read)  # what is returned does not depend on it
        return rules.einsum("c->", mean)
