"""nn.EmbeddingBag of equal bags: split over the batch and over tables."""

from __future__ import annotations

import plain_models
import pytest
import torch
from torch import nn

from autoplan.capture.export import capture
from experiments.compatibility import families
from experiments.compatibility.architectures.plain import DLRM


def test_a_recommendation_model() -> None:
    plain_models.assert_equal(plain_models.filled(DLRM()), families._clicks(), families.click_loss)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_modes(mode: str) -> None:
    model = nn.Sequential(nn.EmbeddingBag(16, 8, mode=mode), nn.Linear(8, 1))
    example = {"input": torch.zeros(4, 3, dtype=torch.long), "clicked": torch.zeros(4, 1)}
    graph = capture(model, example, families.click_loss)
    assert {"embedding", mode} <= {n.op for b in graph.blocks.values() for n in b.nodes}
