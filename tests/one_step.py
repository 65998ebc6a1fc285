"""One training step of a program on several ranks, compared with the module on the whole batch in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from parity import worst
from torch import nn

from autoplan.runtime.model import ParallelModel


class StepErrors(NamedTuple):
    """Relative error of the loss, the worst of a gradient, and the parameters that only one of both has one of."""

    loss: float
    gradient: float
    different: list[str]


def errors_of_a_step(
    pm: ParallelModel, model: nn.Module, batch: Mapping[str, torch.Tensor], loss: Callable[[], torch.Tensor]
) -> StepErrors:
    """`loss` computes that of the module on the whole `batch`, of which every rank steps its part."""
    size = len(next(iter(batch.values()))) // pm.data_world
    found = pm.step({n: x[pm.data_rank * size : (pm.data_rank + 1) * size] for n, x in batch.items()})
    got, wanted = pm.gradients(), loss()
    wanted.backward()
    want = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    gradient, _ = worst({n: got[n] for n in want}, want)
    return StepErrors(abs(found.item() / wanted.item() - 1), gradient, sorted(set(got) ^ set(want)))
