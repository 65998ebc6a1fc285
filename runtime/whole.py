"""Whole tensors on the host: gathered from the ranks, or broadcast from one rank, a bucket at a time.

A model that is spread over devices need not fit on one of them. At most HOST_BUCKET_BYTES of a tensor, sent and
received together, are on a device at a time; on the CPU nothing is copied on the way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

CPU = torch.device("cpu")
HOST_BUCKET_BYTES = 64 << 20
# What both gloo and NCCL send (complex numbers as pairs). Others, such as int16 and floats of 8 bits, travel as bytes.
_SENT = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64),
        *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
    }
)


def gather(
    local: torch.Tensor, shapes: Sequence[Sequence[int]], group: dist.ProcessGroup, device: torch.device
) -> list[torch.Tensor]:
    """Gather every rank's tensor on the host, in the order of the group. A collective.

    Args:
        local: this rank's tensor, on the host or the device.
        shapes: the shape of every rank's tensor.
        device: device of the group's tensors.
    """
    shapes = [tuple(s) for s in shapes]
    flat = local.contiguous().view(-1)
    if local.dtype not in _SENT:
        sizes = [[math.prod(s) * local.element_size()] for s in shapes]
        found = gather(flat.view(torch.uint8), sizes, group, device)
        return [part.view(local.dtype).view(shape) for part, shape in zip(found, shapes, strict=True)]
    if device.type == local.device.type == CPU.type and len(set(shapes)) == 1:
        whole = [torch.empty_like(flat) for _ in shapes]
        dist.all_gather(whole, flat, group=group)
        return [part.view(shape) for part, shape in zip(whole, shapes, strict=True)]
    parts = [torch.empty(shape, dtype=local.dtype, device=CPU) for shape in shapes]
    longest = max(part.numel() for part in parts)
    step = min(longest, max(1, HOST_BUCKET_BYTES // (local.element_size() * (len(parts) + 1))))
    bucket = [torch.zeros(step, dtype=local.dtype, device=device) for _ in range(1 + len(parts))]
    for begin in range(0, longest, step or 1):
        sent, *received = (x.narrow(0, 0, min(step, longest - begin)) for x in bucket)
        _copy(flat, begin, sent)
        dist.all_gather(received, sent, group=group)
        for part, piece in zip(parts, received, strict=True):
            whole_part = part.view(-1)
            left = min(max(whole_part.numel() - begin, 0), piece.numel())
            if left:
                whole_part.narrow(0, begin, left).copy_(piece.narrow(0, 0, left))
    return parts


def _copy(flat: torch.Tensor, begin: int, out: torch.Tensor) -> None:
    """Copy the elements from `begin` on into `out`, as far as there are any."""
    left = min(max(flat.numel() - begin, 0), out.numel())
    if left:
        out.narrow(0, 0, left).copy_(flat.narrow(0, begin, left))


def broadcast_whole(
    tensor: torch.Tensor, source: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> None:
    """Give a contiguous tensor on the host the values that it has on rank `source`. A collective."""
    flat = tensor.view(-1) if tensor.dtype in _SENT else tensor.view(-1).view(torch.uint8)
    if device.type == CPU.type:
        dist.broadcast(flat, source, group=group)
        return
    step = min(flat.numel(), max(1, HOST_BUCKET_BYTES // flat.element_size()))
    bucket = torch.empty(step, dtype=flat.dtype, device=device)
    for begin in range(0, flat.numel(), step or 1):
        size = min(step, flat.numel() - begin)
        piece, sent = flat.narrow(0, begin, size), bucket.narrow(0, 0, size)
        sent.copy_(piece)
        dist.broadcast(sent, source, group=group)
        piece.copy_(sent)


def _length(size: int, parts: int, index: int) -> int:
    """Return the length of part `index` of a dim cut by `fully_shard`: equal parts, the last ones shorter or empty."""
    part = -(-size // parts)
    return min(max(size - index * part, 0), part)


def _sharded(like: DTensor) -> tuple[int, int] | None:
    """Return (mesh dim, tensor dim) of the only sharding of a tensor; None if it is whole.

    Raises:
        ValueError: it is sharded over several mesh dims.
    """
    found = [(i, p.dim) for i, p in enumerate(like.placements) if isinstance(p, Shard)]
    if len(found) > 1:
        raise ValueError(f"a tensor sharded over several dims of a mesh, {like.placements}, cannot be gathered here")
    return found[0] if found else None


def of_shards(local: torch.Tensor, like: DTensor, device: torch.device) -> torch.Tensor:
    """Return the whole tensor, on the host, from every rank's `local`, laid out as `like`. A collective."""
    found = _sharded(like)
    if found is None or like.device_mesh.size(found[0]) == 1:
        return local.to(CPU)
    over, dim = found
    ranks = like.device_mesh.size(over)
    shapes = [[*like.shape[:dim], _length(like.shape[dim], ranks, i), *like.shape[dim + 1 :]] for i in range(ranks)]
    return torch.cat(gather(local, shapes, like.device_mesh.get_group(over), device), dim=dim)


def own_shard(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return this rank's part of a whole tensor, laid out as `like`: a view."""
    found = _sharded(like)
    if found is None:
        return whole
    over, dim = found
    ranks, index = like.device_mesh.size(over), like.device_mesh.get_local_rank(over)
    part = -(-whole.shape[dim] // ranks)
    return whole.narrow(dim, min(index * part, whole.shape[dim]), _length(whole.shape[dim], ranks, index))
