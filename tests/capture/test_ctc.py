"""Connectionist temporal classification: one op of the losses of all samples, which every rank computes for its own."""

from __future__ import annotations

import plain_models
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoplan.capture.export import capture
from autoplan.errors import CaptureError

BATCH = {
    "wave": torch.randn(4, 12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    "labels": torch.randint(1, 9, (4, 5), generator=torch.Generator().manual_seed(1)),
    "lengths": torch.tensor([5, 3, 4, 0]),
}


class _Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)]), nn.Linear(6, 9)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            wave = wave + layer(wave).tanh()
        return self.head(wave).log_softmax(-1)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_program_has_the_losses_of_pytorch(reduction: str) -> None:
    def loss(out: torch.Tensor, batch: plain_models.families.Batch) -> torch.Tensor:
        tokens = torch.full((out.shape[0],), out.shape[1], dtype=torch.long)
        rows = F.ctc_loss(out.transpose(0, 1), batch["labels"], tokens, batch["lengths"], 0, reduction, True)
        return rows if reduction == "mean" else rows / out.shape[0]

    torch.manual_seed(0)
    graph = plain_models.assert_equal(plain_models.filled(_Speech()), BATCH, loss)
    assert [n.op for b in graph.blocks.values() for n in b.nodes].count("ctc_losses") == 1


def test_lengths_that_are_numbers_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"ctc_loss is given lengths that are numbers.*give tensors \[batch\]"):
        capture(
            _Speech().double(),
            BATCH,
            lambda out, batch: F.ctc_loss(out.transpose(0, 1), batch["labels"], (12,) * 4, batch["lengths"]),
        )
