"""Offloading in the search: as every plan priced one by one, where memory binds and never elsewhere."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from enumeration import brute_force, cluster, graph, request

from autoplan.catalog import load_model
from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.memory.ranks import MemoryModel
from autoplan.errors import PinError
from autoplan.search import planner
from autoplan.search.estimate import estimate_config
from autoplan.search.layout_store import LayoutStore
from autoplan.search.layouts import LayoutCache
from autoplan.search.planner import NothingFits, PlanRequest, SearchResult, search_plan
from autoplan.search.request import offloaded, space_of

ROOM = 1 << 40
FAST, SLOW = 1e10, 1e8  # bytes per second to the host


def offloads(found: SearchResult) -> bool:
    config = found.plans[0].config
    how = config.recompute.values() if isinstance(config.recompute, dict) else [config.recompute]
    return bool(config.offload) or "offload" in how


def peak_bytes(pins: dict[str, Any], devices: int, **kw: Any) -> float:
    return search_plan(request(devices, pins=pins, **kw)).plans[0].estimate.peak_memory_bytes.mid


SMALL = [
    ({"pp": 1, "tp": 1, "num_micro_batches": 2}, 2),
    ({"pp": 2, "dp": 1, "tp": 1, "micro_batch_size": 2}, 2),
    ({"pp": 2, "tp": 1, "zero_stage": 2, "num_micro_batches": 4}, 4),
    ({"pp": 2, "dp": 1, "tp": 1, "num_micro_batches": 4, "schedule": "Interleaved1F1B"}, 2),
]


@pytest.mark.parametrize("mode", [Mode.COMPILED, pytest.param(Mode.EAGER, marks=pytest.mark.slow)])
@pytest.mark.parametrize("speed", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("pins", "devices"), SMALL)
def test_the_search_is_enumeration(pins: dict[str, Any], devices: int, speed: float, mode: Mode) -> None:
    """With less and less memory, and with a host that is large, and one that is small."""
    peak, seen = peak_bytes(pins, devices, mode=mode), set()
    for share, host in ((1.01, ROOM), (0.8, ROOM), (0.6, ROOM), (0.45, ROOM), (0.6, int(0.2 * peak))):
        r = request(devices, int(peak * share), pins=pins, host=(host, speed), mode=mode)
        expected = brute_force(r)
        if expected == math.inf:
            with pytest.raises(NothingFits):
                search_plan(r)
            continue
        found = search_plan(r)
        assert found.plans[0].estimate.step_time_s.mid == pytest.approx(expected, rel=1e-9), (share, host)
        assert found.plans[0].estimate.fits
        c = found.certificate
        assert c.gap == 0.0 and c.status == "complete"
        assert c.considered == c.illegal + c.too_big + c.bounded_out + c.solved and c.open == 0
        seen.add(offloads(found))
    assert seen == {False, True} or speed == SLOW


def test_a_model_that_does_not_fit_is_made_to_fit() -> None:
    """By what is on the host; priced alike when given as a configuration; and nothing fits a host without room."""
    pins = {"pp": 1, "tp": 1, "dp": 1}
    free = search_plan(request(1, pins=pins)).plans[0].estimate
    least = min(
        search_plan(request(1, pins={**pins, "recompute": how, "micro_batch_size": 1}))
        .plans[0]
        .estimate.stages[0]
        .memory_bytes.mid
        for how in ("full", "offload")
    )
    memory = int(0.8 * least)
    assert memory < free.peak_memory_bytes.mid
    with pytest.raises(NothingFits):
        search_plan(request(1, memory, pins=pins))
    r = request(1, memory, pins=pins, host=(ROOM, FAST))
    found = search_plan(r).plans[0]
    assert found.config.offload == ("optimizer",) and found.estimate.fits
    assert "optimizer" not in found.estimate.stages[0].memory
    host = found.estimate.stages[0].host_memory["state"].mid
    again = estimate_config(r, found.config).estimate
    assert again.step_time_s.mid == pytest.approx(found.estimate.step_time_s.mid, rel=1e-12)
    assert again.stages[0].memory == found.estimate.stages[0].memory
    assert again.stages[0].host_memory == found.estimate.stages[0].host_memory
    assert again.breakdown["offload"].mid > 0
    with pytest.raises(NothingFits, match="in the host's memory on stage 0, a device's share of it is") as error:
        less = {**pins, "micro_batch_size": found.config.micro_batch_size}
        search_plan(request(1, memory, pins=less, host=(int(0.99 * host), FAST)))
    assert error.value.report.term == "state on the host"


def test_parameters_go_to_the_host_where_their_shards_are_too_large() -> None:
    """With all else there nothing fits, with the shards themselves it does: found, and by enumeration."""
    pins = {"pp": 1, "tp": 1, "dp": 4, "zero_stage": 3, "num_micro_batches": 2, "zero_replicas": 1}
    config = search_plan(request(4, pins=pins)).plans[0].config
    ways = [("offload", "optimizer"), ("full", "optimizer"), ("offload", "parameters"), ("full", "parameters")]
    least = [
        estimate_config(request(4, host=(ROOM, FAST)), replace(config, recompute=how, offload=(kind,))).estimate
        for how, kind in ways
    ]
    bytes_ = [e.peak_memory_bytes.mid for e in least]
    assert min(bytes_[2:]) < 0.9 * min(bytes_[:2])
    r = request(4, int((min(bytes_[:2]) + min(bytes_[2:])) / 2), pins=pins, host=(ROOM, FAST))
    found = search_plan(r).plans[0]
    assert found.config.offload == ("parameters",) and found.estimate.fits
    assert found.estimate.step_time_s.mid == pytest.approx(brute_force(r), rel=1e-9)
    for kind in ("activations+optimizer", "optimizer"):
        with pytest.raises(NothingFits):
            search_plan(replace(r, pins={**pins, "offload": kind}))


def test_what_fits_without_is_faster_with_a_fast_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies cost less than computing again: equal to enumeration, and not if the search were wrong about memory."""
    pins = {"pp": 2, "dp": 1, "tp": 1, "micro_batch_size": 2, "schedule": "1F1B"}
    peak = peak_bytes(pins, 2)
    memory = int(0.7 * peak)
    without = search_plan(request(2, memory, pins=pins)).plans[0].estimate.step_time_s.mid
    r = request(2, memory, pins=pins, host=(ROOM, 1e13))
    found = search_plan(r)
    assert offloads(found) and found.plans[0].estimate.step_time_s.mid < without * (1 - 1e-3)
    assert found.plans[0].estimate.step_time_s.mid == pytest.approx(brute_force(r), rel=1e-9)
    monkeypatch.setattr(planner._Search, "_memory_binds", lambda self, candidate: False)
    assert search_plan(r).plans[0].estimate.step_time_s.mid == pytest.approx(without, rel=1e-9)


