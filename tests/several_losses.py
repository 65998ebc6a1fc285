"""A language model with losses of several means, each over its own valid labels, and a job that runs a step of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from one_step import errors_of_a_step
from torch import nn

import autoplan

Batch = Mapping[str, torch.Tensor]


class TwoHeads(nn.Module):
    """Predicts the next token and the one after it, and a class of the whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(2))
        self.first, self.second, self.pooled = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.first(x), self.second(x), self.pooled(x[:, 0])


def _tokens(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def auxiliary(out: Any, batch: Batch) -> torch.Tensor:
    """Main and auxiliary labels of their own."""
    return _tokens(out[0], batch["labels"]) + 0.3 * _tokens(out[1], batch["others"])


def predicted_ahead(out: Any, batch: Batch) -> torch.Tensor:
    """Multi-token prediction: the same labels, shifted once more."""
    labels = batch["labels"]
    return _tokens(out[0][:, :-1], labels[:, 1:]) + 0.5 * _tokens(out[1][:, :-2], labels[:, 2:])


def next_sentence(out: Any, batch: Batch) -> torch.Tensor:
    """Masked tokens and a class of every sample, some without a label."""
    return _tokens(out[0], batch["labels"]) + F.cross_entropy(out[2], batch["is_next"], ignore_index=-1)


def same_labels(out: Any, batch: Batch) -> torch.Tensor:
    """Two heads with the same labels."""
    return _tokens(out[0], batch["labels"]) + _tokens(out[1], batch["labels"])


def masked(out: Any, batch: Batch) -> torch.Tensor:
    """A mean over labels and one under a mask."""
    mask = (batch["others"] != -100).to(out[1].dtype)
    return _tokens(out[0], batch["labels"]) + (out[1].square().mean(-1) * mask).sum() / mask.sum()


def two_masks(out: Any, batch: Batch) -> torch.Tensor:
    """Two totals."""
    one, two = ((batch[n] != -100).to(out[0].dtype) for n in ("labels", "others"))
    return (out[0].square().mean(-1) * one).sum() / one.sum() + (out[1].square().mean(-1) * two).sum() / two.sum()


LOSSES: Mapping[str, tuple[Callable[[Any, Batch], torch.Tensor], int]] = {  # and the number of denominators
    "auxiliary": (auxiliary, 2),
    "predicted ahead": (predicted_ahead, 2),
    "next sentence": (next_sentence, 2),
    "same labels": (same_labels, 2),
    "masked": (masked, 2),
    "two masks": (two_masks, 2),
}


def made() -> nn.Module:
    torch.manual_seed(0)
    return TwoHeads().double()


def batch(loss: str) -> dict[str, torch.Tensor]:
    """Four samples with unequal numbers of labels; only what the loss reads."""
    generator = torch.Generator().manual_seed(1)
    ids, labels, others = (torch.randint(32, (4, 12), generator=generator) for _ in range(3))
    for k in range(4):
        labels[k, 12 - 3 * k :] = -100
        others[k, : 2 * k + 1] = -100
    out = {"ids": ids, "labels": labels, "others": others, "is_next": torch.tensor([1, -1, 3, 0])}
    unread = {
        "auxiliary": ("is_next",),
        "next sentence": ("others",),
        "masked": ("is_next",),
        "two masks": ("is_next",),
    }
    return {n: x for n, x in out.items() if n not in unread.get(loss, ("others", "is_next"))}


def errors(rank: int, world: int, name: str, pins: dict[str, Any]) -> tuple[float, float]:
    """Relative error of the loss, and the worst of a gradient."""
    model, whole, (loss, _) = made(), batch(name), LOSSES[name]
    pm = autoplan.parallelize(
        model,
        "local",
        example_inputs={n: x[:2] for n, x in whole.items()},
        loss_fn=loss,
        pins=pins,
        global_batch_size=4,
    )
    loss_error, gradient, _ = errors_of_a_step(pm, model, whole, lambda: loss(model(whole["ids"]), whole))
    return loss_error, gradient
