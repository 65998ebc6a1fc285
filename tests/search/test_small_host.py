"""Activations on a host that has no room for the state of the optimizer: searched, and counted when a search stops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autoplan.catalog import load_model
from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.memory.room import Room
from autoplan.cost_models.time.price import ranges_of
from autoplan.search import progress
from autoplan.search.certificate import Status
from autoplan.search.cuts import device_bytes
from autoplan.search.interleaved_cuts import ChunkCutter
from autoplan.search.layouts import LayoutCache
from autoplan.search.planner import PlanRequest, search_plan
from autoplan.search.progress import Progress

ACTIVATIONS = ("activations",)


def request(host_bytes: float) -> PlanRequest:
    """A 48 GB device whose plan is 15 % faster with activations on the host."""
    cluster = Cluster.parse("1x1xh100-sxm5-80gb")
    host = {"memory_bytes": 48_000_000_000, "host_memory_bytes": int(host_bytes), "host_bytes_per_s": 4.5e11}
    return PlanRequest(
        load_model("llama-3.2-1b"),
        replace(cluster, device=replace(cluster.device, **host)),
        16384,
        4,
        gap=0.0,
        equal_within=0.0,
        pins={"micro_batch_size": 1},
        mode=Mode.COMPILED,
        patient=False,
    )


def test_activations_need_no_room_for_the_optimizer() -> None:
    """19 GB hold the activations; the optimizer's state, which stays on the device, takes more."""
    r = request(19e9)
    points, plain = LayoutCache(r), ParallelConfig(num_micro_batches=4)
    assert points.shortage(plain.but(offload=ACTIVATIONS)) is None
    assert points.shortage(plain.but(offload=("optimizer",))) == "state on the host"
    without, there = (points.cutter(c).search().step_s for c in (plain, plain.but(offload=ACTIVATIONS)))
    assert there < 0.9 * without
    found = search_plan(r)
    assert found.plans[0].estimate.step_time_s.mid == pytest.approx(there) and found.certificate.gap == 0.0
    assert "offload" in dict(found.plans[0].config.recompute).values()


def test_an_interrupted_search_counts_what_offload_may_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    whole = search_plan(request(100e9))

    def stop(told: Progress) -> None:
        if told.best_s is not None:
            raise KeyboardInterrupt

    stopped = search_plan(request(100e9), stop)
    certificate, (best, first) = (
        stopped.certificate,
        (f.plans[0].estimate.step_time_s.mid for f in (whole, stopped)),
    )
    assert certificate.status is Status.INTERRUPTED and first > 1.1 * best
    assert certificate.considered == whole.certificate.considered and certificate.open > 0
    assert first * (1 - certificate.gap) <= best * (1 + 1e-9)


def gemma(room: Room) -> tuple[LayoutCache, ParallelConfig, ChunkCutter]:
    pins = {"pp": 4, "tp": 1, "micro_batch_size": 1}
    cluster = Cluster.parse("2x4xh100-sxm5-80gb")
    points = LayoutCache(PlanRequest(load_model("gemma-2-2b"), cluster, 16384, 48, pins=pins, mode=Mode.FUSED))
    points.room = room
    degrees = ParallelConfig(dp=2, pp=4, zero_stage=2, micro_batch_size=1, num_micro_batches=24, schedule="ZB-H1")
    candidate = degrees.but(offload=("activations", "parameters"))
    cutter = points.cutter(candidate)
    assert isinstance(cutter, ChunkCutter)
    return points, candidate, cutter


def test_a_last_step_that_needs_more_than_it_frees_is_not_taken() -> None:
    """Offloading the last layer of the last stage of Gemma costs more in its backward than it frees."""
    unlimited = Room(math.inf)
    _, _, cutter = gemma(unlimited)
    pricer, ranges = cutter.pricer, ranges_of(cutter.chunks)
    most = [pricer.frontier.height(units) for units in ranges]
    others = [device_bytes(pricer, unlimited, rank, ranges, most) for rank in range(3)]
    needs = [device_bytes(pricer, unlimited, 3, ranges, [*most[:3], n]) for n in range(most[3] + 1)]
    assert needs[-1] > 1.04 * needs[-2] and needs[:-1] == sorted(needs[:-1], reverse=True)
    least = max(needs[-2], *others)
    assert least < needs[-1]
    room = Room((least + needs[-1]) / 2)

    points, candidate, cutter = gemma(room)
    assert points.shortage(candidate) is None
    found = cutter.search()
    assert found.chunks is not None and found.recompute[3] < most[3]
    assert gemma(room)[2].bound_s() == found.step_s
    assert gemma(Room(0.99 * least))[2].search().chunks is None