@pytest.mark.parametrize("mode", [Mode.EAGER, Mode.FUSED])
def test_with_ample_memory_nothing_is_offloaded(mode: Mode) -> None:
    """And no candidate with offload is searched at all."""
    r = PlanRequest(load_model("gpt2"), Cluster.parse("1x2xh100-sxm5-80gb"), 1024, 16, {"tp": 1, "pp": 1}, mode=mode)
    free = search_plan(r)
    assert not offloads(free) and "offload" not in free.plans[0].estimate.breakdown
    never = search_plan(replace(r, pins={**r.pins, "offload": "none"}, layouts=LayoutStore()))  # begins anew
    assert free.plans[0].config == never.plans[0].config
    c, d = free.certificate, never.certificate
    assert c.solved == d.solved
    assert c.considered - c.illegal == sum(1 + len(offloaded(r, each)) for each in space_of(r).candidates)
    assert {len(offloaded(r, each)) for each in space_of(r).candidates} == {3, 5}  # parameters where ZeRO shards
    assert any(text.startswith("offload: the optimizer state") for text in c.restrictions)
    assert any(text == "offload pinned to none" for text in d.restrictions)


def test_memory_that_does_not_bind_is_seen() -> None:
    """`Cutter.binds` is False of degrees whose best plan computes nothing again, and True where it does."""
    pins = {"pp": 2, "dp": 1, "tp": 1, "zero_stage": 0, "micro_batch_size": 1, "num_micro_batches": 8}
    candidate = ParallelConfig(**pins)
    for share, binds in ((1.5, False), (0.7, True)):
        peak = peak_bytes(pins, 2)
        cutter = LayoutCache(request(2, int(peak * share), pins=pins)).cutter(candidate)
        assert cutter is not None
        found = cutter.search()
        assert cutter.binds(found.step_s * (1 + 1e-9)) is binds
        assert any(found.recompute) is binds


