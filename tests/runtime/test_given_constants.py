"""Constants, functions and layers that a program has of its capture may not change under it."""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoplan
from autoplan.runtime.given_numbers import GivenNumbers


class Kind(enum.Enum):
    PLAIN = "plain"
    SCALED = "scaled"


RATE, RATES, MODE = 0.5, {"a": [0.5]}, "mean"


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * RATES["a"][0]


class Schedule:
    def __init__(self) -> None:
        self.now, self.unread = 0.5, 0.5

    def value(self) -> float:
        return 2 * self.now


class Constants(nn.Module):
    """Reads globals, also by a function, its class, texts, a function, and an object by its method."""

    scale, unread = 1.0, 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.act, self.kind, self.mode, self.limit = torch.relu, Kind.PLAIN, "a", None
        self.schedule = Schedule()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.layers(x)) * scaled(x) * RATE * self.scale * self.schedule.value()
        x = x if self.limit is None else x.clamp(max=self.limit)
        return -x if self.kind is Kind.SCALED or self.mode == "b" or MODE == "sum" else x


HERE = sys.modules[__name__]
CONSTANTS: dict[str, Callable[[Constants, pytest.MonkeyPatch], Any]] = {
    "RATE, which the forward reads, was 0.5": lambda m, patch: patch.setattr(HERE, "RATE", 0.25),
    "RATES['a'][0], which the forward reads, was 0.5": lambda m, patch: patch.setitem(RATES, "a", [0.25]),
    "MODE, which the forward reads, was 'mean'": lambda m, patch: patch.setattr(HERE, "MODE", "sum"),
    "Constants.scale was 1.0": lambda m, patch: patch.setattr(Constants, "scale", 2.0),
    "Constants.scale was 1.0 when the program was made and is 2.0": lambda m, patch: setattr(m, "scale", 2.0),
    "Constants.act was relu": lambda m, patch: setattr(m, "act", torch.tanh),
    "Constants.kind was Kind.PLAIN": lambda m, patch: setattr(m, "kind", Kind.SCALED),
    "Constants.mode was 'a'": lambda m, patch: setattr(m, "mode", "b"),
    "Constants.limit was None": lambda m, patch: setattr(m, "limit", 3),
    "Constants.schedule.now was 0.5": lambda m, patch: setattr(m.schedule, "now", 0.25),
}


@pytest.mark.parametrize("told", CONSTANTS)
def test_constants_that_a_forward_reads(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Constants()
    numbers = GivenNumbers(model, None)
    model.schedule.unread, model.unread = 1.0, 2.0
    assert numbers.changed() is None
    CONSTANTS[told](model, monkeypatch)
    assert (numbers.changed() or "").startswith(told)


class Criterion:
    """A loss function that holds a module, as a closure may."""

    def __init__(self) -> None:
        self.entropy = nn.CrossEntropyLoss(label_smoothing=0.1)

    def __call__(self, output: torch.Tensor, batch: Any) -> Any:
        return self.entropy(output, batch["y"])


def test_modules_and_arguments_of_loss_functions() -> None:
    held, settings = Criterion(), {"weight": 0.5}
    entropy = held.entropy
    for loss, name in (
        (held, "loss_fn.entropy"),
        (lambda output, batch: entropy(output, batch["y"]), "entropy"),
        (functools.partial(lambda output, batch, of: of(output, batch["y"]), of=entropy), "of"),
    ):
        numbers = GivenNumbers(nn.Linear(2, 2), loss)
        assert numbers.changed() is None
        entropy.label_smoothing = 0.2
        assert (numbers.changed() or "").startswith(f"{name}.label_smoothing was 0.1 when")
        entropy.label_smoothing = 0.1
    weighs = functools.partial(lambda output, batch, settings: output.mean() * settings["weight"], settings=settings)
    numbers = GivenNumbers(nn.Linear(2, 2), weighs)
    settings["weight"] = 0.25
    assert (numbers.changed() or "").startswith("settings, which loss_fn reads, was ")


def test_another_layer_is_refused(one_process: None) -> None:
    batch, model = {"x": torch.ones(4, 4)}, Constants()
    pm = autoplan.parallelize(model, example_inputs=batch, loss_fn=lambda output, _: output.mean(), global_batch_size=4)
    model.metric = nn.Identity()  # no container: nothing says that a forward runs it
    first, gelu = pm.step(batch).item(), model.layers[1]
    model.layers[1] = nn.ReLU()
    with pytest.raises(ValueError, match=r"^layers.1 is another module now \(ReLU\) than .* \(GELU\)"):
        pm.step(batch)
    model.layers[1] = gelu
    assert pm.step(batch).item() == first
    model.layers.append(nn.ReLU())
    with pytest.raises(ValueError, match=r"^layers.2 is another module now \(ReLU\) than .* \(not there\)"):
        pm.step(batch)
