"""The values of cp that a search looks at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoplan import catalog
from autoplan.cost_models.hardware.cluster import Cluster
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
    assert any("half of them at the mesh of a plan that recomputes" in text for text in result.certificate.restrictions)
    whole = search_plan(replace(r, pins={**pins, "cp": 1})).plans[0].estimate.step_time_s.mid
    assert result.fastest_s < 0.95 * whole
