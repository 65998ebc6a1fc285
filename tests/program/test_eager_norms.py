"""Norms as one kernel where nothing else is fused, and losses that every tensor-parallel rank computes whole."""

from __future__ import annotations

from autoplan.catalog import load_model
from autoplan.config.parallel import Mode, ParallelConfig, RunOptions
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.search.estimate import Planned, estimate_config
from autoplan.search.request import PlanRequest

NODE = Cluster.parse("1x8xh100-sxm5-80gb")


def planned(options: RunOptions, mode: Mode = Mode.EAGER, tp: int = 1, model: str = "llama-3.2-1b") -> Planned:
    request = PlanRequest(load_model(model), NODE, 2048, 8, mode=mode, options=options)
    return estimate_config(request, ParallelConfig(dp=8 // tp, tp=tp, num_micro_batches=tp))


def test_a_norm_written_out_may_be_one_kernel() -> None:
    """Eight operations of Llama's norm read and write some 40 bytes per element forward, its kernel 4."""
    apart, fused = (planned(RunOptions(fused_norms=f)) for f in (False, True))
    blocks = [p.point.workload.blocks["layer"] for p in (apart, fused)]
    forward = [dict(op.attrs).get("fused_forward_bytes") for op in blocks[1].ops]
    norm = [op for op, moved in zip(blocks[1].ops, forward, strict=True) if moved is not None]
    assert [op.op for op in norm].count("rsqrt") == 2 and not any(op.op in ("linear", "silu", "add") for op in norm)
    hidden = next(op for op in norm if op.op == "rsqrt").inputs[0].shape[-2] * 2048
    assert sum(n for n in forward if n) == 2 * (2 * 2 * hidden + 2 * 2048)  # read, written, and the weights
    assert not any("fused_forward_bytes" in dict(op.attrs) for op in blocks[0].ops)
    assert len(blocks[1].same_kernel) == len(norm) - 2 and not blocks[0].same_kernel
    steps = [p.estimate.step_time_s.mid for p in (apart, fused)]
    held = [p.estimate.stages[0].memory["activations"].mid for p in (apart, fused)]
    assert steps[1] < 0.97 * steps[0] and held[1] < 0.9 * held[0]
    for mode in (Mode.FUSED, Mode.COMPILED):  # which have such kernels anyway
        assert planned(RunOptions(fused_norms=True), mode).estimate == planned(RunOptions(), mode).estimate


def test_a_loss_may_be_of_gathered_logits() -> None:
    split, whole = (planned(RunOptions(whole_losses=w), tp=4) for w in (False, True))
    heads = [p.point.workload.blocks["head"] for p in (split, whole)]
    losses = [next(op for op in head.ops if "cross_entropy" in op.op) for head in heads]
    assert [op.inputs[0].shape[-1] for op in losses] == [128256 // 4, 128256]
    assert whole.estimate.step_time_s.mid > split.estimate.step_time_s.mid
    assert whole.estimate.stages[0].memory["activations"].mid > split.estimate.stages[0].memory["activations"].mid
    assert planned(RunOptions(whole_losses=True)).estimate == planned(RunOptions()).estimate  # one rank has all logits
