"""Async TP is tried before it is used. A CPU has no operators for it; torch's fallbacks, which gather, stand in."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from harness import pool

from autoplan.runtime.async_tp import hides_behind_pieces


def tried(rank: int, world: int, operators: str) -> tuple[bool, list[str]]:
    """Whether it works on this rank, and what is said; `operators`: none, right, or wrong on rank 1."""
    from torch.distributed import _symmetric_memory as torch_s

    library = torch.library.Library("symm_mem", "IMPL", "CPU")
    if operators != "none":

        def scatter(a: torch.Tensor, b: torch.Tensor, op: str, dim: int, name: str) -> torch.Tensor:
            out: torch.Tensor = torch_s._fused_matmul_reduce_scatter_fallback(a, b, op, dim, name)
            return out + int(operators == "wrong" and rank == 1)

        library.impl("fused_all_gather_matmul", torch_s._fused_all_gather_matmul_fallback)
        library.impl("fused_matmul_reduce_scatter", scatter)
    group = dist.group.WORLD
    assert group is not None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        works = hides_behind_pieces(group, torch.device("cpu"))
    library._destroy()
    return works, [str(w.message) for w in said if "async TP" in str(w.message)]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("operators", "reason"),
    [
        ("none", "NotImplementedError: Could not run 'symm_mem::fused_all_gather_matmul'"),
        ("right", None),
        ("wrong", "rank 1: a product before a reduce-scatter came out wrong"),
    ],
)
def test_all_ranks_use_async_tp_or_none_does_and_says_why(operators: str, reason: str | None) -> None:
    for works, said in pool(2).run(tried, operators, timeout_s=60.0):
        assert works is (reason is None)
        assert len(said) == (reason is not None)
        assert all(str(reason) in line and "one by one" in line for line in said)
