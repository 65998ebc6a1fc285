"""Random bits that are a function of the element, not of the rank that draws it.

The bits of an element depend only on (seed, step, site, global position). So they are the same on one device and in
every plan, for every micro-batch size, and when a forward is recomputed. torch's generators cannot do that: they number
the elements of the local tensor in the order in which the ranks happen to draw.

The generator is SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) used as a
counter-based generator: output i of the stream with state s is mix(s + i * golden), with Stafford's 64-bit mixer number
13. It is computed in int64 tensor arithmetic, where products wrap around modulo 2**64 on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import spmd_types
import torch
from spmd_types import R, V

from autoplan.runtime.mesh import AxisMesh

Factor = tuple[int, int, tuple[str, ...] | Literal["batch"]]
"""(local size, global size, the axes that shard it contiguously, major to minor), or 'batch' in place of the axes."""


def check_factors(what: str, x: torch.Tensor, rng: torch.Tensor, index: tuple[Factor, ...], mesh: AxisMesh) -> None:
    """Raise TypeError or ValueError, which begin with `what`, if generator and factors do not fit a tensor."""
    if rng.dtype != torch.int64 or rng.shape != (3,):
        raise TypeError(f"{what}: rng is {rng.dtype} of shape {tuple(rng.shape)}; it must be int64 of shape (3,)")
    if math.prod(local for local, _, _ in index) != x.numel():
        raise ValueError(f"{what}: the factors {index} do not multiply to the {x.numel()} elements of {tuple(x.shape)}")
    if sum(axes == "batch" for _, _, axes in index) > 1:
        raise ValueError(f"{what}: more than one batch factor in {index}")
    for local, whole, axes in index:
        if axes != "batch" and local * mesh.size(axes) != whole:
            raise ValueError(f"{what}: {axes} of size {mesh.size(axes)} cannot shard {whole} into parts of {local}")


def check_random_types(
    what: str, x: torch.Tensor, rng: torch.Tensor, index: tuple[Factor, ...], mesh: AxisMesh
) -> None:
    """Raise SpmdTypeError, which begins with `what`, if ranks would draw otherwise than the type of `x` says."""
    types = spmd_types.get_local_type(x)
    for _, _, axes in index:
        for key in () if axes == "batch" else mesh.type_axes(axes):
            if types.get(key) is not V:
                raise spmd_types.SpmdTypeError(
                    f"{what}: index says that {key} shards x, whose type there is {types.get(key)}"
                )
    for rng_key, kind in spmd_types.get_local_type(rng).items():
        if kind is V and types.get(rng_key) is not V:
            raise spmd_types.SpmdTypeError(
                f"{what}: rng is V on {rng_key} but x is {types.get(rng_key)}: its ranks would differ"
            )
        if kind is not V and kind is not R and kind is not spmd_types.I:
            raise spmd_types.SpmdTypeError(f"{what}: rng is {kind} on {rng_key}")


def as_int64(constant: int) -> int:
    """Return the int64 with the bits of an unsigned constant."""
    return constant - (1 << 64) if constant >= 1 << 63 else constant


GOLDEN = as_int64(0x9E3779B97F4A7C15)
_MIX = ((30, as_int64(0xBF58476D1CE4E5B9)), (27, as_int64(0x94D049BB133111EB)))


def upper_bits(z: torch.Tensor, num: int) -> torch.Tensor:
    """Return the upper `num` bits of int64 as numbers from 0; shifts of int64 copy the sign."""
    return (z >> (64 - num)).bitwise_and_((1 << num) - 1)


def mix_(z: torch.Tensor) -> torch.Tensor:
    """Apply SplitMix64's output function in place to int64: every temporary here is 4 times a bf16 activation."""
    for bits, factor in _MIX:
        z.bitwise_xor_(upper_bits(z, 64 - bits)).mul_(factor)
    return z.bitwise_xor_(upper_bits(z, 33))


