"""Of plans that are equal within the error, the simplest is taken."""

from __future__ import annotations

import pytest
from enumeration import best_of, request

from autoplan.config.parallel import ParallelConfig
from autoplan.search.cuts import Cut
from autoplan.search.planner import search_plan
from autoplan.search.simplicity import complexity
from autoplan.search.space import space
from autoplan.search.standings import Standings


def test_what_is_simpler() -> None:
    """Fewer kinds of parallelism, then a plain schedule, then fewer stages per rank, then less recompute."""
    dp, tp = ParallelConfig(dp=4), ParallelConfig(tp=2, dp=2)
    pp = ParallelConfig(pp=2, dp=2)
    interleaved = pp.but(schedule="Interleaved1F1B", virtual_stages=2)
    more = pp.but(schedule="Interleaved1F1B", virtual_stages=4)
    order = [complexity(c) for c in (dp, tp, interleaved, more, tp.but(pp=2, dp=1))]
    assert order == sorted(order) and len(set(order)) == len(order)
    assert complexity(dp, 0.0) < complexity(dp, 0.1) == complexity(dp, 0.25) < complexity(dp, 1.0) < complexity(tp)


@pytest.mark.parametrize("share", [0.05, 0.4, 0.9])
@pytest.mark.parametrize("pins", [{}, {"pp": 2, "dp": 1}], ids=["free", "pp2"])
def test_the_choice_is_that_of_enumeration(share: float, pins: dict[str, int]) -> None:
    r = request(2, pins=pins, equal_within=share)
    steps = {c: best_of(r, c) for c in space(r.graph, r.cluster, r.global_batch_size, r.pins).candidates}
    fastest = min(steps.values())
    simplest = min(complexity(c) for c, step in steps.items() if step <= fastest * (1 + share))
    found = search_plan(r)
    chosen = found.plans[0]
    assert complexity(chosen.config)[:3] == simplest[:3]
    assert chosen.estimate.step_time_s.mid <= fastest * (1 + share)
    listed = [*(step for _, step in found.equals), chosen.estimate.step_time_s.mid]
    assert min(listed) == pytest.approx(fastest, rel=1e-9)
    assert all(complexity(config)[:3] >= simplest[:3] for config, _ in found.equals)


def test_without_equals_the_fastest_is_taken() -> None:
    exact, loose = search_plan(request(4)), search_plan(request(4, equal_within=0.9))
    assert not exact.equals and loose.equals
    assert exact.plans[0].estimate.step_time_s.mid <= loose.plans[0].estimate.step_time_s.mid


@pytest.mark.parametrize("slower", [1.0008, 1.5])
@pytest.mark.parametrize("first", [0, 1])
def test_a_plan_without_offload_is_simpler_than_its_twin(slower: float, first: int) -> None:
    """Found in any order: the host holds nothing where that is worth less than the error."""
    plans = Standings(request(4, equal_within=0.02))
    host = ParallelConfig(dp=4, offload=("optimizer",))
    found = [(host, 10.0), (host.but(offload=()), 10.0 * slower)]
    for config, step_s in (found[first], found[1 - first]):
        plans.add(config, Cut((1,), (), step_s, step_s, exact=True))
    plans.add(host.but(dp=2, tp=2), Cut((1,), (), 9.99, 9.99, exact=True))
    equals = [e.candidate for e in plans.equals(lambda e: complexity(e.candidate))]
    assert equals[0] == (host.but(offload=()) if slower < 1.02 else host)
    assert host.but(dp=2, tp=2) in equals  # the fastest
    chosen = plans.equals(lambda e: complexity(e.candidate))[0]
    assert [e.candidate for e in plans.others(chosen)] == [host.but(dp=2, tp=2)]  # answers differ in degrees
