"""Schedules with several stages per rank and with split backwards in the search."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import models
import pytest
from enumeration import best_of, brute_force, request

from autoplan.capture.export import capture
from autoplan.catalog import load_model
from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import PinError
from autoplan.ir.graph import ModelGraph
from autoplan.search.estimate import estimate_config
from autoplan.search.interleaved_cuts import ChunkCutter, even_cut, even_cuts
from autoplan.search.later_choices import more_stages
from autoplan.search.layouts import LayoutCache
from autoplan.search.planner import NothingFits, SearchResult, search_plan
from autoplan.search.request import PlanRequest
from autoplan.search.space import space


def test_layers_that_are_left_over_are_in_one_round() -> None:
    """13 equal layers in 4 chunks on each of 2 ranks: 1 or 2 in each, with as few rounds of 2 as there can be."""

    def rounds(cut: tuple[int, ...], pp: int) -> list[int]:
        return [max(cut[k : k + pp]) for k in range(0, len(cut), pp)]

    for layers, pp, chunks in ((13, 2, 4), (126, 16, 7), (10, 4, 2), (9, 2, 4), (7, 4, 1)):
        cuts = even_cuts((1.0,) * layers, pp, chunks)
        assert cuts[0] == even_cut((1.0,) * layers, pp * chunks)
        for cut in cuts:
            assert sum(cut) == layers and len(cut) == pp * chunks and max(cut) - min(cut) <= 1
        # no rank has more than its share of layers to wait for
        assert min(sum(rounds(cut, pp)) for cut in cuts) == -(-layers // pp)
    assert even_cuts((1.0,) * 32, 4, 2) == ((4,) * 8,)
    assert even_cuts((1.0, 1.0, 1.0, 3.0), 2, 1)[0] == even_cut((1.0, 1.0, 1.0, 3.0), 2) == (3, 1)


def test_the_fastest_of_the_even_cuts_is_taken() -> None:
    """80 layers of Llama 70B with a heavy head in 4 chunks on each of 12 stages, none of which divides the other."""
    setup = PlanRequest(
        load_model("llama-3.1-70b"), Cluster.parse("12x8xh100-sxm5-80gb"), 4096, 24, mode=Mode.FUSED,
        pins={"tp": 8, "pp": 12, "schedule": "Interleaved1F1B", "virtual_stages": 4, "micro_batch_size": 1},
    )  # fmt: skip
    (candidate, *_) = space(setup.graph, setup.cluster, 24, setup.pins).candidates
    cutter = LayoutCache(setup).cutter(candidate)
    assert isinstance(cutter, ChunkCutter) and len(cutter.cuts) > 1
    steps = {cut: cutter.pricer.step_s(cut, [0] * len(cut)) for cut in cutter.cuts}
    assert steps[cutter.chunks] == min(steps.values()) < max(steps.values())
    assert cutter.quick_bound_s() <= min(steps.values())


def test_left_over_layers_in_one_round_are_faster() -> None:
    """32 layers in 3 chunks on each of 8 stages, simulated: 8 that are left over are slower spread over all rounds."""
    setup = PlanRequest(load_model("llama-3.1-8b"), Cluster.parse("1x8xh100-sxm5-80gb"), 4096, 16, mode=Mode.FUSED)
    config = ParallelConfig(dp=1, pp=8, num_micro_batches=16, schedule="Interleaved1F1B", virtual_stages=3)
    spread = tuple((k + 1) * 32 // 24 - k * 32 // 24 for k in range(24))
    level = estimate_config(setup, config)
    apart = estimate_config(setup, replace(config, stages=spread))
    assert level.config.stages != spread and sorted(level.config.stages or ()) == sorted(spread)
    assert level.estimate.step_time_s.mid < 0.95 * apart.estimate.step_time_s.mid


@pytest.mark.parametrize("share", [2.0, 0.9, 0.6])
@pytest.mark.parametrize("pins", [{"pp": 2, "dp": 1}, {"pp": 2, "dp": 2, "zero_stage": 1}, {"schedule": "ZBV"}])
def test_the_search_over_schedules_is_enumeration(pins: dict[str, Any], share: float) -> None:
    devices = 2 * pins.get("dp", 1)
    pins = {**pins, "tp": 1, "num_micro_batches": 4}
    free = search_plan(request(devices, pins=pins))
    assert free.plans[0].config.schedule != "1F1B"  # a bubble that others do not have
    r = request(devices, int(free.plans[0].estimate.peak_memory_bytes.mid * share), pins=pins)
    expected = brute_force(r)
    if expected == math.inf:
        with pytest.raises(NothingFits):
            search_plan(r)
        return
    found = search_plan(r)
    assert found.plans[0].estimate.step_time_s.mid == pytest.approx(expected, rel=1e-9)
    assert found.certificate.gap == 0.0 and found.certificate.status == "complete"


@functools.cache
def _twelve_layers() -> ModelGraph:
    return capture(models.make_llama(num_hidden_layers=12), models.token_batch(2, 16))


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "InterleavedZeroBubble"])
def test_every_number_of_equal_stages_is_looked_at(schedule: str) -> None:
    """12 layers on 2 ranks: 3 and 6 stages per rank beside the usual 2, 4 and 8; the best of all is found."""
    pins = {"pp": 2, "dp": 1, "tp": 1, "num_micro_batches": 4, "zero_stage": 0, "schedule": schedule}
    r = replace(request(2, pins=pins), graph=_twelve_layers())
    found = search_plan(r)
    steps = {
        v: best_of(r, ParallelConfig(pp=2, num_micro_batches=4, micro_batch_size=2, zero_stage=0, schedule=schedule,
                                     virtual_stages=v))
        for v in (2, 3, 4, 6)
    }  # fmt: skip
    assert found.plans[0].estimate.step_time_s.mid == pytest.approx(min(steps.values()), rel=1e-9)
    assert found.plans[0].config.virtual_stages == min(steps, key=steps.__getitem__)
    assert any("other numbers of stages per rank" in text for text in _free(r).certificate.restrictions)


def _free(r: PlanRequest) -> SearchResult:
    return search_plan(replace(r, pins={k: v for k, v in r.pins.items() if k != "schedule"}))


def test_more_stages_are_evaluated_for_less_gain_than_the_allowed_gap() -> None:
    """GPT-3 175B on 128 H100: 12 stages per rank, which NVIDIA measured, are 1 % faster than 3."""
    model, cluster = load_model("gpt3-175b"), Cluster.parse("16x8xh100-sxm5-80gb")
    r = PlanRequest(model, cluster, 2048, 256, {"tp": 4, "pp": 8}, like="megatron-bridge@24.11")
    c = ParallelConfig(dp=4, tp=4, pp=8, zero_stage=1, num_micro_batches=64, schedule="Interleaved1F1B")
    measured = estimate_config(r, c.but(virtual_stages=12)).estimate.step_time_s.mid
    assert estimate_config(r, c.but(virtual_stages=3)).estimate.step_time_s.mid > measured
    assert search_plan(r).fastest_s <= measured


def test_more_stages_are_tried_where_fewer_are_too_big() -> None:
    """Six stages per rank are one layer each, and fit; two and four do not."""
    model, cluster = load_model("gpt3-175b"), Cluster.parse("8x8xa100-sxm4-80gb")
    pins = {"tp": 4, "pp": 16, "recompute": "selective", "schedule": "Interleaved1F1B"}
    r = PlanRequest(model, cluster, 2048, 64, {**pins, "virtual_stages": 2}, like="megatron-lm@22.05")
    with pytest.raises(NothingFits):
        search_plan(r)
    del pins["schedule"]
    found = search_plan(replace(r, pins=pins))
    assert found.plans[0].config.virtual_stages == 6
    plain = search_plan(replace(r, pins={**pins, "schedule": "1F1B"}))
    assert found.fastest_s < 0.9 * plain.fastest_s


def test_more_stages_are_equal_and_legal() -> None:
    """Llama 405B has 126 layers, and 128 with embedding and head: on 16 ranks 8 to each."""
    r = PlanRequest(load_model("llama-3.1-405b"), Cluster.parse("128x8xh100-sxm5-80gb"), 8192, 512)
    c = ParallelConfig(dp=8, tp=8, pp=16, num_micro_batches=64, schedule="Interleaved1F1B", virtual_stages=2)
    assert [each.virtual_stages for each in more_stages(r, c)] == [4]  # 8 x 16 is more than 126 layers
    assert [each.virtual_stages for each in more_stages(r, c.but(pp=2, dp=64, num_micro_batches=8))] == [
        3, 4, 7, 8, 9, 16, 21, 32, 63,
    ]  # fmt: skip
    assert not list(more_stages(replace(r, pins={"virtual_stages": 2}), c))
    assert not list(more_stages(r, c.but(schedule="ZBV")))


def test_the_quick_bound_of_a_schedule_is_one() -> None:
    """Of every candidate with several stages per rank or a split backward."""
    r = request(4, pins={"tp": 1})
    points, seen = LayoutCache(r), set()
    for c in space(r.graph, r.cluster, r.global_batch_size, r.pins).candidates:
        cutter = points.cutter(c)
        if isinstance(cutter, ChunkCutter):
            seen.add((c.schedule, c.virtual_stages))
            assert cutter.quick_bound_s() <= cutter.bound_s() * (1 + 1e-12), c
    assert {s for s, _ in seen} == {"Interleaved1F1B", "ZB-H1", "InterleavedZeroBubble", "ZBV", "DualPipeV"}


@pytest.mark.parametrize(
    ("pins", "why"),
    [
        (
            {"schedule": "Interleaved1F1B", "pp": 1},
            "virtual_stages=2 needs a pipeline; nearest legal: pp=2",
        ),
        ({"schedule": "ZBV", "virtual_stages": 3}, r"nearest legal: virtual_stages=2"),
        (
            {"schedule": "ZBV", "pp": 2, "zero_stage": 3},
            "splits the backward, which with zero_stage=3 gives wrong gradients; nearest legal: zero_stage=2",
        ),
        (
            {"schedule": "DualPipeV", "pp": 2, "num_micro_batches": 2},
            "needs at least 2 micro-batches per stage, not 2 on 2 stages; nearest legal: num_micro_batches=4",
        ),
        (
            {"virtual_stages": 8, "pp": 2},
            "= 16 chunks need at least as many layers, the model has 4; nearest legal: virtual_stages=2",
        ),
        ({"schedule": "Interleaved"}, "nearest legal: schedule='Interleaved1F1B'"),
    ],
)
def test_schedules_that_cannot_be_say_why(pins: dict[str, Any], why: str) -> None:
    with pytest.raises(PinError, match=why):
        search_plan(request(4, pins=pins))
