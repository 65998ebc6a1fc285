"""Reductions over gloo: the sums of torch's reduce-scatter, in the order of the ranks, in fewer bytes."""

import pytest
import torch
import torch.distributed as dist
from harness import pool
from spmd_types import R

from autoplan.runtime.convert import all_gather, record_collectives, reduce_scatter
from autoplan.runtime.exchange import ReduceScatterByExchange
from autoplan.runtime.mesh import AxisMesh, use_mesh

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


def converted(rank: int, world: int, dim: int) -> tuple[list[torch.Tensor], list[tuple[str, str]]]:
    """A reduce-scatter and a gather along `dim`, and the gradients of both (the weights are those of the rank)."""
    mesh = AxisMesh([("tp", world)])
    whole, part = (torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for shape in ((8, 8), (2, 2)))
    whole, part = whole.requires_grad_(), part.requires_grad_()
    with use_mesh(mesh), record_collectives(mesh) as records:
        scattered, gathered = reduce_scatter(whole, "tp", dim), all_gather(part, "tp", dim, dst=R)
        ((rank + 1) * (scattered.sum() + gathered.sum())).backward()
    assert whole.grad is not None and part.grad is not None
    return [x.detach() for x in (scattered, gathered, whole.grad, part.grad)], [(r.kind, r.phase) for r in records]


@pytest.mark.processes
@pytest.mark.parametrize("dim", [0, 1])
def test_conversions_over_gloo_reduce_by_an_exchange(dim):
    found = pool(4).run(converted, dim)
    wholes, parts = (
        [torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
        for shape in ((8, 8), (2, 2))
    )
    total = sum(wholes[1:], wholes[0])
    for rank, ((scattered, gathered, for_whole, for_part), records) in enumerate(found):
        assert torch.equal(scattered, total.chunk(4, dim)[rank])
        assert torch.equal(gathered, torch.cat(parts, dim))
        weights = torch.cat([torch.full((8, 8), r + 1.0).chunk(4, dim)[r] for r in range(4)], dim)
        assert torch.equal(for_whole, weights)
        assert torch.equal(for_part, torch.full((2, 2), 10.0))
        assert sorted(records) == [
            ("all_gather", "backward"),
            ("all_gather", "forward"),
            ("reduce_scatter", "backward"),
            ("reduce_scatter", "forward"),
        ]
