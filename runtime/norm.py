"""The norm of gradients, and scaling them: a few kernels for all tensors, without copies or waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from autoplan.runtime.agree import AgreedRuntimeError, AgreedValueError

_ON_CPU = 1 << 16  # elements per sum: torch's widened copy of them stays in the cache


def order_of(norm_type: float) -> float:
    """Return the order of a norm, which torch takes as a number or as text ("inf").

    Raises:
        AgreedValueError: it is not a positive number.
    """
    order = _number(norm_type)
    if not order > 0:  # of 0 and negative orders, torch's norm of norms is not the norm of all elements
        raise AgreedValueError(f"norm_type={norm_type!r}: give a number above 0 (1, 2, 3.5), or inf for the greatest")
    return order


def limit_of(max_norm: float) -> float:
    """Return the limit of a norm as a number.

    Raises:
        AgreedValueError: it is negative, which would turn gradients around, or not a number.
    """
    limit = _number(max_norm)
    if not limit >= 0:
        raise AgreedValueError(f"max_norm={max_norm!r}: give a number of at least 0, or inf not to clip")
    return limit


def _number(given: float) -> float:
    try:
        return float(given)
    except (TypeError, ValueError):
        return math.nan


def check_finite(norm: torch.Tensor, order: float, *, skipped: bool) -> None:
    """Check the norm of all gradients, []. This waits for the device.

    Args:
        order: of the norm.
        skipped: True if the loss scaler of a float16 program dropped the gradients of this step.

    Raises:
        AgreedRuntimeError: (on every rank alike, since all have the same norm) it is infinite or NaN.
    """
    if not torch.isfinite(norm):
        then = "They are unchanged; error_if_nonfinite=False scales them by it all the same"
        if skipped:
            then = "The loss scaler dropped them and lowered its scale; error_if_nonfinite=False leaves out the update"
        raise AgreedRuntimeError(
            f"the norm of order {order:g} of the gradients is {float(norm)}, so that they cannot be clipped. {then}"
        )


def norm_of_all(tensors: Iterable[torch.Tensor], order: float, device: torch.device, world: int) -> torch.Tensor:
    """Return the norm of the elements that all ranks give, on every rank. A collective, unless `world` is 1.

    It sends 8 bytes, whatever the order: ranks that are given other orders do not wait for one another.

    Args:
        tensors: of any shapes, devices and dtypes, except complex ones; each element of the model on one rank.
        order: p of the p-norm; inf: the greatest absolute value.
        device: device of the result.
        world: number of ranks.

    Returns:
        float64 []; NaN if any element is.
    """
    if order == math.inf:
        most = greatest(tensors, device)
        if world > 1:
            bits = most.abs().view(torch.int64)  # in the order of the numbers, and NaN above them: MAX may lose it
            dist.all_reduce(bits, op=dist.ReduceOp.MAX)
            most = bits.view(torch.float64)
        return most
    total = power_sum(tensors, order, device)
    if world > 1:
        dist.all_reduce(total)
    return total.sqrt() if order == 2 else total.pow(1 / order)


def power_sum(tensors: Iterable[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """Return the sum of the absolute values of all elements to the power of `order`.

    Each element is widened to float64 on its way into the sum, without a wide copy (on the CPU: 65,536 elements at a
    time). Ranks, shards and micro-batches that partition the same gradient differently thus agree on its norm to some
    1e-15, and bit by bit on the clipped gradient. In float32 they would agree to 1e-7 (and for 10**8 elements of one
    tensor, added one after the other, to 1e-2).

    Args:
        tensors: of any shapes, devices and dtypes, except complex ones.
        order: above 0 and finite.
        device: device of the result. Tensors elsewhere are summed there; one number per device is copied.

    Returns:
        float64 [].
    """
    parts = []
    for norms in _norms(tensors, order):
        total = torch.linalg.vecdot(norms, norms) if order == 2 else norms.pow(order).sum()
        parts.append(total.to(device, non_blocking=norms.device.type == "cpu"))
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def greatest(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the greatest absolute value of all elements, float64 []; NaN if any is, 0 without elements."""
    some = (t for t in tensors if t.numel())
    parts = [n.amax().to(device, non_blocking=n.device.type == "cpu") for n in _norms(some, math.inf)]
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    return parts[0] if len(parts) == 1 else torch.stack(parts).amax()


def _norms(tensors: Iterable[torch.Tensor], order: float) -> Iterable[torch.Tensor]:
    """Yield the norms of tensors, or of pieces of them, for each device and dtype: float64 [number]."""
    for same in alike(tensors):
        if same[0].device.type == "cpu":
            same = [piece for t in same for piece in torch.split(t.reshape(-1), _ON_CPU)]
        yield torch.stack(torch._foreach_norm(same, order, dtype=torch.float64))


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
