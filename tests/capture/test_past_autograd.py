"""Tensors that are changed past autograd: they keep the gradient that they had, which no functional program has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small_stacks import ScaledBlock, Stack, square_loss
from test_faithful import assert_stack_equal

from autoplan.capture.export import capture
from autoplan.errors import CaptureError


def _data(x: torch.Tensor) -> None:
    x.data.mul_(2)


def _detached(x: torch.Tensor) -> None:
    x.detach().mul_(2)


def _without_gradient(x: torch.Tensor) -> None:
    with torch.no_grad():
        x.mul_(2)


class Changed(ScaledBlock):
    change: Callable[[torch.Tensor], None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.linear(x)
        type(self).change(made)
        return x + made


class Read(ScaledBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * x.data + x.data.clone().mul_(2)


@pytest.mark.parametrize("change", [_data, _detached, _without_gradient])
def test_a_tensor_changed_past_autograd_is_refused(change: Callable[[torch.Tensor], None]) -> None:
    block = type("Block", (Changed,), {"change": staticmethod(change)})
    with pytest.raises(CaptureError, match=r"test_past_autograd\.py:\d+: in-place op aten\.mul_"):
        capture(Stack(block), {"ids": torch.zeros(2, 4, dtype=torch.long)}, square_loss)


def test_data_is_read_as_what_it_is() -> None:
    torch.manual_seed(0)
    assert_stack_equal(Stack(Read))
