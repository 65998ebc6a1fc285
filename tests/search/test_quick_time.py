"""The bound that needs no layout is below the bounds that have one, and known at any stop."""

from __future__ import annotations

import clocks
import pytest

from autoplan import catalog
from autoplan.config.parallel import Mode
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.search.group_bounds import grouped, step_bounds_s
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
    r = PlanRequest(
        catalog.load_model(model), Cluster.parse(cluster), 1024, 64, {"cp": 1}, mode=mode, precision=precision
    )
    points, quick, shares = LayoutCache(r), QuickTime(r), list[float]()
    for members in list(grouped(space_of(r).candidates))[::7]:
        least = points.least_pass(members[0])
        if least is not None:
            bounds = step_bounds_s(least, members)
            shares += [quick.bound_s(c) / bound for c, bound in zip(members, bounds, strict=True)]
    assert min(shares) > 0.0 and 0.05 < max(shares) < 1.0


def test_a_search_that_is_stopped_at_once_still_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    r = PlanRequest(catalog.load_model("gpt2"), Cluster.parse("1x8xh100-sxm5-80gb"), 1024, 64, time_limit_s=10.0)
    best = search_plan(r).fastest_s
    clocks.ticking(monkeypatch, 1.0)
    found = search_plan(r)
    assert found.certificate.open and found.certificate.gap < 1.0
    assert found.fastest_s * (1 - found.certificate.gap) <= best * (1 + 1e-9)
