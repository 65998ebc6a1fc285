"""Collectives that return new tensors: torch's raw functional operators, which a compiler can take into a graph.

Their Python wrappers return an asynchronous tensor subclass. None of these has a gradient: autograd functions call
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from autoplan.runtime.exchange import sum_of_parts, sums_by_exchange


def _wait(x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return out


def raw_all_reduce(x: torch.Tensor, op: str, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the reduction (`sum`, `max` or `min`) of `x` over a group."""
    return _wait(torch.ops._c10d_functional.all_reduce(x, op, group.group_name))


def raw_all_gather(x: torch.Tensor, group: dist.ProcessGroup, ranks: int) -> torch.Tensor:
    """Concatenate [n, ...] of every rank -> [ranks * n, ...]."""
    return _wait(torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), ranks, group.group_name))


def raw_reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup, ranks: int) -> torch.Tensor:
    """Sum [ranks * n, ...] over a group and keep this rank's part, [n, ...]."""
    if sums_by_exchange(group):
        return sum_of_parts(x.contiguous(), group)
    return _wait(torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", ranks, group.group_name))


def raw_all_to_all(
    x: torch.Tensor, group: dist.ProcessGroup, come: Sequence[int] | None = None, sent: Sequence[int] | None = None
) -> torch.Tensor:
    """Send parts of dim 0 to the ranks of a group and concatenate what comes; equal parts unless sizes are given."""
    ranks = dist.get_world_size(group)
    equal = [x.shape[0] // ranks] * ranks
    out = torch.ops._c10d_functional.all_to_all_single(
        x.contiguous(), list(come or equal), list(sent or equal), group.group_name
    )
    return _wait(out)
