"""Numbers that the forward itself changes: refused by name where it computes with them, else no harm."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from autoplan.capture.export import capture
from autoplan.errors import CaptureError
from autoplan.verify.check import verify_whole
from autoplan.verify.runs import VerifyTask

EXAMPLE = {"x": torch.randn(4, 8, dtype=torch.float64)}


class State:
    def __init__(self) -> None:
        self.step, self.counts = 0, {"a": 0}


class Counting(nn.Module):
    """A layer that counts its calls, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)
        self.way = way
        self.seen, self.ready, self.length = 0, False, 0
        self.state = State()
        self.numbers, self.steps = {"seen": 0, "each": [0, 0]}, [0]
        self.last: torch.Tensor | None = None
        self.table = torch.zeros(8, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        y = self.linear(x)
        match self.way:
            case "anneal":
                y = y * min(1.0, self.seen / 10)
            case "anneal-and-keep":  # beside a tensor of this forward
                y = y * min(1.0, self.seen / 10)
                self.last = y
            case "branch":
                if self.ready:
                    y = y.tanh()
                self.ready = True
            case "dropout":
                self.drop.p *= 0.9
                y = self.drop(y)
            case "state":
                self.state.step += 1
                y = y / self.state.step
            case "dict":
                self.numbers["seen"] += 1
                y = y / self.numbers["seen"]
            case "list":
                self.steps[0] += 1
                y = y / self.steps[0]
            case "nested":
                self.numbers["each"][1] += 1
                y = y / self.numbers["each"][1]
            case "in an object":
                self.state.counts["a"] += 1
                y = y / self.state.counts["a"]
            case "fails":
                if self.ready:
                    y = y * float(y.sum())
                self.ready = True
            case "logs":
                if self.seen % 100 == 0:
                    print(self.seen)
            case "cache":
                if not self.ready or self.length < y.shape[-1]:
                    self.table, self.ready, self.length = torch.arange(8, dtype=y.dtype), True, 8
                y = y + self.table
        return y


class Layers(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList(Counting(way) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def loss(y: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return y.square().mean()


NAMES = {
    "anneal": r"'seen' \(0 -> 1\)",
    "anneal-and-keep": r"'seen' \(0 -> 1\)",
    "branch": r"'ready' \(False -> True\)",
    "dropout": r"'drop\.p' \(0\.5 -> 0\.45\)",
    "state": r"'state\.step' \(0 -> 1\)",
    "dict": r"[\"']numbers\['seen'\][\"'] \(0 -> 1\)",
    "list": r"'steps\[0\]' \(0 -> 1\)",
    "nested": r"[\"']numbers\['each'\]\[1\][\"'] \(0 -> 1\)",
    "in an object": r"[\"']state\.counts\['a'\][\"'] \(0 -> 1\)",
    "fails": r"'ready' \(False -> True\)",
}


@pytest.mark.parametrize("way", list(NAMES))
def test_a_number_that_the_forward_changes_and_computes_with_is_refused_by_name(way: str) -> None:
    model = Counting(way).double()
    with pytest.raises(
        CaptureError, match=f"changes and computes with .*{NAMES[way]}.*; give what changes as an input"
    ):
        capture(model, EXAMPLE, loss)
    assert (model.seen, model.ready, model.drop.p, model.state.step) == (0, False, 0.5, 0)


@pytest.mark.parametrize(("way", "name"), [("anneal", r"'layers\.0\.seen'"), ("list", r"'layers\.0\.steps\[0\]'")])
def test_it_is_found_inside_layers(way: str, name: str) -> None:
    model = Layers(way).double()
    with pytest.raises(CaptureError, match=rf"computes with .*{name} \(0 -> 1\)"):
        capture(model, EXAMPLE, loss)
    assert all(m.steps == [0] and m.numbers["seen"] == 0 for m in model.modules() if isinstance(m, Counting))


@pytest.mark.parametrize("way", ["", "logs", "cache"])
@pytest.mark.parametrize("make", [Counting, Layers])
def test_a_counter_that_influences_nothing_is_no_harm(make: type[nn.Module], way: str) -> None:
    model = make(way).double()
    graph = capture(model, EXAMPLE, loss)
    assert verify_whole(VerifyTask(model, graph, EXAMPLE, loss), limit_s=60.0).done
    blocks = [call.block for call in graph.calls if call.name.startswith("layers.")]
    assert len(set(blocks)) <= 1
    assert not any(m.seen or m.ready or m.length for m in model.modules() if isinstance(m, Counting))
