"""A job that trains any small model under a plan for some steps, and compares with one process."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import autoplan

Batch = dict[str, torch.Tensor]
Loss = Callable[[Any, Mapping[str, torch.Tensor]], torch.Tensor]
SIZE = 8  # samples of a batch


@dataclass(frozen=True)
class TrainedCase:
    """A model in float64: `batch(size, seed)` gives what it and its loss take."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Loss

    def model(self) -> nn.Module:
        """The model with the same values on every rank, complex numbers in double precision too."""
        torch.manual_seed(0)
        model = self.make()
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is not None and p.dtype in _WIDE:
                    module._parameters[name] = nn.Parameter(p.detach().to(_WIDE[p.dtype]), p.requires_grad)
            for name, b in module._buffers.items():
                if b is not None and b.dtype in _WIDE:
                    module._buffers[name] = b.to(_WIDE[b.dtype])
        return model


_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def normal(*shape: int, name: str = "x") -> Callable[[int, int], Batch]:
    """Return a batch of random numbers."""

    def made(size: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(size, *shape, generator=generator, dtype=torch.float64)}

    return made


def square(out: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean of the squares."""
    return out.square().mean()


def of_one_process(
    model: nn.Module, batches: Sequence[Mapping[str, torch.Tensor]], loss: Loss, num_parts: int, data_ranks: int
) -> tuple[list[float], dict[str, Any]]:
    """Losses, and the state after training in one process, which runs each micro-batch of all data ranks at once."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    taken = inspect.signature(model.forward).parameters
    for whole in batches:
        total = 0.0
        by_rank = {n: x.reshape(data_ranks, num_parts, -1, *x.shape[1:]) for n, x in whole.items()}
        for part in range(num_parts):
            mine = {n: x[:, part].flatten(0, 1) for n, x in by_rank.items()}
            found = loss(model(**{n: x for n, x in mine.items() if n in taken}), mine) / num_parts
            torch.autograd.backward(found)
            total += found.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def trained(rank: int, world: int, module: str, name: str, pins: dict[str, Any], steps: int = 3) -> float:
    """Return the largest difference to one process, relative: of losses, parameters and buffers after some steps.

    Args:
        module, name: `CASES[name]` of this module is trained.
    """
    case: TrainedCase = importlib.import_module(module).CASES[name]
    model = case.model()
    one = copy.deepcopy(model)
    pm = autoplan.parallelize(
        model,
        "local",
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        example_inputs=case.batch(4, 0),
        loss_fn=case.loss,
        pins=pins,
        global_batch_size=SIZE,
    )
    size, losses, batches = SIZE // pm.data_world, [], [case.batch(SIZE, 1 + step) for step in range(steps)]
    for batch in batches:
        losses.append(pm.step({n: x[pm.data_rank * size :][:size] for n, x in batch.items()}).item())
        assert pm.optimizer is not None
        pm.optimizer.step()
        pm.optimizer.zero_grad()
    want, state = of_one_process(one, batches, case.loss, pm.num_micro_batches, pm.data_world)
    got = pm.state_dict()
    assert list(got) and got.keys() == state.keys()
    errors = [abs(a / b - 1) for a, b in zip(losses, want, strict=True)]
    for key, x in state.items():
        assert got[key].dtype == x.dtype
        errors.append(float((got[key] - x).abs().max() / x.abs().max().clamp(min=1e-3)))
    return max(errors)
