"""Why a plan: alternatives are the best plans with other pins, differences add up, the front dominates."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import lru_cache

import pytest

from autoplan.catalog import load_model
from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import PinError
from autoplan.search.planner import PlanRequest, SearchResult, StoppedError, estimate_config, search_plan
from autoplan.sweeps.difference import Pair, decided, difference
from autoplan.sweeps.explain import Explanation, FrontPoint, explain, undominated
from autoplan.sweeps.whatif import RunTask

REQUEST = PlanRequest(
    load_model("gpt2"), Cluster.parse("1x2xh100-sxm5-80gb@price=2"), 1024, 16, {"schedule": "1F1B"}, time_limit_s=600
)


@lru_cache(maxsize=1)
def explained() -> Explanation:
    return explain(REQUEST, only=("tp", "zero_stage", "recompute"), seconds=600)


def test_alternatives_are_the_best_plans_with_other_pins() -> None:
    found = explained()
    own = found.planned.estimate.step_time_s.mid
    assert own == search_plan(REQUEST).plans[0].estimate.step_time_s.mid
    tried = {d.name: {a.value for a in d.alternatives} for d in found.decisions}
    plan = decided(REQUEST, found.planned.config)
    assert tried["zero_stage"] == {0, 1, 2, 3} - {plan["zero_stage"]}
    assert tried["recompute"] == {"none", "selective", "products", "full"} - {plan["recompute"]}
    for d in found.decisions:
        for a in d.alternatives:
            pinned = search_plan(replace(REQUEST, pins={**REQUEST.pins, d.name: a.value})).plans[0]
            assert a.planned is not None and a.planned.config == pinned.config
            assert a.cost == pytest.approx(pinned.estimate.step_time_s.mid / own - 1)
            assert a.difference is not None and d.name in a.difference.decisions
        costs = [a.cost for a in d.alternatives]
        assert costs == sorted(costs)
    worth = [d.cost for d in found.decisions]
    assert worth == sorted(worth, reverse=True) and worth[0] > 0.05


def test_differences_add_up() -> None:
    found = explained()
    for a in itertools.chain.from_iterable(d.alternatives for d in found.decisions):
        d = a.difference
        assert d is not None and d.step_s.more is not None and d.peak_bytes.more is not None
        assert sum(d.time_s.values()) == pytest.approx(d.step_s.more, abs=1e-9)
        assert sum(d.memory_bytes.values()) == pytest.approx(d.peak_bytes.more, abs=1.0)


def test_a_difference_of_two_clusters_has_money() -> None:
    other = replace(REQUEST, cluster=Cluster.parse("2x2xh100-sxm5-80gb@price=3"), pins={})
    own = explained().planned
    there = search_plan(other).plans[0]
    d = difference(REQUEST, own, other, there, RunTask(1e9))
    assert d.num_devices == Pair(2, 4) and d.usd_per_hour == Pair(4, 12)
    assert d.days.own == pytest.approx(1e9 / own.estimate.tokens_per_s / 86400)
    assert d.usd.other == pytest.approx(12 * 1e9 / there.estimate.tokens_per_s / 3600)
    assert d.tokens_per_s.share == pytest.approx(there.estimate.tokens_per_s / own.estimate.tokens_per_s - 1)
    free = difference(replace(REQUEST, cluster=replace(REQUEST.cluster, price=None)), own, other, there)
    assert free.usd_per_hour == Pair(None, 12) and free.usd_per_hour.share is None and free.days == Pair(None, None)


def test_money_per_hour_counts_idle_nodes_as_the_cost_of_the_run_does() -> None:
    idle = replace(REQUEST, cluster=Cluster.parse("1x2xh100-sxm5-80gb@price=2,idle=1"))
    own = explained().planned
    d = difference(REQUEST, own, idle, own, RunTask(1e9))
    assert d.num_devices == Pair(2, 2) and d.usd_per_hour == Pair(4, 8)
    assert d.usd.share == pytest.approx(d.usd_per_hour.share)


def test_what_does_not_fit_says_where() -> None:
    tight = replace(REQUEST, cluster=REQUEST.cluster.with_(memory_gb=2.8))
    found = explain(tight, only=("micro_batch_size", "recompute"), every_value=True, settings=False, seconds=600)
    lacking = [a for d in found.decisions for a in d.alternatives if a.status == "does not fit"]
    assert lacking, [(d.name, a.value, a.status) for d in found.decisions for a in d.alternatives]
    for a in lacking:
        assert a.cost == math.inf and a.planned is None and a.shortage is not None
        assert a.shortage.needed_bytes > a.shortage.available_bytes == pytest.approx(2.8e9)


def test_a_given_plan_is_explained_as_it_is() -> None:
    """Also where the pins of its request are not the best: they may be replaced by alternatives."""
    request = replace(REQUEST, pins={"tp": 2, "schedule": "1F1B"})
    config = search_plan(request).plans[0].config
    found = explain(request, config, only=("tp",), settings=False, seconds=600)
    assert found.certificate is None and found.planned.config == estimate_config(request, config).config
    ((other,),) = [d.alternatives for d in found.decisions]
    assert other.value == 1 and other.cost < 0
    assert other.planned is not None and other.planned.config.tp == 1


def test_settings_are_priced_with_the_same_plan_and_the_best_planned_anew() -> None:
    found = explained()
    by_name = {(s.name, str(s.value)): s for s in found.settings}
    gains = [s.best_gain for s in found.settings]
    assert gains == sorted(gains, reverse=True) and gains[-1] > 0
    wider = by_name["memory_gb_s", "6700.0"]
    faster = replace(REQUEST, cluster=REQUEST.cluster.with_(memory_gb_s=6700.0))
    own = found.planned.estimate.tokens_per_s
    same = estimate_config(faster, found.planned.config).estimate.tokens_per_s
    assert wider.same_gain == pytest.approx(same / own - 1) and wider.own == 3350.0
    assert wider.gain == pytest.approx(search_plan(faster).plans[0].estimate.tokens_per_s / own - 1)
    assert sum(s.gain is not None for s in found.settings) <= 3


def test_a_new_plan_gains_only_what_comes_from_the_change() -> None:
    """A plan that is slower than need be gains nothing from more memory: the new plan fits without it."""
    slow = ParallelConfig(tp=2, micro_batch_size=4, num_micro_batches=4)
    found = explain(REQUEST, slow, only=("ep",), front=True, seconds=600)
    best = search_plan(REQUEST).plans[0].estimate.tokens_per_s
    assert best > 1.3 * found.planned.estimate.tokens_per_s
    assert "memory_gb" not in {s.name for s in found.settings}
    anew = [s for s in found.settings if s.gain is not None and s.planned is not None]
    assert anew
    for s in anew:
        assert s.planned is not None and s.gain == pytest.approx(s.planned.estimate.tokens_per_s / best - 1, abs=0.02)
    # its own plan needs less memory than those that were searched for the front, and stands on it
    assert found.planned.config in [p.planned.config for p in found.front]
    assert [p.certificate is None for p in found.front if p.planned is found.planned] == [True]


def test_a_new_plan_is_one_that_the_stack_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[PlanRequest] = []

    def search(request: PlanRequest) -> SearchResult:
        searched.append(request)
        raise StoppedError("no plan")

    monkeypatch.setattr("autoplan.sweeps.explain.search_plan", search)
    request = replace(REQUEST, pins={}, like="torchtitan")
    config = ParallelConfig(dp=2, zero_stage=3, micro_batch_size=8)
    assert not [s for s in explain(request, config, only=("ep",)).settings if s.gain is not None]
    assert len(searched) == 3
    for r in searched:
        assert r.facts.like is not None and r.facts.like.name == "torchtitan@26.08"
        assert r.mode in r.facts.like.can.modes and r.options.launch not in ("graphs", "full_graphs")


def test_experts_that_follow_tensor_parallelism_are_explained() -> None:
    """Their `etp` is none, beside which no number is larger or smaller; other values need experts over ranks."""
    request = PlanRequest(load_model("olmoe-1b-7b"), Cluster.parse("1x4xh100-sxm5-80gb"), 1024, 16)
    for degrees in ({"dp": 4}, {"dp": 2, "tp": 2}):
        config = ParallelConfig(**degrees, micro_batch_size=16 // degrees["dp"])
        (etp,) = explain(request, config, only=("etp",), settings=False).decisions
        assert (etp.name, etp.value, etp.alternatives) == ("etp", None, ())


@pytest.mark.slow
def test_the_front_is_what_no_plan_beats() -> None:
    found = explain(REQUEST, only=("tp",), settings=False, front=True, seconds=600)
    steps, peaks = zip(*((p.step_s, p.peak_bytes) for p in found.front), strict=True)
    assert len(found.front) > 1 and list(steps) == sorted(steps) and list(peaks) == sorted(peaks, reverse=True)
    assert found.front[0].planned.config == found.planned.config
    assert found.front_end == "less than 8.5 GB was not tried"
    small = replace(REQUEST, cluster=REQUEST.cluster.with_(memory_gb=12))
    ended = explain(small, only=("tp",), settings=False, front=True, seconds=600).front_end
    assert ended.startswith("nothing fits into ")
    for p in found.front:
        assert p.planned.estimate.peak_memory_bytes.high <= p.capacity_bytes

    class Point(FrontPoint):
        def __init__(self, step: float, peak: float) -> None:
            object.__setattr__(self, "figures", (step, peak))

        step_s = property(lambda self: self.figures[0])  # type: ignore[assignment]
        peak_bytes = property(lambda self: self.figures[1])  # type: ignore[assignment]

    points = [Point(s, p) for s, p in [(3, 1), (1, 5), (2, 5), (2, 3), (4, 1), (5, 0.5), (1, 6)]]
    assert [p.figures for p in undominated(points)] == [(1, 5), (2, 3), (3, 1), (5, 0.5)]  # type: ignore[attr-defined]


def test_an_unknown_choice_is_named() -> None:
    with pytest.raises(PinError, match="explain: unknown choice 'dp'; known: tp, pp"):
        explain(REQUEST, only=("dp",))


def test_ctrl_c_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[PlanRequest] = []

    def search(request: PlanRequest, told: object = None) -> SearchResult:
        calls.append(request)
        if len(calls) == 3:  # the plan, and one alternative before
            raise KeyboardInterrupt
        return search_plan(request)

    for door in ("autoplan.search.best_use", "autoplan.sweeps.explain"):
        monkeypatch.setattr(f"{door}.search_plan", search)
    found = explain(REQUEST, only=("zero_stage",), settings=False, seconds=600)
    assert found.interrupted and [len(d.alternatives) for d in found.decisions] == [1] and len(calls) == 3
