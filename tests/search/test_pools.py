"""Plans over several pools against every plan of a small space, and against one pool of the same devices."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import enumeration
import pytest

from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.time.pools import PooledPricer
from autoplan.cost_models.time.price import ranges_of
from autoplan.errors import InfeasibleError, PinError
from autoplan.search.planner import PlanRequest, estimate_config
from autoplan.search.pools import PooledCutter, PooledPlan, _PoolSearch, least_step_s, search_pools

MEMORY = 1 << 40


def request(devices: int, speed: float = 1.0, memory: int = MEMORY, batch: int = 8, **kw: Any) -> PlanRequest:
    made = enumeration.request(devices, memory, batch=batch, **kw)
    device = made.cluster.device
    faster = replace(device, peak_flops=device.peak_flops * speed, memory_bytes_per_s=device.memory_bytes_per_s * speed)
    return replace(made, cluster=replace(made.cluster, device=faster))


def every_plan(requests: tuple[PlanRequest, ...]) -> list[tuple[float, PooledCutter, tuple[int, ...]]]:
    """Every candidate, order of the pools, cut and recompute that fits, with its step."""
    search = _PoolSearch(requests, None, None)
    out = []
    for _, candidate in search._bounds(search._candidates())[0]:
        for order in itertools.permutations(range(len(requests))):
            cutter = search._cutter(candidate, order)
            pricer = cutter.pooled
            for cut in enumeration.compositions(pricer.num_units, pricer.config.pp):
                options = []
                for stage, units in enumerate(ranges_of(cut)):
                    room = search.rooms[cutter.pools[stage]]
                    heights = range(pricer.of(stage).frontier.height(units) + 1)
                    options.append([n for n in heights if room.fits(cutter.memory_of(stage, units, n))])
                out += [(pricer.step_s(cut, steps), cutter, steps) for steps in itertools.product(*options)]
    return out


@pytest.mark.parametrize(
    ("speeds", "memory"),
    [((1.0, 3.0), (MEMORY, MEMORY)), ((3.0, 1.0), (MEMORY, 400_000)), ((1.0, 1.5), (400_000, 400_000))],
)
def test_the_best_of_every_plan(speeds: tuple[float, float], memory: tuple[int, int]) -> None:
    pins = {"micro_batch_size": 1, "tp": 1}
    requests = tuple(request(2, s, m, pins=pins) for s, m in zip(speeds, memory, strict=True))
    plans = every_plan(requests)
    assert len(plans) >= 8 and len({cutter.pools for _, cutter, _ in plans}) > 1
    found = search_pools(requests)
    assert found.best.step_time_s.mid == pytest.approx(min(step for step, *_ in plans), rel=1e-9)
    assert found.num_open == 0 and found.gap == pytest.approx(0.0, abs=1e-6)
    for cutter in {id(cutter): cutter for _, cutter, _ in plans}.values():
        least = min(step for step, mine, _ in plans if mine is cutter)
        counts = [cutter.pools.count(pool) for pool in (0, 1)]
        seconds = [[f + b for f, b in zip(p.forward, p.backward, strict=True)] for p in cutter.pooled.pricers]
        assert least_step_s(seconds, counts, cutter.m) <= least * (1 + 1e-9)
        assert cutter.bound_s() <= least * (1 + 1e-9)


def test_pools_of_the_same_devices_cost_what_one_pool_costs() -> None:
    found = search_pools((request(2, pins={"tp": 1}), request(2, pins={"tp": 1})))
    whole = estimate_config(request(4), found.best.config)
    assert whole.estimate.step_time_s.mid == found.best.step_time_s.mid
    for stage, alone in zip(found.best.stages, whole.estimate.stages, strict=True):
        assert stage.memory_bytes.mid == alone.memory_bytes.mid and stage.num_layers == alone.num_layers


def layers_by_pool(plan: PooledPlan) -> dict[int, int]:
    return {pool: sum(s.num_layers for s in plan.stages if s.pool == pool) for pool in set(plan.pools)}


def test_the_faster_pool_gets_more_layers_and_time_shrinks() -> None:
    pins = {"tp": 1, "dp": 1}
    found = search_pools((request(1, 1.0, pins=pins), request(1, 3.0, pins=pins)))
    layers = layers_by_pool(found.best)
    assert layers[1] > layers[0]
    assert found.equal is not None and found.best.step_time_s.mid < found.equal.step_time_s.mid


def test_a_pool_with_little_memory_recomputes_or_gives_layers_away() -> None:
    pins = {"tp": 1, "dp": 1}
    free = search_pools((request(1, pins=pins), request(1, pins=pins))).best
    peak = max(s.memory_bytes.mid for s in free.stages)
    tight = search_pools((request(1, pins=pins), request(1, memory=int(0.8 * peak), pins=pins))).best
    for stage in tight.stages:
        assert stage.memory_bytes.mid <= stage.capacity_bytes
    assert (tight.config.stages, tight.config.recompute) != (free.config.stages, free.config.recompute)


def test_a_slow_network_between_pools_costs() -> None:
    text, pins = ("1x2xh100-sxm5-80gb", "1x2xa100-sxm4-80gb"), {"tp": 1, "micro_batch_size": 1, "zero_stage": 1}
    fast, slow = (
        search_pools(
            [PlanRequest(enumeration.graph(), Cluster.parse(c), 64, 8, pins, precision="native") for c in text],
            nic_gbit_s=nic,
        ).best.step_time_s.mid
        for nic in (400.0, 0.02)
    )
    assert slow > 1.5 * fast


def test_three_pools() -> None:
    pins = {"tp": 1, "dp": 1}
    found = search_pools(tuple(request(1, s, pins=pins) for s in (1.0, 2.0, 3.0)))
    assert sorted(found.best.pools) == [0, 1, 2] and found.best.config.pp == 3


@pytest.mark.parametrize("looks", [0, 1])
def test_ctrl_c_keeps_the_best_plan_so_far(looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pins = {"tp": 1, "micro_batch_size": 1}
    requests = (request(2, 1.0, pins=pins), request(2, 3.0, pins=pins))
    whole, look = search_pools(requests), _PoolSearch._look_at
    left = iter(range(looks))

    def interrupted(self: _PoolSearch, candidate: ParallelConfig) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        look(self, candidate)

    monkeypatch.setattr(_PoolSearch, "_look_at", interrupted)
    if not looks:
        with pytest.raises(KeyboardInterrupt):
            search_pools(requests)
        return
    found = search_pools(requests)
    assert found.num_open > 0 == whole.num_open and found.bound_s <= whole.best.step_time_s.mid * (1 + 1e-9)
    assert found.best.step_time_s.mid >= whole.best.step_time_s.mid


def test_what_does_not_go() -> None:
    with pytest.raises(PinError, match="the number of pools, 1, must be from 2"):
        search_pools((request(2),))
    with pytest.raises(PinError, match="global_batch_size must be the same on all pools, not 8, 16"):
        search_pools((request(2), request(2, batch=16)))
    with pytest.raises(PinError, match=r"stages=.* cannot be pinned over pools"):
        search_pools((request(2, pins={"stages": (1, 1)}), request(2)))
    with pytest.raises(PinError, match=r"pools of 2 and 4 devices: no legal degrees fill all of them .* at most 2"):
        search_pools((request(2, batch=6, pins={"dp": 3}), request(4, batch=6, pins={"dp": 3})))
    with pytest.raises(InfeasibleError, match=r"nothing fits on these pools: .* needs .* GB on stage"):
        search_pools((request(2, memory=1000, pins={"tp": 1}), request(2, memory=1000, pins={"tp": 1})))


def test_a_pooled_pricer_needs_a_pool_for_every_stage() -> None:
    cutter = _PoolSearch((request(1), request(1)), None, None)
    made = cutter._cutter(cutter._bounds(cutter._candidates())[0][0][1], (0, 1)).pooled
    with pytest.raises(ValueError, match="1 stages with a pool"):
        PooledPricer(made.pricers, (0,), made.across)
