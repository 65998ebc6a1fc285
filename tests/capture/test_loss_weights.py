"""Losses weighed by learned uncertainties (Kendall, Gal, Cipolla 2018): each is a factor and a term."""

from __future__ import annotations

from typing import Any

import plain_models
import pytest
import torch
import torch.nn.functional as F
from torch import nn


class _Weighed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.uncertainty = nn.Parameter(torch.randn(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = layer(x).tanh()
        return x, self.uncertainty


def _one_by_one(out: Any, batch: plain_models.families.Batch) -> torch.Tensor:
    (x, uncertainty), y = out, batch["y"]
    first, second = F.softplus(uncertainty)
    return torch.exp(-first) * F.mse_loss(x, y) + first + torch.exp(-second) * F.l1_loss(x, y) + 0.5 * second


def _together(out: Any, batch: plain_models.families.Batch) -> torch.Tensor:
    (x, uncertainty), y = out, batch["y"]
    return (torch.exp(-uncertainty) * torch.stack([F.mse_loss(x, y), F.l1_loss(x, y)]) + uncertainty).sum()


@pytest.mark.parametrize("loss", [_one_by_one, _together])
def test_a_value_may_be_a_weight_and_a_term(loss: Any) -> None:
    torch.manual_seed(0)
    batch = {n: torch.randn(4, 6, dtype=torch.float64) for n in ("x", "y")}
    plain_models.assert_equal(plain_models.filled(_Weighed()), batch, loss)
