"""Async TP is tried before it is used. A CPU has no operators for it; torch's fallbacks, which gather, stand in."""

from __future__ import annotations

import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import pool

from autoplan.runtime import async_tp
from autoplan.runtime.async_tp import ProductSize, hides_behind_pieces, largest_product
from autoplan.runtime.mesh import AxisMesh
from autoplan.runtime.spec import ParamSpec, ShardSpec

SLOW_S = 0.02


def tried(rank: int, world: int, operators: str, slow: str) -> tuple[bool, list[str]]:
    """Whether it is used on this rank, and what is said.

    Args:
        operators: none, right, or wrong on rank 1.
        slow: which way takes longer on rank 1: apart or pieces.
    """
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
    with warnings.catch_warnings(record=True) as said, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        way = getattr(async_tp._Trial, slow)
        patch.setattr(async_tp._Trial, slow, lambda self: (time.sleep(SLOW_S if rank == 1 else 0.0), way(self))[1])
        works = hides_behind_pieces(group, torch.device("cpu"), ProductSize(8, 96, 40))
    library._destroy()
    return works, [str(w.message) for w in said if "async TP" in str(w.message)]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("operators", "slow", "reason"),
    [
        ("none", "apart", "NotImplementedError: Could not run 'symm_mem::fused_all_gather_matmul'"),
        ("right", "apart", None),
        ("right", "pieces", r"they take \d.* ms where one by one take"),
        ("wrong", "apart", "rank 1: a product before a reduce-scatter came out wrong"),
    ],
)
def test_all_ranks_use_async_tp_or_none_does_and_says_why(operators: str, slow: str, reason: str | None) -> None:
    """Because a rank fails, gets other values, or is slower with it than without."""
    for works, said in pool(2).run(tried, operators, slow, timeout_s=60.0):
        assert works is (reason is None)
        assert len(said) == (reason is not None)
        for line in said:
            with pytest.raises(UserWarning, match=f"{reason}.*one by one"):
                raise UserWarning(line)


def test_a_device_that_is_stuck_ends_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that waits for another rank cannot be stopped, so that nothing else can run on the device."""
    stuck = SimpleNamespace(record_event=lambda: SimpleNamespace(query=lambda: False))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stuck)
    monkeypatch.setattr(async_tp, "_LONGEST_S", 0.01)
    trial: Any = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(RuntimeError, match="stuck; start the job again with async_tp=False"):
        async_tp._Trial._wait(trial)


def weight(shape: tuple[int, int], *axes: str, dim: int = 0) -> ParamSpec:
    factors = ((2, shape[0] // 2), (2, shape[1] // 2))
    shards = tuple(ShardSpec(axis, dim, k) for k, axis in enumerate(axes))
    return ParamSpec("block", "weight", f"weight{shape}", shape, factors, "bfloat16", True, shards, (), ())


def test_both_ways_are_timed_at_the_size_of_the_largest_product() -> None:
    """Of those that tensor parallelism splits, over one of its sub-axes or more."""
    dist.init_process_group("fake", rank=0, world_size=8)
    try:
        mesh = AxisMesh([("dp", 2), ("a", 2), ("b", 2)], {"tp": ("a", "b")})
        whole, cut, wide = weight((512, 512)), weight((64, 32), "a", dim=1), weight((128, 48), "a", "b")
        assert largest_product([whole, cut, wide], mesh, 7) == ProductSize(7, 48, 32)
        assert largest_product([whole, cut], mesh, 7) == ProductSize(7, 64, 16)
        assert largest_product([whole, weight((4096, 64), "dp")], mesh, 7) == ProductSize(7)
    finally:
        dist.destroy_process_group()
