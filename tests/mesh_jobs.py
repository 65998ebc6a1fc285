"""Jobs of test_mesh.py that run on several processes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from autoplan.runtime.mesh import AxisMesh

WANTED = {"dp": True, "tp": True, "alone": True, "left": 0}


def made_twice(rank: int, world: int) -> dict[str, bool | int]:
    """A mesh, closed, then another: sums over each axis are those of its ranks, and nothing is left over."""
    before = len(dist.distributed_c10d._world.pg_map)
    found: dict[str, bool | int] = {}
    for _ in range(2):
        mesh = AxisMesh([("pp", 1), ("dp", 2), ("tp", 2)])
        for axis in ("dp", "tp"):
            total = torch.tensor([float(rank)])
            dist.all_reduce(total, group=mesh.group(axis))
            found[axis] = found.get(axis, True) and total.item() == sum(mesh._own_ranks((axis,)))
        alone = torch.tensor([float(rank)])
        dist.all_reduce(alone, group=mesh.group("pp"))
        found["alone"] = alone.item() == rank
        mesh.close()
    return {**found, "left": len(dist.distributed_c10d._world.pg_map) - before}
