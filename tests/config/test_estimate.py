"""autoplan.search.estimate: what a given configuration may be beyond what the search offers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoplan.catalog import load_model
from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import PinError
from autoplan.search.estimate import estimate_config
from autoplan.search.request import PlanRequest

INTERLEAVED = "Interleaved1F1B"


def test_products_of_4_bits_run_where_a_device_has_them_and_never_in_the_head() -> None:
    r = PlanRequest(load_model("llama-3.2-1b"), Cluster.parse("1x8xb200-sxm-180gb"), 4096, 32)
    config = ParallelConfig(dp=8, micro_batch_size=4)
    planned = {p: estimate_config(replace(r, precision=p, mode=Mode.FUSED), config) for p in ("bf16", "fp8", "fp4")}
    compute = [p.estimate.breakdown["compute"].mid for p in planned.values()]
    assert compute[0] > compute[1] > compute[2]
    assert planned["fp4"].estimate.peak_memory_bytes == planned["fp8"].estimate.peak_memory_bytes
    work = planned["fp4"].point.workload
    narrow = {
        name: {dict(op.attrs).get("matmul_dtype") for op in block.ops if op.op == "linear"}
        for name, block in work.blocks.items()
    }
    assert {k: v for k, v in narrow.items() if v} == {"layer": {"float4"}, "head": {None}}
    with pytest.raises(PinError, match=r"h100-sxm5-80gb has no figure for float4.*choose a precision"):
        estimate_config(replace(r, cluster=Cluster.parse("1x8xh100-sxm5-80gb"), precision="fp4"), config)


def test_embedding_and_head_may_be_chunks_of_their_own() -> None:
    """Megatron's account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split: 16 layers + 2."""
    r = PlanRequest(load_model("llama-3.2-1b"), Cluster.parse("1x8xh100-sxm5-80gb"), 4096, 32)

    def planned(pp: int, virtual: int, stages: tuple[int, ...] | None = None) -> Any:
        dp = 8 // pp
        schedule = INTERLEAVED if virtual > 1 else "1F1B"
        return estimate_config(
            r,
            ParallelConfig(
                dp=dp,
                pp=pp,
                num_micro_batches=32 // dp,
                schedule=schedule,
                virtual_stages=virtual,
                stages=stages,
                recompute="full",
            ),
        )

    apart, together = planned(2, 9), planned(2, 8)
    assert apart.config.stages == (0, *(1,) * 16, 0) and together.config.stages == (1,) * 16
    # the same work, cut elsewhere: forward of all ranks, parameters, layers
    for measure in (
        lambda s: s.forward_s.mid,
        lambda s: s.memory["optimizer"].mid,
        lambda s: s.num_layers,
        lambda s: s.num_recomputed,
    ):
        a, b = (sum(map(measure, p.estimate.stages)) for p in (apart, together))
        assert a == pytest.approx(b, rel=0.02)
    assert planned(2, 9, apart.config.stages).estimate.step_time_s == apart.estimate.step_time_s
    assert planned(2, 1, (16, 0)).config.stages == (16, 0)
    for virtual, stages, message in (
        (10, None, "20 chunks need at least as many layers, the model has 16"),
        (1, (8, 8, 0), "3 entries for pp=2"),
        (1, (0, 15), "add up to the model's 16 layers"),
        (2, (8, 0, 8, 0), "4 positive numbers"),
    ):
        with pytest.raises(PinError, match=message):
            planned(2, virtual, stages)


def test_a_users_frozen_layer_costs_no_gradient_no_reduction_and_no_optimizer() -> None:
    import torch
    from torch import nn

    from autoplan.capture.export import capture

    class Two(nn.Module):
        def __init__(self, frozen: bool) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(512, 512), nn.Linear(512, 512)
            self.first.requires_grad_(not frozen)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.relu(self.first(x))).pow(2).mean()

    example = {"x": torch.zeros(4, 512)}
    trained, frozen = (
        estimate_config(
            PlanRequest(capture(Two(f), example), Cluster.parse("1x8xh100-sxm5-80gb"), 1, 1 << 16),
            ParallelConfig(dp=8, zero_stage=0, micro_batch_size=1 << 12, num_micro_batches=2),
        )
        for f in (False, True)
    )
    backward = [
        [
            op.has_backward
            for block in p.point.workload.blocks.values()
            for op in block.ops
            if op.op in ("linear", "relu")
        ]
        for p in (trained, frozen)
    ]
    assert backward == [[True, True, True], [False, False, True]]
    memory = [p.estimate.stages[0].memory for p in (trained, frozen)]
    assert memory[1]["parameters"] == memory[0]["parameters"]
    assert memory[1]["optimizer"].mid == memory[0]["optimizer"].mid / 2
    for term in ("compute", "dp_comm", "accumulate", "optimizer"):
        assert frozen.estimate.breakdown[term].mid < trained.estimate.breakdown[term].mid


def test_stages_that_are_not_given_are_balanced_and_take_less_memory_where_it_is_short() -> None:
    """Layers without experts in front: several cuts have the same longest stage, and not the same fullest one."""
    config = ParallelConfig(dp=128, pp=16, ep=64, zero_stage=1, micro_batch_size=1, num_micro_batches=120)
    graph, found = load_model("deepseek-v3"), {}
    for memory_gb in (1000, 160, 144, 60):
        cluster = Cluster.parse(f"256x8xh800@memory_gb={memory_gb}")
        planned = estimate_config(PlanRequest(graph, cluster, 4096, 15360), config)
        peak = max(s.memory_bytes.mid for s in planned.estimate.stages) / 1e9
        found[memory_gb] = planned.estimate.fits, peak, planned.estimate.step_time_s.mid
    balanced_gb, balanced_s = found[1000][1:]
    assert [fits for fits, _, _ in found.values()] == [True, True, True, False]
    assert balanced_gb > 160 and found[60][1] < 0.8 * balanced_gb  # what is lacking is what a good cut lacks
    assert all(step_s <= 1.02 * balanced_s for _, _, step_s in found.values())
