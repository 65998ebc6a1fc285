"""Dropout whose mask is a function of the element, not of the rank that draws it.

The mask of an element depends only on (seed, step, site, global position). So it is the same on one device and in every
plan, for every micro-batch size, and when a forward is recomputed. torch's generators cannot do that: they number the
elements of the local tensor in the order in which the ranks happen to draw.

The generator is SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) used as a
counter-based generator: output i of the stream with state s is mix(s + i * golden), with Stafford's 64-bit mixer number
13. It is computed in int64 tensor arithmetic, where products wrap around modulo 2**64 on every device. On GPUs one
kernel reads the tensor and writes the result, in forward and backward alike (autoplan.runtime.fused).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import spmd_types
import torch
from spmd_types import R, V, rules

from autoplan.runtime.fused import one_dropout
from autoplan.runtime.mesh import AxisMesh, current_mesh

Factor = tuple[int, int, tuple[str, ...] | Literal["batch"]]
"""(local size, global size, the axes that shard it contiguously, major to minor), or 'batch' in place of the axes."""


def dropout(
    x: torch.Tensor,
    p: float,
    rng: torch.Tensor | None,
    site: int,
    index: tuple[Factor, ...],
    *,
    training: bool = True,
) -> torch.Tensor:
    """Zero each element of ``x`` with probability ``p`` and scale the others by ``1 / (1 - p)``.

    Args:
        x: any floating tensor.
        p: in [0, 1]; 0 returns ``x``.
        rng: int64 [3]: seed, step, and the global number of the first sample of this micro-batch on this rank. None
            (in an evaluation) returns ``x``.
        site: number of this dropout in the program; sites draw independently.
        index: the factors of ``x`` in order, so that ``x.reshape([f[0] for f in index])`` is valid. At most one is the
            batch, whose global position is ``rng[2]`` + local position and whose global size is not used.
        training: False returns ``x``.

    Returns:
        A tensor of the shape, dtype and type of ``x`` (P too: the same mask on every rank is linear).

    Raises:
        ValueError: p outside [0, 1], factors that do not multiply to ``x.numel()`` or do not fit the mesh, or two batch
            factors.
        TypeError: an rng that is not int64 [3].
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout: p is {p}; it must be in [0, 1]")
    if not training or p == 0.0 or rng is None:
        return x
    mesh = current_mesh()
    _check(x, rng, index, mesh)
    out: torch.Tensor = _Dropout.apply(x, rng, mesh, index, p, site)  # type: ignore[no-untyped-call]
    return out


def _check(x: torch.Tensor, rng: torch.Tensor, index: tuple[Factor, ...], mesh: AxisMesh) -> None:
    if rng.dtype != torch.int64 or rng.shape != (3,):
        raise TypeError(f"dropout: rng is {rng.dtype} of shape {tuple(rng.shape)}; it must be int64 of shape (3,)")
    if math.prod(local for local, _, _ in index) != x.numel():
        raise ValueError(
            f"dropout: the factors {index} do not multiply to the {x.numel()} elements of {tuple(x.shape)}"
        )
    if sum(axes == "batch" for _, _, axes in index) > 1:
        raise ValueError(f"dropout: more than one batch factor in {index}")
    for local, whole, axes in index:
        if axes != "batch" and local * mesh.size(axes) != whole:
            raise ValueError(f"dropout: {axes} of size {mesh.size(axes)} cannot shard {whole} into parts of {local}")


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >= 1 << 63 else constant


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))
_BITS = 53


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    # int64 shifts copy the sign; the generator needs zeros.
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix_(z: torch.Tensor) -> torch.Tensor:
    """Apply SplitMix64's output function in place to int64: every temporary here is 4 times a bf16 activation."""
    for bits, factor in _MIX:
        z.bitwise_xor_(_shift(z, bits)).mul_(factor)
    return z.bitwise_xor_(_shift(z, 31))


def _stream(rng: torch.Tensor, site: int) -> torch.Tensor:
    """Return the state of the stream of this (seed, step, site), int64 []."""
    state = _mix_(rng[0] + _GOLDEN)
    state = _mix_(state + (rng[1] + 1) * _GOLDEN)
    return _mix_(state + _signed((site + 1) * _GOLDEN % (1 << 64)))


def _start(rng: torch.Tensor, mesh: AxisMesh, index: tuple[Factor, ...]) -> torch.Tensor:
    """Return the global position of the first local element, int64 []."""
    start = torch.zeros((), dtype=torch.int64, device=rng.device)
    for (local, _, axes), stride in zip(index, _strides(index), strict=True):
        if axes == "batch":
            start = start + rng[2] * stride
        elif mesh.size(axes) > 1:
            start = start + mesh.index_tensor(axes, rng.device) * (local * stride)
    return start


def _strides(index: tuple[Factor, ...]) -> list[int]:
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
        digit = torch.arange(local, dtype=torch.int64, device=device) * _signed(stride * _GOLDEN % (1 << 64))
        counter = (counter.unsqueeze(1) + digit).reshape(-1)
    return counter


def _traced_mask(state: torch.Tensor, start: torch.Tensor, index: tuple[Factor, ...], p: float) -> torch.Tensor:
    """Return what `_mask` does, as a compiler makes one loop of it.

    It multiplies with the golden number last: inductor computes sums and products of positions symbolically, and
    refuses a constant beyond int64.
    """
    position = start
    for (local, _, _), stride in zip(index, _strides(index), strict=True):
        digit = torch.arange(local, dtype=torch.int64, device=state.device) * stride
        position = position.unsqueeze(-1) + digit
    drawn = _mix_(state + (position + 1) * _GOLDEN)
    return (_shift(drawn, 64 - _BITS) < _kept_below(p)).reshape(-1)


