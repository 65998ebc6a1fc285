"""Searches that begin with what others found: a step that shall be beaten, the best plans of points of a sweep."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import fields, replace
from typing import Any

import pytest

import autoplan
from autoplan import catalog
from autoplan.config.choices import options_of
from autoplan.config.parallel import Mode, ParallelConfig, RunOptions
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import PinError
from autoplan.ir.layout import Layout
from autoplan.planning import options_of_way
from autoplan.program.problem import ValueKey
from autoplan.search.first_plans import as_before
from autoplan.search.infeasible import NotFasterError
from autoplan.search.layout_problem import layout_problem, prices_key
from autoplan.search.layout_store import MOST_BEST, LayoutStore
from autoplan.search.layouts import LayoutCache
from autoplan.search.planner import search_plan
from autoplan.search.request import PlanRequest, space_of

CUT = (4, 1, 1, False)  # tp, micro-batch size, cp, own dispatch
# a value other than the default of each option of whole steps
OF_STEPS = {
    "launch": "blocking",
    "overlap": "tp,ep",
    "dispatcher": "flex",
    "narrow_gather": True,
    "overlap_zero": False,
    "overlap_gather": False,
    "zero_by_tensor": True,
    "whole_sums": True,
    "wide_sums": True,
    "all_reduced": True,
    "reduce_once": True,
    "module_hooks": True,
    "host_sums": True,
    "sends": "serial",
    "zero_bucket": 1000,
}


def _request(**more: Any) -> PlanRequest:
    settings = {"seq_len": 1024, "global_batch_size": 64} | more
    return PlanRequest(catalog.load_model("gpt2"), Cluster.parse("1x4xh100-sxm5-80gb"), **settings)


def test_a_plan_below_a_step_is_that_of_the_whole_search() -> None:
    alone = search_plan(_request(pins={"pp": 1, "micro_batch_size": 2}))
    step_s = alone.fastest_s
    found = search_plan(_request(pins={"pp": 1, "micro_batch_size": 2}, below_s=step_s * 1.2))
    assert [p.config for p in found.plans] == [p.config for p in alone.plans]
    assert [p.estimate for p in found.plans] == [p.estimate for p in alone.plans]
    assert found.certificate.gap <= alone.certificate.gap + 1e-12
    assert found.certificate.status == alone.certificate.status


def test_no_plan_below_the_best_step_is_found() -> None:
    step_s = search_plan(_request(pins={"pp": 1, "micro_batch_size": 2})).fastest_s
    with pytest.raises(NotFasterError, match=f"takes less than {step_s:.6g} s"):
        search_plan(_request(pins={"pp": 1, "micro_batch_size": 2}, below_s=step_s))


def test_candidates_with_less_tp_are_not_looked_at() -> None:
    whole, part = space_of(_request()), space_of(_request(least_tp=2))
    assert part.candidates == tuple(c for c in whole.candidates if c.tp >= 2) != whole.candidates
    assert part.restrictions == (*whole.restrictions, "tp of at least 2")
    found = search_plan(_request(least_tp=2, pins={"pp": 1, "micro_batch_size": 1}))
    assert found.plans[0].config.tp >= 2
    assert "tp of at least 2" in found.certificate.restrictions
    with pytest.raises(PinError, match="no tp of at least 2 is legal; the largest is 1"):
        space_of(_request(least_tp=2, pins={"tp": 1}))


def test_a_call_finds_the_cheapest_of_all_ways_searched_alone() -> None:
    task: dict[str, Any] = {"precision": "native", "executed": True, "pins": {"pp": 1, "micro_batch_size": 1}}
    steps = {}
    for way in ((False, False), (True, False), (True, True)):
        mode = Mode.COMPILED if way[0] else Mode.EAGER
        found = search_plan(_request(mode=mode, options=options_of_way(way[1]), **task))
        steps[way] = found.plans[0].estimate.step_time_s.mid
    plan = autoplan.plan("gpt2", "1x4xh100-sxm5-80gb", seq_len=1024, global_batch_size=64, pins=task["pins"])
    assert plan.estimate is not None
    assert plan.estimate.step_time_s.mid == min(steps.values()) == steps[plan.compiled, plan.async_tp]


def test_without_tensor_parallelism_async_tp_changes_no_price() -> None:
    """So candidates with tp 1 need no second search (`autoplan.planning.SoFar`)."""
    pins = {"tp": 1, "pp": 1, "zero_stage": 3}
    alone, hidden = (
        search_plan(_request(mode=Mode.COMPILED, options=options_of_way(way), pins=pins)) for way in (False, True)
    )
    assert hidden.plans[0].config == alone.plans[0].config
    assert hidden.plans[0].estimate.step_time_s == alone.plans[0].estimate.step_time_s


def test_the_options_of_whole_steps_are_those_that_are_tried_here() -> None:
    usual = RunOptions()
    other = options_of(OF_STEPS)
    assert {f.name for f in fields(RunOptions) if getattr(other, f.name) != getattr(usual, f.name)} == set(OF_STEPS)
    assert other.of_operations == usual
    for name in ("attention", "sequence_parallel", "fused_loss"):
        given = {"attention": "flash1", "sequence_parallel": False, "fused_loss": "online"}[name]
        assert options_of({name: given}).of_operations == options_of({name: given}) != usual


@pytest.mark.parametrize("name", OF_STEPS)
def test_options_of_whole_steps_change_no_layout(name: str) -> None:
    request, other = _request(), _request(options=options_of({name: OF_STEPS[name]}))
    other = replace(other, graph=request.graph)
    first, second = (layout_problem(r, r.costs, CUT)[1] for r in (request, other))
    assert first.choices == second.choices
    made: dict[ValueKey, set[Layout]] = defaultdict(set)
    for key, layout in (pair for choice in first.choices for o in choice.options for pair in o.provides):
        made[key].add(layout)
    conversions = [(key, *pair) for key, layouts in made.items() for pair in itertools.permutations(layouts, 2)]
    prices = [(first.convert_s(*each), first.convert_once_s(*each)) for each in conversions]
    assert any(map(any, prices))
    assert prices == [(second.convert_s(*each), second.convert_once_s(*each)) for each in conversions]
    assert prices_key(request, request.costs, CUT) == prices_key(other, other.costs, CUT)
    works = [LayoutCache(replace(r, layouts=LayoutStore())).get(*CUT[:3]) for r in (request, other)]
    assert works[0] is not None
    assert works[1] is not None
    assert works[0].workload == works[1].workload


def test_a_search_begins_with_the_best_plans_of_others() -> None:
    base = _request(pins={"pp": 1, "micro_batch_size": 2})
    best = search_plan(base).plans[0].config
    assert base.layouts.best[0].dp == best.dp
    larger = replace(base, global_batch_size=128, cluster=base.cluster.with_(nodes=2))
    some = as_before(space_of(larger).candidates, base.layouts.best)
    assert [(c.tp, c.pp, c.zero_stage, c.micro_batch_size) for c in some] == [
        (c.tp, c.pp, c.zero_stage, c.micro_batch_size) for c in base.layouts.best
    ]
    assert {c.num_devices for c in some} == {8}
    shared, alone = search_plan(larger), search_plan(replace(larger, layouts=LayoutStore()))
    assert shared.plans[0].config == alone.plans[0].config
    assert shared.plans[0].estimate == alone.plans[0].estimate
    assert shared.fastest_s <= alone.fastest_s / (1 - larger.allowed_gap)


def test_the_last_best_plans_are_kept() -> None:
    store = LayoutStore()
    some = [ParallelConfig(dp=n) for n in range(1, MOST_BEST + 3)]
    for each in some:
        store.found_best([each, each])
    assert store.best == some[: -MOST_BEST - 1 : -1]
    assert not as_before((), store.best)
    assert math.isinf(_request().below_s)
