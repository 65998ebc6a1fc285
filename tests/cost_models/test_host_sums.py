"""An optimizer on the host: what DeepSpeed copies in every micro-batch and step, and whose memory the host's is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fused_steps import NODE, fused_workload, layer_of

from autoplan.catalog import load_model
from autoplan.config.parallel import Mode, ParallelConfig, RunOptions
from autoplan.config.precision import precision_of
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.network.groups import mesh_groups
from autoplan.cost_models.time.states import StatePricer
from autoplan.search.estimate import estimate_config
from autoplan.search.planner import search_plan
from autoplan.search.request import PlanRequest, space_of

SUMS = RunOptions(host_sums=True, overlap_zero=False)
WORK = fused_workload("llama-3.1-8b")
LAYER = layer_of(WORK)
SHARD = sum(p.num_elements for p in LAYER.params) / 8


def pricer(stage: int, m: int, offload: str = "optimizer", options: RunOptions = SUMS) -> StatePricer:
    config = ParallelConfig(dp=8, zero_stage=stage, num_micro_batches=m, offload=(offload,))
    costs = Costs(NODE, None, Mode.EAGER, options)
    return StatePricer(config, costs, precision_of("bf16-grad16"), mesh_groups(config, WORK.axes))


def test_sums_of_gradients_travel_in_every_micro_batch() -> None:
    """ZeRO 2 fetches none in the first micro-batch and keeps none where there is one; ZeRO 3 always has both ways."""
    times = {(stage, m): pricer(stage, m).host_sum_copies for stage in (1, 2, 3) for m in (1, 4)}
    assert times == {(1, 1): 0, (1, 4): 2, (2, 1): 0, (2, 4): 1.75, (3, 1): 2, (3, 4): 2}
    link = NODE.host_link_bytes_per_s
    assert link is not None
    assert pricer(2, 4).summed_on_host(LAYER).mid == pytest.approx(1.75 * 2 * SHARD / link)
    plain = replace(SUMS, host_sums=False)
    assert pricer(2, 4, options=plain).summed_on_host(LAYER).mid == 0.0
    # nothing hides them, nor the reduction, where overlap_comm is off
    none, some = (pricer(2, 4, options=o).traffic_s(LAYER)[1] for o in (plain, SUMS))
    assert some == pytest.approx(none + 1.75 * 2 * SHARD / link)


def test_a_step_widens_gradients_and_returns_parameters_in_16_bits() -> None:
    """4 bytes there and 2 back; from pageable memory under ZeRO 3; none back where parameters stay on the host."""
    link = NODE.host_link_bytes_per_s
    assert link is not None
    for stage, offload, size in ((2, "optimizer", 6), (3, "optimizer", 4 + 5 * 2), (3, "parameters", 4)):
        assert pricer(stage, 4, offload).moved(LAYER).mid == pytest.approx(size * SHARD / link), stage
    assert pricer(2, 4, options=RunOptions()).moved(LAYER).mid == pytest.approx(8 * SHARD / link)


def test_devices_share_the_memory_of_their_host() -> None:
    """614 GB/s of a DGX H100 for as many devices as a node uses; what a cluster states is each device's own."""

    def seconds(cluster: str, options: RunOptions = SUMS) -> float:
        return Costs(Cluster.parse(cluster), None, Mode.EAGER, options).host_optimizer_s(1e9, "bfloat16", 12.0).mid

    all_of_them = seconds("1x8xh100-sxm5-80gb")
    assert all_of_them == pytest.approx(3.2 * (30 + 14) * 8 / (0.8 * 614.4))
    assert seconds("1x8xh100-sxm5-80gb", RunOptions()) == pytest.approx(all_of_them * 30 / 44)
    assert seconds("1x2xh100-sxm5-80gb") == pytest.approx(all_of_them / 4)
    assert seconds("1x16xh100-sxm5-80gb") == all_of_them  # two hosts, however they are counted
    assert Cluster.parse("1x8xmi300x-192gb").host_memory_bytes_per_s == 40e9
    stated = replace(NODE, device=replace(NODE.device, host_memory_bytes_per_s=70e9))
    assert stated.host_memory_bytes_per_s == 70e9


def test_the_search_bounds_sums_on_the_host() -> None:
    pins = {"pp": 1, "tp": 1, "cp": 1, "offload": "optimizer", "recompute": "none"}
    request = PlanRequest(load_model("gpt2"), Cluster.parse("1x4xh100-sxm5-80gb"), 1024, 64, pins, options=SUMS)
    steps = [estimate_config(request, c).estimate.step_time_s.mid for c in space_of(request).candidates]
    assert search_plan(request).fastest_s <= min(steps) * (1 + 1e-9)
