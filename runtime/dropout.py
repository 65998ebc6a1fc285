"""Dropout whose mask is a function of the element, not of the rank that draws it (autoplan.runtime.random_bits).

On GPUs one kernel reads the tensor and writes the result, in forward and backward alike (autoplan.runtime.fused).
"""

from __future__ import annotations

from typing import Any

import torch
from spmd_types import rules

from autoplan.runtime.fused import one_dropout
from autoplan.runtime.mesh import AxisMesh, current_mesh
from autoplan.runtime.random_bits import (
    Factor,
    check_factors,
    check_random_types,
    drawn,
    first_position,
    global_strides,
    mix_,
    stream_state,
    upper_bits,
)


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
    check_factors("dropout", x, rng, index, mesh)
    out: torch.Tensor = _Dropout.apply(x, rng, mesh, index, p, site)  # type: ignore[no-untyped-call]
    return out


_BITS = 53


def _mask(state: torch.Tensor, start: torch.Tensor, index: tuple[Factor, ...], p: float) -> torch.Tensor:
    """Return a flattened bool mask, True where an element is kept."""
    threshold = _kept_below(p)
    return drawn(state, start, index, lambda counters: upper_bits(mix_(counters), _BITS) < threshold)


def _merged(index: tuple[Factor, ...]) -> tuple[list[int], list[int]]:
    """Return local sizes and global strides of the factors, major to minor; globally contiguous ones are merged."""
    sizes, strides = [1], [0]
    for (local, _, _), stride in zip(index, global_strides(index), strict=True):
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
    for (local, _, axes), stride in zip(index, global_strides(index), strict=True):
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
        state, start = stream_state(rng, site), first_position(rng, mesh, index)
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
        check_random_types("dropout", x, rng, index, mesh)
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
