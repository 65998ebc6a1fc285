"""A catalog model costs what the published runs of it are priced by."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoplan import catalog
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.report.degrees import checked_config
from autoplan.search.estimate import estimate_config
from autoplan.search.request import PlanRequest
from autoplan.stacks.like import read_like
from experiments.published.graphs import graph_of
from experiments.published.shapes import Kind, Shape

SHAPES = {
    "llama-3.1-8b": Shape(
        layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256, positions=4096, num_experts=0, top_k=0,
        expert_ffn=0, shared_ffn=0, first_dense=0, kind=Kind(gated=True, tied=False, head_dim=128),
    ),
    # whose rows are read without windows and sinks
    "gpt-oss-120b": Shape(
        layers=36, hidden=2880, ffn=2880, heads=64, kv_heads=8, vocab=201088, positions=4096, num_experts=128, top_k=4,
        expert_ffn=2880, shared_ffn=0, first_dense=0, kind=Kind(gated=True, tied=False, head_dim=64),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "within"), [("llama-3.1-8b", 1e-6), ("gpt-oss-120b", 0.1)])
def test_a_model_of_the_catalog_costs_what_its_shape_does(name: str, within: float) -> None:
    pins = {"dp": 64, "micro_batch_size": 1} | ({"ep": 16} if "oss" in name else {})
    found = []
    for graph in (catalog.load_model(name), replace(graph_of(SHAPES[name]), name=name)):
        like = read_like("megatron-bridge@26.08", {"precision": "bf16"})
        request = PlanRequest(graph, Cluster.parse("8x8xh100-sxm5-80gb"), 4096, 1280, precision="bf16", like=like)
        found.append(estimate_config(request, checked_config(request, pins)).estimate.step_time_s.mid)
    assert found[0] == pytest.approx(found[1], rel=within)
