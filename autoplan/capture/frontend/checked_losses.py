"""Capture losses of PyTorch that look at the values of their tensors before they compute, without the look."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_SIGNATURE = inspect.signature(F.gaussian_nll_loss)


class CaptureCheckedLosses(TorchFunctionMode):
    """Replace `F.gaussian_nll_loss`, which raises an error for a negative variance: a program takes it for `eps`."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is not F.gaussian_nll_loss:
            return function(*args, **(kwargs or {}))
        bound = _SIGNATURE.bind(*args, **(kwargs or {}))
        bound.apply_defaults()
        return _gaussian(**bound.arguments)


def _gaussian(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """Write the loss out. The gradient passes the lower bound of the variance, as it does in PyTorch."""
    if not isinstance(var, torch.Tensor):
        var = torch.full_like(input, var)
    elif var.dim() < input.dim():
        var = var.unsqueeze(-1)
    var = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    loss = loss + 0.5 * math.log(2 * math.pi) if full else loss
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss
