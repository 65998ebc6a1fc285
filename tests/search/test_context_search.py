"""The values of cp that a search looks at."""

from __future__ import annotations

import pytest

from autoplan import catalog
from autoplan.cost_models.hardware.cluster import Cluster
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
