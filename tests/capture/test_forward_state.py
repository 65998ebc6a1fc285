"""Tensors that a forward hands to the next one are refused by name; caches and results are not."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import nn

from autoplan.capture.evaluation import updated_by
from autoplan.capture.export import capture
from autoplan.errors import CaptureError
from autoplan.verify.check import verify_whole
from autoplan.verify.runs import VerifyTask

X = torch.randn(4, 8)


class Stateful(nn.Module):
    """A layer that keeps tensors of its own, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.way = way
        self.register_buffer("mean", torch.zeros(8))
        self.plain = torch.zeros(8)
        self.cached: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        match self.way:
            case "mean":  # nothing of the loss reads it: the update would be lost
                self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
            case "read":
                self.mean = self.mean.mul(0.9)
                y = y + self.mean
            case "plain":
                self.plain = torch.add(self.plain, 1)
                y = y * self.plain
            case "last":  # what the forward before has left
                y = y + self.plain
                self.plain = y.detach().mean(0)
            case "moved":
                self.mean = self.mean.to(y.dtype)
                y = y + self.mean
            case "cache":
                if self.plain.shape[0] < 2 * y.shape[-1]:
                    self.plain = torch.arange(16, dtype=y.dtype)
                y = y + self.plain[:8]
            case "kept":
                self.cached = y
            case _:
                y = y + self.mean
        return y


def loss(y: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return (y - batch["x"]).square().mean()


@pytest.mark.parametrize("way", ["plain", "last"])
def test_a_value_for_the_next_forward_is_refused_by_name(way: str) -> None:
    with pytest.raises(CaptureError, match=r"reads and then replaces 'plain'.*depend on the split.*registered buffer"):
        capture(Stateful(way), {"x": X}, loss_fn=loss)


@pytest.mark.parametrize("way", ["mean", "read"])
def test_a_registered_buffer_gets_the_value(way: str) -> None:
    model = Stateful(way)
    graph = capture(model, {"x": X}, loss_fn=loss)
    assert updated_by(graph) == {"mean"} and torch.equal(model.mean, torch.zeros(8))
    assert verify_whole(VerifyTask(model, graph, {"x": X}, loss)).done


@pytest.mark.parametrize("name", ["1.plain"])
def test_it_is_found_inside_layers(name: str) -> None:
    model = nn.Sequential(Stateful(""), Stateful("plain"))
    with pytest.raises(CaptureError, match=f"replaces '{name}'"):
        capture(model, {"input": X}, loss_fn=lambda y, input: y.square().mean())


def test_it_is_found_where_modules_share_a_tensor() -> None:
    model = nn.Sequential(Stateful("mean"), Stateful(""))
    model[1].mean = model[0].mean
    with pytest.raises(CaptureError, match=r"buffer '0\.mean' is changed .* 2 places .*module of its own"):
        capture(model, {"input": X}, loss_fn=lambda y, input: y.square().mean())


@pytest.mark.parametrize("way", ["", "moved", "cache", "kept"])
def test_a_cache_or_a_result_is_no_state(way: str) -> None:
    """A cache is made again without its old values, or moved; what is only written is not read by the next forward."""
    model = Stateful(way)
    graph = capture(model, {"x": X}, loss_fn=loss)
    assert graph.params and model.cached is None and torch.equal(model.mean, torch.zeros(8))


class Dropped(nn.Module):
    """Layers that are dropped at random, as in LayerDrop."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layers, self.draw = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.draw() >= 0.0:
                x = layer(x)
        return x


@pytest.mark.parametrize(
    ("draw", "name"),
    [(random.random, "Python's random"), (lambda: random.gauss(9, 1), "Python's random"), (np.random.rand, "numpy")],
)
def test_what_is_drawn_past_torch_is_refused_by_name(draw: Callable[[], float], name: str) -> None:
    """Also where the capture drew what it draws nearly always, so that a comparison finds no difference."""
    with pytest.raises(CaptureError, match=rf"^the forward of Dropped draws random numbers with {name}"):
        capture(Dropped(draw), {"x": X}, loss_fn=loss)


def seeded() -> float:
    random.seed(3)
    return random.random()


def test_what_is_drawn_alike_in_every_forward_is_captured() -> None:
    assert len(capture(Dropped(seeded), {"x": X}, loss_fn=loss).params) == 6


class Holder:
    def __init__(self) -> None:
        self.scale = torch.ones(8)


class Keeps(nn.Module):
    """A layer that keeps tensors in containers or an object, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.way = way
        self.cache: dict[str, dict[int, torch.Tensor]] = {"positions": {}}
        self.memory = [torch.ones(8), torch.full((8,), 0.5)]
        self.history: list[torch.Tensor] = []
        self.queue = deque([torch.ones(8)], maxlen=1)
        self.seen = set[torch.Tensor]()
        self.ordered: OrderedDict[str, torch.Tensor] = OrderedDict(a=torch.ones(8))
        self.holder = Holder()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        match self.way:
            case "cache":
                if 8 not in self.cache["positions"]:
                    self.cache["positions"][8] = torch.arange(8, dtype=y.dtype) / 8 + 1
                y = y * self.cache["positions"][8]
            case "history":
                self.history.append(y.detach().mean())
            case "seen":
                self.seen.add(y)
                self.ordered["b"] = y
            case "first":  # what a later part reads, made anew in every forward
                self.history.clear()
                self.history.append(y.tanh())
                y = y + self.history[0]
            case "memory":
                old = self.memory[0]
                self.memory[0] = 0.9 * old + 0.1 * y.detach().mean(0)
                y = y * old
            case "queue":
                y = y * self.queue[0]
                self.queue.append(y.detach().mean(0))
            case "holder":
                y = y * self.holder.scale
                self.holder.scale = self.holder.scale * 0.5
        return y


def contents(model: Keeps) -> list[object]:
    ordered = list(model.ordered.items())
    return [
        dict(model.cache["positions"]), [*model.memory, *model.queue, *model.history], set(model.seen), ordered,
        model.holder.scale,
    ]  # fmt: skip


@pytest.mark.parametrize("before", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("way", ["cache", "history", "seen", "first"])
def test_what_a_forward_puts_into_containers_is_taken_out_again(way: str, before: bool) -> None:
    model = Keeps(way).double()
    example = {"x": X.double()}
    if before:
        model(example["x"])
    kept = contents(model)
    graph = capture(model, example, loss_fn=loss)
    assert verify_whole(VerifyTask(model, graph, example, loss), limit_s=60.0).done
    assert all(_same(a, b) for a, b in zip(contents(model), kept, strict=True))
    model(example["x"])


@pytest.mark.parametrize(
    ("way", "name"), [("memory", r"memory\[0\]"), ("queue", r"queue\[0\]"), ("holder", r"holder\.scale")]
)
def test_a_value_for_the_next_forward_is_found_in_containers_and_objects(way: str, name: str) -> None:
    model = Keeps(way)
    kept = contents(model)
    with pytest.raises(
        CaptureError, match=f"reads and then replaces '{name}'.*depend on the split.* compute it outside"
    ):
        capture(model, {"x": X}, loss_fn=loss)
    assert all(_same(a, b) for a, b in zip(contents(model), kept, strict=True))


def _same(a: object, b: object) -> bool:
    """The same tensors in the same containers."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return _same(list(a.items()), list(b.items()))
    if isinstance(a, set) and isinstance(b, set):
        return {id(x) for x in a} == {id(x) for x in b}
    return a is b or (not isinstance(a, torch.Tensor) and a == b)
