"""Cross entropy as a local sum, with whole or class-sharded logits.

It is a sum, not a mean: the caller divides by the number of valid tokens of the whole batch, which is known before the
first backward. So the result depends neither on micro-batches nor on the data-parallel split.

On GPUs one kernel reads the logits for a token's maximum, sum of exponentials and target logit, and another reads them
for the gradient (autoplan.runtime.fused). Without Triton, and for the sharded loss on the CPU, that is done in chunks
of tokens. Maximum and sum are first taken over the local classes, then rescaled by exp(local maximum - maximum) after
the all-reduce of maxima, as online softmax does (Milakov, Gimelshein: Online normalizer calculation for softmax, 2018).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import spmd_types
import torch
import torch.distributed as dist
from spmd_types import I, V, rules
from torch.nn import functional

from autoplan.runtime import functional as functional_collectives
from autoplan.runtime.convert import as_constant_beside
from autoplan.runtime.fused import one_kernel
from autoplan.runtime.mesh import Axes, AxisMesh, current_mesh

_HALF = (torch.bfloat16, torch.float16)


def cross_entropy_sum(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int = -100, label_smoothing: float = 0.0
) -> torch.Tensor:
    """``F.cross_entropy(logits, target, reduction='sum', ...)``, except that bf16 and fp16 are summed in float32.

    A sum over thousands of tokens does not fit the 8 bits of bf16; its gradient is unaffected. On GPUs the softmax of
    16-bit logits is computed in float32 too, and no second tensor of the size of the logits is kept, with or without
    Triton.

    Args:
        logits: [N, C], or [N, C, ...] as ``F.cross_entropy`` takes it.
        target: int64 [N] or [N, ...], class numbers or ``ignore_index``. On GPUs other values make the sum NaN.
        ignore_index: targets with this value count neither in the sum nor in the gradient.
        label_smoothing: mass spread evenly over the classes.

    Returns:
        [], float32 for bf16 and fp16 logits, else in the dtype of the logits; 0 if every target is ignored.
    """
    if logits.device.type != "cpu" and logits.dim() == 2 and target.dim() == 1:
        _check(logits, target, label_smoothing, "cross_entropy_sum")
        fused: torch.Tensor = _CrossEntropySum.apply(  # type: ignore[no-untyped-call]
            logits, target, None, (), ignore_index, label_smoothing
        )
        return fused
    half = logits.dtype in _HALF
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
    """Sum the cross entropies of valid tokens from logits whose class dim is sharded: V -> I on ``axis``.

    Forward: one all-reduce (max) of one number per token, and one all-reduce (sum) of two, or three with label
    smoothing. Backward: no communication. bf16 and fp16 logits are computed in float32.

    Args:
        logits_local: [..., C / size(axis)], an even contiguous chunk of the classes; V on ``axis``.
        target: int64 [...], global class numbers or ``ignore_index``; R or I on ``axis``. Other numbers outside
            ``range(C)`` make the sum NaN (``F.cross_entropy`` raises).
        axis: the axis or axes that shard the classes, major to minor.
        ignore_index: targets with this value count neither in the sum nor in the gradient.
        label_smoothing: mass spread evenly over all C classes.

    Returns:
        [], the same on every rank of ``axis``, float32 for bf16 and fp16 logits, else in the dtype of the logits.

    Raises:
        ValueError: a target whose shape is not the tokens' shape, or label_smoothing outside [0, 1].
    """
    _check(logits_local, target, label_smoothing, "vocab_parallel_cross_entropy_sum")
    loss: torch.Tensor = _CrossEntropySum.apply(  # type: ignore[no-untyped-call]
        logits_local, target, current_mesh(), axis, ignore_index, label_smoothing
    )
    return loss


def _check(logits: torch.Tensor, target: torch.Tensor, label_smoothing: float, name: str) -> None:
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"{name}: target has shape {tuple(target.shape)}, "
            f"the logits {tuple(logits.shape)} need {tuple(logits.shape[:-1])}"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{name}: label_smoothing is {label_smoothing}; it must be in [0, 1]")


def _all_reduce(x: torch.Tensor, op: str, groups: tuple[dist.ProcessGroup, ...]) -> torch.Tensor:
    for group in groups:
        x = functional_collectives.raw_all_reduce(x, op, group)
    return x


@dataclass(frozen=True)
class _Classes:
    """The classes of the local logits: ``count`` of ``total``, from ``first`` on (a tensor for simulated ranks)."""

    count: int
    total: int
    first: int | torch.Tensor
    ignore_index: int

    def here(self, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (local class numbers, True where the target is a local class); elsewhere the number is 0."""
        local = target - self.first
        inside = (local >= 0) & (local < self.count) & (target != self.ignore_index)
        return local.masked_fill_(~inside, 0), inside


