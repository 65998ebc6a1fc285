"""Tensors of fixed size into whose parts a model writes numbers: masks of windows, as torchvision's Swin makes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_stacks import ScaledBlock, Stack, square_loss
from test_faithful import assert_stack_equal

from autoplan.capture.export import capture
from autoplan.errors import CaptureError


class Regions(ScaledBlock):
    """Numbers regions of an 8 x 8 square, looks at it, numbers one more, and looks again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x.new_zeros((8, 8))
        for i, rows in enumerate((slice(0, -4), slice(-4, -2), slice(-2, None))):
            for k, columns in enumerate((slice(0, 5), slice(5, None))):
                mask[rows, columns] = 2 * i + k
        before = mask.transpose(0, 1).cos()
        mask[3, 1:4] = 11
        return x + self.linear(x) @ mask.sin() + x @ before


class Rows(ScaledBlock):
    """Writes whole rows, and a part of one, and takes as many as there are tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x.new_zeros((8, 8))
        mask[1] = 3
        mask[2:4] = 5
        mask[6][2:4] = 7
        return x + self.linear(x) @ mask.sin() + mask[: x.shape[1]].cos()


class Large(ScaledBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x.new_zeros((80, 80))
        mask[:40, :40] = 1
        return x + self.linear(x) * mask.mean()


@pytest.mark.parametrize("block", [Regions, Rows])
def test_numbers_in_parts_of_a_tensor(block: Any) -> None:
    torch.manual_seed(0)
    assert_stack_equal(Stack(block))


def test_a_large_tensor_of_numbers_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"test_painted\.py:\d+: a tensor filled slice by slice"):
        capture(Stack(Large), {"ids": torch.zeros(2, 4, dtype=torch.long)}, square_loss)
