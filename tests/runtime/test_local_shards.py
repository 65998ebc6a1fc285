"""Optimizers over the local parts of sharded parameters: the same bits as over the DTensors themselves."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from harness import pool, worker_mesh
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from autoplan.runtime.optim import on_local_shards

OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2),
    "sgd": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    # by number of dims, as one leaves out norms and biases
    "groups": lambda ps: torch.optim.AdamW(
        [
            {"params": [p for p in ps if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in ps if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
    ),
}


class Odd(nn.Module):
    """Shards of 2 and 1 rows of 3, of 1 and 0 of 1; a parameter without a gradient, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(3, 1)
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh() * self.frozen).square().mean()


def trained(rank: int, world: int, name: str, local: bool, closure: str) -> dict[str, Any]:
    """Parameters after three steps, and what the optimizer holds."""
    torch.manual_seed(0)
    model = Odd().double()
    fully_shard(model, mesh=worker_mesh((world,), ("dp",)))
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = on_local_shards(OPTIMIZERS[name], parameters) if local else OPTIMIZERS[name](parameters)
    for step in range(3):
        x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))

        def backward(x: torch.Tensor = x) -> torch.Tensor:
            for p in parameters:
                p.grad = None
            loss = model(x)
            loss.backward()
            return loss

        if closure == "argument":
            optimizer.step(backward)
        elif closure == "keyword":
            optimizer.step(closure=backward)
        else:
            backward()
            optimizer.step()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "parameters": [p.full_tensor().detach() for p in model.parameters()],
        "sharded": any(isinstance(t, DTensor) for s in optimizer.state.values() for t in (*s.values(), *held)),
        "gradients": sum(p.grad is not None for p in held),
    }


@pytest.mark.processes
@pytest.mark.parametrize("closure", ["no", "argument", "keyword"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_local_parts_train_as_the_dtensors_do(name: str, closure: str) -> None:
    whole = pool(2).run(trained, name, False, closure)
    local = pool(2).run(trained, name, True, closure)
    torch.manual_seed(0)
    before = [p.detach() for p in Odd().double().parameters()]
    for mine, theirs in zip(local, whole, strict=True):
        assert theirs["sharded"] and not mine["sharded"]
        assert mine["gradients"] == 0
        assert all(torch.equal(a, b) for a, b in zip(mine["parameters"], theirs["parameters"], strict=True))
        changed = [not torch.equal(a, b) for a, b in zip(mine["parameters"], before, strict=True)]
        assert changed == [name not in ("unused", "frozen") for name, _ in Odd().named_parameters()]


def test_plain_parameters_are_given_as_they_are() -> None:
    parameters = list(Odd().parameters())
    optimizer = on_local_shards(OPTIMIZERS["adamw"], iter(parameters))
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], parameters, strict=True))


class OnCuda(nn.Parameter):
    """A parameter that says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    ("kind", "settings", "place", "fuses"),
    [
        (torch.optim.AdamW, {}, OnCuda, True),
        (torch.optim.Adam, {}, OnCuda, True),
        (torch.optim.AdamW, {}, nn.Parameter, True),
        (torch.optim.Adam, {}, nn.Parameter, True),
        (torch.optim.AdamW, {"foreach": False}, nn.Parameter, False),
        (torch.optim.AdamW, {"foreach": True}, OnCuda, False),
        (torch.optim.AdamW, {"fused": False}, OnCuda, False),
        (torch.optim.SGD, {}, OnCuda, False),
    ],
)
def test_adamw_is_one_kernel_unless_told_otherwise(
    kind: Any, settings: dict[str, Any], place: Any, fuses: bool
) -> None:
    """The fused kernel, run here on the CPU, gives what torch's default gives; the state is read back by both."""
    values = torch.linspace(-1, 1, 12, dtype=torch.float64)

    def step(p: nn.Parameter, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        for _ in range(3):
            p.grad = (p.detach() * 3 + 1).clone()
            optimizer.step()
        return p.detach().clone()

    p = place(values.clone())
    optimizer = on_local_shards(lambda ps: kind(ps, lr=1e-2, **settings), [p])
    assert bool(optimizer.param_groups[0].get("fused")) is fuses
    plain = nn.Parameter(values.clone())
    usual = kind([plain], lr=1e-2)
    torch.testing.assert_close(step(p, optimizer), step(plain, usual), rtol=1e-12, atol=1e-12)
    usual.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(usual.state_dict()))
    torch.testing.assert_close(step(p, optimizer), step(plain, usual), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("settings", [{}, {"fused": True}])
@pytest.mark.parametrize("place", ["nowhere", "gradient", "moments", "parameter", "closure"])
def test_the_kernel_of_a_cpu_gets_contiguous_tensors(place: str, settings: dict[str, Any]) -> None:
    """torch's kernel ignores strides: without the copies it would update the wrong elements."""
    values = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x.t().contiguous().t()

    def trained(optimize: Any) -> torch.Tensor:
        p = nn.Parameter(turned(values) if place == "parameter" else values.clone())
        optimizer = optimize(lambda ps: torch.optim.AdamW(ps, lr=1e-2, **settings), [p])

        def backward() -> None:
            gradient = (p.detach() * 3 + torch.arange(12).reshape(3, 4)).clone()
            p.grad = turned(gradient) if place in ("gradient", "closure") else gradient.contiguous()

        for _ in range(3):
            if place == "closure":
                optimizer.step(backward)
            else:
                backward()
                optimizer.step()
            if place == "moments":
                for name in ("exp_avg", "exp_avg_sq"):
                    optimizer.state[p][name] = turned(optimizer.state[p][name])
        return p.detach().clone()

    def plainly(make: Any, parameters: list[nn.Parameter]) -> Any:
        optimizer = make(parameters)
        optimizer.param_groups[0]["fused"] = False
        return optimizer

    torch.testing.assert_close(trained(on_local_shards), trained(plainly), rtol=1e-12, atol=1e-12)
