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


def without_memory(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None = None
) -> torch.Tensor:
    """Return a tensor whose storage has no bytes yet; `device` is None for the current default device.

    It gets bytes for a moment, since torch has no other way to give it its shape. They are asked for after everything
    else, so that glibc gets them back at the end of its heap, and no hole is left.
    """
    value = torch.empty(0, dtype=dtype, device=device)
    value.resize_(shape)
    value.untyped_storage().resize_(0)
    return value


def declare(
    stage: nn.Module,
    spec: StageSpec,
    size: Callable[[str], int],
    device: torch.device,
    stored: Callable[[ParamSpec], torch.dtype],
) -> None:
    """Give a freshly built stage its parameters, which have no memory until `fill`.

    Args:
        size: size of a sub-axis.
        stored: the dtype to store a parameter in.
    """
    for p in spec.params:
        value = without_memory(local_param_shape(p, size), stored(p), device)
        setattr(stage.get_submodule(f"blocks.{p.block}"), p.attr, nn.Parameter(value, requires_grad=p.trainable))


def fill(
    stage: nn.Module,
    spec: StageSpec,
    parameters: Mapping[str, torch.Tensor],
    size: Callable[[str], int],
    coordinate: Callable[[str], int],
    block: str | None = None,
) -> None:
    """Give the declared parameters of a block memory and their values, one after the other; None: of all blocks."""
    for p in spec.params:
        if block is not None and p.block != block:
            continue
        parameter = stage.get_submodule(f"blocks.{p.block}").get_parameter(p.attr)
        storage = parameter.untyped_storage() if not isinstance(parameter, DTensor) else None
        if storage is None or storage.nbytes() or not parameter.numel():
            continue
        storage.resize_(parameter.numel() * parameter.element_size())
        with torch.no_grad():
            parameter.copy_(shard_param(parameters[p.name].detach(), p, size, coordinate))


def fill_buffers(
    stage: nn.Module,
    spec: StageSpec,
    buffers: Mapping[str, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> None:
    """Give a stage its buffers. `dtype` replaces every floating dtype."""
    for b in spec.buffers:
        value = buffers[b.name].detach()
        kind = dtype if dtype is not None and value.is_floating_point() else value.dtype
        setattr(buffer_owner(stage, b), b.attr, value.to(device=device, dtype=kind, copy=True))


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
