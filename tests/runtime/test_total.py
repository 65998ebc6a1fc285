"""The loss of a step: summed over ranks with the gradients, beside the last backward, or after it (several stages)."""

from __future__ import annotations

import math

import pytest
import torch
from harness import pool
from torch import nn

from autoplan.runtime.convert import record_collectives
from autoplan.runtime.mesh import AxisMesh
from autoplan.runtime.total import TotalLoss
from autoplan.runtime.zero import apply_zero


def totals(rank: int, world: int, axes: list[tuple[str, int]]) -> tuple[list[tuple[float, torch.dtype]], list[int]]:
    """The total if `send` is called and if not, and the collectives after `send` and in all."""
    mesh = AxisMesh(axes)
    device = torch.device("cpu")
    losses = [torch.tensor(rank + 0.25), torch.tensor(0.5)] if mesh.coordinate("pp") == mesh.size("pp") - 1 else []
    found, counts = [], []
    with record_collectives(mesh) as records:
        for sends in (True, False):
            total = TotalLoss(mesh, "dp", device, torch.float32)
            if sends:
                total.send(losses)
                counts.append(len(records))
            result = total.result(losses)
            found.append((float(result), result.dtype))
            counts.append(len(records))
    return found, counts


@pytest.mark.processes
@pytest.mark.parametrize(
    ("axes", "want", "counts"),
    [
        ([("dp", 4), ("pp", 1)], 0.25 * 4 + 6 + 0.5 * 4, [1, 1, 2]),
        ([("dp", 1), ("pp", 4)], 3.75, [0, 1, 2]),  # the losses are known on one stage only
        ([("dp", 2), ("pp", 2)], 1.25 + 3.25 + 2 * 0.5, [0, 2, 4]),
    ],
)
def test_the_loss_is_summed_over_parts_of_the_batch_and_stages(axes, want, counts):
    for found, seen in pool(4).run(totals, axes):
        assert found == [(want, torch.float32)] * 2
        assert seen == counts


def taken_along(rank: int, world: int, numbers: list[float], dtypes: dict[str, str], used: bool) -> list[object]:
    """The total, the number of messages, and the gradients, where ZeRO 0 reduces after the backward."""
    mesh = AxisMesh([("dp", world), ("pp", 1)])
    gradient, loss = (getattr(torch, dtypes[name]) for name in ("gradient", "loss"))
    stage = nn.Module()
    stage.blocks = nn.ModuleDict({"only": nn.Module()})
    for name, size in (("first", 3), ("second", 5)):
        setattr(stage.blocks["only"], name, nn.Parameter(torch.ones(size, dtype=gradient)))
    sync = apply_zero(stage, mesh.submesh("dp"), 0)
    total = TotalLoss(mesh, "dp", torch.device("cpu"), loss, sync)
    losses = [torch.tensor(numbers[rank], dtype=loss)]
    with record_collectives(mesh) as records:
        for parameter in stage.parameters() if used else ():
            parameter.grad = torch.full_like(parameter, rank + 1)
        total.send(losses)
        sync.before_backward(0, is_last=True)
        sync.finish_step()
        result = total.result(losses)
    return [float(result), len(records), [p.grad.tolist() if p.grad is not None else None for p in stage.parameters()]]


FAR_APART = [2.0**20, 1 / 3, -(2.0**20), 0.1]  # their sum in float32 would keep little of the small ones
WHOLE = [[10.0] * 3, [10.0] * 5]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("dtypes", "used", "messages", "gradients"),
    [
        ({"gradient": "float32", "loss": "float32"}, True, 1, WHOLE),
        ({"gradient": "float64", "loss": "float64"}, True, 1, WHOLE),
        ({"gradient": "float32", "loss": "float64"}, True, 2, WHOLE),  # float32 does not hold it
        ({"gradient": "float32", "loss": "float32"}, False, 1, [None, None]),
    ],
)
def test_the_loss_goes_with_the_gradients_and_is_not_rounded(dtypes, used, messages, gradients):
    wide = [float(torch.tensor(x, dtype=getattr(torch, dtypes["loss"]))) for x in FAR_APART]
    expected = float(torch.tensor(math.fsum(wide), dtype=getattr(torch, dtypes["loss"])))
    for found, sent, grads in pool(4).run(taken_along, FAR_APART, dtypes, used):
        assert found == pytest.approx(expected, rel=1e-9)
        assert (sent, grads) == (messages, gradients)


@pytest.mark.processes
@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_leaves_the_gradients_alone(number):
    numbers = [1.0, number, 1.0, 1.0]
    for found, _, grads in pool(4).run(taken_along, numbers, {"gradient": "float32", "loss": "float32"}, True):
        assert str(found) == str(number)
        assert grads == WHOLE