def _mask(state: torch.Tensor, start: torch.Tensor, index: tuple[Factor, ...], p: float) -> torch.Tensor:
    """Return a flattened bool mask, True where an element is kept."""
    if torch.compiler.is_compiling():
        return _traced_mask(state, start, index, p)
    factors = [(local, stride) for (local, _, _), stride in zip(index, _strides(index), strict=True)]
    block = 1 << 18 if state.device.type == "cpu" else 1 << 26
    split, columns = len(factors), 1
    while split > 0 and columns * factors[split - 1][0] <= block:
        split -= 1
        columns *= factors[split][0]
    inner = _counters(0, factors[split:], state.device)
    outer = _counters(state + (start + 1) * _GOLDEN, factors[:split], state.device).unsqueeze(1)
    # In blocks: on the CPU to stay in the cache (5 times as fast), elsewhere to bound the int64 temporaries. Not too
    # many blocks, for FakeTensorMode, where each operation costs the same whatever its size.
    rows = max(block // max(columns, 1), -(-outer.shape[0] // 256))
    threshold = _kept_below(p)
    parts = [_shift(_mix_(part + inner), 64 - _BITS) < threshold for part in torch.split(outer, rows)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(-1)


def _merged(index: tuple[Factor, ...]) -> tuple[list[int], list[int]]:
    """Return local sizes and global strides of the factors, major to minor; globally contiguous ones are merged."""
    sizes, strides = [1], [0]
    for (local, _, _), stride in zip(index, _strides(index), strict=True):
        if sizes[-1] == 1 or strides[-1] == local * stride:
            sizes[-1], strides[-1] = sizes[-1] * local, stride
        elif local > 1:
            sizes.append(local)
            strides.append(stride)
    return sizes, strides


def _kept_below(p: float) -> int:
    """Return the threshold below which the upper 53 bits of an element's draw keep it."""
    return round((1.0 - p) * (1 << _BITS))


def _scale(p: float) -> float:
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0


def _fused_arguments(mesh: AxisMesh, index: tuple[Factor, ...], p: float, site: int) -> tuple[Any, ...]:
    """Return the arguments of `torch.ops.autoplan_fused.dropout` after the tensor and its rng."""
    first, batch_stride = 0, 0
    for (local, _, axes), stride in zip(index, _strides(index), strict=True):
        if axes == "batch":
            batch_stride = stride
        else:
            first += mesh.coordinate(axes) * local * stride
    return (site, *_merged(index), first, batch_stride, _kept_below(p), _scale(p))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, rng: torch.Tensor, mesh: AxisMesh, index: tuple[Factor, ...], p: float, site: int
    ) -> torch.Tensor:
        # The backward draws the mask a second time. It does not consult the mesh: it may run in another thread.
        ctx.index, ctx.p = index, p
        if one_dropout(x.device):
            ctx.fused = _fused_arguments(mesh, index, p, site)
            ctx.save_for_backward(rng)
            return _apply_fused(x, rng, ctx.fused)
        ctx.fused = None
        state, start = _stream(rng, site), _start(rng, mesh, index)
        ctx.save_for_backward(state, start)
        return _apply(x, state, start, index, p)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        if ctx.fused is not None:
            (rng,) = ctx.saved_tensors
            return _apply_fused(grad, rng, ctx.fused), None, None, None, None, None
        state, start = ctx.saved_tensors
        return _apply(grad, state, start, ctx.index, ctx.p), None, None, None, None, None

    @staticmethod
    def spmd_typecheck(*, x: torch.Tensor, rng: torch.Tensor, mesh: AxisMesh, index: tuple[Factor, ...]) -> Any:
        types = spmd_types.get_local_type(x)
        for _, _, axes in index:
            for key in () if axes == "batch" else mesh.type_axes(axes):
                if types.get(key) is not V:
                    raise spmd_types.SpmdTypeError(
                        f"dropout: index says that {key} shards x, whose type there is {types.get(key)}"
                    )
        for rng_key, kind in spmd_types.get_local_type(rng).items():
            if kind is V and types.get(rng_key) is not V:
                raise spmd_types.SpmdTypeError(
                    f"dropout: rng is V on {rng_key} but x is {types.get(rng_key)}: its ranks would differ"
                )
            if kind is not V and kind is not R and kind is not spmd_types.I:
                raise spmd_types.SpmdTypeError(f"dropout: rng is {kind} on {rng_key}")
        rules.ignore(rng)
        return rules.einsum("...->...", x, linear_in=(0,))


def _apply_fused(x: torch.Tensor, rng: torch.Tensor, arguments: tuple[Any, ...]) -> torch.Tensor:
    out: torch.Tensor = torch.ops.autoplan_fused.dropout(x.contiguous(), rng.contiguous(), *arguments)
    return out


def _apply(
    x: torch.Tensor, state: torch.Tensor, start: torch.Tensor, index: tuple[Factor, ...], p: float
) -> torch.Tensor:
    kept = _mask(state, start, index, p).reshape(x.shape)
    return torch.where(kept, x * _scale(p), 0)
