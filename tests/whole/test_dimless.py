"""Parameters that ZeRO cannot shard, without dims or of two dtypes in a block: executed without it, else refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity import cluster_of
from torch import nn

from autoplan.api import plan_program
from autoplan.capture.export import capture
from autoplan.errors import PinError
from autoplan.plans.record import Plan


class Scaled(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.embed, self.scale = nn.Embedding(16, 8), nn.Parameter(torch.ones(shape))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.embed(ids) * self.scale
        return out


class Layer(nn.Module):
    def __init__(self, other: torch.dtype) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8, dtype=other), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.inner(x.to(self.inner.weight.dtype)).float())
        return out


class TwoDtypes(nn.Module):
    def __init__(self, other: torch.dtype) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(16, 8), nn.ModuleList([Layer(other)]), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers[0](self.embed(ids)))
        return out


def _planned(model: tuple[int, ...] | nn.Module, **pins: Any) -> Plan:
    batch = {"ids": torch.zeros(2, 4, dtype=torch.long)}
    made = model if isinstance(model, nn.Module) else Scaled(model)
    graph = capture(made, batch, lambda out, batch: out.square().mean())
    return plan_program(graph, cluster_of(2, "bandwidth"), pins, 4, 4)[0]


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_zero_names_the_parameter(zero_stage: int) -> None:
    message = rf"zero_stage={zero_stage}: parameter 'scale' has no dim.*torch\.ones\(1\).*nearest legal: zero_stage=0"
    with pytest.raises(PinError, match=message):
        _planned((), dp=2, zero_stage=zero_stage)


def test_what_it_names_works_and_the_search_finds_it() -> None:
    assert _planned((1,), dp=2, zero_stage=3).config.zero_stage == 3
    assert _planned((), dp=2).config.zero_stage == 0


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_zero_names_the_block_of_two_dtypes(zero_stage: int) -> None:
    """It was an error of the runtime after the search, also where nobody had pinned the stage."""
    message = (
        rf"zero_stage={zero_stage}: the parameters of 'layers\.0' are in bfloat16 and float32.*"
        "nearest legal: zero_stage=0"
    )
    with pytest.raises(PinError, match=message):
        _planned(TwoDtypes(torch.bfloat16), dp=2, zero_stage=zero_stage)
    assert _planned(TwoDtypes(torch.bfloat16), dp=2).config.zero_stage == 0
    assert _planned(TwoDtypes(torch.float32), dp=2, zero_stage=zero_stage).config.zero_stage == zero_stage
    frozen = TwoDtypes(torch.bfloat16)
    frozen.layers[0].inner.requires_grad_(False)
    assert _planned(frozen, dp=2, zero_stage=zero_stage).config.zero_stage == zero_stage
