"""A parameter without dims: executed where nothing is sharded, refused by name under ZeRO 1 to 3."""

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


def _planned(shape: tuple[int, ...], **pins: Any) -> Plan:
    batch = {"ids": torch.zeros(2, 4, dtype=torch.long)}
    graph = capture(Scaled(shape), batch, lambda out, batch: out.square().mean())
    return plan_program(graph, cluster_of(2, "bandwidth"), pins, 4, 4)[0]


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_zero_names_the_parameter(zero_stage: int) -> None:
    message = rf"zero_stage={zero_stage}: parameter 'scale' has no dim.*torch\.ones\(1\).*nearest legal: zero_stage=0"
    with pytest.raises(PinError, match=message):
        _planned((), dp=2, zero_stage=zero_stage)


def test_what_it_names_works_and_the_search_finds_it() -> None:
    assert _planned((1,), dp=2, zero_stage=3).config.zero_stage == 3
    assert _planned((), dp=2).config.zero_stage == 0
