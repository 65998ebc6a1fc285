"""Searches that share a store of layouts find what each finds alone, and solve fewer problems."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoplan import catalog
from autoplan.config.choices import options_of
from autoplan.config.parallel import Mode
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.search.certificate import SearchResult
from autoplan.search.intra import LayoutProgram, solve
from autoplan.search.layout_problem import layout_batches, layout_problem, prices_key
from autoplan.search.layout_store import FEWEST, MOST, LayoutStore, layouts_in
from autoplan.search.layouts import LayoutCache
from autoplan.search.planner import search_plan
from autoplan.search.request import PlanRequest
from autoplan.sweeps.size import size

CUT = (4, 1, 1, False)  # tp, micro-batch size, cp, own dispatch


def _request(nodes: int = 2, model: str = "llama-3.2-1b", at: str = "", **more: Any) -> PlanRequest:
    figures: dict[str, Any] = {"seq_len": 8192, "global_batch_size": 512} | more
    return PlanRequest(catalog.load_model(model), Cluster.parse(f"{nodes}x8xh100-sxm5-80gb{at}"), **figures)


def _at(request: PlanRequest, nodes: int) -> PlanRequest:
    return replace(request, cluster=request.cluster.with_(nodes=nodes))


def test_a_sweep_finds_the_plans_of_separate_searches() -> None:
    pins = {"tp": 2, "micro_batch_size": 1}
    base = replace(_request(8), pins=pins)
    for nodes in (8, 4, 2):
        shared, alone = search_plan(_at(base, nodes)), search_plan(replace(_request(nodes), pins=pins))
        _same(shared, alone)
        assert shared.certificate.gap == pytest.approx(alone.certificate.gap, abs=1e-12)
    assert shared.certificate.by_phase_s.get("intra-op build", 0.0) == 0.0  # the third point solves no layout
    assert alone.certificate.by_phase_s["intra-op build"] > 0.0


def test_larger_and_smaller_batches_have_the_plans_of_separate_searches() -> None:
    pins = {"tp": 2, "zero_stage": 1, "micro_batch_size": 1}
    base = replace(_request(4), pins=pins)
    for batch in (256, 1024, 128):
        point = replace(base, global_batch_size=batch)
        _same(search_plan(point), search_plan(replace(point, layouts=LayoutStore())))


def test_the_sizes_that_are_tried_have_the_plans_of_separate_searches() -> None:
    seen: list[int] = []

    def search(point: PlanRequest) -> SearchResult:
        shared, alone = search_plan(point), search_plan(replace(point, layouts=LayoutStore()))
        _same(shared, alone)
        seen.append(point.cluster.num_nodes)
        return shared

    pins = {"tp": 2, "micro_batch_size": 1, "zero_stage": 1, "schedule": "1F1B"}
    found = size(replace(_request(), pins=pins), 20e12, 60, search=search)
    assert found.fewest is not None
    assert found.fewest.nodes in seen and len(set(seen)) == len(seen) > 2


def _same(shared: SearchResult, alone: SearchResult) -> None:
    assert shared.plans[0].config == alone.plans[0].config
    assert shared.plans[0].estimate == alone.plans[0].estimate


def test_other_devices_have_the_plans_of_separate_searches() -> None:
    pins = {"tp": 2, "micro_batch_size": 1, "zero_stage": 1, "schedule": "1F1B"}
    base = replace(_request(4), pins=pins)
    for device in ("h100-sxm5-80gb", "b200-sxm-180gb", "a100-sxm4-40gb"):
        point = replace(base, cluster=base.cluster.with_device(device))
        _same(search_plan(point), search_plan(replace(point, layouts=LayoutStore())))


@pytest.mark.parametrize(("device", "link", "equal"), [("h200-sxm-141gb", 450, True), ("h100-sxm5-80gb", 100, False)])
def test_problems_that_differ_in_prices_share_all_but_these(device: str, link: int, equal: bool) -> None:
    """Prices are those of a problem made alone, to the last bit; work is shared where layouts are equal."""
    base = _request(model="mixtral-8x7b")
    other = replace(base, cluster=base.cluster.with_device(device).with_(scaleup=link))
    programs = [LayoutCache(request)._program(CUT)[1] for request in (base, other)]
    alone = LayoutCache(replace(other, layouts=LayoutStore()))._program(CUT)[1]
    assert programs[1].shape is programs[0].shape is not alone.shape
    assert programs[1].seconds.tolist() == alone.seconds.tolist() != programs[0].seconds.tolist()
    assert programs[1].problem.choices == alone.problem.choices
    assert (alone.shape.columns == programs[1].shape.columns).all() and alone.shape.costs == programs[1].shape.costs
    works = [LayoutCache(request).get(*CUT[:3]) for request in (base, other)]
    assert works[0] is not None and works[1] is not None
    assert (layouts_in(works[0].solution.selection) == layouts_in(works[1].solution.selection)) is equal
    assert (works[0].workload is works[1].workload) is equal


@pytest.mark.parametrize("model", ["llama-3.2-1b", "mixtral-8x7b"])
def test_a_layout_between_two_solved_ones_has_the_cost_of_its_own_problem(model: str) -> None:
    base = _request(16, model)
    numbers = []
    for nodes in (4, 2):  # solves for some number of micro-batches, then for the most
        request = _at(base, nodes)
        assert LayoutCache(request).get(*CUT[:3]) is not None
        numbers.append(layout_batches(request, CUT))
    known = base.layouts._found[prices_key(base, base.costs, CUT)][1]
    assert [(r.fewest[0], r.most[0]) for r in known] == [(min(numbers), MOST)]
    for number in (numbers[0], 3 * numbers[1], 10**6):
        found = known[0].at(number)
        own = solve(layout_problem(base, base.costs, CUT, number)[1])
        assert {k: o.name for k, o in found.selection.items()} == {k: o.name for k, o in own.selection.items()}
        assert found.cost_s == pytest.approx(own.cost_s, rel=1e-9)
        assert found.bound_s <= own.cost_s and found.gap < 1e-5


def test_another_selection_is_another_range() -> None:
    """A selection that is the best for few micro-batches and not for many is not taken for those between."""
    request = _request()
    axes, problem = layout_problem(request, request.costs, CUT)
    best = solve(problem)
    choice = next(c for c in problem.choices if len(c.options) > 1)
    other = next(o for o in choice.options if o != best.selection[choice.name])
    changed = replace(best, selection={**best.selection, choice.name: other})
    asked: list[int] = []

    def solved(number: int) -> Any:
        asked.append(number)
        return axes, best if number >= 10 else changed

    found = [request.layouts.get("key", number, solved)[1] for number in (20, 15, 5, 17, 3, 12)]
    assert asked == [20, FEWEST, 15, 5, 12]  # 17 lies between 15 and 20, 3 between 1 and 5
    assert [s.selection is best.selection for s in found] == [True, True, False, True, False, True]


def test_a_stopped_layout_is_not_kept() -> None:
    request = _request()
    axes, problem = layout_problem(request, request.costs, CUT)
    stopped = replace(solve(problem), status="stopped by time limit")
    for _ in range(2):
        assert request.layouts.get("key", 7, lambda number: (axes, stopped))[1] is stopped
    assert not request.layouts._found


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"nodes": 8}, True),
        ({"at": "@nic=100"}, True),  # four ranks of a node send nothing over it
        ({"at": "@price=1"}, True),
        ({"seq_len": 4096}, False),
        ({"at": "@memory_gb_s=1000"}, False),
        ({"at": "@scaleup=100"}, False),
    ],
)
def test_a_key_holds_what_ranks_of_tensor_parallelism_see(change: dict[str, Any], same: bool) -> None:
    graph = catalog.load_model("llama-3.2-1b")
    first, other = (replace(_request(**c), graph=graph) for c in ({}, change))
    assert (prices_key(first, first.costs, CUT) == prices_key(other, other.costs, CUT)) is same
    wide = (16, 1, 1, False)  # crosses the network
    if "nic" in str(change):
        assert prices_key(first, first.costs, wide) != prices_key(other, other.costs, wide)


@pytest.mark.parametrize(
    ("change", "times", "seconds"),
    [
        ({"global_batch_size": 64}, True, True),
        ({"at": "@price=1"}, True, True),
        ({"nodes": 8}, True, False),
        ({"at": "@nic=100"}, True, False),
        ({"at": "@memory_gb_s=1000"}, False, False),
        ({"mode": Mode.FUSED}, False, False),
        ({"options": options_of({"launch": "graphs"})}, False, False),
    ],
)
def test_searches_share_the_prices_of_equal_work(change: dict[str, Any], times: bool, seconds: bool) -> None:
    """Seconds of operations depend on the device, those of parameters on the cluster, neither on the batch."""
    base = _request()
    other = replace(_request(**change), graph=base.graph, layouts=base.layouts)
    first, second = LayoutCache(base), LayoutCache(other)
    assert (first._op_times is second._op_times) is times
    assert (first._state_seconds is second._state_seconds) is seconds


def test_the_program_of_a_layout_is_made_once_for_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    base = _request(16)
    caches = [LayoutCache(replace(base, global_batch_size=size)) for size in (512, 1024)]
    made: list[object] = []
    inside = LayoutProgram.__init__

    def counted(self: LayoutProgram, *args: Any, **more: Any) -> None:
        made.append(args)
        inside(self, *args, **more)

    monkeypatch.setattr(LayoutProgram, "__init__", counted)
    assert all(cache.get(*CUT[:3]) is not None for cache in caches)
    assert len(made) == 1
