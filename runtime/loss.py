"""Cross entropy as a local sum, with whole or class-sharded logits.

A sum, not a mean: the caller divides by the number of valid tokens of the whole batch, which is known before the first
backward, so that the result depends neither on micro-batches nor on the data-parallel split.
"""

from __future__ import annotations

from typing import Any

import spmd_types
import torch
import torch.distributed as dist
from spmd_types import I, V, rules
from torch.nn import functional

from autoplan.runtime.convert import as_constant_beside
from autoplan.runtime.mesh import Axes, AxisMesh, current_mesh


def cross_entropy_sum(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int = -100, label_smoothing: float = 0.0
) -> torch.Tensor:
    """``F.cross_entropy(logits, target, reduction='sum', ...)``, except that bf16 and fp16 are summed in float32.

    A sum over thousands of tokens does not fit the 8 bits of bf16; its gradient is unaffected.

    Args:
        logits: [N, C], or [N, C, ...] as ``F.cross_entropy`` takes it.
        target: int64 [N] or [N, ...], class numbers or ``ignore_index``.
        ignore_index: targets that count neither in the sum nor in the gradient.
        label_smoothing: mass spread evenly over the classes.

    Returns:
        [], float32 for bf16 and fp16 logits, else of the dtype of the logits; 0 if every target is ignored.
    """
    half = logits.dtype in (torch.bfloat16, torch.float16)
    loss = functional.cross_entropy(
        logits,
        target,
        ignore_index=ignore_index,
        reduction="none" if half else "sum",
        label_smoothing=label_smoothing,
    )
    return loss.float().sum() if half else loss


def vocab_parallel_cross_entropy_sum(
    logits_local: torch.Tensor,
    target: torch.Tensor,
    axis: Axes,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """The sum of cross entropies over valid tokens from logits whose class dim is sharded: V -> I on ``axis``.

    Forward: an all-reduce (max) of one number per token and one all-reduce (sum) of two, three with label smoothing.
    Backward: no communication. bf16 and fp16 logits are computed in float32.

    Args:
        logits_local: [..., C / size(axis)], an even contiguous chunk of the classes; V on ``axis``.
        target: int64 [...], global class numbers or ``ignore_index``; R or I on ``axis``. Other numbers outside
            ``range(C)`` are not detected (``F.cross_entropy`` raises).
        axis: the axis or axes that shard the classes, major to minor.
        ignore_index: targets that count neither in the sum nor in the gradient.
        label_smoothing: mass spread evenly over all C classes.

    Returns:
        [], the same on every rank of ``axis``, float32 for bf16 and fp16 logits, else of the dtype of the logits.

    Raises:
        ValueError: a target whose shape is not that of the tokens, or label_smoothing outside [0, 1].
    """
    if target.shape != logits_local.shape[:-1]:
        raise ValueError(
            f"vocab_parallel_cross_entropy_sum: target has shape {tuple(target.shape)}, "
            f"the logits {tuple(logits_local.shape)} need {tuple(logits_local.shape[:-1])}"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(
            f"vocab_parallel_cross_entropy_sum: label_smoothing is {label_smoothing}; it must be in [0, 1]"
        )
    loss: torch.Tensor = _VocabParallelCrossEntropySum.apply(  # type: ignore[no-untyped-call]
        logits_local, target, current_mesh(), axis, ignore_index, label_smoothing
    )
    return loss


def _all_reduce(x: torch.Tensor, op: str, groups: tuple[dist.ProcessGroup, ...]) -> torch.Tensor:
    # The raw operators: their python wrappers return an asynchronous tensor subclass.
    for group in groups:
        x = torch.ops._c10d_functional.all_reduce(x, op, group.group_name)
        x = torch.ops._c10d_functional.wait_tensor(x)
    return x


class _VocabParallelCrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        mesh: AxisMesh,
        axes: Axes,
        ignore_index: int,
        label_smoothing: float,
    ) -> torch.Tensor:
        classes = logits.shape[-1]
        groups = mesh.groups_of(axes)
        local = target - mesh.index_tensor(axes, target.device) * classes
        inside = (local >= 0) & (local < classes) & (target != ignore_index)
        valid = target != ignore_index

        shifted = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        top = _all_reduce(shifted.amax(-1), "max", groups)
        shifted = shifted - top.unsqueeze(-1)
        predicted = shifted.gather(-1, local.masked_fill(~inside, 0).unsqueeze(-1)).squeeze(-1).masked_fill_(~inside, 0)
        parts = [predicted, shifted.sum(-1)] if label_smoothing > 0 else [predicted]
        # In place: the logits are the largest tensor of the program. Only this last use of the shifted values may be.
        parts.append(shifted.exp_().sum(-1))
        sums = _all_reduce(torch.stack(parts), "sum", groups)

        log_sum = sums[-1].log()
        loss = (log_sum - sums[0]) * (1.0 - label_smoothing)
        if label_smoothing > 0:
            loss = loss + (log_sum - sums[1] / (classes * mesh.size(axes))) * label_smoothing
        # The softmax is recomputed in backward: keeping it would hold a second tensor as large as the logits.
        ctx.save_for_backward(logits, local.masked_fill(~inside, -1), valid, top + log_sum)
        ctx.label_smoothing = label_smoothing
        ctx.classes = classes * mesh.size(axes)
        return loss.masked_fill(~valid, 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        logits, local, valid, log_sum_exp = ctx.saved_tensors
        probability = (logits.to(log_sum_exp.dtype) - log_sum_exp.unsqueeze(-1)).exp_()
        if ctx.label_smoothing > 0:
            probability.sub_(ctx.label_smoothing / ctx.classes)
        hit = (local >= 0).to(probability.dtype) * (ctx.label_smoothing - 1.0)
        probability.scatter_add_(-1, local.clamp_min(0).unsqueeze(-1), hit.unsqueeze(-1))
        # where, not a product: an ignored token with non-finite logits must not give NaN.
        scale = torch.where(valid, grad, 0).unsqueeze(-1)
        probability = torch.where(valid.unsqueeze(-1), probability.mul_(scale), 0)
        return probability.to(logits.dtype), None, None, None, None, None

    @staticmethod
    def spmd_typecheck(*, logits: torch.Tensor, target: torch.Tensor, mesh: AxisMesh, axes: Axes) -> Any:
        loss = rules.einsum("...v,...->", logits, as_constant_beside(target, logits))
        for key in mesh.type_axes(axes):
            if spmd_types.get_local_type(target).get(key) is V:
                raise spmd_types.SpmdTypeError(
                    f"vocab_parallel_cross_entropy_sum: target is V on {key}, which shards the classes; "
                    "every rank there needs all the targets"
                )
            loss = rules.all_reduce(loss, key, src=V, dst=I)
        return loss
