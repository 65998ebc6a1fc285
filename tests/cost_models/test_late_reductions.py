"""Gradients of ZeRO that are reduced in the last micro-batch, in 32 bits, or by an all-reduce; hooks of ZeRO 3."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fused_steps import NODE, estimate, fused_workload, layer_of

from autoplan.catalog import load_model
from autoplan.config.parallel import Mode, ParallelConfig, RunOptions
from autoplan.config.precision import precision_of
from autoplan.cost_models.constants import Constants
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Cluster, Group
from autoplan.cost_models.memory.least import LeastMemory
from autoplan.cost_models.memory.room import Room
from autoplan.cost_models.time.host import hooks_s
from autoplan.search.estimate import estimate_config
from autoplan.search.planner import search_plan
from autoplan.search.request import PlanRequest, space_of

ZERO_3 = ParallelConfig(dp=8, zero_stage=3, num_micro_batches=4)
ONCE, WIDE = RunOptions(reduce_once=True), RunOptions(reduce_once=True, wide_sums=True)


def test_whole_gradients_stay_until_the_last_micro_batch() -> None:
    """fully_shard under set_requires_gradient_sync(False): 4 bytes per parameter on every rank, one reduction."""
    params = load_model("llama-3.1-8b").num_params
    for zero in (2, 3):
        config = replace(ZERO_3, zero_stage=zero)
        each, once = (estimate(config, options=o, mode=Mode.EAGER) for o in (RunOptions(), ONCE))
        kept = [e.stages[0].memory["gradients"].mid / params for e in (each, once)]
        assert kept[0] < 1 and 4 <= kept[1] < 4.5
        assert once.breakdown["dp_comm"].mid < 0.7 * each.breakdown["dp_comm"].mid
        assert once.breakdown["accumulate"].mid > 4 * each.breakdown["accumulate"].mid  # whole ones are added
    alone = replace(ZERO_3, num_micro_batches=1)
    assert estimate(alone, options=ONCE) == estimate(alone)
    first = replace(ZERO_3, zero_stage=1)
    assert estimate(first, options=ONCE) == estimate(first)


def test_gradients_in_16_bits_may_be_reduced_in_32() -> None:
    """reduce_dtype of PyTorch's FSDP; what no_sync keeps is as wide. Nothing changes for gradients of 32 bits."""

    def priced(options: RunOptions, precision: str) -> tuple[float, float]:
        graph = load_model("llama-3.1-8b")
        request = PlanRequest(graph, NODE, 4096, 32, precision=precision, mode=Mode.EAGER, options=options)
        found = estimate_config(request, ZERO_3).estimate
        return found.stages[0].memory["gradients"].mid / graph.num_params, found.breakdown["dp_comm"].mid

    (narrow, sent), (wide, sent_wide) = (priced(o, "native") for o in (ONCE, WIDE))
    assert 2 <= narrow < 2.3 and 4 <= wide < 4.5 and sent_wide > 1.05 * sent
    assert priced(ONCE, "bf16") == priced(WIDE, "bf16")


def test_gradients_may_be_all_reduced_before_a_rank_takes_its_shard() -> None:
    config = ParallelConfig(dp=8, num_micro_batches=4)
    usual, whole = (estimate(config, options=RunOptions(overlap_zero=False, all_reduced=a)) for a in (False, True))
    params = load_model("llama-3.1-8b").num_params
    added = whole.breakdown["dp_comm"].mid - usual.breakdown["dp_comm"].mid
    reduced = Costs(NODE, mode=Mode.FUSED).collective_s("reduce_scatter", 4 * params, Group(8, 1)).mid
    assert 0.5 * reduced < added < 1.3 * reduced
    assert usual.stages[0].memory == whole.stages[0].memory


def test_bounds_hold_for_late_reductions() -> None:
    cluster = Cluster.parse("2x8xh100-sxm5-80gb")
    for zero, m, mode, options in (
        (3, 4, Mode.EAGER, ONCE), (2, 4, Mode.EAGER, WIDE), (3, 4, Mode.FUSED, WIDE), (3, 1, Mode.EAGER, ONCE),
    ):  # fmt: skip
        config = ParallelConfig(dp=16, zero_stage=zero, num_micro_batches=m)
        request = PlanRequest(load_model("gpt2"), cluster, 1024, 16 * m, mode=mode, options=options)
        found = estimate_config(request, config)
        bound = LeastMemory(found.point.workload, precision_of(request.precision), cluster, mode, options)
        least = sum(bound.terms(found.config, Room(0.0)).values())
        fullest = max(Room(0.0).total_bytes(stage.memory) for stage in found.estimate.stages)
        assert 0.5 * fullest < least <= fullest * (1 + 1e-9)
    request = PlanRequest(
        load_model("gpt2"), cluster, 1024, 512, {"pp": 1, "tp": 1, "cp": 1, "zero_stage": 3}, options=WIDE
    )
    steps = [estimate_config(request, c).estimate.step_time_s.mid for c in space_of(request).candidates]
    assert search_plan(request).fastest_s <= min(steps) * (1 + 1e-9)


def test_hooks_of_deepspeed_go_around_every_module() -> None:
    """Llama: a layer, attention with four products, the MLP with three, two norms. Products start a gather each."""
    c, layer = Constants.shipped(), layer_of(fused_workload("llama-3.1-8b"))

    def seconds(options: RunOptions, ranks: int, cluster: Cluster = NODE) -> float:
        return hooks_s(layer, ranks, Costs(cluster, None, Mode.EAGER, options)).mid

    hooked = RunOptions(module_hooks=True)
    assert seconds(hooked, 1) == pytest.approx(2 * 12 * c.host_hook_s)
    assert seconds(hooked, 8) == pytest.approx(2 * 12 * c.host_hook_s + 7 * c.host_comm_s)
    assert seconds(RunOptions(), 8) == seconds(hooked, 8, Cluster.local(2)) == 0
    short = {"mode": Mode.EAGER, "seq_len": 256}
    steps = [estimate(ZERO_3, options=o, **short).step_time_s.mid for o in (RunOptions(), hooked)]  # type: ignore[arg-type]
    passes = 2 * ZERO_3.num_micro_batches * 32
    assert steps[0] < steps[1] < steps[0] + passes * seconds(hooked, 8) * 1.2  # the device works meanwhile
    other = replace(ZERO_3, zero_stage=2)
    assert estimate(other, options=hooked, **short) == estimate(other, **short)  # type: ignore[arg-type]
