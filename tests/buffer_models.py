"""Models whose forward updates buffers while they train, and a job that trains one of them for three steps."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import autoplan

WIDTH, LENGTH, CODES = 8, 4, 6


class Mlp(nn.Module):
    """A residual of two linear layers."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = lambda m: m) -> None:
        super().__init__()
        self.up, self.down = wrap(nn.Linear(WIDTH, 2 * WIDTH)), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.gelu(self.up(x)))
        return out


class Stacked(nn.Module):
    """Layers, and what sub-classes do before, between and after them."""

    def __init__(self, make: Callable[[], nn.Module] = Mlp, layers: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WIDTH)

    def before(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def after(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.before(x))
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(self.after(x))
        return out


class Quantizer(nn.Module):
    """The codebook of a VQ-VAE, as moving averages (van den Oord et al., 2017, appendix A.1)."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randn(CODES, WIDTH)
        self.register_buffer("codes", codes)
        self.register_buffer("sizes", torch.ones(CODES))
        self.register_buffer("sums", codes.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        with torch.no_grad():
            distance = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.codes.t() + self.codes.pow(2).sum(1)
            index = distance.argmin(1)
            chosen = F.one_hot(index, CODES).to(flat.dtype)
        found = F.embedding(index, self.codes).view_as(x)  # the codes before the update
        if self.training:
            self.sizes.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.sums.data.mul_(0.9).add_((chosen.t() @ flat).detach(), alpha=0.1)
            total = self.sizes.sum()
            smooth = (self.sizes + 1e-5) / (total + CODES * 1e-5) * total
            self.codes.data.copy_(self.sums / smooth.unsqueeze(1))
        return x + (found - x).detach() + 0.25 * (x - found.detach())


class Codebook(Stacked):
    """A quantizer between encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.quantizer = Quantizer()

    def after(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.quantizer(x)
        return out


class Normalizer(nn.Module):
    """Running mean and variance of inputs, as of observations (Chan's update); normalises with the new ones."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))
        self.register_buffer("count", torch.tensor(1e-4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            flat = x.detach().flatten(0, 1)
            mean, var, number = flat.mean(0), flat.var(0, unbiased=False), flat.shape[0]
            delta, total = mean - self.mean, self.count + number
            joined = self.var * self.count + var * number + delta.square() * self.count * number / total
            self.mean.copy_(self.mean + delta * number / total)
            self.var.copy_(joined / total)
            self.count.copy_(total)
        return (x - self.mean) / torch.sqrt(self.var + 1e-8)


class Normalized(Stacked):
    """A normalizer of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.normalizer = Normalizer()

    def before(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.normalizer(x)
        return out


class Counted(Stacked):
    """A counter of forwards that schedules a scale, and one that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def after(self, x: torch.Tensor) -> torch.Tensor:
        old = self.steps / 10
        self.steps += 1
        self.seen += x.shape[0]
        return x * torch.clamp(self.steps / 10, max=1.0) + 0.1 * old


class Balanced(nn.Module):
    """A layer of experts whose router has a bias that follows the load (DeepSeek-V3)."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, WIDTH) * 0.3)
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).sigmoid()
        _, index = torch.topk(scores + self.bias, 2, dim=-1)
        weights = scores.gather(-1, index)
        chosen = F.one_hot(index, 4).to(x.dtype)
        if self.training:
            with torch.no_grad():
                load = chosen.sum((0, 1, 2))
                self.bias += 0.05 * torch.sign(load.mean() - load)
        mixed = (weights.unsqueeze(-1) * chosen).sum(-2)
        return x + torch.tanh(mixed @ self.up)


class Averaged(nn.Module):
    """A layer that subtracts a moving average of its activations, assigned anew in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.full((WIDTH,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        out = x + torch.tanh(y - self.average)
        self.average = 0.8 * self.average + 0.2 * y.detach().mean((0, 1))
        return out


class Tokens(Stacked):
    """Has token ids as inputs, as the check of types makes them."""

    def __init__(self) -> None:
        super().__init__(Averaged, 1)
        self.embedding = nn.Embedding(16, WIDTH)

    def before(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.embedding(x)
        return out


class Tracked(Stacked):
    """Keeps a moving average of a term of its loss, which it returns beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        out = super().forward(x)
        term = 0.1 * out.square().mean()
        self.average.lerp_(term.detach(), 0.2)
        return out, term


class Observed(nn.Module):
    """A layer whose activations are scaled by the extremes that they had so far, as quantizers observe them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("low", torch.zeros(WIDTH))
        self.register_buffer("high", torch.zeros(WIDTH))
        self.register_buffer("most", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        seen = y.detach().flatten(0, 1)
        self.low.copy_(torch.minimum(self.low, seen.amin(0)))
        self.high.copy_(torch.maximum(self.high, seen.max(dim=0)[0]))
        self.most.copy_(0.5 * self.most + 0.5 * seen.abs().max())
        return x + torch.tanh(y / (self.high - self.low + self.most))


class Teacher(nn.Module):
    """A linear layer and a slow copy of it in a buffer, whose result is the target of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("slow", torch.randn(WIDTH, WIDTH) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.slow.mul_(0.9).add_(self.online.weight, alpha=0.1)
            target = F.linear(x, self.slow)
        return x + self.online(x) - 0.5 * target


def spectral_layer(old: bool) -> nn.Module:
    """A layer with spectral normalisation of one weight: the hook of torch.nn.utils, or the parametrization."""
    return Mlp(nn.utils.spectral_norm if old else parametrizations.spectral_norm)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "codebook": Codebook,
    "normalizer": Normalized,
    "counter": Counted,
    "router": lambda: Stacked(Balanced),
    "averaged": lambda: Stacked(Averaged),
    "tracked": Tracked,
    "observed": lambda: Stacked(Observed),
    "teacher": lambda: Stacked(Teacher),
    "spectral": lambda: Stacked(lambda: spectral_layer(old=False)),
    "spectral-hook": lambda: Stacked(lambda: spectral_layer(old=True)),
}


def made(name: str, seed: int = 0) -> nn.Module:
    """The model in float64."""
    torch.manual_seed(seed)
    return MODELS[name]().double()


def batch(size: int = 8, seed: int = 1) -> dict[str, torch.Tensor]:
    """Inputs whose rows differ much, so that statistics of a part are not those of the whole."""
    generator = torch.Generator().manual_seed(seed)
    shape = size, LENGTH, WIDTH
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * torch.linspace(0.5, 2, size).view(-1, 1, 1)
    return {"x": x + torch.linspace(-1, 1, size).view(-1, 1, 1), "y": torch.randn(shape, generator=generator).double()}


def loss(out: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mean squared error, and the term that the model returns beside its output, if any."""
    found, more = out if isinstance(out, tuple) else (out, 0.0)
    return (found - batch["y"]).square().mean() + more


STEPS = 3


def reference(model: nn.Module, num_parts: int, data_ranks: int, own: bool = False) -> tuple[list[float], Any]:
    """Losses, and the state after training in one process, which runs each micro-batch of all data ranks at once.

    `own`: each of them runs the rows of the first data rank alone through its buffers, as a wrong program would.
    """
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(STEPS):
        by_rank = {n: x.unflatten(0, (data_ranks, num_parts, -1)) for n, x in batch(seed=step).items()}
        total = 0.0
        for part in range(num_parts):
            rows = slice(0, 1) if own else slice(None)
            mine = {n: x[rows, part].flatten(0, 1) for n, x in by_rank.items()}
            found = loss(model(mine["x"]), mine) / num_parts
            found.backward()
            total += found.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, relative to the largest element of `b`."""
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-300))


def program_of(
    model: nn.Module,
    example: dict[str, torch.Tensor],
    loss_fn: Callable[..., torch.Tensor],
    pins: dict[str, Any],
    compile: str | None,
    *,
    lr: float,
) -> Any:
    """The program of a model trained by SGD on eight rows a step."""
    return autoplan.parallelize(
        model,
        "local",
        optimizer=lambda p: torch.optim.SGD(p, lr=lr),
        example_inputs=example,
        loss_fn=loss_fn,
        pins=pins,
        global_batch_size=8,
        compile=compile or False,
    )


def trained(rank: int, world: int, name: str, pins: dict[str, Any], compile: str | None = None) -> tuple[float, float]:
    """The largest difference to one process of losses, parameters and buffers; and to one that has one rank's rows."""
    model = made(name)
    one, apart, again = copy.deepcopy(model), copy.deepcopy(model), copy.deepcopy(model)
    pm = program_of(model, batch(4), loss, pins, compile, lr=0.05)
    size, losses = 8 // pm.data_world, []
    for step in range(STEPS):
        losses.append(pm.step({n: x[pm.data_rank * size :][:size] for n, x in batch(seed=step).items()}).item())
        pm.optimizer.step()
        pm.optimizer.zero_grad()
    want, state = reference(one, pm.num_micro_batches, pm.data_world)
    _, others = reference(apart, pm.num_micro_batches, pm.data_world, own=True)
    got = pm.state_dict()
    assert list(got) and got.keys() == state.keys()
    assert all(got[n].dtype == x.dtype for n, x in state.items())
    errors = [abs(a / b - 1) for a, b in zip(losses, want, strict=True)]
    errors += [_apart(got[n].double(), x.double()) for n, x in state.items()]
    back = pm.to_module()  # on rank 0
    assert back is None or all(torch.equal(x, got[n]) for n, x in back.state_dict().items())
    pm.load_state_dict(again.state_dict())
    assert all(torch.equal(x, again.state_dict()[n]) for n, x in pm.state_dict().items())
    changed = [n for n, _ in again.named_buffers() if n in others]
    return max(errors), max(_apart(got[n].double(), others[n].double()) for n in changed)


READ_WHAT_THEY_CHANGE = ("averaged", "counter", "observed", "teacher", "tracked")  # also in eval()


def _alone(
    name: str, state: Mapping[str, torch.Tensor], whole: dict[str, torch.Tensor], data_ranks: int, num_parts: int
) -> tuple[float, torch.Tensor]:
    """Loss and output of the module in eval() with this state on each micro-batch of all data ranks at once."""
    found, outs = 0.0, torch.zeros_like(whole["x"])
    by_rank = torch.arange(len(outs)).chunk(data_ranks)
    for each in zip(*(rows.tensor_split(num_parts) for rows in by_rank), strict=True):
        one, at = made(name), torch.cat(each)
        one.load_state_dict(state)
        mine = {n: x[at] for n, x in whole.items()}
        with torch.no_grad():
            out = one.eval()(mine["x"])
        found += loss(out, mine).item() * len(at) / len(outs)
        outs[at] = out[0] if isinstance(out, tuple) else out
    return found, outs


def evaluated(rank: int, world: int, name: str, pins: dict[str, Any], rows: int, compile: str | None = None) -> float:
    """The largest difference of evaluations after a step to the module's in eval(), on `rows` rows of each data rank.

    Asserts that evaluations change nothing: the state is the same, and so are the steps of a program that is not asked.
    """

    def program() -> Any:
        return program_of(made(name), batch(4), loss, pins, compile, lr=0.05)

    def step(of: Any, number: int) -> float:
        size = 8 // of.data_world
        found = of.step({n: x[of.data_rank * size :][:size] for n, x in batch(seed=number).items()}).item()
        of.optimizer.step()
        return float(found)

    asked, other, errors = program(), program(), list[float]()
    whole = batch(rows * asked.data_world, seed=9)
    mine = {n: x[rows * asked.data_rank :][:rows] for n, x in whole.items()}
    for number in range(2):
        assert step(asked, number) == step(other, number)
        before = asked.state_dict()
        got = asked.eval_step(mine).item()
        again, outputs = asked.eval_outputs(mine, rows="all")
        after = asked.state_dict()
        assert all(torch.equal(x, after[n]) for n, x in before.items())
        parts = min(rows, asked.num_micro_batches) if name in READ_WHAT_THEY_CHANGE else 1
        want, out = _alone(name, after, whole, asked.data_world, parts)
        errors += [abs(got / want - 1), abs(got - again.item()), *(_apart(x, out) for x in outputs.values())]
        assert len(outputs) == 1
    state = other.state_dict()
    assert all(torch.equal(x, state[n]) for n, x in asked.state_dict().items())
    return max(errors)


def resumed(rank: int, world: int, folder: str, pins: dict[str, Any], then: dict[str, Any]) -> None:
    """Assert that buffers that are not persistent come back in modules, and from a checkpoint under another plan."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        made = Stacked(Averaged).double()
        for layer in made.layers:
            layer.register_buffer("average", layer.average, persistent=False)  # type: ignore[union-attr,arg-type]
        return made

    def program(pins: dict[str, Any]) -> Any:
        sgd = functools.partial(torch.optim.SGD, lr=0.05)
        given: dict[str, Any] = {"example_inputs": batch(4), "loss_fn": loss, "global_batch_size": 8}
        return autoplan.parallelize(model(), "local", optimizer=sgd, pins={"num_micro_batches": 2, **pins}, **given)

    def trained(pm: Any, one: nn.Module, seed: int) -> None:
        size, parts = 8 // pm.data_world, batch(seed=seed)
        found = pm.step({n: x[pm.data_rank * size :][:size] for n, x in parts.items()}).item()
        pm.optimizer.step()
        by_rank = {n: x.unflatten(0, (pm.data_world, 2, -1)) for n, x in parts.items()}
        wanted = 0.0
        for part in range(2):
            mine = {n: x[:, part].flatten(0, 1) for n, x in by_rank.items()}
            each = loss(one(mine["x"]), mine) / 2
            each.backward()
            wanted += each.item()
        with torch.no_grad():
            for p in one.parameters():
                p -= 0.05 * p.grad
                p.grad = None
        assert abs(found / wanted - 1) < 1e-12

    pm, one = program(pins), model()
    for seed in range(2):
        trained(pm, one, seed)
    back, wanted = pm.to_module(None), dict(one.named_buffers())
    assert len(wanted) == 4 and not wanted.keys() & pm.state_dict().keys()
    assert all(_apart(b, wanted[n]) < 1e-12 for n, b in back.named_buffers())
    pm.save_checkpoint(folder)
    again = program(then)
    assert again.load_checkpoint(folder) is not None
    trained(again, one, 2)
    wanted = dict(one.named_buffers())
    assert all(_apart(b, wanted[n]) < 1e-12 for n, b in again.to_module(None).named_buffers())
