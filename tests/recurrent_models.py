"""Language models of recurrent layers, and a job that trains one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import models
import torch
from one_step import errors_of_a_step
from torch import nn

import autoplan

KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
LAYERS: Mapping[str, Callable[[], nn.RNNBase]] = {
    "lstm": lambda: nn.LSTM(32, 32, 2, batch_first=True),
    "lstm-both-ways": lambda: nn.LSTM(32, 16, batch_first=True, bidirectional=True),
    "lstm-projected": lambda: nn.LSTM(32, 48, proj_size=32, batch_first=True),
    "gru": lambda: nn.GRU(32, 32, 2, batch_first=True),
    "rnn": lambda: nn.RNN(32, 32, bias=False, batch_first=True),
    "rnn-relu": lambda: nn.RNN(32, 32, nonlinearity="relu", batch_first=True),
}


class LanguageModel(nn.Module):
    def __init__(self, layers: nn.RNNBase) -> None:
        super().__init__()
        self.embedding, self.layers, self.head = nn.Embedding(96, 32), layers, nn.Linear(32, 96)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(self.embedding(input_ids))[0])
        return out


def made(name: str) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LAYERS[name]())


def loss(out: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())


def errors(rank: int, world: int, name: str, pins: dict[str, Any]) -> tuple[float, float]:
    """Relative error of the loss, and the worst of a gradient."""
    model, batch = made(name).double(), models.token_batch(4, 16)
    pm = autoplan.parallelize(
        model,
        "local",
        example_inputs={n: x[:2] for n, x in batch.items()},
        loss_fn=loss,
        pins=pins,
        global_batch_size=4,
    )
    loss_error, gradient, _ = errors_of_a_step(pm, model, batch, lambda: loss(model(batch["input_ids"]), batch))
    assert all(p.grad is not None for p in model.parameters())
    return loss_error, gradient
