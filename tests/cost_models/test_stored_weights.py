"""What a stack's storage of weights and its allocator do to the memory of a rank."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from autoplan.catalog import load_model
from autoplan.config.parallel import Mode, ParallelConfig, RunOptions
from autoplan.config.precision import precision_of
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.memory.least import LeastMemory
from autoplan.cost_models.memory.ranks import FRAGMENTATION
from autoplan.cost_models.memory.room import Room
from autoplan.ir.graph import ModelGraph
from autoplan.search.estimate import Planned, estimate_config
from autoplan.search.quick_memory import QuickMemory
from autoplan.search.request import PlanRequest

CONFIG = ParallelConfig(dp=8, zero_stage=1, num_micro_batches=2)
NARROW = RunOptions(narrow_gather=True)


@cache
def graph() -> ModelGraph:
    return load_model("llama-3.2-1b")


def request(device: str, precision: str, options: RunOptions, mode: Mode) -> PlanRequest:
    cluster = Cluster.parse(f"1x8x{device}")
    return PlanRequest(graph(), cluster, 1024, 16, precision=precision, mode=mode, options=options)


def planned(device: str, precision: str, options: RunOptions, mode: Mode = Mode.FUSED, zero: int = 1) -> Planned:
    config = CONFIG.but(zero_stage=zero)
    return estimate_config(request(device, precision, options, mode), config)


@pytest.mark.parametrize(
    ("device", "precision", "options", "mode", "zero", "width"),
    [
        ("b200-sxm-180gb", "fp8", NARROW, Mode.FUSED, 1, 1),
        ("b200-sxm-180gb", "fp8", RunOptions(), Mode.FUSED, 1, 2),
        ("b200-sxm-180gb", "fp8", NARROW, Mode.FUSED, 0, 2),  # the masters are in a sharded optimizer
        ("b200-sxm-180gb", "mxfp8", NARROW, Mode.FUSED, 1, 2),  # a copy by rows, one by columns
        ("b200-sxm-180gb", "bf16", NARROW, Mode.FUSED, 1, 2),
        ("h100-sxm5-80gb", "fp8", NARROW, Mode.FUSED, 1, 2),  # and its transpose
    ],
)
def test_weights_in_8_bits(device: str, precision: str, options: RunOptions, mode: Mode, zero: int, width: int) -> None:
    found = planned(device, precision, options, mode, zero)
    (stage,) = found.estimate.stages
    layers = [p for name, p in graph().params.items() if ".layers." in name and len(p.shape) == 2]
    weights = sum(p.num_elements for p in layers)
    assert stage.memory["parameters"].mid == 2 * graph().num_params - (2 - width) * weights
    wide = planned(device, precision, RunOptions(), mode, zero).estimate.stages[0]
    for term in ("gradients", "optimizer", "activations"):
        assert stage.memory[term] == wide.memory[term]


def test_shards_of_fully_shard_stay_wide() -> None:
    """torchtitan gathers in 8 bits, and stores what it gathers from."""
    wide, narrow = (planned("b200-sxm-180gb", "fp8", o, Mode.EAGER, 3) for o in (RunOptions(), NARROW))
    assert wide.estimate.stages[0].memory["parameters"] == narrow.estimate.stages[0].memory["parameters"]


@pytest.mark.parametrize("options", [NARROW, RunOptions(expandable_segments=True)])
def test_bounds_hold(options: RunOptions) -> None:
    r, found = (
        request("b200-sxm-180gb", "fp8", options, Mode.FUSED),
        planned("b200-sxm-180gb", "fp8", options),
    )
    bound = LeastMemory(found.point.workload, precision_of("fp8"), r.cluster, r.mode, r.options)
    for guard in (0.0, 1.0):
        room = Room(0.0, guard=guard)
        fullest = max(room.total_bytes(stage.memory) for stage in found.estimate.stages)
        assert 0.5 * fullest < sum(bound.terms(found.config, room).values()) <= fullest * (1 + 1e-9)
    memory = found.estimate.stages[0].memory
    states = memory["parameters"].mid + memory["optimizer"].mid
    for share, fits in ((1.0, True), (0.7, False)):
        quick = QuickMemory(replace(r, pins={"offload": ()}))
        quick.capacity_bytes = int(share * states) + 1
        assert (quick.shortage(found.config, states=True) is None) is fits


def test_segments_that_grow_lose_little() -> None:
    plain, grown = (
        planned("h100-sxm5-80gb", "bf16", RunOptions(expandable_segments=grows)).estimate.stages[0].memory
        for grows in (False, True)
    )
    active = plain["activations"].mid + plain["transient"].mid
    assert plain[FRAGMENTATION].mid == pytest.approx(0.03 * active)
    assert (grown[FRAGMENTATION].mid, grown[FRAGMENTATION].high) == (0.0, pytest.approx(0.03 * active))
    assert {**plain, FRAGMENTATION: None} == {**grown, FRAGMENTATION: None}
