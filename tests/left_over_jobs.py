"""Jobs for test_left_overs.py: what a loop of PyTorch does that is not changed wholly for a program."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import autoplan

Batch = dict[str, torch.Tensor]


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(16, 8), nn.Dropout(dropout)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(ids))
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x * scale)
        return out


def loss_fn(out: torch.Tensor, batch: Any) -> torch.Tensor:
    each = F.cross_entropy(out.transpose(1, 2), batch["labels"], reduction="none")
    return (each * batch["weights"]).mean()


def batch_of(num: int = 4, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 16, (num, 9), generator=generator)
    rows = {"ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    return {**rows, "scale": torch.rand(num, 8, 1, generator=generator), "weights": torch.ones(num, 8)}


def made(pins: dict[str, Any] | None = None, **settings: Any) -> tuple[nn.Module, autoplan.ParallelModel]:
    torch.manual_seed(0)
    model, batch = Net(**settings), batch_of()
    pm = autoplan.parallelize(
        model,
        "local",
        example_inputs=batch,
        loss_fn=loss_fn,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        global_batch_size=4 * (pins or {}).get("dp", 1),
        pins={"tp": 1, "pp": 1, "dp": 1, **(pins or {})},
        verify=False,
    )
    return model, pm


def said_by(call: Callable[[], Any]) -> list[str]:
    """The warnings of a call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in found]


def compiled_loop(rank: int, world: int, pins: dict[str, Any]) -> tuple[list[float], list[float]]:
    """The losses of a loop under torch.compile, and without it."""

    def loop(pm: autoplan.ParallelModel, batch: Batch) -> torch.Tensor:
        loss = pm.step(batch)
        pm.clip_grad_norm_(1.0)
        assert pm.optimizer is not None
        pm.optimizer.step()
        return 2 * loss

    def losses(run: Callable[..., torch.Tensor]) -> list[float]:
        _, pm = made(pins)
        return [run(pm, batch_of(seed=pm.data_rank)).item() for _ in range(2)]

    _, alone = made(pins)
    step = torch.compile(alone.step, backend="eager")(batch_of(seed=alone.data_rank)).item()
    return [2 * step, *losses(torch.compile(loop, backend="eager"))], losses(loop)


def other_dtypes(rank: int, world: int, pins: dict[str, Any]) -> tuple[dict[str, str], dict[str, float]]:
    """What is said of batches of other dtypes, and how far the losses of those that are taken are off."""
    _, pm = made(pins)
    batch, said, off = batch_of(seed=0), {}, {}
    wanted = pm.eval_step(batch).item()
    for name, dtype in [
        ("ids", torch.int32), ("labels", torch.uint8), ("weights", torch.float64),
        ("ids", torch.int16), ("labels", torch.int32), ("labels", torch.float32),
        ("scale", torch.float64), ("scale", torch.float16),
    ]:  # fmt: skip
        given = {**batch, name: batch[name].to(dtype)}
        try:
            off[f"{name} {dtype}"] = max(abs(run(given).item() - wanted) for run in (pm.step, pm.eval_step))
        except ValueError as exc:
            said[f"{name} {dtype}"] = str(exc)
    return said, off
