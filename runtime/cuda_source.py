"""Dropout as one kernel in CUDA C++, for GPUs where Triton cannot build kernels.

NVRTC compiles it, which is part of torch's CUDA build: there need be neither a C compiler nor Python's or CUDA's
headers. The same text compiles as C++ for the host (what differs is in `_PRELUDE`), where tests run it. On an H200 it
drew the mask of the CPU. The first use on a device draws a few elements and compares them with the generator in plain
integers, and whatever fails leaves dropout to torch's operators.
"""

from __future__ import annotations

import functools
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from autoplan.runtime.private import compile_cuda

_PRELUDE = """
typedef unsigned long long u64;
#ifndef AUTOPLAN_ON_HOST
__device__ static float from_half(unsigned short x) {
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x));
  return out;
}
__device__ static unsigned short to_half(float x) {
  unsigned short out;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(x));
  return out;
}
__device__ static unsigned bits_of(float x) { return __float_as_uint(x); }
__device__ static float of_bits(unsigned x) { return __uint_as_float(x); }
#endif
"""

# {T}: the type in memory; {C}: that of the product; {LOAD}, {STORE}: from one to the other. 64-bit integers come as two
# of 32 bits, low one first, because torch passes integers as `int`.
_KERNEL = """
__device__ static u64 mix(u64 z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}
__device__ static float from_bfloat16(unsigned short x) { return of_bits((unsigned)x << 16); }
__device__ static unsigned short to_bfloat16(float x) {
  unsigned bits = bits_of(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0;
  return (unsigned short)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}
__device__ static float same(float x) { return x; }
__device__ static double same(double x) { return x; }
#define WIDE(name) (((u64)(unsigned)name##_high << 32) | (u64)(unsigned)name##_low)

extern "C" __global__ void dropout(const {T}* x, {T}* out, const u64* rng, double scale, {WORDS}) {
  const u64 golden = 0x9E3779B97F4A7C15ULL, at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= WIDE(count)) return;
  u64 state = mix(rng[0] + golden);
  state = mix(state + (rng[1] + 1) * golden);
  state = mix(state + (WIDE(site) + 1) * golden);
  u64 position = WIDE(first) + rng[2] * WIDE(batch_stride);
  {INDEX} rest = ({INDEX})at;
{DIGITS}
  const bool kept = (mix(state + (position + 1) * golden) >> 11) < WIDE(kept);
  out[at] = {STORE}(kept ? {LOAD}(x[at]) * ({C})scale : ({C})0);
}
"""
_TYPES = {
    torch.float64: ("double", "double", "same", "same"),
    torch.float32: ("float", "float", "same", "same"),
    torch.float16: ("unsigned short", "float", "from_half", "to_half"),
    torch.bfloat16: ("unsigned short", "float", "from_bfloat16", "to_bfloat16"),
}
_SCALARS = ("count", "site", "first", "batch_stride", "kept")
_BLOCK = 256
_NARROW = 1 << 31  # up to so many elements their numbers are divided in 32 bits


def source(dtype: torch.dtype, num_factors: int, narrow: bool) -> str:
    """Return the text of the kernel for tensors of a dtype.

    Args:
        num_factors: length of `sizes` and `strides`.
        narrow: True if the number of an element fits 32 bits.
    """
    memory, computed, load, store = _TYPES[dtype]
    words = [*_SCALARS, *(f"{name}{i}" for i in range(num_factors) for name in ("size", "stride"))]
    digits = [
        f"  position += (u64)(rest % ({{INDEX}})WIDE(size{i})) * WIDE(stride{i}); rest /= ({{INDEX}})WIDE(size{i});"
        for i in range(num_factors - 1, 0, -1)
    ]
    out = _PRELUDE + _KERNEL
    for name, text in (
        ("{WORDS}", ", ".join(f"int {word}_low, int {word}_high" for word in words)),
        ("{DIGITS}", "\n".join([*digits, "  position += (u64)rest * WIDE(stride0);"])),
        ("{INDEX}", "unsigned" if narrow else "u64"),
        ("{T}", memory),
        ("{C}", computed),
        ("{LOAD}", load),
        ("{STORE}", store),
    ):
        out = out.replace(name, text)
    return out


@functools.cache
def _compiled(dtype: torch.dtype, num_factors: int, narrow: bool, device: torch.device) -> Any:
    return compile_cuda(source(dtype, num_factors, narrow), "dropout", torch.cuda.get_device_capability(device))


def _words(values: list[int]) -> list[int]:
    return [word for value in values for word in (value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF)]


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
    out, count = torch.empty_like(x, memory_format=torch.contiguous_format), x.numel()
    if not count:
        return out
    factors = [number for pair in zip(sizes, strides, strict=True) for number in pair]
    words = _words([count, site, first, batch_stride, kept, *factors])
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        kernel = _compiled(x.dtype, len(sizes), count < _NARROW, x.device)
        kernel(grid=(-(-count // _BLOCK), 1, 1), block=(_BLOCK, 1, 1), args=[x, out, rng, scale, *words])
    return out


# -- trusted after a trial ---------------------------------------------------------------------------------------------

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def _drawn(rng: tuple[int, int], site: int, position: int) -> int:
    """Return the upper 53 bits of what SplitMix64 draws at a position."""
    state = 0
    for number in (0, rng[1] + 1, site + 1):
        state = _mix((state + (number * _GOLDEN if number else rng[0] + _GOLDEN)) & _MASK)
    return _mix((state + (position + 1) * _GOLDEN) & _MASK) >> 11


def _differs(device: torch.device) -> str | None:
    """Return what is wrong with the kernel on a device, tried in bfloat16 with two factors; None if it is right."""
    seed, step, sample, site, rows, columns, stride, kept = 2**62 + 11, 7, 5, 3, 6, 50, 1 << 33, 1 << 52
    out = dropout(
        torch.full((rows, columns), 3.0, dtype=torch.bfloat16, device=device),
        torch.tensor([seed, step, sample], device=device),
        site,
        [rows, columns],
        [stride, 1],
        columns,
        rows * stride,
        kept,
        2.0,
    )
    begin = columns + sample * rows * stride
    want = [
        6.0 * (_drawn((seed, step), site, begin + row * stride + column) < kept)
        for row in range(rows)
        for column in range(columns)
    ]
    return None if out.flatten().tolist() == want else "it draws another mask"


@functools.cache
def works(device: torch.device) -> bool:
    """Return True if the kernel can be compiled and draws the right mask on this GPU. Warns once if not."""
    try:
        # in a thread of its own, where no mode makes tensors fake or records them
        with ThreadPoolExecutor(1) as thread:
            wrong = thread.submit(_differs, device).result()
    except (AssertionError, AttributeError, ImportError, OSError, RuntimeError, TypeError) as error:
        wrong = f"{type(error).__name__}: {error}"
    if wrong is not None:
        warnings.warn(f"dropout runs by many kernels instead of one, which failed on {device}: {wrong}", stacklevel=2)
    return wrong is None
