"""Derivatives that a forward takes itself are refused by the line that takes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autoplan.capture.export import capture
from autoplan.errors import CaptureError


def _force(energy: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(energy(x).sum(), x, create_graph=True)[0]


def _jacobian(energy: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(torch.func.jacrev(lambda row: energy(row).sum()))(x)


def _mapped(energy: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(energy)(x)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (_force, r"test_derivatives\.py:\d+ .*takes derivatives itself by torch\.autograd\.grad"),
        (_jacobian, r"test_derivatives\.py:\d+ .*takes derivatives itself by a transform of torch\.func"),
        (_mapped, r"test_derivatives\.py:\d+.*write torch\.vmap out in operations on the whole batch"),
    ],
)
def test_they_are_refused_by_name(form: Callable[[nn.Module, torch.Tensor], torch.Tensor], message: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return form(self.energy, x).square().mean()

    with pytest.raises(CaptureError, match=message):
        capture(Model(), {"x": torch.zeros(4, 6)})
