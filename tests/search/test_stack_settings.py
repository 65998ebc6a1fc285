"""Settings of a stack beside its defaults."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from autoplan.catalog import load_model
from autoplan.config.parallel import Dispatcher, Launch
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.program.legality import not_executed
from autoplan.search.best_use import best_use
from autoplan.search.infeasible import NothingFits
from autoplan.search.planner import search_as_given, search_plan
from autoplan.search.request import PlanRequest
from autoplan.search.stack_settings import at_degrees, lacks_graphs, other_settings
from autoplan.stacks.like import read_like


def _asked(like: str, model: str = "llama-3.2-1b", **pins: int) -> PlanRequest:
    return PlanRequest(load_model(model), Cluster.parse("1x8xh100-sxm5-80gb"), 4096, 32, like=like, pins=pins)


def test_only_what_the_stack_can_and_nobody_gave() -> None:
    r = _asked("megatron-lm@25.06", "mixtral-8x7b", dp=8)
    plan = search_plan(replace(_asked("megatron-lm@25.06"), pins={"dp": 8})).plans[0].config
    spread = plan.but(ep=8)
    found = [(other.option, other.value) for other in other_settings(r, spread)]
    assert found == [("dispatcher", "flex"), ("launch", "graphs")]
    assert [other.option for other in other_settings(r, plan)] == ["launch"]  # no experts travel
    (changed,) = (other.request for other in other_settings(r, spread) if other.option == "dispatcher")
    assert changed.options == replace(r.options, dispatcher=Dispatcher.FLEX)
    given = replace(r, like=read_like("megatron-lm@25.06", {"launch": "async"}))
    assert [other.option for other in other_settings(given, spread)] == ["dispatcher"]
    assert not list(other_settings(_asked("megatron-lm@23.10"), spread))
    assert not list(other_settings(replace(r, like=None), spread))


@pytest.mark.parametrize(("pins", "faster"), [({"tp": 8}, False), ({"tp": 8, "micro_batch_size": 1}, True)])
def test_a_setting_that_is_faster_is_taken_and_named(pins: dict[str, int], faster: bool) -> None:
    """Against a search of the whole space with either value. CUDA graphs spare small kernels their host's time."""
    r = _asked("megatron-lm@25.06", **pins)
    steps = {}
    for launch in Launch.ASYNC, Launch.GRAPHS:
        like = read_like("megatron-lm@25.06", {"launch": str(launch)})
        steps[launch] = search_plan(replace(r, like=like)).fastest_s
    assert (steps[Launch.GRAPHS] * (1 + r.equal_within) < steps[Launch.ASYNC]) is faster
    used = best_use(r)
    assert used.result.fastest_s == steps[Launch.GRAPHS if faster else Launch.ASYNC]
    assert used.settings == ({"launch": "graphs"} if faster else {})
    assert used.request.options.launch is (Launch.GRAPHS if faster else Launch.ASYNC)
    assert used.asked({"cluster": "c", "launch": None})["launch"] == ("graphs" if faster else None)
    assert any("launch=graphs" in text for text in used.result.certificate.restrictions)


def test_graphs_are_not_taken_where_recompute_excludes_them() -> None:
    """Megatron captures no layer that is recomputed in full, so that the faster price would be of no run."""
    r = PlanRequest(load_model("gpt2"), Cluster.parse("1x2xh100-sxm5-80gb"), 512, 16, like="megatron-lm@25.06")
    open_to, pinned = (best_use(replace(r, pins=pins)) for pins in ({}, {"recompute": "full"}))
    assert open_to.settings == {"launch": "graphs"}
    assert pinned.settings == {} and pinned.request.options.launch is Launch.ASYNC
    (with_graphs,) = (other.request for other in other_settings(pinned.request, pinned.result.plans[0].config))
    said = not_executed(pinned.result.plans[0].config, with_graphs.facts)
    assert any("CUDA graphs of layers exclude full recompute" in reason for reason in said)


@pytest.mark.parametrize(
    ("given", "pins", "launch"),
    [
        ({}, {}, Launch.ASYNC),
        ({"launch": "graphs"}, {}, Launch.GRAPHS),
        ({}, {"recompute": "full"}, Launch.ASYNC),
        ({"launch": "graphs"}, {"recompute": "full"}, None),
    ],
    ids=["nothing given", "graphs", "recompute", "both"],
)
def test_a_plan_that_graphs_exclude_gives_way_to_one_that_runs(
    given: dict[str, str], pins: dict[str, Any], launch: Launch | None
) -> None:
    """Against searches of the whole space of each. Long sequences on one device: something has to be recomputed."""
    r = PlanRequest(load_model("llama-3.1-8b"), Cluster.parse("1x1xgb300-nvl72"), 32768, 16, pins=pins)
    r = replace(r, like=read_like("megatron-bridge@25.09", given))
    found = search_as_given(r)
    assert r.options.launch is Launch.GRAPHS and lacks_graphs(r, found.plans[0].config)
    used = best_use(r)
    assert (used.request, used.result.plans) == ((again := search_plan(r)).request, again.plans)
    if launch is None:  # as it was asked for
        assert used == replace(used, request=r, settings={}) and lacks_graphs(r, used.result.plans[0].config)
        return
    assert not lacks_graphs(used.request, used.result.plans[0].config)
    assert used.request.options.launch is launch and used.settings == ({} if given else {"launch": "async"})
    others = [replace(r, like=read_like("megatron-bridge@25.09", {"launch": "async"}))] if not given else []
    for how in ("none", "modules:layernorm", "modules:core_attn", "modules:mlp") if not pins else ():
        others.append(replace(r, pins={"recompute": how}))
    steps = []
    for other in others:
        with suppress(NothingFits):
            steps.append(search_as_given(other).fastest_s)
    assert used.result.fastest_s == min(steps) > found.fastest_s
    assert any("CUDA graphs of layers" in text for text in used.result.certificate.restrictions)


def test_the_degrees_of_a_plan_are_all_that_is_searched() -> None:
    r = _asked("megatron-lm@25.06", tp=2)
    plan = search_plan(r).plans[0].config
    found = search_plan(at_degrees(r, plan))
    assert found.plans[0].config == plan
    assert found.certificate.considered < 20
