"""Parameters: cut full tensors into local shards by factors, reassemble them, and reduce deferred gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.runtime.mesh import AxisMesh
from autoplan.runtime.spec import BufferSpec, ParamSpec, StageSpec
from autoplan.runtime.whole import CPU, gather


def _open(spec: ParamSpec) -> tuple[list[int], dict[tuple[int, int], int]]:
    """Return the flattened factor shape of the full tensor, and the index of each (dim, position) in it."""
    shape: list[int] = []
    where: dict[tuple[int, int], int] = {}
    for dim, factors in enumerate(spec.factor_shape):
        for position, size in enumerate(factors):
            where[dim, position] = len(shape)
            shape.append(size)
    return shape, where


def local_param_shape(spec: ParamSpec, axis_size: Callable[[str], int]) -> tuple[int, ...]:
    """Return the shape of one rank's shard. Raises ValueError if a factor does not divide."""
    factors = [list(f) for f in spec.factor_shape]
    for shard in spec.shards:
        size, parts = factors[shard.dim][shard.position], axis_size(shard.axis)
        if size % parts:
            raise ValueError(f"{spec.name}: {size} cannot be cut into {parts} equal parts over {shard.axis}")
        factors[shard.dim][shard.position] = size // parts
    out = []
    for dim in factors:
        total = 1
        for size in dim:
            total *= size
        out.append(total)
    return tuple(out)


def shard_param(
    full: torch.Tensor, spec: ParamSpec, size: Callable[[str], int], coordinate: Callable[[str], int]
) -> torch.Tensor:
    """Return this rank's shard of a full tensor, contiguous.

    Args:
        full: a tensor of shape `spec.shape`.
        size, coordinate: size of a sub-axis and this rank's index on it, by name.

    Raises:
        ValueError: `full` has another shape.
    """
    if tuple(full.shape) != tuple(spec.shape):
        raise ValueError(f"{spec.name} has shape {tuple(full.shape)}; the program was made for {tuple(spec.shape)}")
    shape, where = _open(spec)
    out = full.reshape(shape)
    for s in spec.shards:  # major to minor
        at = where[s.dim, s.position]
        part = out.shape[at] // size(s.axis)
        out = out.narrow(at, coordinate(s.axis) * part, part)
    return out.reshape(local_param_shape(spec, size)).contiguous()


def unshard(local: torch.Tensor, spec: ParamSpec, mesh: AxisMesh, device: torch.device | None = None) -> torch.Tensor:
    """Return the full tensor, on the host, from the shards of all ranks of its sub-axes. A collective over them.

    `device`: the device of the groups' tensors; None: the device of `local` (`local` itself may be on the host).
    """
    device = local.device if device is None else device
    shape, where = _open(spec)
    now = list(shape)
    for s in spec.shards:
        now[where[s.dim, s.position]] //= mesh.size(s.axis)
    out = local.reshape(now)
    for s in reversed(spec.shards):  # minor first
        if mesh.size(s.axis) == 1:
            continue
        parts = gather(out, [out.shape] * mesh.size(s.axis), mesh.group(s.axis), device)
        out = torch.cat(parts, dim=where[s.dim, s.position])
    return out.to(CPU).reshape(spec.shape)


def buffer_owner(stage: nn.Module, spec: BufferSpec) -> nn.Module:
    """Return the module of a stage that holds a buffer: one of its blocks, or a parameter-free table beside them."""
    inside = spec.block in stage.get_submodule("blocks")._modules
    return stage.get_submodule(f"blocks.{spec.block}" if inside else spec.block)


def materialise(
    stage: nn.Module,
    spec: StageSpec,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    size: Callable[[str], int],
    coordinate: Callable[[str], int],
    device: torch.device,
    dtype: torch.dtype | None = None,
    stored: Callable[[ParamSpec, torch.dtype], torch.dtype] | None = None,
) -> None:
    """Give a freshly built stage its parameters and buffers, in place.

    Args:
        dtype: replaces every floating dtype (parity runs).
        stored: returns the dtype to store a parameter in, given the dtype of its values (mixed precision); None: the
            values' dtype.
    """

    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.to(device=device, dtype=dtype if dtype is not None and x.is_floating_point() else x.dtype)

    with torch.no_grad():
        for p in spec.params:
            block = stage.get_submodule(f"blocks.{p.block}")
            local = shard_param(parameters[p.name].detach(), p, size, coordinate)
            value = cast(local).clone() if stored is None else local.to(device, stored(p, local.dtype), copy=True)
            setattr(block, p.attr, nn.Parameter(value, requires_grad=p.trainable))
        for b in spec.buffers:
            setattr(buffer_owner(stage, b), b.attr, cast(buffers[b.name].detach()).clone())


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rank's own part of a ZeRO-sharded tensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reduce_deferred(
    pairs: Sequence[tuple[nn.Parameter, ParamSpec]],
    mesh: AxisMesh,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> None:
    """Sum the gradients that are pending on a sub-axis, once per step, several in one message.

    Args:
        dtype: the dtype to send and sum in (16-bit gradients); None: each gradient's own.
        device: the device of the collective, if gradients may be elsewhere (on the host).
    """
    by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for parameter, spec in pairs:
        axes = tuple(a for a in spec.reduce_axes if mesh.size(a) > 1)
        if axes and parameter.grad is not None:
            by_axes.setdefault(axes, []).append(local_of(parameter.grad))
    for axes, gradients in by_axes.items():
        for axis in axes:
            all_reduce_flat(gradients, mesh.group(axis), dtype, device)


def all_reduce_flat(
    tensors: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> None:
    """Sum several tensors over a group, in place, with one message per dtype.

    Args:
        dtype: the dtype to send and sum in; None: the tensors' own.
        device: the device to send from; None: the tensors' own.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for t in tensors:
        by_dtype.setdefault(t.dtype, []).append(t)
    for same in by_dtype.values():
        flat = torch.cat([t.reshape(-1) for t in same])
        flat = flat.to(device=device or flat.device, dtype=dtype or flat.dtype)
        dist.all_reduce(flat, group=group)
        offset = 0
        for t in same:
            t.copy_(flat[offset : offset + t.numel()].view_as(t))
            offset += t.numel()
