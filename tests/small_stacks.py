"""Stacks of linear layers: layers that read their number, alternate, return tuples, or are used twice."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn


class ScaledBlock(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = x + self.linear(x) / (self.index + 1)
        return scaled


class Stack(nn.Module):
    """Layers of one class; `make` builds layer i."""

    def __init__(self, make: Any, num_layers: int = 3) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(make(i) for i in range(num_layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def square_loss(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return out.square().mean()


class UnusedNumber(ScaledBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.linear(x)
        return out


class Alternating(ScaledBlock):
    """Two kinds of layers by turns, told apart by an attribute; every layer has its own equal activation."""

    runs: ClassVar[list[int]] = []
    wide = False  # for layers that do not set their own

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.act = functools.partial(F.gelu, approximate="tanh")
        if index % 3 == 2:
            self.wide = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Alternating.runs.append(1)
        made: torch.Tensor = self.act(self.linear(x))
        return x + made.cos() if self.wide else x + made * torch.tensor([float(i) for i in range(8)])


class Tupled(UnusedNumber):
    """Returns what older layers return: a tuple with empty places."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return x + self.linear(x), None


class TupleStack(Stack):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x, _ = layer(x)
        return x


class Looped(Stack):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for _ in range(2):
            for layer in self.layers:
                x = layer(x) * 0.5
        return x
