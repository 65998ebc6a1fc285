"""Pins of a request whose configuration is given: what a search would refuse is refused, not ignored."""

from __future__ import annotations

from typing import Any

import pytest

from autoplan import Cluster, ParallelConfig, PlanRequest, estimate_config, explain, load_model
from autoplan.errors import PinError

CONFIG = ParallelConfig(dp=2, tp=2, num_micro_batches=8)


def request_with(**pins: Any) -> PlanRequest:
    return PlanRequest(load_model("gpt2"), Cluster.parse("4xh100"), 1024, 16, pins=pins)


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        ({"tp": 2, "dp": 4}, "pin dp=4 x tp=2 x pp=1 = 8 devices, but the cluster has 4; nearest legal: dp=2, or tp=1"),
        ({"micro_batch_size": 3}, "pin micro_batch_size=3 does not divide the global batch of 16; nearest legal"),
        ({"zero_stage": 0, "zero_replicas": 2}, "ZeRO 0 shards nothing; nearest legal: zero_stage=1"),
    ],
    ids=str,
)
def test_pins_that_leave_no_plan_are_refused(pins: dict[str, Any], says: str) -> None:
    with pytest.raises(PinError, match=says):
        estimate_config(request_with(**pins), CONFIG)


def test_pins_that_the_configuration_contradicts_are_refused_where_it_is_explained() -> None:
    with pytest.raises(PinError, match="pin tp=4: the configuration has tp=2; leave out the pin"):
        explain(request_with(tp=4), CONFIG, only=["tp"], settings=False)
    with pytest.raises(PinError, match="time_limit_s=-1 must be a finite number of at least 0"):
        explain(request_with(tp=2), CONFIG, only=["tp"], settings=False, seconds=-1)
    found = explain(request_with(tp=2), CONFIG, only=["zero_stage"], settings=False)
    assert found.planned.config.tp == 2
