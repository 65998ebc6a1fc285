"""A model and a loss that hold parameters past the modules that own them, and a job that runs a step of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from one_step import errors_of_a_step
from torch import nn

import autoplan

Batch = Mapping[str, torch.Tensor]


class Scaled(nn.Module):
    """Layers, and a scale that the last one reads from a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(2))
        self.head, self.scale = nn.Linear(16, 32), nn.Parameter(torch.ones(32))
        self.held = [self.scale]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * self.held[0]


def made() -> Scaled:
    torch.manual_seed(0)
    return Scaled().double()


def batch() -> dict[str, torch.Tensor]:
    ids, labels = torch.randint(32, (2, 4, 12), generator=torch.Generator().manual_seed(1))
    return {"ids": ids, "labels": labels}


def penalty(model: nn.Module) -> Callable[[torch.Tensor, Batch], torch.Tensor]:
    """Cross entropy and the squares of all parameters in a list that is made now."""
    parameters = list(model.parameters())

    def loss(out: torch.Tensor, batch: Batch) -> torch.Tensor:
        squares = torch.stack([p.square().sum() for p in parameters]).sum()
        return F.cross_entropy(out.flatten(0, 1), batch["labels"].flatten()) + 0.01 * squares

    return loss


def errors(rank: int, world: int, pins: dict[str, Any]) -> tuple[float, float, list[str]]:
    """Relative error of the loss, the worst of a gradient, and the parameters that only one side has one of."""
    model, whole = made(), batch()
    loss = penalty(model)
    pm = autoplan.parallelize(
        model,
        "local",
        example_inputs={n: x[:2] for n, x in whole.items()},
        loss_fn=loss,
        pins=pins,
        global_batch_size=4,
    )
    return errors_of_a_step(pm, model, whole, lambda: loss(model(whole["ids"]), whole))
