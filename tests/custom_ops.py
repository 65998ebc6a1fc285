"""Operators of a user, and a job that trains a model with them on several ranks."""

from __future__ import annotations

from typing import Any

import torch
from one_step import errors_of_a_step
from torch import nn

import autoplan


@autoplan.rule("[*b,i!] -> [*b,i!]")
@torch.library.custom_op("autoplan_tests::centred", mutates_args=())
def centred(x: torch.Tensor) -> torch.Tensor:
    """Subtract the mean of the last dim."""
    return x - x.mean(-1, keepdim=True)


@centred.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


centred.register_autograd(lambda ctx, grad: grad - grad.mean(-1, keepdim=True))


@autoplan.rule("[*b] * [*b] -> [*b]")
@torch.library.custom_op("autoplan_tests::gated", mutates_args=())
def gated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Multiply."""
    return x * y


@gated.register_fake
def _(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


gated.register_autograd(
    lambda ctx, grad: (grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]), setup_context=_keep
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.ops.autoplan_tests.centred(x)
        out: torch.Tensor = x + self.last(gated(self.first(x), self.second(x)))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return out.square().mean()


def errors(rank: int, world: int, pins: dict[str, Any]) -> tuple[float, float, str]:
    """Relative error of the loss, the worst of a gradient, and the program."""
    torch.manual_seed(0)
    model, batch = Model().double(), {"x": torch.randn(4, 6, 16, dtype=torch.float64)}
    pm = autoplan.parallelize(model, "local", example_inputs=batch, loss_fn=loss, pins=pins)
    loss_error, gradient, _ = errors_of_a_step(pm, model, batch, lambda: loss(model(**batch), batch))
    assert all(p.grad is not None for p in model.parameters())
    return loss_error, gradient, "".join(pm.source.values())
