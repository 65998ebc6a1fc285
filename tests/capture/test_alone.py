"""A model is captured as in one process, whatever job it is in and whatever else is installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import fake_group
from test_faithful import Model, assert_equal, given, graph_of, mean_square

from autoplan.errors import CaptureError
from autoplan.verify.check import verify_whole
from autoplan.verify.runs import VerifyTask


def summed_over_ranks(m: Any, x: torch.Tensor) -> torch.Tensor:
    """What code for DistributedDataParallel does between the ranks of a job."""
    if not dist.is_initialized():
        return x
    whole = x.detach() * 3  # in the place of an all-reduce, for which rank 0 would wait
    return x + whole * dist.get_world_size()


def test_a_forward_that_asks_for_the_job_computes_what_one_process_does() -> None:
    model, batch = Model(summed_over_ranks).double(), given()
    alone = graph_of(model, batch)
    with fake_group(2):
        inside = graph_of(model, batch)
        verified = verify_whole(VerifyTask(model, inside, batch, mean_square), 1e9)
        assert dist.is_initialized() and dist.get_world_size() == 2
    assert inside.content_hash == alone.content_hash
    assert verified.done  # the module ran as in one process there, too


def test_a_forward_that_needs_the_job_is_refused() -> None:
    def scaled(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x * dist.get_world_size()

    with fake_group(2):
        with pytest.raises(CaptureError, match=r"test_alone.py:\d+.* needs the other processes of a job"):
            graph_of(Model(scaled).double(), given())
        assert dist.get_world_size() == 2


def test_products_of_many_tensors_hold_for_any_size_with_opt_einsum(monkeypatch: pytest.MonkeyPatch) -> None:
    def path(equation: str, *tensors: torch.Tensor, optimize: object) -> tuple[list[tuple[int, int]], None]:
        assert all(
            int(size) for t in tensors for size in t.shape
        )  # as opt_einsum: numbers, for which it finds an order
        return [(0, 1)] * (len(tensors) - 1), None

    inside = torch.backends.opt_einsum._set_enabled.__globals__  # the module sets its flags by properties
    for name, value in (
        ("is_available", lambda: True),
        ("get_opt_einsum", lambda: SimpleNamespace(contract_path=path)),
        ("enabled", True),
        ("strategy", "auto"),
    ):
        monkeypatch.setitem(inside, name, value)

    def gated(m: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bsd,bse,bsd->bsd", x, x.tanh(), x)

    model, batch = Model(gated).double(), given()
    assert [str(size) for size in graph_of(model, batch).values["x"].shape][:2] == ["b", "s"]
    assert_equal(model, batch)
