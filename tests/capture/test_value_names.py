"""Names of values in a graph, where a module or an input of the batch is called as another value would be."""

from __future__ import annotations

import torch
from torch import nn

from autoplan.capture.export import capture
from autoplan.verify.check import verify_whole
from autoplan.verify.runs import VerifyTask

DIM = 8


class NumberedNorm(nn.Module):
    """`norm_1`, and a norm that is used twice, whose second output would be called so."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_1, self.last = nn.LayerNorm(DIM), nn.LayerNorm(DIM), nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss. x: [b, DIM], y: [b]."""
        return (self.last(self.norm(self.norm(self.norm_1(x)).exp()))[..., 0] - y).square().mean()


class InputLikeAnOp(nn.Module):
    """An input of the batch that is called as the op is that comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)

    def forward(self, add: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss. add: [b, DIM], y: [b]."""
        return (self.last(self.first(add).exp() + add)[..., 0] - y).square().mean()


def _check(model: nn.Module, name: str) -> None:
    torch.manual_seed(0)
    batch = {name: torch.randn(4, DIM), "y": torch.randn(4)}
    assert verify_whole(VerifyTask(model, capture(model, batch), batch, None), limit_s=60.0).done


def test_a_module_whose_name_ends_in_a_number() -> None:
    _check(NumberedNorm(), "x")


def test_an_input_that_is_called_as_an_op_is() -> None:
    _check(InputLikeAnOp(), "add")
