"""The loss of a step: summed over ranks beside the last backward, or after it where stages hold parts of it."""

from __future__ import annotations

import pytest
import torch
from harness import pool

from autoplan.runtime.convert import record_collectives
from autoplan.runtime.mesh import AxisMesh
from autoplan.runtime.total import TotalLoss


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
