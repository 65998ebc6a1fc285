"""Layers stand for one another only if they compute the same: with the same tensors tied, and the same hooks inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from small_stacks import square_loss
from torch import nn

from autoplan.capture.export import capture
from autoplan.ir.graph import ModelGraph
from autoplan.verify.check import verify_whole
from autoplan.verify.runs import VerifyTask

EXAMPLE = {"x": torch.randn(4, 6, dtype=torch.float64)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("shift", torch.rand(6))
        self.register_buffer("scale", torch.rand(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.b(torch.relu(self.a(x)) + self.shift) * self.scale
        return out


class Blocks(nn.Module):
    """Blocks behind a linear layer: the inputs of all of them have a gradient."""

    def __init__(self, change: Callable[[Blocks], Any], num_layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.double()
        change(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def kinds(graph: ModelGraph, num_layers: int = 4) -> list[int]:
    """Which layers have one block, by the number of the first of them."""
    blocks = {call.name: call.block for call in graph.calls}
    names = [blocks[f"layers.{i}"] for i in range(num_layers)]
    return [names.index(name) for name in names]


def captured(change: Callable[[Blocks], Any]) -> ModelGraph:
    """The graph of changed blocks, which computes what they do."""
    model = Blocks(change)
    graph = capture(model, EXAMPLE, square_loss)
    trained = {name for name, p in graph.params.items() if p.trainable}
    assert trained == dict(model.named_parameters()).keys()
    assert verify_whole(VerifyTask(model, graph, EXAMPLE, square_loss), limit_s=60.0).done
    return graph


def tie(*pairs: tuple[str, str]) -> Callable[[nn.Module], None]:
    """Give the first of each pair the tensor of the second."""

    def change(model: nn.Module) -> None:
        for name, other in pairs:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, dict(_tensors(model))[other])

    return change


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


TIED: dict[str, tuple[list[tuple[str, str]], list[int]]] = {
    "the-first": ([("layers.0.b.weight", "layers.0.a.weight")], [0, 1, 1, 1]),
    "another": ([("layers.1.b.weight", "layers.1.a.weight")], [0, 1, 0, 0]),
    "buffers": ([("layers.1.scale", "layers.1.shift")], [0, 1, 0, 0]),
    "every": ([(f"layers.{i}.b.weight", f"layers.{i}.a.weight") for i in range(4)], [0, 0, 0, 0]),
    "across": ([("layers.2.a.weight", "layers.0.b.weight")], [0, 0, 0, 0]),
    "across-buffers": ([("layers.2.shift", "layers.0.shift")], [0, 0, 0, 0]),
    "one-for-all": ([(f"layers.{i}.a.weight", "layers.0.a.weight") for i in range(1, 4)], [0, 0, 0, 0]),
    "the-first-to-what-is-outside": ([("layers.0.a.weight", "first.weight")], [0, 0, 0, 0]),
    "another-to-what-is-outside": ([("layers.2.a.weight", "first.weight")], [0, 0, 0, 0]),
    "in-turns": (
        [(f"layers.{i}.b.weight", f"layers.{i}.a.weight") for i in (1, 3)] + [("layers.1.a.bias", "layers.0.a.bias")],
        [0, 1, 0, 1],
    ),
}


@pytest.mark.parametrize("name", list(TIED))
def test_layers_with_tied_tensors(name: str) -> None:
    pairs, found = TIED[name]
    graph = captured(tie(*pairs))
    assert kinds(graph) == found


class Twice:
    """A hook that is an object."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * self.factor


def times(factor: float) -> Callable[..., Any]:
    return lambda module, args, out: out * factor


def on_every(make: Callable[[Blocks, int], Callable[..., Any]]) -> Callable[[Blocks], None]:
    def change(model: Blocks) -> None:
        for i, layer in enumerate(model.layers):
            layer.a.register_forward_hook(make(model, i))  # type: ignore[union-attr]

    return change


def on_one(register: str, hook: Callable[..., Any], inside: str = "a", **options: Any) -> Callable[[Blocks], Any]:
    return lambda model: getattr(model.layers[1].get_submodule(inside), register)(hook, **options)


def with_arguments(module: nn.Module, args: tuple[torch.Tensor], kwargs: Mapping[str, Any]) -> Any:
    return (args[0] * 2,), kwargs


HOOKED: dict[str, tuple[Callable[[Blocks], Any], int]] = {
    "one": (on_one("register_forward_hook", times(2)), 2),
    "one-before": (on_one("register_forward_pre_hook", lambda module, args: (args[0] * 2,)), 2),
    "one-with-kwargs": (on_one("register_forward_pre_hook", with_arguments, with_kwargs=True), 2),
    "on-the-layer": (on_one("register_forward_hook", times(2), inside=""), 1),
    "before-the-layer": (on_one("register_forward_pre_hook", lambda module, args: (args[0] * 2,), inside=""), 1),
    "every": (on_every(lambda model, i: lambda module, args, out: out * 2), 1),
    "every-by-a-closure": (on_every(lambda model, i: times(2)), 1),
    "every-with-its-own-number": (on_every(lambda model, i: times(2 + i % 2)), 2),
    "objects": (on_every(lambda model, i: Twice(2)), 1),
    "other-objects": (on_every(lambda model, i: Twice(2 + i % 2)), 2),
    "a-module-of-the-layer": (
        on_every(lambda model, i: lambda module, args, out, layer=model.layers[i]: out + layer.shift),
        1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(HOOKED))
def test_layers_with_hooks(name: str) -> None:
    change, number = HOOKED[name]
    assert len(set(kinds(captured(change)))) == number


class Processor:
    """What a layer computes with, an object of its own in every layer, as in diffusers."""

    def __init__(self, factor: float) -> None:
        self.factor, self.owner = factor, self

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x


class Processed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.processor = Processor(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.processor(super().forward(x))


def processed(*factors: float) -> Callable[[Blocks], Any]:
    """Blocks with processors of their own."""

    def change(model: Blocks) -> None:
        model.layers = nn.ModuleList(Processed() for _ in factors).double()
        for layer, factor in zip(model.layers, factors, strict=True):
            layer.processor = Processor(factor)

    return change


def test_layers_with_equal_objects_of_their_own_are_alike() -> None:
    assert kinds(captured(processed(0.5, 0.5, 0.25, 0.5))) == [0, 0, 2, 0]


def test_layers_with_equal_objects_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = list[int]()
    monkeypatch.setattr(Processor, "__call__", lambda self, x: runs.append(1) or self.factor * x)
    model = Blocks(processed(*[0.5] * 4))
    capture(model, EXAMPLE, square_loss)
    few = len(runs)
    capture(Blocks(processed(*[0.5] * 8)), EXAMPLE, square_loss)
    assert len(runs) == 2 * few
