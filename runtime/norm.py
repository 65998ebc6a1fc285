"""The norm of gradients, and scaling them: a few kernels for all tensors, no copy of any, no wait for the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

_ON_CPU = 1 << 16  # elements per sum: what torch widens there before it adds stays in the cache


def square_sum(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The sum of the squares of all elements.

    Each element is widened to float64 on its way into the sum; no wide copy is made (on the CPU: of 65,536 elements at
    a time). So ranks, shards and micro-batches that hold the same gradient otherwise agree on its norm to some 1e-15,
    and on what it is clipped by to the bit; in float32 they would to 1e-7 (and 10**8 elements of one tensor, added one
    after the other, to 1e-2).

    Args:
        tensors: of any shapes, dtypes and devices, without complex ones.
        device: of the result. Tensors elsewhere are summed where they are; one number per device travels.

    Returns:
        float64 [].
    """
    parts = []
    for same in _alike(tensors):
        if same[0].device.type == "cpu":
            same = [piece for t in same for piece in torch.split(t.reshape(-1), _ON_CPU)]
        norms = torch.stack(torch._foreach_norm(same, 2, dtype=torch.float64))
        parts.append(torch.linalg.vecdot(norms, norms).to(device, non_blocking=same[0].device.type == "cpu"))
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def scale_(tensors: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply all elements in place by a factor of shape [], rounded to the dtype of each tensor.

    For tensors on another device than the factor it is copied there once: for those on the host the device is waited
    for.
    """
    for same in _alike(tensors):
        torch._foreach_mul_(same, factor.to(same[0]))


def _alike(tensors: Iterable[torch.Tensor]) -> Sequence[list[torch.Tensor]]:
    """The tensors by device and dtype, in order."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for t in tensors:
        groups.setdefault((t.device, t.dtype), []).append(t)
    return list(groups.values())