def test_nothing_on_the_host_beats_the_bound_without_memory() -> None:
    """`free_bound_s` of every candidate, against its best plan with everything that may be on the host."""
    pins = {"tp": 1, "pp": 2, "micro_batch_size": 1}
    r = request(4, int(0.6 * peak_bytes(pins, 4)), pins=pins, host=(ROOM, FAST), mode=Mode.EAGER)
    points, seen = LayoutCache(r), set()
    for c in space_of(r).candidates:
        plain = points.cutter(c)
        assert plain is not None
        for each in offloaded(r, c):
            cutter = points.cutter(each)
            assert cutter is not None
            cut = cutter.search()
            assert plain.free_bound_s() <= cut.step_s * (1 + 1e-12), each
            seen.add((c.schedule, each.offload, cut.chunks is not None))
    assert {s for s, _, fits in seen if fits} == {
        "1F1B", "Interleaved1F1B", "ZB-H1", "InterleavedZeroBubble", "ZBV", "DualPipeV"
    }  # fmt: skip


def test_what_is_on_the_host_costs_its_copies() -> None:
    """Optimizer: gradients there and parameters back, once, and a step at the speed of the host's memory; parameters:
    with every gather and reduction. Nothing of it is faster than without."""
    config = ParallelConfig(dp=8, zero_stage=3, micro_batch_size=1, num_micro_batches=2)
    r = PlanRequest(load_model("gpt2"), Cluster.parse("1x8xh100-sxm5-80gb"), 1024, 16)
    plain, optimizer, parameters = (
        estimate_config(r, replace(config, offload=kind)).estimate for kind in ((), ("optimizer",), ("parameters",))
    )
    work = estimate_config(r, config).point.workload  # with tied weights twice, as fully_shard has them
    elements = sum(p.num_elements for u in work.units for b in u for p in work.blocks[b].params)
    assert elements > 124_439_808
    speed = r.cluster.device.host_bytes_per_s
    assert speed is not None
    # float32 masters are what is sharded: 4 bytes there, 4 back
    assert optimizer.breakdown["offload"].mid == pytest.approx(elements / 8 * 8 / speed, rel=0.01)
    assert optimizer.breakdown["optimizer"].mid >= plain.breakdown["optimizer"].mid
    assert "offload" not in parameters.breakdown
    assert parameters.breakdown["dp_comm"].mid > plain.breakdown["dp_comm"].mid
    memory = [e.stages[0].memory for e in (plain, optimizer, parameters)]
    assert "optimizer" in memory[0] and "optimizer" not in memory[1] and "optimizer" not in memory[2]
    assert memory[1]["parameters"] == memory[0]["parameters"] and "parameters" not in memory[2]
    state = memory[0]["optimizer"].mid
    for e in (optimizer, parameters):
        # moments, masters and gradients: 16 bytes per element
        assert e.stages[0].host_memory["state"].mid == pytest.approx(16 * elements / 8, rel=0.01)
        assert e.stages[0].host_memory["state"].mid == pytest.approx(2 * state, rel=0.01)
        assert e.step_time_s.mid > plain.step_time_s.mid
    assert plain.stages[0].host_memory == {} and plain.fits_host


def test_activations_on_the_host_count_there() -> None:
    """Of all micro-batches in flight."""
    r = PlanRequest(load_model("gpt2"), Cluster.parse("1x2xh100-sxm5-80gb"), 1024, 16)
    config = ParallelConfig(pp=2, micro_batch_size=2, num_micro_batches=8, zero_stage=0, recompute="offload")
    config = replace(config, stages=(6, 6))
    found = estimate_config(r, config)
    work = found.point.workload
    sums = [
        sum(
            work.blocks[b].offloaded_bytes
            for u in units
            for b, m in zip(work.units[u], work.is_layer[u], strict=True)
            if m
        )
        for units in (range(6), range(6, 12))
    ]
    for stage, size, flight in zip(found.estimate.stages, sums, (2, 1), strict=True):
        assert stage.host_memory["activations"].mid == pytest.approx(size * flight)
    tight = replace(r, cluster=r.cluster.with_(host_memory_gb=sums[0] / 1e9))
    assert not estimate_config(tight, config).estimate.fits


