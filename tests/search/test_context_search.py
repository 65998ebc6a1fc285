"""The values of cp that a search looks at."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from autoplan import catalog
from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.search.later_choices import other_copies, shorter_parts
from autoplan.search.planner import search_plan
from autoplan.search.request import PlanRequest, space_of


@pytest.mark.parametrize(
    ("seq_len", "batch", "wanted"),
    [
        (8_192, 64, {1}),
        (131_072, 64, {1, 2, 4, 8, 16}),
        (131_072, 16, {1, 2, 4, 8, 16, 32}),  # fewer sequences than devices: smaller parts
    ],
)
def test_sequences_are_cut_as_far_as_their_parts_are_worth_it(seq_len: int, batch: int, wanted: set[int]) -> None:
    """Also over several nodes."""
    r = PlanRequest(catalog.load_model("llama-3.2-1b"), Cluster.parse("8x8xh100-sxm5-80gb"), seq_len, batch)
    assert {c.cp for c in space_of(r).candidates} == wanted


def test_the_layout_of_the_long_context_stage_of_llama_405b_is_searched() -> None:
    """16,384 H100, tp 8, cp 16, pp 16, dp 8, 16 M tokens of 131,072 each (arXiv 2407.21783, table 4)."""
    r = PlanRequest(
        catalog.load_model("llama-3.1-405b"), Cluster.parse("2048x8xh100-sxm5-80gb"), 131_072, 128, {"tp": 8, "pp": 16}
    )
    assert any((c.cp, c.dp) == (16, 8) for c in space_of(r).candidates)


def test_parts_are_shorter_at_the_mesh_of_a_plan_that_memory_slows_down() -> None:
    """Llama 405B on 512 H200, 1,152 sequences of 8,192 tokens: MLPerf 5.1's layout has cp 2, and needs no recompute."""
    pins = {"tp": 4, "pp": 8, "micro_batch_size": 1, "zero_stage": 1}
    model, cluster = catalog.load_model("llama-3.1-405b"), Cluster.parse("64x8xh200")
    r = PlanRequest(model, cluster, 8192, 1152, pins, precision="fp8", like="megatron-bridge@25.11")
    assert {c.cp for c in space_of(r).candidates} == {1}
    result = search_plan(r)
    assert result.plans[0].config.cp == 2
    assert any("half of them at the mesh of a plan, or" in text for text in result.certificate.restrictions)
    whole = search_plan(replace(r, pins={**pins, "cp": 1})).plans[0].estimate.step_time_s.mid
    assert result.fastest_s < 0.95 * whole


def test_parts_are_shorter_in_place_of_half_of_tp() -> None:
    """The same run without pins: tp 8 without recompute is 6 % slower than its tp 4, cp 2, pp 8."""
    model, cluster = catalog.load_model("llama-3.1-405b"), Cluster.parse("64x8xh200")
    r = PlanRequest(model, cluster, 8192, 1152, {"micro_batch_size": 1}, precision="fp8", like="megatron-bridge@25.11")
    plan = search_plan(r).plans[0]
    assert (plan.config.tp, plan.config.cp, plan.config.pp) == (4, 2, 8)
    pinned = search_plan(replace(r, pins={**r.pins, "cp": 1})).plans[0]
    assert plan.estimate.step_time_s.mid < 0.97 * pinned.estimate.step_time_s.mid


def test_shorter_parts_keep_to_pins() -> None:
    r = PlanRequest(catalog.load_model("llama-3.1-405b"), Cluster.parse("64x8xh200"), 8192, 1152)
    c = ParallelConfig(dp=16, tp=8, pp=4, zero_stage=1, micro_batch_size=1, num_micro_batches=72)
    best = SimpleNamespace(candidate=c, recompute=())
    found = {(x.tp, x.cp, x.pp, x.dp) for x in shorter_parts(r, best)}
    assert found == {(8, 2, 4, 8), (4, 2, 4, 16), (4, 2, 8, 8), (2, 2, 4, 32), (2, 2, 8, 16)}
    assert {x.tp for x in shorter_parts(replace(r, pins={"pp": 8}), best)} == {4, 2}
    assert {x.tp for x in shorter_parts(replace(r, pins={"tp": 8}), best)} == {8}
    assert shorter_parts(replace(r, pins={"tp": 16}), best) == [] == shorter_parts(replace(r, pins={"cp": 1}), best)


def test_a_plan_is_tried_with_other_copies_of_its_state() -> None:
    """MaxText's Llama 3 70B on 1,024 H100 in FP8: shards over a part are 5 % faster than over all."""
    model, cluster = catalog.load_model("llama-3.1-70b"), Cluster.parse("128x8xh100-sxm5-80gb")
    pins = {"dp": 1024, "zero_stage": 3, "micro_batch_size": 2, "recompute": "full"}
    r = PlanRequest(model, cluster, 8192, 2048, pins, precision="fp8", like="maxtext@25.08")
    everywhere = {c.zero_replicas for c in space_of(r).candidates}
    plan = search_plan(r).plans[0]
    assert everywhere == {1, 8, 128} and plan.config.zero_replicas not in everywhere
    over_all = search_plan(replace(r, pins={**pins, "zero_replicas": 1})).plans[0]
    assert plan.estimate.step_time_s.mid < 0.97 * over_all.estimate.step_time_s.mid
    best, held = (SimpleNamespace(candidate=replace(plan.config, offload=kind)) for kind in ((), ("optimizer",)))
    assert other_copies(replace(r, pins={**pins, "zero_replicas": 1}), best) == []
    kept = {x.offload for x in other_copies(replace(r, pins={"offload": "optimizer"}), held)}
    assert kept == {("optimizer",)} and {x.offload for x in other_copies(r, held)} == {()}
