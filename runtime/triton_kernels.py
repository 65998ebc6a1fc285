"""Triton kernels of the operators in autoplan.runtime.fused; imported only where Triton is installed.

Each reads what it needs once and writes its result once. Integers that may be any are not specialised on, so that
another step, rank or batch size does not compile again.
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
    """SplitMix64's output function on uint64: `_mix_` of autoplan.runtime.dropout."""
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
    """See `autoplan.runtime.fused.dropout`."""
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
        COMPUTE=tl.float64 if x.dtype == torch.float64 else tl.float32,
        INDEX=tl.int32 if x.numel() < 1 << 30 else tl.int64,
        BLOCK=_BLOCK,
    )
    return out
