"""Graphs of published models from their dimensions alone: repeated layers, adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from made_up import case_of

from autoplan.capture.export import capture
from autoplan.capture.frontend.config_file import model_from_config
from autoplan.catalog import load_model
from autoplan.config.parallel import Launch, Mode, ParallelConfig, RunOptions
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import GraphError, PinError
from autoplan.ir.graph import Call, ModelGraph
from autoplan.search.estimate import estimate_config
from autoplan.search.request import PlanRequest
from experiments.published import validate as tool
from experiments.published.graphs import deepened, graph_of
from experiments.published.rows import Adapters, Kind, Shape


@pytest.mark.parametrize(
    "shape",
    [
        Shape(2, 64, 192, 4, 2, 512, 128, 0, 0, 0, 0, 0, Kind(True, False, 16)),
        Shape(2, 64, 256, 4, 2, 512, 128, 0, 0, 0, 0, 0, Kind(False, False, 16)),
        Shape(2, 64, 256, 4, 4, 512, 128, 0, 0, 0, 0, 0, Kind(False, True, 16)),
        Shape(4, 64, 192, 4, 2, 512, 128, 8, 2, 96, 0, 1, Kind(True, False, 32)),
        Shape(4, 64, 192, 4, 2, 512, 128, 8, 2, 96, 0, 0, Kind(True, False, 32, expert_every=2)),
        Shape(2, 64, 192, 4, 2, 512, 128, 8, 2, 96, 96, 0, Kind(True, False, 16)),
        Shape(3, 64, 192, 4, 4, 512, 128, 8, 2, 96, 96, 1, Kind(True, False, 128, True, 1536)),
        Shape(3, 64, 192, 4, 4, 512, 128, 8, 2, 96, 192, 1, Kind(True, False, 128, True, None)),
    ],
    ids=lambda s: f"{s.config()['model_type']}-{s.num_experts}-{s.kind.expert_every}-{s.kind.q_rank}",
)
def test_a_shape_makes_a_model_with_the_parameters_that_it_counts(shape: Shape) -> None:
    from autoplan.capture.frontend.config_file import model_from_config

    model = model_from_config(shape.config(), "test")
    made = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert made == pytest.approx(shape.num_params, rel=0.002)  # a router may have a gate of one row


def layer_calls(graph: ModelGraph) -> list[Call]:
    return [c for c in graph.calls if c.params and c.name[-1].isdigit()]


def cut(graph: ModelGraph, num_layers: int) -> ModelGraph:
    """Only its first layers."""
    layers = layer_calls(graph)
    gone, last, end = layers[num_layers:], layers[num_layers - 1], layers[-1]
    handed = dict(zip(end.outputs, last.outputs, strict=True))
    names = {full for c in gone for full in c.params.values()}
    return replace(
        graph,
        calls=tuple(
            c if c in layers else replace(c, inputs=tuple(handed.get(v, v) for v in c.inputs))
            for c in graph.calls
            if c not in gone
        ),
        params={name: p for name, p in graph.params.items() if name not in names},
    )


@pytest.mark.parametrize(("model", "few"), [("gpt2", 2), ("deepseek-v3", 5)])
def test_repeated_layers_are_those_of_the_whole_model(model: str, few: int) -> None:
    whole = load_model(model)
    repeated = deepened(cut(whole, few), len(layer_calls(whole)), 1)
    assert repeated.params == whole.params
    maker = [{v: c.name for c in g.calls for v in c.outputs} for g in (repeated, whole)]
    for mine, theirs in zip(repeated.calls, whole.calls, strict=True):
        assert (mine.name, mine.block, mine.params) == (theirs.name, theirs.block, theirs.params)
        assert [maker[0].get(v, v) for v in mine.inputs] == [maker[1].get(v, v) for v in theirs.inputs]
    with pytest.raises(GraphError, match="too few to repeat"):
        deepened(cut(whole, 1), 4, 1)


# a graph of two layers whose queries and keys have adapters
ADAPTED = Shape(2, 64, 192, 4, 2, 512, 128, 0, 0, 0, 0, 0, Kind(True, False, 16), Adapters(4, ("q_proj", "k_proj")))


@pytest.mark.parametrize(
    ("recompute", "sp", "milliseconds"), [("none", "0", 19.6), ("none", "1", 19.0), ("full", "0", 27.2)]
)
def test_a_single_layer_is_what_a_second_one_adds(recompute: str, sp: str, milliseconds: float) -> None:
    """Korthikanti et al., 2022, table 4: forward and backward of a layer of 22B, tp 8, 4 sequences of 2,048. A model of
    one layer with its embedding, loss and optimizer takes 1.6 to 1.8 times as long."""
    sizes = {"layers": "1", "hidden": "6144", "ffn_hidden": "24576", "heads": "64", "kv_heads": "64", "vocab": "51200"}
    ran = {"tp": "8", "dp": "1", "n_gpus": "8", "micro_batch": "4", "global_batch": "4", "recompute": recompute}
    where = {
        "gpu": "A100",
        "gpu_mem_gb": "80",
        "precision": "FP16 mixed",
        "source": "arXiv 2205.05198",
        "zero_stage": "",
    }
    fields = {**sizes, **ran, **where, "sp": sp, "seq_len": "2048", "step_time_s": "0.01", "params_b": ""}
    layer = tool.result_of(case_of(model="GPT 22B single transformer layer", **fields))
    assert not layer.reason and "a layer alone" in layer.notes[-1]
    assert layer.predicted_s == pytest.approx(milliseconds / 1e3, rel=0.06) and "optimizer" not in layer.breakdown_s
    assert layer.low_s < layer.predicted_s < layer.high_s
    assert sum(layer.breakdown_s.values()) == pytest.approx(layer.predicted_s)
    model = tool.result_of(case_of(model="GPT 22B", **fields))
    assert model.predicted_s > 1.5 * layer.predicted_s and not any("a layer" in note for note in model.notes)


def test_what_is_frozen_has_no_gradient_no_reduction_and_no_optimizer() -> None:
    def estimate(adapters: Adapters | None) -> Any:
        graph = graph_of(replace(ADAPTED, adapters=adapters))
        request = PlanRequest(graph, Cluster.parse("1x8xh100-sxm5-80gb"), 128, 16)
        return graph, estimate_config(request, ParallelConfig(dp=8, zero_stage=0, num_micro_batches=2)).estimate

    (graph, adapted), (_, whole) = estimate(ADAPTED.adapters), estimate(None)
    trained = sum(p.num_elements for p in graph.params.values() if p.trainable)
    assert trained == 2 * 4 * (64 + 4 * 16 + 64 + 2 * 16)  # down and up of both in two layers
    memory = adapted.stages[0].memory
    # in bf16 four bytes of gradients and twelve of optimizer state (config.precision.PRECISIONS)
    assert (memory["gradients"].mid, memory["optimizer"].mid) == (4 * trained, 12 * trained)
    assert memory["parameters"].mid > whole.stages[0].memory["parameters"].mid
    for term in ("dp_comm", "optimizer", "accumulate"):
        assert adapted.breakdown[term].mid < whole.breakdown[term].mid


def test_a_sliding_window_leaves_a_part_of_attention_to_price() -> None:
    """Every query sees 1,024 of up to 8,192 keys: arithmetic, time and the model's FLOPs (MFU) of that, nothing else;
    the ranks of a context-parallel group together see the same keys."""
    config = {
        "model_type": "mistral", "vocab_size": 1024, "hidden_size": 1024, "intermediate_size": 2048,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    }  # fmt: skip

    def planned(window: int | None, cp: int = 1) -> Any:
        model = model_from_config({**config, "sliding_window": window}, "windowed")
        ids = torch.zeros(2, 128, dtype=torch.long)
        request = PlanRequest(
            capture(model, {"input_ids": ids, "labels": ids}), Cluster.parse("1x8xh100-sxm5-80gb"), 8192, 8,
            mode=Mode.FUSED, options=RunOptions(launch=Launch.FULL_GRAPHS),
        )  # fmt: skip
        return estimate_config(request, ParallelConfig(dp=8 // cp, cp=cp, num_micro_batches=cp))

    def flops(found: Any) -> float:
        blocks = found.point.workload.blocks.values()
        return float(next(op.flops for b in blocks for op in b.ops if op.op == "attention"))

    whole, window, longer = planned(None), planned(1024), planned(8192)
    points = sum(min(i + 1, 1024) for i in range(8192)) / (8192 * 8193 / 2)
    assert flops(window) / flops(whole) == pytest.approx(points, rel=1e-3)
    assert flops(longer) == flops(whole) and longer.estimate.step_time_s == whole.estimate.step_time_s
    assert flops(planned(1024, cp=2)) == pytest.approx(flops(window) / 2)
    less = whole.point.workload.model_flops - window.point.workload.model_flops
    # 4 b h s s d forward, three times that with the backward, two layers
    assert less == pytest.approx(2 * 3 * 4 * 1024 * 8192**2 * (1 - points), rel=1e-3)
    assert window.estimate.step_time_s.mid < 0.9 * whole.estimate.step_time_s.mid
    assert window.estimate.peak_memory_bytes.mid == whole.estimate.peak_memory_bytes.mid  # fused kernels know windows


def test_adapters_need_a_layer_of_that_name() -> None:
    with pytest.raises(PinError, match=r"no linear layer of .* is named wq or wk; there are q_proj"):
        graph_of(replace(ADAPTED, adapters=Adapters(4, ("wq", "wk"))))


def test_frozen_products_and_adapters_are_modules_of_their_own() -> None:
    """linear_qkv stays one module; linear_in and linear_out of the adapter beside it are two."""
    counts = []
    for adapters in (None, Adapters(4, ("q_proj", "k_proj", "v_proj"))):
        graph = graph_of(replace(ADAPTED, adapters=adapters))
        request = PlanRequest(graph, Cluster.parse("1x8xh100-sxm5-80gb"), 128, 16, mode=Mode.FUSED)
        blocks = estimate_config(request, ParallelConfig(dp=8, num_micro_batches=2)).point.workload.blocks
        layer = next(b for b in blocks.values() if any(op.op == "attention" for op in b.ops))
        counts.append([op.op for k, op in enumerate(layer.ops) if k not in layer.joined_ops].count("linear"))
    assert counts == [4, 6]
