"""Layouts where the host decides: fewer collectives, if that is faster and keeps hardly more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoplan import catalog
from autoplan.config.parallel import Launch, ParallelConfig, RunOptions
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.search import host_layouts
from autoplan.search.candidate_layout import CandidateLayout
from autoplan.search.estimate import estimate_config
from autoplan.search.host_layouts import PassPrices, passes_of, with_host
from autoplan.search.intra import SendWish
from autoplan.search.layouts import LayoutCache
from autoplan.search.planner import search_plan
from autoplan.search.request import PlanRequest

CLUSTER = Cluster.parse("4x4xgb200")
TP4 = ParallelConfig(dp=4, tp=4, num_micro_batches=16)
CUT = (4, 1, 1, False)


def request(model: str = "llama-3.2-1b", seq_len: int = 2048, **given: object) -> PlanRequest:
    return PlanRequest(catalog.load_model(model), CLUSTER, seq_len, 64, cache=False, **given)  # type: ignore[arg-type]


def num_sent(point: CandidateLayout, block: str) -> int:
    return sum(c.per != "step" for c in point.workload.blocks[block].comms)


def both(r: PlanRequest) -> tuple[CandidateLayout, CandidateLayout]:
    """Return the layout that is the fastest for the device, and the one that is taken."""
    points = LayoutCache(r)
    first, taken = points.for_device(4, 1, 1, None), points.get(4, 1)
    assert first is not None and taken is not None
    return first, taken


def test_where_the_host_decides_fewer_collectives_are_faster() -> None:
    r = request()
    first, taken = both(r)
    assert (num_sent(first, "layer"), num_sent(taken, "layer")) == (8, 4)
    old, new = (passes_of(p, CUT, None, r.costs, LayoutCache(r).precision) for p in (first, taken))
    assert new.seconds < 0.85 * old.seconds and new.waited_s < old.waited_s
    planned = estimate_config(r, TP4)
    assert planned.point.solution.selection == taken.solution.selection


@pytest.mark.parametrize(
    "changes",
    [
        {"options": RunOptions(launch=Launch.FULL_GRAPHS)},  # no host
        {"seq_len": 32_768},  # the device has enough to do
        {"like": "megatron-bridge"},  # a framework splits layers as it does
    ],
    ids=["graphs", "long", "stack"],
)
def test_elsewhere_the_layout_is_the_fastest_for_the_device(changes: dict[str, object]) -> None:
    first, taken = both(request(**changes))
    assert taken is first


def test_a_layout_that_keeps_much_more_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer collectives end sequence parallelism here, which keeps a third more."""
    r = request("qwen3-30b-a3b", 8192)
    first, taken = both(r)
    assert sum(taken.workload.unit_saved) > 1.2 * sum(first.workload.unit_saved)
    monkeypatch.setattr(host_layouts, "_MORE_KEPT", 0.01)
    first, taken = both(r)
    assert sum(taken.workload.unit_saved) <= 1.01 * sum(first.workload.unit_saved)


def test_values_between_blocks_stay_if_they_would_keep_too_much() -> None:
    """Then others are solved, with all choices between blocks as they were, and less weight on the host."""
    first, _ = both(request())
    asked: list[SendWish] = []

    def made(wish: SendWish) -> CandidateLayout:
        asked.append(wish)
        kept = tuple(5 * saved for saved in first.workload.unit_saved)
        return replace(first, workload=replace(first.workload, unit_saved=kept))

    assert with_host(first, 1e-4, 1e9, made, lambda point: PassPrices(1.0, 0.5)) is first
    assert [(wish.send_s, bool(wish.fixed)) for wish in asked] == [
        (1e-4, False), (1e-4, True), (5e-5, True), (2.5e-5, True)
    ]  # fmt: skip
    assert {name.partition(" ")[0] for name, _ in asked[1].fixed} == {"boundary"}
    assert with_host(first, 1e-4, 1e9, made, lambda point: PassPrices(1.0, 0.005)) is first and len(asked) == 4


def test_a_faster_device_is_not_slower() -> None:
    """The fault that this mends: with cheaper collectives more of them were chosen, each of which the host starts."""
    times = [
        estimate_config(replace(request(), cluster=Cluster.parse(text)), TP4).estimate.step_time_s.mid
        for text in ("4x4xa100-sxm4-80gb", "4x4xh100-sxm5-80gb", "4x4xgb200")
    ]
    assert times == sorted(times, reverse=True)


def test_a_faster_memory_is_not_slower() -> None:
    """With it whole norms cost nothing, but keep too much: before, the layout with most collectives was taken."""
    r = PlanRequest(catalog.load_model("llama-3.1-8b"), Cluster.parse("64x8xgb200"), 8192, 256, cache=False)
    c = ParallelConfig(dp=16, tp=16, cp=2, num_micro_batches=8, micro_batch_size=2, zero_stage=1)
    twice = r.cluster.with_(memory_gb_s=2 * r.cluster.device.memory_bytes_per_s / 1e9)
    usual, faster = (estimate_config(replace(r, cluster=cluster), c) for cluster in (r.cluster, twice))
    assert faster.estimate.step_time_s.mid < usual.estimate.step_time_s.mid


def test_a_search_prices_its_plan_as_an_estimate_does() -> None:
    r = replace(request(), pins={"tp": 4, "micro_batch_size": 1})
    result = search_plan(r)
    plan, certificate = result.plans[0], result.certificate
    again = estimate_config(r, plan.config)
    assert again.estimate.step_time_s == plan.estimate.step_time_s
    assert again.point.solution.selection == plan.point.solution.selection
    assert certificate.status in ("complete", "within the gap asked for")
    assert num_sent(plan.point, "layer") == 4


@pytest.mark.parametrize("how", [{"recompute": "offload"}, {}])
def test_layouts_of_activations_on_the_host_keep_least(how: dict[str, str]) -> None:
    first, taken = both(request())
    planned = estimate_config(request(), TP4.but(**how))
    assert planned.point.solution.selection == (first if how else taken).solution.selection
    points, wanted = LayoutCache(request()), TP4.but(offload=("activations",) if how else ())
    found = points.of(wanted)
    assert found is not None and found.solution.selection == planned.point.solution.selection
