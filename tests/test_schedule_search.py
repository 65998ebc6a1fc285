"""Schedules with several stages per rank and with split backwards in the search."""

from __future__ import annotations

import math
from typing import Any

import pytest
from enumeration import brute_force, request

from autoplan.cost_models.errors import PinError
from autoplan.planner import NothingFits, search_plan
from autoplan.points import Points
from autoplan.search.chunks import ChunkCutter
from autoplan.search.space import space


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


def test_the_quick_bound_of_a_schedule_is_one() -> None:
    """Of every candidate with several stages per rank or a split backward."""
    r = request(4, pins={"tp": 1})
    points, seen = Points(r), set()
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
            "virtual_stages=2 needs a pipeline; nearest legal: virtual_stages=1, or pp=2",
        ),
        ({"schedule": "ZBV", "virtual_stages": 3}, r"has 2 chunks per rank; nearest legal: virtual_stages=2"),
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
        ({"schedule": "Interleaved"}, "nearest legal: Interleaved1F1B"),
    ],
)
def test_schedules_that_cannot_be_say_why(pins: dict[str, Any], why: str) -> None:
    with pytest.raises(PinError, match=why):
        search_plan(request(4, pins=pins))
