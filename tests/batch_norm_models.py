"""A small convolutional model with batch norm, and a job that trains it for two steps."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from buffer_models import program_of
from torch import nn


class Unit(nn.Module):
    """A residual of a convolution and batch norm."""

    def __init__(self, width: int, **given: Any) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width, **given)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    """A stem, units in a sequence, one batch norm over features; `given`: arguments of the norms of the units."""

    def __init__(self, units: int = 2, **given: Any) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8, momentum=None)
        self.units = nn.Sequential(*(Unit(8, **given) for _ in range(units)))
        self.last, self.head = nn.BatchNorm1d(8, affine=False), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.units(F.relu(self.first(self.stem(x))))
        out: torch.Tensor = self.head(self.last(x.mean((2, 3))))
        return out


def made(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def batch(size: int = 8, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(8, (size,), generator=generator)}


def loss(out: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(out, batch["labels"])


def reference(model: nn.Module, steps: int, num_parts: int, data_ranks: int) -> tuple[list[float], dict[str, Any]]:
    """Losses, and the state after training in one process, which runs each micro-batch of all data ranks at once."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        whole, total = batch(seed=step), 0.0
        by_rank = {n: x.unflatten(0, (data_ranks, num_parts, -1)) for n, x in whole.items()}
        for part in range(num_parts):
            mine = {n: x[:, part].flatten(0, 1) for n, x in by_rank.items()}
            found = loss(model(mine["x"]), mine) / num_parts
            found.backward()
            total += found.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def trained(rank: int, world: int, pins: dict[str, Any], compile: str | None = None) -> float:
    """The largest difference to one process, relative: of losses, parameters and running statistics of two steps."""
    model = made()
    one = copy.deepcopy(model)
    pm = program_of(model, batch(4), loss, pins, compile, lr=0.1)
    size, losses = 8 // pm.data_world, []
    for step in range(2):
        losses.append(pm.step({n: x[pm.data_rank * size :][:size] for n, x in batch(seed=step).items()}).item())
        pm.optimizer.step()
        pm.optimizer.zero_grad()
    want, state = reference(one, 2, pm.num_micro_batches, pm.data_world)
    got = pm.state_dict()
    assert list(got) and got.keys() == state.keys()
    errors = [abs(a / b - 1) for a, b in zip(losses, want, strict=True)]
    for name, x in state.items():
        assert got[name].dtype == x.dtype
        errors.append(float((got[name] - x).abs().max() / x.abs().max()))
    pm.load_state_dict(made(3).state_dict())
    assert torch.equal(pm.state_dict()["first.running_var"], torch.ones(8, dtype=torch.float64))
    return max(errors)


def evaluated(rank: int, world: int, pins: dict[str, Any], rows: int, compile: str | None = None) -> float:
    """The largest difference of an evaluation behind a step to the module in eval(), on `rows` rows of each data rank.

    Asserts that different numbers of rows are evaluated too, and that no step takes them.
    """
    pm = program_of(made(), batch(4), loss, pins, compile, lr=0.1)
    size = 8 // pm.data_world
    pm.step({n: x[pm.data_rank * size :][:size] for n, x in batch().items()})
    pm.optimizer.step()
    before, whole = pm.state_dict(), batch(rows * pm.data_world, seed=9)
    uneven = pm.data_world > 1
    begin, end = (pm.data_rank * (rows + 1), rows + 1 + pm.data_rank * rows) if uneven else (0, rows)
    mine = {n: x[begin:end] for n, x in whole.items()}
    got, outputs = pm.eval_outputs(mine, rows="all")
    if uneven:
        with pytest.raises(ValueError, match=r"Net computes means over samples.*give each the same number"):
            pm.step({n: torch.cat([x] * pm.num_micro_batches) for n, x in mine.items()})
    one = made(3)
    one.load_state_dict(before)
    after = pm.state_dict()
    assert all(torch.equal(x, after[n]) for n, x in before.items())
    with torch.no_grad():
        out = one.eval()(whole["x"])
    error = float((outputs["output"] - out).abs().max() / out.abs().max())
    return max(error, abs(got.item() / loss(out, whole).item() - 1), abs(pm.eval_step(mine).item() - got.item()))