def stream_state(rng: torch.Tensor, site: int) -> torch.Tensor:
    """Return the state of the stream of this (seed, step, site), int64 []."""
    state = mix_(rng[0] + GOLDEN)
    state = mix_(state + (rng[1] + 1) * GOLDEN)
    return mix_(state + as_int64((site + 1) * GOLDEN % (1 << 64)))


def first_position(rng: torch.Tensor, mesh: AxisMesh, index: tuple[Factor, ...]) -> torch.Tensor:
    """Return the global position of the first local element, int64 []."""
    start = torch.zeros((), dtype=torch.int64, device=rng.device)
    for (local, _, axes), stride in zip(index, global_strides(index), strict=True):
        if axes == "batch":
            start = start + rng[2] * stride
        elif axes and mesh.size(axes) > 1:
            start = start + mesh.index_tensor(axes, rng.device) * (local * stride)
    return start


def global_strides(index: tuple[Factor, ...]) -> list[int]:
    """Return the global stride of each factor; the batch is the most significant digit wherever it stands."""
    strides = [0] * len(index)
    stride = 1
    for i in reversed(range(len(index))):
        if index[i][2] != "batch":
            strides[i] = stride
            stride *= index[i][1]
    return [stride if factor[2] == "batch" else s for factor, s in zip(index, strides, strict=True)]


def _counters(first: torch.Tensor | int, factors: list[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Return ``first`` + golden times the increments of these (local size, global stride) factors, int64, flattened."""
    # full, not tensor: no copy from the host
    counter = (torch.full((), first, dtype=torch.int64, device=device) if isinstance(first, int) else first).reshape(1)
    for local, stride in factors:
        digit = torch.arange(local, dtype=torch.int64, device=device) * as_int64(stride * GOLDEN % (1 << 64))
        counter = (counter.unsqueeze(1) + digit).reshape(-1)
    return counter


Finish = Callable[[torch.Tensor], torch.Tensor]
"""Makes values of the counters of elements, int64, which it may overwrite: `mix_` gives their bits."""


def _traced(state: torch.Tensor, start: torch.Tensor, index: tuple[Factor, ...], finish: Finish) -> torch.Tensor:
    """Return what `drawn` does, as a compiler makes one loop of it.

    It multiplies with the golden number last: inductor computes sums and products of positions symbolically, and
    refuses a constant beyond int64.
    """
    position = start
    for (local, _, _), stride in zip(index, global_strides(index), strict=True):
        digit = torch.arange(local, dtype=torch.int64, device=state.device) * stride
        position = position.unsqueeze(-1) + digit
    return finish(state + (position + 1) * GOLDEN).reshape(-1)


def drawn(state: torch.Tensor, start: torch.Tensor, index: tuple[Factor, ...], finish: Finish) -> torch.Tensor:
    """Return the values that `finish` makes of this rank's elements, flattened.

    Args:
        state: of the stream (`stream_state`).
        start: the global position of the first element (`first_position`).
        index: the factors of the tensor.
    """
    if torch.compiler.is_compiling():
        return _traced(state, start, index, finish)
    factors = [(local, stride) for (local, _, _), stride in zip(index, global_strides(index), strict=True)]
    block = 1 << 18 if state.device.type == "cpu" else 1 << 26
    split, columns = len(factors), 1
    while split > 0 and columns * factors[split - 1][0] <= block:
        split -= 1
        columns *= factors[split][0]
    inner = _counters(0, factors[split:], state.device)
    outer = _counters(state + (start + 1) * GOLDEN, factors[:split], state.device).unsqueeze(1)
    # In blocks: on the CPU to stay in the cache (5 times as fast), elsewhere to bound the int64 temporaries. Not too
    # many blocks, for FakeTensorMode, where each operation costs the same whatever its size.
    rows = max(block // max(columns, 1), -(-outer.shape[0] // 256))
    parts = [finish(part + inner) for part in torch.split(outer, rows)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(-1)
