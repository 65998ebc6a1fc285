"""A model of tokens whose heads, tables and buffers in evaluation are others than in training, and its comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from buffer_models import WIDTH, Averaged
from torch import nn

import autoplan

WORDS, LENGTH = 11, 8


class Scaled(Averaged):
    """A layer like all others in training, with a scale of its own in evaluation."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out if self.training else out * self.scale


class Changing(nn.Module):
    """Two heads in training; in evaluation one, further positions, and scales. Its layers keep running means."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList(map(Scaled, (1.0, 1.5, 1.5)))
        self.head, self.other = nn.Linear(WIDTH, WORDS), nn.Linear(WIDTH, WORDS)
        for name in ("scale", "frequencies", "common"):
            self.register_buffer(name, torch.rand(WIDTH) + 0.5)

    def forward(self, ids: torch.Tensor) -> Any:
        places = torch.arange(ids.shape[1], dtype=torch.float64)[:, None]
        x = self.embedding(ids) + torch.cos(places * self.common)
        if not self.training:
            x = x + torch.sin(places * self.frequencies)
        for layer in self.layers:
            x = layer(x)
        return (self.head(x), self.other(x)) if self.training else self.head(x * self.scale)


def loss(out: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    first = out[0] if isinstance(out, tuple) else out
    found = F.cross_entropy(first.flatten(0, 1), batch["labels"].flatten())
    if isinstance(out, tuple):  # another mean, over other labels
        found = found + 0.5 * F.cross_entropy(out[1].flatten(0, 1), batch["others"].flatten())
    return found


def _batch(size: int, seed: int) -> dict[str, torch.Tensor]:
    generator, shape = torch.Generator().manual_seed(seed), (size, LENGTH)
    found = {n: torch.randint(0, WORDS, shape, generator=generator) for n in ("ids", "labels", "others")}
    for name, share in (("labels", 0.3), ("others", 0.6)):
        found[name][torch.rand(shape, generator=generator) < share] = -100
    return found


def evaluated(rank: int, world: int, pins: dict[str, Any]) -> float:
    """The difference, relative, of an evaluation behind a step to the module in eval() on the same micro-batches."""
    torch.manual_seed(0)
    given: dict[str, Any] = {"example_inputs": _batch(4, 0), "loss_fn": loss, "global_batch_size": 8, "pins": pins}
    pm = autoplan.parallelize(Changing().double(), "local", optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **given)
    pm.step({n: x.chunk(pm.data_world)[pm.data_rank] for n, x in _batch(8, 1).items()})
    assert pm.optimizer is not None
    pm.optimizer.step()
    whole, one = _batch(6, 2), pm.to_module(None)
    got = pm.eval_step({n: x.chunk(pm.data_world)[pm.data_rank] for n, x in whole.items()}).item()
    assert one is not None
    state, want = {n: x.clone() for n, x in one.eval().state_dict().items()}, 0.0
    by_rank = torch.arange(6).chunk(pm.data_world)
    for rows in zip(*(each.tensor_split(pm.num_micro_batches) for each in by_rank), strict=True):
        at = torch.cat(rows)
        one.load_state_dict(state)
        with torch.no_grad():
            out = one(whole["ids"][at])
        want += F.cross_entropy(out.flatten(0, 1), whole["labels"][at].flatten(), reduction="sum").item()
    return abs(got * int((whole["labels"] != -100).sum()) / want - 1)