def test_a_device_without_a_host_of_its_own_offloads_nothing_by_itself() -> None:
    """Processes of one machine share its memory; a link of unknown speed has no price."""
    assert not Cluster.local(2).offloads and Cluster.parse("1x1xh100-sxm5-80gb").offloads
    assert not cluster(1, ROOM).offloads and cluster(1, ROOM, host=(ROOM, FAST)).offloads
    h100 = Cluster.parse("1x1xh100-sxm5-80gb")
    unknown = replace(h100, device=replace(h100.device, host_bytes_per_s=None))
    assert not unknown.offloads
    r = PlanRequest(graph(), unknown, 64, 8, {"offload": "optimizer"})
    with pytest.raises(PinError, match="the catalog has no speed of the host link of h100-sxm5-80gb"):
        search_plan(r)
    with pytest.raises(PinError, match=r"host_memory_gb=0"):
        h100.with_(host_memory_gb=0)
    assert Cluster.parse("1x1xh100-sxm5-80gb@host_memory_gb=256").host_memory_bytes == 256e9
    assert h100.host_memory_bytes == 128e9


def test_the_memory_model_of_one_parameter() -> None:
    """Bytes per element of a bf16 model on two ranks, device and host, as the table of `autoplan.runtime.offload`."""
    r = PlanRequest(load_model("gpt2"), Cluster.parse("1x2xh100-sxm5-80gb"), 1024, 16)
    base = ParallelConfig(dp=2, micro_batch_size=1, num_micro_batches=8)
    point = estimate_config(r, base).point
    elements = sum(p.num_elements for u in point.workload.units for b in u for p in point.workload.blocks[b].params)
    want = {  # stored, gradients, state, host
        (0, ()): (2, 4, 12, 0),
        (0, ("optimizer",)): (2, 4, 0, 16),
        (1, ("optimizer",)): (2, 4, 0, 8),
        (2, ("optimizer",)): (2, 2, 0, 8),
        (1, ("parameters",)): (0, 4, 0, 8),
        (3, ("parameters",)): (0, 0, 0, 8),
    }
    for (zero, offload), expected in want.items():
        config = replace(base, zero_stage=zero, offload=offload)
        m = MemoryModel(point.workload, config, LayoutCache(r).precision, r.cluster)
        got = tuple(sum(x) / elements for x in (m.stored, m.grads, m.states, m.hosted))
        assert got == pytest.approx(expected, rel=1e-6), (zero, offload)


@pytest.mark.parametrize("share", [0.7, 1.5])
def test_offload_that_cannot_help_is_not_priced(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the same degrees are too slow with unlimited memory. The plan is the same, and nothing is left open."""
    pins = {"pp": 2, "dp": 1, "tp": 1, "micro_batch_size": 1}
    r = request(2, int(share * peak_bytes(pins, 2)), pins=pins, host=(ROOM, 1e11))
    priced: list[ParallelConfig] = []
    refine = planner._Search.refine

    def counted(self: planner._Search, candidate: ParallelConfig, cutoff_s: float) -> float:
        priced.append(candidate)
        return refine(self, candidate, cutoff_s)

    def searched() -> tuple[float, int]:
        priced.clear()
        result = search_plan(replace(r, layouts=LayoutStore()))  # each begins anew
        assert result.certificate.open == 0 and result.certificate.gap == 0.0
        return result.plans[0].estimate.step_time_s.mid, sum(bool(c.offload) for c in priced)

    monkeypatch.setattr(planner._Search, "refine", counted)
    best, few = searched()
    monkeypatch.setattr(planner._Search, "_memory_binds", lambda self, candidate: True)
    same, many = searched()
    assert best == same and few < many


@pytest.mark.parametrize("limit_s", [0.0, 60.0])
def test_a_plan_that_needs_the_host_is_found_after_the_time_limit(limit_s: float) -> None:
    """A search without a plan goes on, and does not say that nothing fits before it has tried offload."""
    pins = {"pp": 1, "tp": 1, "zero_stage": 3}
    r = request(2, int(0.22 * peak_bytes(pins, 2)), pins=pins, host=(ROOM, FAST))
    with pytest.raises(NothingFits):
        search_plan(replace(r, pins={**pins, "offload": ()}))
    assert offloads(search_plan(replace(r, time_limit_s=limit_s)))
