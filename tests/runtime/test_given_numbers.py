"""A number that a forward or a loss function reads may not change under a program that has its old value."""

from __future__ import annotations

import functools
import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import autoplan
from autoplan.runtime.given_numbers import GivenNumbers

WEIGHT = 0.5


@dataclass
class Config:
    scale: float = 2.0
    cached: bool = False
    unread: float = 1.0


class Inner(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.rates, self.seen, self.name = config, [0.1, 0.2], 0, "inner"
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.1)
        self.unread = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        if self.config.cached:
            return x
        return self.dropout(self.linear(x)) * self.config.scale * sum(self.rates) * len(self.name)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.temperature = Inner(Config()), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) / self.temperature


def other(x: torch.Tensor) -> torch.Tensor:
    return x * WEIGHT


def of_global(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return other(output).mean()


def of_closure(weight: float) -> tuple[Any, Any]:
    def anneal(to: float) -> None:
        nonlocal weight
        weight = to

    return lambda output, batch: (output * weight).mean(), anneal


class Loss:
    def __init__(self) -> None:
        self.beta = 1.0

    def __call__(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return (output * self.beta).mean()

    def named(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return self(output, batch) * self.beta


CHANGES = {
    "temperature": lambda m: setattr(m, "temperature", 2.0),
    "inner.rates": lambda m: m.inner.rates.append(0.3),
    "inner.config.scale": lambda m: setattr(m.inner.config, "scale", 3.0),
    "inner.dropout.p": lambda m: setattr(m.inner.dropout, "p", 0.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_numbers_of_modules(name: str) -> None:
    model = Model()
    numbers = GivenNumbers(model, None)
    assert numbers.changed() is None
    CHANGES[name](model)
    told = numbers.changed()
    assert told is not None and name in told and "give what changes as an input" in told


def test_what_is_no_number_of_the_forward_may_change() -> None:
    """A counter of its own, what no method reads, modes, training, the whole model."""
    model = Model()
    numbers = GivenNumbers(model, None)
    model.inner.seen, model.inner.unread, model.inner.config.unread = 7, 7.0, 7.0
    model.inner.config.cached = True
    model.eval()
    model.new = 3
    assert numbers.changed() is None
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None and numbers.changed() is None


def test_numbers_of_loss_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = GivenNumbers(Model(), of_global)
    assert numbers.changed() is None
    monkeypatch.setitem(globals(), "WEIGHT", 0.25)
    told = numbers.changed()
    assert told is not None and told.startswith("WEIGHT, which loss_fn reads, was 0.5 when") and "is 0.25 now" in told

    loss, anneal = of_closure(1.0)
    numbers = GivenNumbers(Model(), functools.partial(loss))
    anneal(1)  # the same number
    assert numbers.changed() is None
    anneal(0.5)
    assert "weight, which loss_fn reads" in (numbers.changed() or "")

    for make in (lambda held: held, lambda held: held.named):
        held = Loss()
        numbers = GivenNumbers(Model(), make(held))
        assert numbers.changed() is None
        held.beta = float("nan")
        assert "beta was 1.0" in (numbers.changed() or "")
    numbers = GivenNumbers(Model(), held)
    assert numbers.changed() is None  # nan still


def test_a_step_refuses_what_the_program_does_not_have(one_process: None) -> None:
    batch = {"x": torch.ones(4, 4)}
    model, (loss, anneal) = Model(), of_closure(1.0)
    pm = autoplan.parallelize(model, example_inputs=batch, loss_fn=loss, global_batch_size=4)
    first = pm.step(batch)
    anneal(0.5)
    for call in (pm.step, pm.eval_step):
        with pytest.raises(ValueError, match=r"weight, which loss_fn reads, was 1.0 .* is 0.5 now"):
            call(batch)
    anneal(1.0)
    model.temperature = 4.0
    with pytest.raises(ValueError, match=r"Model.temperature was 1.0"):
        pm.step(batch)
    model.temperature = 1.0
    assert pm.step(batch).shape == first.shape
    del model
    assert torch.isfinite(pm.step(batch))
