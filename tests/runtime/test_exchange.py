"""ZeRO's reduction over gloo: the sums of torch's reduce-scatter, in the order of the ranks, in fewer bytes."""

import pytest
import torch
import torch.distributed as dist
from harness import pool

from autoplan.runtime.convert import record_collectives
from autoplan.runtime.exchange import ReduceScatterByExchange
from autoplan.runtime.mesh import AxisMesh

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def given(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(12, generator=torch.Generator().manual_seed(rank)).to(dtype)


def reduced(rank: int, world: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[tuple[str, str, int]]]:
    mesh = AxisMesh([("dp", world)])
    sent, out = given(rank, dtype), torch.empty(12 // world, dtype=dtype)
    with record_collectives(mesh) as records:
        ReduceScatterByExchange()(out, sent, mesh.group("dp"), dist.ReduceOp.SUM)
    assert torch.equal(sent, given(rank, dtype))  # gradients that are added up later stay as they are
    return out, [(r.kind, r.axis, r.bytes) for r in records]


@pytest.mark.processes
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rank_gets_its_part_of_the_sum_in_the_order_of_ranks(dtype):
    found = pool(4).run(reduced, dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32  # a sum of 16 bits is rounded once
    total = given(0, dtype).to(wide)
    for rank in range(1, 4):
        total = total + given(rank, dtype).to(wide)
    assert torch.equal(torch.cat([out for out, _ in found]), total.to(dtype))
    assert all(records == [("reduce_scatter", "dp", 12 * dtype.itemsize)] for _, records in found)


def largest(rank: int, world: int) -> torch.Tensor:
    out = torch.empty(12 // world)
    ReduceScatterByExchange()(out, given(rank, torch.float32), dist.group.WORLD, dist.ReduceOp.MAX)
    return out


@pytest.mark.processes
def test_other_reductions_than_sums_are_torch_s():
    whole = torch.stack([given(rank, torch.float32) for rank in range(2)]).amax(0)
    assert torch.equal(torch.cat(pool(2).run(largest)), whole)
