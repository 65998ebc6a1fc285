"""The norm of gradients, and scaling them: a few kernels for all tensors, without copies or waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

_ON_CPU = 1 << 16  # elements per sum: torch's widened copy of them stays in the cache


def square_sum(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of the squares of all elements.

    Each element is widened to float64 on its way into the sum, without a wide copy (on the CPU: 65,536 elements at a
    time). Ranks, shards and micro-batches that partition the same gradient differently thus agree on its norm to some
    1e-15, and bit by bit on the clipped gradient. In float32 they would agree to 1e-7 (and for 10**8 elements of one
    tensor, added one after the other, to 1e-2).

    Args:
        tensors: of any shapes, devices and dtypes, except complex ones.
        device: device of the result. Tensors elsewhere are summed there; one number per device is copied.

    Returns:
        float64 [].
    """
    parts = []
    for same in alike(tensors):
        if same[0].device.type == "cpu":
            same = [piece for t in same for piece in torch.split(t.reshape(-1), _ON_CPU)]
        norms = torch.stack(torch._foreach_norm(same, 2, dtype=torch.float64))
        parts.append(torch.linalg.vecdot(norms, norms).to(device, non_blocking=same[0].device.type == "cpu"))
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def scale_(tensors: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply all elements in place by a factor of shape [], rounded to the dtype of each tensor.

    The factor is copied once to each other device; for tensors on the host this waits for the device.
    """
    for same in alike(tensors):
        torch._foreach_mul_(same, factor.to(same[0]))


def alike(tensors: Iterable[torch.Tensor]) -> Sequence[list[torch.Tensor]]:
    """Group the tensors by device and dtype, in order."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for t in tensors:
        groups.setdefault((t.device, t.dtype), []).append(t)
    return list(groups.values())
