"""Small models that draw random numbers, update buffers, mix by Fourier transforms, or have no list of layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from experiments.compatibility.plan_fuzz.models import Batch, Block, Task

WIDTH, CODES, TIMES = 12, 6, 10


def _rows(samples: int, length: int, generator: torch.Generator, dtype: torch.dtype) -> Batch:
    """Return rows that differ much, so that statistics of a part are not those of the whole."""
    x, y = (torch.randn(samples, length, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    spread = torch.linspace(0.5, 2, samples, dtype=torch.float64).view(-1, 1, 1)
    return {"x": (x * spread + spread - 1).to(dtype), "targets": y.to(dtype)}


def _squares(out: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(out, batch["targets"])


def _parts(out: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Squared errors, and a term that the model returns for each token."""
    made, term = out
    return (made - batch["targets"]).square().sum(-1).mean() + 0.1 * term.mean()


def _hidden(out: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Squared errors of the tokens that were hidden."""
    made, hidden = out
    return ((made - batch["targets"]).square().mean(-1) * hidden).sum() / hidden.sum()


def _drawn_in_loss(out: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Squared errors of tokens that the loss weighs by random numbers."""
    weight = torch.rand(out.shape[:2], device=out.device, dtype=out.dtype)
    return ((out - batch["targets"]).square().mean(-1) * weight).mean()


class _Base(nn.Module):
    """Attention layers between two linear ones."""

    def __init__(self, layers: int = 2, dropout: float = 0.0, heads: int = 2, causal: bool = False) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH, heads, heads, 20, dropout, causal, False) for _ in range(layers))

    def through(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layers make of it."""
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.through(self.first(x)))


class _Vae(_Base):
    """Noise of a learned size between the layers and the head."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.moments = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        mean, log_variance = self.moments(self.through(self.first(x))).chunk(2, -1)
        made = self.head(mean + torch.randn_like(mean) * (0.5 * log_variance).exp())
        return made, (mean.square() + log_variance.exp() - log_variance - 1).sum(-1)


class _Diffusion(_Base):
    """Times and noise before the layers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("share", torch.linspace(0.99, 0.05, TIMES))
        self.times = nn.Embedding(TIMES, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        time, noise = torch.randint(0, TIMES, (x.shape[0],), device=x.device), torch.randn_like(x)
        share = self.share[time][:, None, None]
        h = share.sqrt() * x + (1 - share).sqrt() * noise + self.times(time)[:, None]
        found = self.head(self.through(h))
        return found, (found - noise).square().sum(-1)


class _DroppedPath(Block):
    """A layer that some samples skip while it trains."""

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        change = super().forward(x) - x
        if self.training:
            change = change * x.new_empty((x.shape[0], 1, 1)).bernoulli_(0.7).div_(0.7)
        return x + change


class _NoisyLayer(Block):
    """A layer with noise of its own, of all samples, and of each token, also in evaluation."""

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        x = super().forward(x + 0.1 * torch.randn_like(x)) + 0.1 * torch.randn(WIDTH, dtype=x.dtype, device=x.device)
        x = x * (0.5 + torch.rand(x.shape[0], x.shape[1], 1, dtype=x.dtype, device=x.device))
        return x + 0.1 * F.gumbel_softmax(x, tau=0.7)


class _NoisyWeight(_Base):
    """Noise in a weight, which all samples share, a number that is drawn, and dropped features."""

    def forward(self, x: torch.Tensor) -> Any:
        weight = self.first.weight + 0.1 * torch.randn_like(self.first.weight)
        x = self.through(F.linear(x, weight, self.first.bias))
        x = F.dropout1d(x, 0.2, self.training) * (1 + torch.rand((), dtype=x.dtype, device=x.device))
        return self.head(x)


class _Masked(_Base):
    """A part of the tokens in an order that is drawn; the loss is over the others."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.blank = nn.Parameter(torch.zeros(1, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        order = torch.rand(x.shape[0], x.shape[1], device=x.device).argsort(1)
        back = order.argsort(1)
        shown = self.first(torch.gather(x, 1, order[:, :4, None].expand(-1, -1, WIDTH)))
        whole = torch.cat([shown, self.blank.expand(x.shape[0], x.shape[1] - 4, -1)], 1)
        h = self.through(torch.gather(whole, 1, back[:, :, None].expand(-1, -1, WIDTH)))
        return self.head(h), (back >= 4).to(x.dtype)


def _of_layers(layer: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return what makes a model of these layers."""

    def make(**options: Any) -> nn.Module:
        model = _Base(**options)
        model.layers = nn.ModuleList(
            layer(WIDTH, 2, 2, 20, options.get("dropout", 0.0), options.get("causal", False), False)
            for _ in model.layers
        )
        return model

    return make


DRAWING: Mapping[str, tuple[Callable[..., nn.Module], Callable[..., torch.Tensor]]] = {
    "vae": (_Vae, _parts),
    "diffusion": (_Diffusion, _parts),
    "paths": (_of_layers(_DroppedPath), _squares),
    "noise": (_of_layers(_NoisyLayer), _squares),
    "weight": (_NoisyWeight, _squares),
    "masked": (_Masked, _hidden),
    "loss": (_Base, _drawn_in_loss),
}


def drawing(kind: str = "vae", **options: Any) -> Task:
    """A model, or a loss, that draws random numbers."""
    make, loss = DRAWING[kind]
    return Task(lambda: make(**options), _rows, loss, by_samples=kind != "masked", draws=True)


# -- buffers that a forward updates -----------------------------------------------------------------------------------


class _Quantizer(nn.Module):
    """A codebook as moving averages."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randn(CODES, WIDTH)
        self.register_buffer("codes", codes)
        self.register_buffer("sizes", torch.ones(CODES))
        self.register_buffer("sums", codes.clone(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        index = torch.cdist(flat.detach(), self.codes).argmin(1)
        found = F.embedding(index, self.codes).view_as(x)
        if self.training:
            chosen = F.one_hot(index, CODES).to(flat.dtype)
            self.sizes.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.sums.data.mul_(0.9).add_(chosen.t() @ flat.detach(), alpha=0.1)
            self.codes.data.copy_(self.sums / (self.sizes + 1e-3).unsqueeze(1))
        return x + (found - x).detach() + 0.25 * (x - found.detach())


class _Normalizer(nn.Module):
    """Running mean and variance of its inputs; it normalises with the new ones."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            flat = x.detach().flatten(0, 1)
            self.mean.lerp_(flat.mean(0), 0.2)
            self.var = 0.8 * self.var + 0.2 * flat.var(0, unbiased=False)
        return (x - self.mean) / (self.var + 1e-3).sqrt()


class _Counter(nn.Module):
    """Counters of forwards and of samples, by which a value is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
            self.seen += 0.1 * x.shape[0]
        return x * torch.clamp(self.steps / 8, max=1.0) + self.seen / (1 + self.seen)


class _Observed(nn.Module):
    """Values that are scaled by their extremes so far."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(WIDTH))
        self.register_buffer("most", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            seen = x.detach().flatten(0, 1)
            self.low.copy_(torch.minimum(self.low, seen.amin(0)))
            self.most.copy_(0.5 * self.most + 0.5 * seen.abs().max())
        return torch.tanh(x / (1 + self.most)) - 0.1 * self.low


class _Teacher(nn.Module):
    """A linear map beside a slow copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("slow", torch.randn(WIDTH, WIDTH) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.slow.mul_(0.9).add_(self.online.weight, alpha=0.1)
        return x + self.online(x) - 0.5 * F.linear(x, self.slow)


class _Balanced(nn.Module):
    """Experts whose router has a bias that follows the load."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Parameter(torch.randn(4, WIDTH) * 0.3)
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).sigmoid()
        index = torch.topk(scores + self.bias, 2, dim=-1)[1]
        chosen = F.one_hot(index, 4).to(x.dtype)
        if self.training:
            load = chosen.sum((0, 1, 2))
            self.bias += 0.05 * torch.sign(load.mean() - load)
        return x + torch.tanh((scores.gather(-1, index).unsqueeze(-1) * chosen).sum(-2) @ self.up)


class _Rows(nn.Module):
    """Batch norm of all tokens."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=momentum)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x.flatten(0, 1)).view_as(x)
        return out


STATES: Mapping[str, Callable[[], nn.Module]] = {
    "codebook": _Quantizer,
    "normalizer": _Normalizer,
    "counter": _Counter,
    "observed": _Observed,
    "teacher": _Teacher,
    "router": _Balanced,
    "rows": _Rows,
    "spectral": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "hook": lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
}


class _Updating(nn.Module):
    """Layers with a module that updates buffers before, between, in or behind them."""

    def __init__(self, kind: str, where: str, layers: int, dropout: float) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        blocks = (Block(WIDTH, 2, 2, 20, dropout, False, False) for _ in range(layers))
        self.layers = nn.ModuleList(nn.Sequential(b, STATES[kind]()) if where == "in" else b for b in blocks)
        self.states = nn.ModuleList(STATES[kind]() for _ in range({"in": 0, "between": layers}.get(where, 1)))
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.where == "before":
            x = self.states[0](x)
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if self.where == "between":
                x = self.states[index](x)
            if self.where == "beside" and not index:
                self.states[0](x)  # nothing reads what it gives
        if self.where == "behind":
            x = self.states[0](x)
        out: torch.Tensor = self.head(x)
        return out


def updating(kind: str = "normalizer", where: str = "before", layers: int = 2, dropout: float = 0.0) -> Task:
    """A model whose forward updates buffers."""
    make = lambda: _Updating(kind, where, layers, dropout)  # noqa: E731
    return Task(make, _rows, _squares, by_samples=True, coupled=True, draws=dropout > 0)


# -- Fourier transforms, and models without lists ---------------------------------------------------------------------


class _Mixer(nn.Module):
    """A layer that mixes tokens by Fourier transforms (FNet), or by a filter that is learned."""

    def __init__(self, filtered: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        if filtered:
            self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        if hasattr(self, "filter"):
            spectrum = torch.fft.rfft(torch.fft.fft(y, dim=1, norm="ortho").real) * torch.view_as_complex(self.filter)
            x = x + torch.fft.irfft(spectrum, n=WIDTH)
        else:
            x = x + torch.fft.fft2(y, norm="ortho").real
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def fourier(filtered: bool = False, layers: int = 2) -> Task:
    """A model of mixing layers."""

    def make() -> nn.Module:
        model = _Base(layers=layers)
        model.layers = nn.ModuleList(_Mixer(filtered) for _ in range(layers))
        return model

    return Task(make, _rows, _squares, by_samples=True)


class _Attributes(nn.Module):
    """Layers that are attributes, of which one may be called again."""

    def __init__(self, again: bool, norm: bool) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.one, self.two, self.three = (Block(WIDTH, 2, 2, 20, 0.0, False, False) for _ in range(3))
        self.again = again
        if norm:
            self.rows = _Rows()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(self.first(x))
        y = self.two(x)
        if hasattr(self, "rows"):
            y = self.rows(y)
        y = self.three(y) + x
        out: torch.Tensor = self.head(self.two(y) if self.again else y)
        return out


class _Convolutions(nn.Module):
    """Stretches of convolutions that go down and up again, with skips and norms between them."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        made: Callable[[int], nn.Module] = nn.BatchNorm1d if norm else lambda n: nn.GroupNorm(2, n)
        self.inc, self.norm1 = nn.Conv1d(WIDTH, 16, 3, padding=1), made(16)
        self.down, self.norm2 = nn.Conv1d(16, 24, 3, padding=1), made(24)
        self.deep, self.norm3 = nn.Conv1d(24, 24, 3, padding=1), made(24)
        self.up, self.out = nn.Conv1d(24, 16, 3, padding=1), nn.Conv1d(32, WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = F.relu(self.norm1(self.inc(x.mT)))
        x = F.relu(self.norm2(self.down(first)))
        x = F.relu(self.norm3(self.deep(x)) + x)
        out: torch.Tensor = self.out(torch.cat([F.relu(self.up(x)), first], 1)).mT
        return out


def divided(kind: str = "attributes", again: bool = False, norm: bool = False) -> Task:
    """A model without a list of layers; `norm`: with batch norm."""
    make = (lambda: _Attributes(again, norm)) if kind == "attributes" else (lambda: _Convolutions(norm))
    return Task(make, _rows, _squares, by_samples=True, coupled=norm)
