"""Tensors that a forward hands to the next one are refused by name; caches and results are not."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from autoplan.capture.export import capture
from autoplan.errors import CaptureError

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


@pytest.mark.parametrize(("way", "name"), [("mean", "mean"), ("read", "mean"), ("plain", "plain"), ("last", "plain")])
def test_a_value_for_the_next_forward_is_refused_by_name(way: str, name: str) -> None:
    with pytest.raises(CaptureError, match=f"reads and then replaces '{name}'.*depend on the split"):
        capture(Stateful(way), {"x": X}, loss_fn=loss)


@pytest.mark.parametrize("name", ["1.mean"])
def test_it_is_found_inside_layers(name: str) -> None:
    model = nn.Sequential(Stateful(""), Stateful("mean"))
    with pytest.raises(CaptureError, match=f"replaces '{name}'"):
        capture(model, {"input": X}, loss_fn=lambda y, input: y.square().mean())


def test_it_is_found_where_modules_share_a_tensor() -> None:
    model = nn.Sequential(Stateful("mean"), Stateful(""))
    model[1].mean = model[0].mean
    with pytest.raises(CaptureError, match=r"replaces '0\.mean'"):
        capture(model, {"input": X}, loss_fn=lambda y, input: y.square().mean())


@pytest.mark.parametrize("way", ["", "moved", "cache", "kept"])
def test_a_cache_or_a_result_is_no_state(way: str) -> None:
    """A cache is made again without its old values, or moved; what is only written is not read by the next forward."""
    model = Stateful(way)
    graph = capture(model, {"x": X}, loss_fn=loss)
    assert graph.params and model.cached is None and torch.equal(model.mean, torch.zeros(8))
