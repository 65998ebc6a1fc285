"""Factories that tests/capture/test_catalog.py names as `catalog_models:...`."""

from __future__ import annotations

from typing import Any

import models
import torch

not_a_function = 3


def gpt() -> tuple[Any, ...]:
    """Module, inputs and loss."""
    made = models.token_batch(2, 16)
    return models.make_gpt(), {"ids": made["input_ids"], "labels": made["labels"]}, models.gpt_loss


def llama() -> Any:
    """A Hugging Face model needs nothing else."""
    return models.make_llama()


def needs_values() -> Any:
    """Works only with real tensors."""
    model = models.make_llama()
    if float(next(model.parameters()).abs().sum()) <= 0:
        raise RuntimeError("no weights")
    return model, models.token_batch(2, 16)


def without_inputs() -> Any:
    return torch.nn.Linear(4, 4)


def fails() -> Any:
    raise OSError("no checkpoint here")


def number() -> Any:
    return 7


def list_of_inputs() -> Any:
    return models.make_llama(), [1, 2]


class Drawn(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.poisson(x)).mean()  # type: ignore[no-any-return]


def unsupported() -> Any:
    return Drawn(), {"x": torch.zeros(2, 8)}