def _chunks(logits: torch.Tensor) -> list[slice]:
    """Return the rows to compute at a time: on the CPU what fits in the cache, elsewhere a bound on temporary memory.

    There are not too many chunks, for FakeTensorMode, where each operation costs the same whatever its size.
    """
    rows, classes = logits.shape
    size = max(CHUNK[logits.device.type == "cpu"] // max(classes, 1), 1)
    if 0 < rows <= size:  # also if the number of rows is a symbol
        return [slice(None)]
    size = max(size, -(-rows // CHUNKS))
    return [slice(i, i + size) for i in range(0, rows, size)]


CHUNK = {True: 1 << 18, False: 1 << 26}
"""Logits per chunk; the key is True on the CPU."""
CHUNKS = 256
"""Largest number of chunks."""


def _statistics(logits: torch.Tensor, target: torch.Tensor, classes: _Classes, summed: bool) -> torch.Tensor:
    """Return statistics per token over the local classes: [3 or 4, tokens], in float32 or wider.

    The rows are: the maximum; the sum of exponentials relative to it; the logit of the target if it is a local class
    (else 0; NaN for a target that is not a class); with ``summed``, the sum of the logits.
    """
    if one_kernel(logits.device):
        out: torch.Tensor = torch.ops.autoplan_fused.loss_statistics(
            logits, target, classes.first, classes.total, classes.ignore_index, summed
        )
        return out
    local, inside = classes.here(target)
    parts = [_statistics_of(logits[rows], local[rows], summed) for rows in _chunks(logits)]
    out = torch.cat(parts, 1) if parts else logits.new_zeros((3 + summed, 0)).float()
    wrong = ((target < 0) | (target >= classes.total)) & (target != classes.ignore_index)
    out[2].masked_fill_(~inside, 0).masked_fill_(wrong, math.nan)
    return out


def _statistics_of(logits: torch.Tensor, local: torch.Tensor, summed: bool) -> torch.Tensor:
    wide = logits.float() if logits.dtype in _HALF else logits
    top = wide.amax(-1)
    predicted = wide.gather(-1, local.unsqueeze(-1)).squeeze(-1)
    total = [wide.sum(-1)] if summed else []
    base = top.masked_fill(top == -math.inf, 0).unsqueeze(-1)
    shifted = wide.sub_(base) if logits.dtype in _HALF else wide - base
    return torch.stack([top, shifted.exp_().sum(-1), predicted, *total])


def _gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    log_sum_exp: torch.Tensor,
    grad: torch.Tensor,
    classes: _Classes,
    label_smoothing: float,
) -> torch.Tensor:
    """Return the gradient of the logits, given the gradient of the sum."""
    if one_kernel(logits.device):
        fused: torch.Tensor = torch.ops.autoplan_fused.loss_gradient(
            logits, target, log_sum_exp, grad, classes.first, classes.total, classes.ignore_index, label_smoothing
        )
        return fused
    local, inside = classes.here(target)
    valid = (target != classes.ignore_index).unsqueeze(-1)
    hit = (inside.to(log_sum_exp.dtype) * (label_smoothing - 1.0)).unsqueeze(-1)
    scale = torch.where(valid, grad, 0)
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    for rows in _chunks(logits):
        parts = (x[rows] for x in (logits, out, log_sum_exp.unsqueeze(-1), local.unsqueeze(-1), hit, scale, valid))
        _gradient_of(*parts, uniform=label_smoothing / classes.total)
    return out


def _gradient_of(
    logits: torch.Tensor,
    out: torch.Tensor,
    log_sum_exp: torch.Tensor,
    local: torch.Tensor,
    hit: torch.Tensor,
    scale: torch.Tensor,
    valid: torch.Tensor,
    *,
    uniform: float,
) -> None:
    """Write (softmax - uniform + hit at the target) * scale to some rows of `out`. Other arguments are [rows, 1]."""
    if logits.dtype in _HALF:
        probability = logits.float().sub_(log_sum_exp).exp_()
    else:
        probability = torch.sub(logits, log_sum_exp, out=out).exp_()
    if uniform > 0:
        probability.sub_(uniform)
    probability.scatter_add_(-1, local, hit).mul_(scale)
    # the product would not do: an ignored token with non-finite logits must not give NaN
    probability.masked_fill_(~valid, 0)
    if logits.dtype in _HALF:
        out.copy_(probability)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        mesh: AxisMesh | None,
        axes: Axes,
        ignore_index: int,
        label_smoothing: float,
    ) -> torch.Tensor:
        count = logits.shape[-1]
        first: int | torch.Tensor = 0
        if mesh is not None and one_kernel(logits.device):
            first = mesh.coordinate(axes) * count
        elif mesh is not None:
            first = mesh.index_tensor(axes, target.device) * count
        classes = _Classes(count, count * (1 if mesh is None else mesh.size(axes)), first, ignore_index)
        groups = () if mesh is None else mesh.groups_of(axes)

        flat = _numbers(target)
        found = _statistics(_rows(logits), flat, classes, label_smoothing > 0)
        top = _all_reduce(found[0], "max", groups)
        found[1].mul_((found[0] - top).exp_().masked_fill_(found[0] == -math.inf, 0))
        sums = _all_reduce(found[1:], "sum", groups)
        log_sum = sums[0].log()
        loss = (log_sum - (sums[1] - top)) * (1.0 - label_smoothing)
        if label_smoothing > 0:
            loss = loss + (log_sum - (sums[2] / classes.total - top)) * label_smoothing

        # The softmax is recomputed in backward: keeping it would hold a second tensor as large as the logits.
        kept = (first,) if isinstance(first, torch.Tensor) else ()
        ctx.save_for_backward(logits, target, top + log_sum, *kept)
        # the mesh is not consulted in backward, which may run in another thread
        ctx.classes = replace(classes, first=0) if kept else classes
        ctx.label_smoothing = label_smoothing
        return loss.masked_fill_(flat == ignore_index, 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        logits, target, log_sum_exp, *kept = ctx.saved_tensors
        classes = replace(ctx.classes, first=kept[0]) if kept else ctx.classes
        out = _gradient(_rows(logits), _numbers(target), log_sum_exp, grad, classes, ctx.label_smoothing)
        return out.view(logits.shape), None, None, None, None, None

    @staticmethod
    def spmd_typecheck(*, logits: torch.Tensor, target: torch.Tensor, mesh: AxisMesh | None, axes: Axes) -> Any:
        loss = rules.einsum("...v,...->", logits, as_constant_beside(target, logits))
        for key in () if mesh is None else mesh.type_axes(axes):
            if spmd_types.get_local_type(target).get(key) is V:
                raise spmd_types.SpmdTypeError(
                    f"vocab_parallel_cross_entropy_sum: target is V on {key}, which shards the classes; "
                    "every rank there needs all the targets"
                )
            loss = rules.all_reduce(loss, key, src=V, dst=I)
        return loss


def _rows(logits: torch.Tensor) -> torch.Tensor:
    """Reshape to [tokens, local classes], contiguous: kernels read memory row by row."""
    return logits.reshape(-1, logits.shape[-1]).contiguous()


def _numbers(target: torch.Tensor) -> torch.Tensor:
    """Reshape to [tokens], contiguous: kernels read memory in order, and `labels[:, 0]` is not."""
    return target.reshape(-1).contiguous()
