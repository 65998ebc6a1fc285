"""Jobs for test_user_scripts.py: what scripts of users give to a program, and what they are told."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import autoplan

TOKENS, ROWS = 8, 32


class Turned(nn.Module):
    """A layer that returns a view of what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(TOKENS, TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.mix(x)).transpose(1, 2)


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(ROWS, TOKENS), nn.Linear(TOKENS, ROWS)
        self.layers = nn.ModuleList(Turned() for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def loss_fn(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())


def batch_of(num: int, seed: int = 0) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, ROWS, (num, 2 * TOKENS), generator=torch.Generator().manual_seed(seed))
    return {"ids": tokens[:, :TOKENS].contiguous(), "labels": tokens[:, TOKENS:].contiguous()}


def program(
    pins: dict[str, Any], optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
) -> autoplan.ParallelModel:
    torch.manual_seed(0)
    return autoplan.parallelize(
        Mixer().double(),
        "local",
        example_inputs=batch_of(4),
        loss_fn=loss_fn,
        optimizer=optimizer,
        global_batch_size=4 * pins.get("dp", 1),
        pins={"tp": 1, "pp": 1, "dp": 1, **pins},
        verify=False,
    )


sgd = functools.partial(torch.optim.SGD, lr=0.1)


def own_errors(rank: int, world: int, where: list[int]) -> tuple[str, float]:
    """The error of an optimizer that cannot be made on some ranks, and the loss of a program that is made next."""

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if rank in where:
            return torch.optim.Muon(parameters, lr=0.1)
        return sgd(parameters)

    try:
        program({"dp": world}, make)
    except ValueError as error:
        said = f"{type(error).__name__}: {error}"
    return said, program({"dp": world}, sgd).step(batch_of(4)).item()


def warned_of(rank: int, world: int, pins: dict[str, Any]) -> list[str]:
    """The warnings of a step and an update."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        pm = program(pins, sgd)
        pm.step(batch_of(4))
        assert pm.optimizer is not None
        pm.optimizer.step()
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


def asked(rank: int, world: int, pins: dict[str, Any]) -> str:
    """What a step says of a batch that requires a gradient."""
    x = torch.randn(4, TOKENS, dtype=torch.float64)
    mixed = nn.Sequential(nn.Linear(TOKENS, 16), nn.Tanh(), nn.Linear(16, TOKENS)).double()
    sums = autoplan.parallelize(
        mixed,
        "local",
        example_inputs={"input": x},
        loss_fn=lambda out, batch: out.square().mean(),
        global_batch_size=4 * pins.get("dp", 1),
        pins={"tp": 1, "pp": 1, "dp": 1, **pins},
        verify=False,
    )
    asks = {"input": x.clone().requires_grad_()}
    try:
        sums.step(asks)
        return "accepted"
    except ValueError as error:
        return str(error)


def outside(rank: int, world: int, pins: dict[str, Any]) -> tuple[list[str], list[float]]:
    """Errors of tokens and labels outside of their tables, and losses of good batches, the last one with a label that
    is ignored."""
    pm, said, losses = program(pins, sgd), [], []
    for name, value in (("ids", ROWS), ("ids", -1), ("labels", 99), ("labels", -100)):
        batch = batch_of(4)
        batch[name][2, 3] = value
        for call in (pm.step, pm.eval_step):
            try:
                losses.append(call(batch).item())
            except ValueError as error:
                said.append(str(error))
    return said, losses
