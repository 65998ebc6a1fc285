"""Capture losses of PyTorch that look at the values of their tensors before they compute, without the look.

`F.gaussian_nll_loss` raises an error for a negative variance, which a program takes for `eps`. `F.ctc_loss` checks its
lengths, and makes its buffers as large as they need; it is one op here, of the loss of every sample.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from autoplan.capture.frontend.marker import marker
from autoplan.capture.frontend.repeated import RepeatedList
from autoplan.errors import CaptureError

# the loss of every sample; log-probabilities are [tokens, batch, classes]
marker(
    "ctc_losses(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, "
    "bool zero_infinity) -> Tensor",
    lambda log_probs, *_: log_probs.new_empty(log_probs.shape[1]),
)


class CaptureCheckedLosses(TorchFunctionMode):
    """Replace `F.gaussian_nll_loss` and `F.ctc_loss`."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        other = _WRITTEN.get(function)
        if other is None:
            return function(*args, **(kwargs or {}))
        signature, written = other
        bound = signature.bind(*args, **(kwargs or {}))
        bound.apply_defaults()
        return written(**bound.arguments)


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


def _ctc(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Write the mean of the losses as PyTorch computes it: each is divided by the length of its target first."""
    input_lengths, target_lengths = (
        x.tensor() if isinstance(x, RepeatedList) else x for x in (input_lengths, target_lengths)
    )
    if not isinstance(input_lengths, torch.Tensor) or not isinstance(target_lengths, torch.Tensor):
        raise CaptureError(
            "ctc_loss is given lengths that are numbers, which a graph would keep for every batch; give tensors "
            "[batch], of the batch or made by torch.full((x.shape[0],), x.shape[1])"
        )
    if log_probs.dim() != 3 or targets.dim() != 2:
        raise CaptureError(
            f"ctc_loss of log-probabilities with {log_probs.dim()} dims and targets with {targets.dim()} is not "
            "supported; give [tokens, batch, classes] and [batch, longest target]"
        )
    given = targets.long(), input_lengths.long(), target_lengths.long()
    losses: torch.Tensor = torch.ops.autoplan.ctc_losses(log_probs, *given, blank, zero_infinity)
    if reduction == "mean":
        return (losses / given[2].clamp(min=1)).mean()
    return losses.sum() if reduction == "sum" else losses


_WRITTEN = {
    function: (inspect.signature(function), written)
    for function, written in ((F.gaussian_nll_loss, _gaussian), (F.ctc_loss, _ctc))
}
