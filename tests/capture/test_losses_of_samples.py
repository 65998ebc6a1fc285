"""Losses of PyTorch without a record, and lists as long as the batch, in models whose batch is split."""

from __future__ import annotations

import plain_models
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoplan.capture.export import capture
from autoplan.errors import CaptureError

_GENERATOR = torch.Generator().manual_seed(0)
BATCH = {
    "x": torch.randn(4, 6, dtype=torch.float64, generator=_GENERATOR),
    "y": torch.randn(4, 6, dtype=torch.float64, generator=_GENERATOR),
    "sign": torch.tensor([1, -1, 1, -1]),
}


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.kinds = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)]), nn.Embedding(3, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kinds, half = torch.tensor([1] * x.shape[0]), torch.tensor(x.size(0) * [0.5], dtype=x.dtype)
        first = self.layers[0](x).tanh()
        return first + self.kinds(kinds) * half.unsqueeze(1), self.layers[1](first)


def _loss(out: tuple[torch.Tensor, torch.Tensor], batch: plain_models.families.Batch) -> torch.Tensor:
    (a, b), sign = out, batch["sign"]
    means = F.cosine_embedding_loss(a, b, sign, 0.1) + F.margin_ranking_loss(a.sum(1), b.sum(1), sign, 0.1)
    summed = F.hinge_embedding_loss(a.sum(1), sign, reduction="sum") / a.shape[0]
    return means + summed + F.poisson_nll_loss(b, batch["y"].exp(), full=True)


def test_means_and_sums_are_those_of_the_losses_of_samples() -> None:
    torch.manual_seed(0)
    plain_models.assert_equal(plain_models.filled(_Pair()), BATCH, _loss)


def _without_ignored(out: tuple[torch.Tensor, torch.Tensor], batch: plain_models.families.Batch) -> torch.Tensor:
    weights = torch.linspace(0.5, 2.0, 6, dtype=torch.float64)
    scores = out[0].log_softmax(-1)
    return F.nll_loss(scores, batch["label"], weights) + F.nll_loss(scores + out[1], batch["label"])


def test_a_mean_without_ignored_targets_is_no_mean_of_samples() -> None:
    """A micro-batch has one target of two, the other none."""
    torch.manual_seed(0)
    batch = {"x": BATCH["x"], "label": torch.tensor([1, -100, 4, 2])}
    plain_models.assert_equal(plain_models.filled(_Pair()), batch, _without_ignored)


class _Listed(_Pair):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x * sum([0.5] * x.shape[0]))


def test_a_list_as_long_as_the_batch_is_for_tensors_alone() -> None:
    with pytest.raises(CaptureError, match=r"\[0\.5\] \* x\.shape\[0\] is a list as long as the batch.*torch\.full"):
        capture(_Listed().double(), BATCH, _loss)
