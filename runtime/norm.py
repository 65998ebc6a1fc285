"""The norm of gradients, and scaling them: a few kernels for all tensors, no copy of any, no wait for the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

_ON_CPU = 1 << 16  # elements per sum, as many as a block of torch's foreach kernels on CUDA takes


def square_sum(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The sum of the squares of all elements.

    16-bit and float32 tensors are summed in float32 in pieces of 65,536 elements, float64 in float64; norms of tensors
    are then squared and added in float64. The root of the result has a relative error of some 1e-6 (measured on the CPU
    for 10**8 elements: 2e-7 of float32, 3e-6 of bfloat16; a sum of all in float32 is off by 1e-2 there). Like torch's
    norms it is inf where a square exceeds float32 (elements above 1.8e19).

    Args:
        tensors: of any shapes, dtypes and devices, without complex ones.
        device: of the result. Tensors elsewhere are summed where they are; one number per device travels.

    Returns:
        float64 [].
    """
    parts = []
    for same in _alike(tensors):
        if same[0].device.type == "cpu":
            same = [piece for t in same for piece in t.reshape(-1).split(_ON_CPU)]
        wide = torch.float64 if same[0].dtype == torch.float64 else torch.float32
        norms = torch.stack(torch._foreach_norm(same, 2, dtype=wide)).to(torch.float64)
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
