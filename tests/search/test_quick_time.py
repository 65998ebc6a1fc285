"""The bound that needs no layout is below the bounds that have one, and known at any stop."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import clocks
import pytest
import torch
from torch import nn

import autoplan
from autoplan import catalog
from autoplan.config.parallel import Mode
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.schedules.schedule import SCHEDULES
from autoplan.search.group_bounds import grouped, step_bounds_s
from autoplan.search.interleaved_cuts import ChunkCutter
from autoplan.search.layout_store import LayoutStore
from autoplan.search.layouts import LayoutCache
from autoplan.search.planner import search_plan
from autoplan.search.quick_time import QuickTime
from autoplan.search.request import PlanRequest, space_of

H100, A100, B200 = "2x8xh100-sxm5-80gb", "2x8xa100-sxm4-80gb", "2x8xb200-sxm-180gb"


@pytest.mark.parametrize(
    ("model", "cluster", "mode", "precision"),
    [
        ("gpt2", A100, Mode.EAGER, "bf16"),
        ("gpt2", H100, Mode.FUSED, "fp8"),
        ("llama-3.2-1b", B200, Mode.COMPILED, "mxfp8"),
        ("mixtral-8x7b", H100, Mode.FUSED, "bf16"),
        ("mixtral-8x7b", A100, Mode.EAGER, "fp32"),
    ],
)
def test_it_is_below_the_bounds_with_a_layout(model: str, cluster: str, mode: Mode, precision: str) -> None:
    """With fewer micro-batches than stages, one of them that passes all stages is longer than the share of a rank.

    The bound with a layout knows that of 1F1B only. So under other schedules the step itself is compared, of the best
    cut with unlimited memory.
    """
    r = PlanRequest(
        catalog.load_model(model), Cluster.parse(cluster), 1024, 64, {"cp": 1}, mode=mode, precision=precision
    )
    points, quick, shares, of_steps = LayoutCache(r), QuickTime(r), list[float](), list[float]()
    for members in list(grouped(space_of(r).candidates))[::7]:
        least = points.least_pass(members[0])
        if least is not None:
            for c, bound in zip(members, step_bounds_s(least, members), strict=True):
                if SCHEDULES[c.schedule].windows or c.num_micro_batches >= c.pp:
                    shares.append(quick.bound_s(c) / bound)
                else:
                    cutter = points.cutter(c)
                    assert isinstance(cutter, ChunkCutter)
                    of_steps.append(quick.bound_s(c) / cutter.free_bound_s())
    assert min(shares) > 0.0 and 0.05 < max(shares) < 1.0
    assert min(of_steps) > 0.0 and max(of_steps) < 1.0


def test_it_is_below_the_steps_of_every_schedule() -> None:
    """Also with so few micro-batches that one of them on its way through the pipeline is most of the step."""
    r = PlanRequest(catalog.load_model("llama-3.2-1b"), Cluster.parse(H100), 4096, 16, {"tp": 1, "dp": 4})
    points, quick, shares = LayoutCache(r), QuickTime(r), dict[str, float]()
    for c in sorted(space_of(r).candidates, key=lambda c: c.num_micro_batches):
        cutter = points.cutter(c) if c.pp > 1 and c.zero_stage < 3 and c.micro_batch_size < 4 else None
        step = math.inf if cutter is None else cutter.bound_s()
        if step < math.inf:
            assert quick.bound_s(c) <= step
            shares[c.schedule] = max(shares.get(c.schedule, 0.0), quick.bound_s(c) / step)
    assert len(shares) >= 5 and min(shares.values()) > 0.2


def test_a_search_looks_at_no_work_of_what_it_excludes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is the same, and so are the counts."""
    r = PlanRequest(catalog.load_model("gpt2-xl"), Cluster.parse(H100), 1024, 16)
    made = list[object]()
    real = LayoutCache._work

    def counted(self: LayoutCache, *layout: Any) -> Any:
        made.append(layout)
        return real(self, *layout)

    monkeypatch.setattr(LayoutCache, "_work", counted)
    quick = search_plan(r)
    few = len(made)
    monkeypatch.setattr(QuickTime, "bound_s", lambda self, candidate: 0.0)
    slow = search_plan(replace(r, layouts=LayoutStore()))
    assert quick.plans[0].config == slow.plans[0].config and quick.fastest_s == slow.fastest_s
    assert 0 < few < len(made) - few
    one, other = quick.certificate, slow.certificate
    assert (one.considered, one.solved, one.too_big) == (other.considered, other.solved, other.too_big)


def test_a_search_that_is_stopped_at_once_still_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    r = PlanRequest(catalog.load_model("gpt2"), Cluster.parse("1x8xh100-sxm5-80gb"), 1024, 64, time_limit_s=10.0)
    best = search_plan(r).fastest_s
    clocks.ticking(monkeypatch, 1.0)
    found = search_plan(r)
    assert found.certificate.open and found.certificate.gap < 1.0
    assert found.fastest_s * (1 - found.certificate.gap) <= best * (1 + 1e-9)


class Waves(nn.Module):
    """A product of complex numbers, as state-space kernels and spectral convolutions have them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)
        self.phase = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wave = self.first(x).to(torch.complex64) @ torch.polar(torch.ones(8, 8), self.phase)
        out: torch.Tensor = self.last(wave.real)
        return out


def test_products_of_complex_numbers_are_planned() -> None:
    plan = autoplan.plan(
        Waves(),
        "2xh100-sxm5-80gb",
        example_inputs={"x": torch.zeros(4, 6, 4)},
        loss_fn=lambda out, _: out.square().mean(),
        global_batch_size=8,
    )
    assert plan.estimate is not None and plan.estimate.fits
