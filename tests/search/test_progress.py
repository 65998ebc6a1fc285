"""The progress of a search, and plans that differ in kind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoplan.catalog import load_model
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.report.waiting import Countdown, progress_text
from autoplan.search import progress
from autoplan.search.planner import PlanRequest, search_plan
from autoplan.search.progress import Progress
from autoplan.search.simplicity import kind_of

REQUEST = PlanRequest(load_model("gpt2"), Cluster.parse("1x4xh100-sxm5-80gb"), 1024, 64, equal_within=0.0, gap=0.0)


def test_a_search_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_EVERY_S", -1.0)
    seen: list[Progress] = []
    # small memory leaves candidates to go through
    small = replace(REQUEST, graph=load_model("gpt2-xl"), cluster=Cluster.parse("1x4xa100-pcie-40gb"))
    result = search_plan(small, seen.append)
    steps = [p.best_s for p in seen if p.best_s is not None]
    assert seen[0].best_s is None and steps == sorted(steps, reverse=True)
    assert steps[-1] >= result.plans[0].estimate.step_time_s.mid == pytest.approx(steps[-1])
    assert all(0 <= p.num_left <= result.certificate.considered for p in seen)
    known = [p.gap for p in seen if p.gap is not None]
    assert known and all(0 <= gap < 1 for gap in known)


def test_plans_that_differ_in_kind_are_the_best_of_their_kinds() -> None:
    every = search_plan(replace(REQUEST, top=2000)).plans
    best = {}
    for p in every:
        best.setdefault(kind_of(p.config), p.estimate.step_time_s.mid)
    assert len(best) > 4
    found = search_plan(replace(REQUEST, top=4, by_kind=True)).plans
    assert [kind_of(p.config) for p in found] == list(best)[:4]
    assert [p.estimate.step_time_s.mid for p in found] == pytest.approx(list(best.values())[:4], rel=1e-9)


def test_progress_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert progress_text(Progress(1234, None, None)) == "1,234 candidates left"
    full = progress_text(Progress(7, 3.41, 0.042))
    assert full == "7 candidates left, best 3.41 s, the best of the space is at most 4.2 % shorter"
    monkeypatch.setattr("autoplan.report.waiting.time.perf_counter", lambda: now)
    now = 100.0
    left = Countdown(12, "points")
    assert left.text(0) == "0 of 12 points"
    now = 130.0
    assert left.text(3) == "3 of 12 points, about 90 s left"
    now = 190.0
    assert left.text(1) == "1 of 12 points, about 16 min left"  # 11 of 90 s
    assert left.text(12) == "12 of 12 points"
