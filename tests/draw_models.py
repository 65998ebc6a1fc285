"""Small models that draw random numbers in their forward or loss, and a job that trains them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from buffer_models import program_of
from models import GPTBlock
from torch import nn

from autoplan.runtime import draws

LENGTH, WIDTH, STEPS = 4, 8, 10
Batch = Mapping[str, torch.Tensor]
Loss = Callable[[Any, Batch], torch.Tensor]


def batch(rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, LENGTH, WIDTH, generator=g, dtype=torch.float64) for _ in range(2))
    return {"x": x, "y": y}


class Vae(nn.Module):
    """A variational autoencoder (Kingma and Welling, 2013): it draws in evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 12))
        self.decoder = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        return self.decoder(mean + torch.randn_like(mean) * (0.5 * log_variance).exp()), mean, log_variance


def vae_loss(out: tuple[torch.Tensor, ...], batch: Batch) -> torch.Tensor:
    made, mean, log_variance = out
    divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum(-1)
    return ((made - batch["x"]).square().sum(-1) + divergence / 2).mean()


class Diffusion(nn.Module):
    """Predicts the noise that it was given at times that are drawn (Ho, Jain, Abbeel: DDPM, NeurIPS 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("share", torch.linspace(0.99, 0.05, STEPS))
        self.times = nn.Embedding(STEPS, WIDTH)
        self.layers = nn.ModuleList(GPTBlock(WIDTH, 2, 0.0) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        time, noise = torch.randint(0, STEPS, (x.shape[0],), device=x.device), torch.randn_like(x)
        share = self.share[time][:, None, None]
        x = share.sqrt() * x + (1 - share).sqrt() * noise + self.times(time)[:, None]
        for layer in self.layers:
            x = layer(x)
        return self.head(x), noise


def diffusion_loss(out: tuple[torch.Tensor, torch.Tensor], batch: Batch) -> torch.Tensor:
    return F.mse_loss(*out)


class PathBlock(GPTBlock):
    """A transformer block that is left out for some samples while it trains, as by timm's `DropPath`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change = super().forward(x) - x
        if self.training:
            kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.7)
            kept.div_(0.7)
            change = change * kept
        return x + change


class Paths(nn.Module):
    """Stochastic depth (Huang et al., ECCV 2016): equal layers, each of which draws for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PathBlock(WIDTH, 2, 0.1) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


class Discrete(nn.Module):
    """Chooses codes by Gumbel softmax, with noise in a weight, which all samples share, and dropped features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.codes, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.features = nn.Dropout1d(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = F.gumbel_softmax(self.first(x), tau=0.7)
        weight = self.codes.weight + 0.1 * torch.randn_like(self.codes.weight)
        out: torch.Tensor = self.head(self.features(F.linear(codes, weight, self.codes.bias)))
        return out


def square_loss(out: torch.Tensor, batch: Batch) -> torch.Tensor:
    return (out - batch["y"]).square().mean()


class Masked(nn.Module):
    """Predicts what it is not shown, in an order that is drawn (He et al.: masked autoencoders, CVPR 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blank = nn.Parameter(torch.zeros(1, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        order = torch.rand(x.shape[0], LENGTH, device=x.device).argsort(1)
        back = order.argsort(1)
        shown = self.first(torch.gather(x, 1, order[:, :2, None].expand(-1, -1, WIDTH)))
        whole = torch.cat([shown, self.blank.expand(x.shape[0], LENGTH - 2, -1)], 1)
        hidden = (back >= 2).to(x.dtype)
        return self.head(torch.gather(whole, 1, back[:, :, None].expand(-1, -1, WIDTH))), hidden


def masked_loss(out: tuple[torch.Tensor, torch.Tensor], batch: Batch) -> torch.Tensor:
    made, hidden = out
    return ((made - batch["x"]).square().mean(-1) * hidden).sum() / hidden.sum()


MODELS: dict[str, tuple[type[nn.Module], Loss]] = {
    "vae": (Vae, vae_loss),
    "diffusion": (Diffusion, diffusion_loss),
    "paths": (Paths, square_loss),
    "discrete": (Discrete, square_loss),
    "masked": (Masked, masked_loss),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().double()


def program(name: str, pins: dict[str, Any], compile: str | None = None) -> Any:
    return program_of(made(name), batch(8), MODELS[name][1], pins, compile, lr=0.1)


def numbers_of(pm: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of two steps, each with three evaluations behind it, and the gradients of the first."""
    size, losses, gradients = 8 // pm.data_world, list[float](), dict[str, torch.Tensor]()
    for seed in range(2):
        mine = {n: x[size * pm.data_rank :][:size] for n, x in batch(8, seed).items()}
        losses.append(pm.step(mine).item())
        gradients = gradients or {n: g.clone() for n, g in pm.gradients().items()}
        pm.optimizer.step()
        losses += [pm.eval_step(mine).item() for _ in range(2)]
        # in parts and ranks of different sizes; those whose loss counts what is drawn refuse the latter
        rows, at, of = 6 if pm.spec.draws_counts else 7, pm.data_rank, pm.data_world
        some = {n: x[rows * at // of : rows * (at + 1) // of] for n, x in batch(rows, 5).items()}
        losses += [pm.eval_step(some).item()]
    return losses, gradients


def trained(
    rank: int, world: int, name: str, pins: dict[str, Any], compile: str | None = None, placed: bool = True
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What `numbers_of` says under a plan. Not `placed`: every rank draws as if it had the first elements."""
    with pytest.MonkeyPatch.context() as patch:
        if not placed:
            patch.setattr(draws, "first_position", lambda rng, *_: torch.zeros_like(rng[0]))
        return numbers_of(program(name, pins, compile))
