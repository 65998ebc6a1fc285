"""Triton kernels of the operators in autoplan.runtime.fused; imported only if Triton is installed.

Each kernel reads its inputs once and writes its result once. Integers that vary are not specialised on, so that another
step, rank or batch size needs no compilation.
"""

# kernels are written in Triton's language, whose arguments have no Python types
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _mix(z):
    """Apply SplitMix64's output function to uint64, as `mix_` of autoplan.runtime.random_bits."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit(do_not_specialize=["sizes", "strides", "first", "batch_stride", "site"])
def _dropout(
    x_at,
    out_at,
    rng_at,
    count,
    sizes,
    strides,
    first,
    batch_stride,
    site,
    KEPT: tl.constexpr,
    SCALE: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    seed = tl.load(rng_at).to(tl.uint64, bitcast=True)
    step = tl.load(rng_at + 1).to(tl.uint64, bitcast=True)
    sample = tl.load(rng_at + 2)
    state = _mix(seed + golden)
    state = _mix(state + (step + 1) * golden)
    state = _mix(state + (tl.cast(site, tl.int64).to(tl.uint64, bitcast=True) + 1) * golden)

    at = tl.cast(tl.program_id(0), INDEX) * BLOCK + tl.arange(0, BLOCK).to(INDEX)
    inside = at < count
    rest = at
    position = tl.cast(first, tl.int64) + sample * tl.cast(batch_stride, tl.int64) + tl.full((BLOCK,), 0, tl.int64)
    for i in tl.static_range(len(sizes) - 1, 0, -1):
        size = tl.cast(sizes[i], INDEX)
        position += (rest % size).to(tl.int64) * tl.cast(strides[i], tl.int64)
        rest = rest // size
    position += rest.to(tl.int64) * tl.cast(strides[0], tl.int64)

    drawn = _mix(state + (position.to(tl.uint64, bitcast=True) + 1) * golden) >> 11
    x = tl.load(x_at + at, mask=inside, other=0.0)
    scaled = x.to(COMPUTE) * tl.full((), SCALE, COMPUTE)
    out = tl.where(drawn < tl.full((), KEPT, tl.uint64), scaled, 0.0)
    tl.store(out_at + at, out.to(x.dtype), mask=inside)


def dropout(
    x: torch.Tensor,
    rng: torch.Tensor,
    site: int,
    sizes: list[int],
    strides: list[int],
    first: int,
    batch_stride: int,
    kept: int,
    scale: float,
) -> torch.Tensor:
    """See the schema of `dropout` in autoplan.runtime.fused."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return out
    _dropout[(triton.cdiv(x.numel(), _BLOCK),)](
        x,
        out,
        rng,
        x.numel(),
        tuple(sizes),
        tuple(strides),
        first,
        batch_stride,
        site,
        KEPT=kept,
        SCALE=scale,
        COMPUTE=_compute(x),
        INDEX=tl.int32 if x.numel() < 1 << 30 else tl.int64,
        BLOCK=_BLOCK,
    )
    return out


_LOSS_BLOCK = 4096
_LOSS_WARPS = 8


@triton.jit(do_not_specialize=["first", "total", "ignore"])
def _loss_statistics(
    logits_at,
    target_at,
    out_at,
    rows,
    classes,
    first,
    total,
    ignore,
    SUMMED: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_at + row)
    row_at = logits_at + row * classes
    top = tl.full((), float("-inf"), COMPUTE)
    exponentials = tl.full((), 0.0, COMPUTE)
    summed = tl.full((), 0.0, COMPUTE)
    for at in range(0, classes, BLOCK):
        column = at + tl.arange(0, BLOCK)
        x = tl.load(row_at + column, mask=column < classes, other=float("-inf")).to(COMPUTE)
        higher = tl.maximum(top, tl.max(x, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        exponentials = exponentials * tl.exp(top - base) + tl.sum(tl.exp(x - base), 0)
        top = higher
        if SUMMED:
            summed += tl.sum(tl.where(column < classes, x, 0.0), 0)

    here = target - first
    valid = target != ignore
    inside = valid & (here >= 0) & (here < classes)
    predicted = tl.load(row_at + here, mask=inside, other=0.0).to(COMPUTE)
    predicted = tl.where(valid & ((target < 0) | (target >= total)), float("nan"), predicted)
    tl.store(out_at + row, top)
    tl.store(out_at + rows + row, exponentials)
    tl.store(out_at + 2 * rows + row, predicted)
    if SUMMED:
        tl.store(out_at + 3 * rows + row, summed)


@triton.jit(do_not_specialize=["first", "ignore"])
def _loss_gradient(
    logits_at,
    target_at,
    log_sum_exp_at,
    grad_at,
    out_at,
    classes,
    first,
    ignore,
    UNIFORM: tl.constexpr,
    HIT: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_at + row)
    valid = target != ignore
    grad = tl.load(grad_at).to(COMPUTE)
    x = tl.load(logits_at + row * classes + column, mask=column < classes, other=0.0)
    probability = tl.exp(x.to(COMPUTE) - tl.load(log_sum_exp_at + row))
    probability -= tl.full((), UNIFORM, COMPUTE)
    probability -= tl.where(column == target - first, tl.full((), HIT, COMPUTE), 0.0)
    # a product with 0 would not do: an ignored token with non-finite logits must not give NaN
    out = tl.where(valid, probability * grad, 0.0)
    tl.store(out_at + row * classes + column, out.to(x.dtype), mask=column < classes)


def _compute(x: torch.Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def loss_statistics(
    logits: torch.Tensor, target: torch.Tensor, first: int, total: int, ignore_index: int, summed: bool
) -> torch.Tensor:
    """See `_statistics` of autoplan.runtime.loss."""
    rows, classes = logits.shape
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    out = logits.new_empty((3 + summed, rows), dtype=wide)
    if rows:
        _loss_statistics[(rows,)](
            logits,
            target,
            out,
            rows,
            classes,
            first,
            total,
            ignore_index,
            SUMMED=summed,
            COMPUTE=_compute(logits),
            BLOCK=min(_LOSS_BLOCK, triton.next_power_of_2(classes)),
            num_warps=_LOSS_WARPS,
        )
    return out


def loss_gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    log_sum_exp: torch.Tensor,
    grad: torch.Tensor,
    first: int,
    total: int,
    ignore_index: int,
    label_smoothing: float,
) -> torch.Tensor:
    """See `_gradient` of autoplan.runtime.loss."""
    rows, classes = logits.shape
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if rows:
        block = min(_LOSS_BLOCK, triton.next_power_of_2(classes))
        _loss_gradient[(rows, triton.cdiv(classes, block))](
            logits,
            target,
            log_sum_exp,
            grad,
            out,
            classes,
            first,
            ignore_index,
            UNIFORM=label_smoothing / total,
            HIT=1.0 - label_smoothing,
            COMPUTE=_compute(logits),
            BLOCK=block,
            num_warps=_LOSS_WARPS,
        )
    return out
