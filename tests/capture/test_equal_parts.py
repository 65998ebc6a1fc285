"""Heads that are joined along the batch, and taken apart by its size."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from trained_jobs import normal, square

from autoplan.capture.export import capture
from autoplan.program.facts import ModelFacts
from autoplan.verify.check import verify_whole
from autoplan.verify.runs import VerifyTask


class JoinsHeads(nn.Module):
    """As the Set Transformer (arXiv 1810.00825) writes attention; `named`: with the arguments by name."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.first, self.last, self.named = nn.Linear(8, 8), nn.Linear(8, 4), named

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = torch.cat(self.first(x).split(4, 2), 0)
        mixed = heads.bmm(heads.transpose(1, 2)).softmax(-1).bmm(heads)
        parts = mixed.split(split_size=x.size(0), dim=0) if self.named else torch.split(mixed, x.size(0), 0)
        out: torch.Tensor = self.last(torch.cat(parts, 2))
        return out


@pytest.mark.parametrize("named", [False, True])
def test_a_batch_that_is_split_by_its_size_is_any_batch(named: bool) -> None:
    torch.manual_seed(0)
    model, example = JoinsHeads(named).double(), normal(6, 8)(4, 0)
    graph = capture(model, example, square)
    assert verify_whole(VerifyTask(model, graph, example, square), limit_s=60.0).done
    assert ModelFacts(graph).batch_obstacle is None


class Pairs(nn.Module):
    """Answers of two inputs in one forward, as preference losses (DPO) run it, taken apart in one of three ways."""

    def __init__(self, apart: str) -> None:
        super().__init__()
        self.body, self.apart = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), apart

    def forward(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        both, num = self.body(torch.cat([chosen, rejected])), chosen.shape[0]
        if self.apart == "slices":
            first, last = both[:num], both[num:]
        else:
            first, last = both.chunk(2) if self.apart == "chunk" else both.split(rejected.shape[0])
        out: torch.Tensor = first * last.exp() - first[:, 1:2]
        return out


@pytest.mark.parametrize("apart", ["slices", "chunk", "split"])
def test_pairs_that_are_joined_and_taken_apart_are_any_batch(apart: str) -> None:
    torch.manual_seed(0)
    model, both = Pairs(apart).double(), normal(6, 8)(8, 0)["x"]
    example = {"chosen": both[:4], "rejected": both[4:]}
    graph = capture(model, example, square)
    assert verify_whole(VerifyTask(model, graph, example, square), limit_s=60.0).done
    assert ModelFacts(graph).batch_obstacle is None
