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
from collections.abc import Callable, Sequence
from typing import Literal

import spmd_types
import torch
from spmd_types import R, V

from autoplan.runtime.mesh import AxisMesh

_FactorAxes = tuple[str, ...] | Literal["batch"]
Factor = tuple[int, int, _FactorAxes] | tuple[int, int, _FactorAxes, str]
"""(local size, global size, the axes that shard it contiguously, major to minor), or 'batch' in place of the axes. Of a
sequence that is cut over ranks also the axis over which it is: every rank has two chunks of it
(`autoplan.runtime.context`), and the axes shard those."""


def check_factors(
    what: str, shape: Sequence[int], rng: torch.Tensor, index: tuple[Factor, ...], mesh: AxisMesh
) -> None:
    """Raise TypeError or ValueError, which begin with `what`, if generator and factors do not fit a local shape."""
    if rng.dtype != torch.int64 or rng.shape != (3,):
        raise TypeError(f"{what}: rng is {rng.dtype} of shape {tuple(rng.shape)}; it must be int64 of shape (3,)")
    number = math.prod(shape)
    if math.prod([factor[0] for factor in index]) != number:
        raise ValueError(f"{what}: the factors {index} do not multiply to the {number} elements of {tuple(shape)}")
    if sum([factor[2] == "batch" for factor in index]) > 1:
        raise ValueError(f"{what}: more than one batch factor in {index}")
    for local, whole, axes, *cut in index:
        if axes == "batch":
            continue
        ranks = mesh.size(axes)
        for axis in cut:
            ranks *= mesh.size(axis)
        if local * ranks != whole or (cut and whole % (2 * mesh.size(cut[0]))):
            over = (*axes, *cut)
            raise ValueError(f"{what}: {over} of size {ranks} cannot shard {whole} into parts of {local}")


def check_random_types(
    what: str, x: torch.Tensor, rng: torch.Tensor, index: tuple[Factor, ...], mesh: AxisMesh
) -> None:
    """Raise SpmdTypeError, which begins with `what`, if ranks would draw otherwise than the type of `x` says."""
    types = spmd_types.get_local_type(x)
    for factor in index:
        for key in () if factor[2] == "batch" else mesh.type_axes((*factor[2], *factor[3:])):
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
    """Return the global position of the first local element, int64 [], but for what `cut_places` adds."""
    start = torch.zeros((), dtype=torch.int64, device=rng.device)
    for (local, _, axes, *cut), stride in zip(index, global_strides(index), strict=True):
        if axes == "batch":
            start = start + rng[2] * stride
        elif not cut and axes and mesh.size(axes) > 1:
            start = start + mesh.index_tensor(axes, rng.device) * (local * stride)
    return start


def cut_places(mesh: AxisMesh, index: tuple[Factor, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the places of local tokens in a sequence that is cut over ranks, int64 [local], of every such factor."""
    found = []
    for local, whole, axes, *cut in index:
        if axes == "batch" or not cut:
            continue
        here = mesh.index_tensor(axes, device) * local + torch.arange(local, device=device)
        length, rank = whole // (2 * mesh.size(cut[0])), mesh.index_tensor(cut[0], device)
        behind = whole - 2 * length - 2 * length * rank  # between the end of the first chunk and the second one
        found.append(here + rank * length + torch.where(here < length, 0, behind))
    return tuple(found)


def global_strides(index: tuple[Factor, ...]) -> list[int]:
    """Return the global stride of each factor; the batch is the most significant digit wherever it stands."""
    strides = [0] * len(index)
    stride = 1
    for i in reversed(range(len(index))):
        if index[i][2] != "batch":
            strides[i] = stride
            stride *= index[i][1]
    return [stride if factor[2] == "batch" else s for factor, s in zip(index, strides, strict=True)]


Places = list[tuple[torch.Tensor, int]]
"""Of every factor the places of its local digits, int64 [local], counted from `first_position`, and its stride."""


def places_of(index: tuple[Factor, ...], cut: tuple[torch.Tensor, ...], device: torch.device) -> Places:
    """Return the places of factors; `cut`: those of `cut_places`."""
    given = iter(cut)
    return [
        (next(given) if len(factor) > 3 else torch.arange(factor[0], dtype=torch.int64, device=device), stride)
        for factor, stride in zip(index, global_strides(index), strict=True)
    ]


def golden(times: int) -> int:
    """Return so many times the golden number, modulo 2**64."""
    return as_int64(times * GOLDEN % (1 << 64))


def counters_of(first: torch.Tensor | int, places: Places, device: torch.device) -> torch.Tensor:
    """Return ``first`` + golden times the positions of these places, int64, flattened."""
    # full, not tensor: no copy from the host
    counter = (torch.full((), first, dtype=torch.int64, device=device) if isinstance(first, int) else first).reshape(1)
    for place, stride in places:
        counter = (counter.unsqueeze(1) + place * golden(stride)).reshape(-1)
    return counter


Finish = Callable[[torch.Tensor], torch.Tensor]
"""Makes values of the counters of elements, int64, which it may overwrite: `mix_` gives their bits."""


def _traced(state: torch.Tensor, start: torch.Tensor, places: Places, finish: Finish) -> torch.Tensor:
    """Return what `drawn` does, as a compiler makes one loop of it.

    It multiplies with the golden number last: inductor computes sums and products of positions symbolically, and
    refuses a constant beyond int64.
    """
    position = start
    for place, stride in places:
        position = position.unsqueeze(-1) + place * stride
    return finish(state + (position + 1) * GOLDEN).reshape(-1)


def drawn(
    state: torch.Tensor,
    start: torch.Tensor,
    index: tuple[Factor, ...],
    finish: Finish,
    cut: tuple[torch.Tensor, ...] = (),
) -> torch.Tensor:
    """Return the values that `finish` makes of this rank's elements, flattened.

    Args:
        state: of the stream (`stream_state`).
        start: the global position of the first element (`first_position`).
        index: the factors of the tensor.
        cut: the places of sequences that are cut over ranks (`cut_places`).
    """
    places = places_of(index, cut, state.device)
    if torch.compiler.is_compiling():
        return _traced(state, start, places, finish)
    block = _block(state.device)
    split, columns = len(places), 1
    while split > 0 and columns * index[split - 1][0] <= block:
        split -= 1
        columns *= index[split][0]
    inner = counters_of(0, places[split:], state.device)
    outer = counters_of(state + (start + 1) * GOLDEN, places[:split], state.device)
    return drawn_of_both(outer, inner, finish).reshape(-1)


def _block(device: torch.device) -> int:
    return 1 << 18 if device.type == "cpu" else 1 << 26


def drawn_of_both(outer: torch.Tensor, inner: torch.Tensor, finish: Finish) -> torch.Tensor:
    """Return the values of elements whose counters are sums of one of `outer` and one of `inner`, [outer, inner]."""
    # In blocks: on the CPU to stay in the cache (5 times as fast), elsewhere to bound the int64 temporaries. Not too
    # many blocks, for FakeTensorMode, where each operation costs the same whatever its size.
    rows = max(_block(outer.device) // max(inner.shape[0], 1), -(-outer.shape[0] // 256))
    parts = [finish(part + inner) for part in torch.split(outer.unsqueeze(1), rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
