"""Graphs with adapters: equal to captured modules with adapters; memory and arithmetic against hand counts."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn

from autoplan.capture.export import capture
from autoplan.capture.frontend.config_file import model_from_config
from autoplan.catalog import load_model
from autoplan.config.adapters import PACKED_BYTES, Adapters, read_adapters
from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.cost_models.constants import Constants
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.kernels.products import phase_flops
from autoplan.errors import PinError
from autoplan.ir.graph import ModelGraph
from autoplan.program.adapters import with_adapters
from autoplan.search.planner import Planned, PlanRequest, estimate_config, search_plan

CLUSTER = Cluster.parse("1x8xh100-sxm5-80gb")
LLAMA = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
QWEN2 = {**LLAMA, "model_type": "qwen2"}  # queries, keys and values have a bias
GPT2 = {"model_type": "gpt2", "vocab_size": 512, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}


def module(config: dict[str, Any]) -> nn.Module:
    return model_from_config(config, "test")


def captured(model: nn.Module) -> ModelGraph:
    ids = torch.zeros(2, 128, dtype=torch.long)
    return capture(model, {"input_ids": ids, "labels": ids})


@lru_cache(maxsize=4)
def graph_of(kind: str) -> ModelGraph:
    return captured(module({"llama": LLAMA, "qwen2": QWEN2, "gpt2": GPT2}[kind]))


class Beside(nn.Module):
    """As PEFT does it: y = base(x) + B A x, with the scale in B."""

    def __init__(self, base: nn.Module, rank: int) -> None:
        super().__init__()
        weight = base.weight
        inner, outer = weight.shape if not isinstance(base, nn.Linear) else reversed(weight.shape)
        self.base = base
        self.down = nn.Linear(inner, rank, bias=False, dtype=weight.dtype)
        self.up = nn.Linear(rank, outer, bias=False, dtype=weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


def with_modules(model: nn.Module, rank: int, names: tuple[str, ...]) -> nn.Module:
    model.requires_grad_(False)
    found = [(parent, n, c) for parent in model.modules() for n, c in parent.named_children() if n in names]
    for parent, name, child in found:
        setattr(parent, name, Beside(child, rank))
    return model


CONFIGS = (
    ParallelConfig(dp=8, zero_stage=0, micro_batch_size=1, num_micro_batches=2),
    ParallelConfig(dp=2, tp=2, pp=2, zero_stage=1, num_micro_batches=8),
    ParallelConfig(dp=8, zero_stage=3, num_micro_batches=2, recompute="full"),
)


@pytest.mark.parametrize(
    ("kind", "names", "mode"),
    [
        ("llama", ("q_proj", "v_proj"), Mode.EAGER),
        ("llama", ("q_proj", "v_proj"), Mode.FUSED),
        ("qwen2", ("k_proj", "down_proj"), Mode.EAGER),
        pytest.param("qwen2", ("k_proj", "down_proj"), Mode.COMPILED, marks=pytest.mark.slow),
    ],
)
def test_a_graph_with_adapters_is_priced_as_the_module_with_them(kind: str, names: tuple[str, ...], mode: Mode) -> None:
    wanted = captured_with(kind, names)
    made = with_adapters(graph_of(kind), Adapters(4, names))
    trained = [sorted(p.num_elements for p in g.params.values() if p.trainable) for g in (wanted, made)]
    assert trained[0] == trained[1] and made.num_params == wanted.num_params
    for config in CONFIGS:
        a, b = (estimate_config(PlanRequest(g, CLUSTER, 128, 16, mode=mode), config).estimate for g in (wanted, made))
        assert b.breakdown.keys() == a.breakdown.keys()
        for name, q in a.breakdown.items():
            assert b.breakdown[name].mid == pytest.approx(q.mid, rel=1e-9, abs=1e-15), name
        for mine, theirs in zip(b.stages, a.stages, strict=True):
            assert {n: q.mid for n, q in mine.memory.items()} == {n: q.mid for n, q in theirs.memory.items()}


@lru_cache(maxsize=8)
def captured_with(kind: str, names: tuple[str, ...]) -> ModelGraph:
    return captured(with_modules(module({"llama": LLAMA, "qwen2": QWEN2}[kind]), 4, names))


def priced(adapters: str | None, mode: Mode = Mode.EAGER, zero: int = 0, model: str = "llama-3.1-8b") -> Planned:
    graph = load_model(model)
    graph = graph if adapters is None else with_adapters(graph, read_adapters(adapters))
    config = ParallelConfig(dp=8, zero_stage=zero, num_micro_batches=2)
    return estimate_config(PlanRequest(graph, CLUSTER, 2048, 16, mode=mode), config)


# parameters of Llama 3.1 8B: 32 layers of 4,096 with 8 of 32 heads of 128 for keys and values, 14,336 inside
HIDDEN, KV, INNER, LAYERS, VOCAB = 4096, 1024, 14336, 32, 128256
LINEAR = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV + 3 * HIDDEN * INNER)
REST = 2 * VOCAB * HIDDEN + (2 * LAYERS + 1) * HIDDEN


def test_memory_of_lora_by_hand() -> None:
    memory = priced("lora:16:q_proj,v_proj").estimate.stages[0].memory
    trained = LAYERS * 16 * ((HIDDEN + HIDDEN) + (HIDDEN + KV))
    assert memory["parameters"].mid == 2 * (LINEAR + REST + trained)
    # of what is trained: gradients in float32; two moments and a master in float32
    assert (memory["gradients"].mid, memory["optimizer"].mid) == (4 * trained, 12 * trained)


def test_memory_of_qlora_by_hand() -> None:
    memory = priced("qlora:16:all-linear").estimate.stages[0].memory
    trained = LAYERS * 16 * (2 * (HIDDEN + HIDDEN) + 2 * (HIDDEN + KV) + 3 * (HIDDEN + INNER))
    assert pytest.approx(4.127, abs=1e-3) == 8 * PACKED_BYTES  # bits: 4 and 0.127 (QLoRA, section 3)
    assert memory["parameters"].mid == pytest.approx(PACKED_BYTES * LINEAR + 2 * (REST + trained))
    assert (memory["gradients"].mid, memory["optimizer"].mid) == (4 * trained, 12 * trained)
    sharded = priced("qlora:16:all-linear", zero=3).estimate.stages[0].memory
    assert sharded["parameters"].mid < memory["parameters"].mid / 4


def test_arithmetic_of_lora_by_hand() -> None:
    """Frozen weights have no gradient of their own: their backward is one product, not two; before the first adapter
    there is none at all."""
    tokens = 2048
    found = {}
    for adapters in (None, "lora:16:q_proj,v_proj"):
        work = priced(adapters).point.workload
        backward = forward = 0.0
        for name in (n for unit in work.units for n in unit):
            for op in work.blocks[name].ops:
                if op.op == "linear":
                    forward += op.flops
                    backward += phase_flops(op, "backward") if op.has_backward else 0.0
        found[adapters] = (forward, backward)
    multiplied = LINEAR + VOCAB * HIDDEN
    assert found[None] == (2 * tokens * multiplied, 4 * tokens * multiplied)
    trained = LAYERS * 16 * ((HIDDEN + HIDDEN) + (HIDDEN + KV))
    first = HIDDEN * (HIDDEN + 2 * KV)  # queries, keys and values of the first layer
    downs = 2 * 16 * HIDDEN  # its adapters need no gradient of their input either
    assert found["lora:16:q_proj,v_proj"] == (
        2 * tokens * (multiplied + trained),
        2 * tokens * (multiplied - first + 2 * trained - downs),
    )
    assert priced("lora:16").estimate.breakdown["compute"].mid < 0.85 * priced(None).estimate.breakdown["compute"].mid


def test_mfu_counts_no_gradient_of_frozen_weights() -> None:
    """Per token 4 N of what is frozen, 6 N of adapters, as Megatron Bridge counts LoRA, and attention as always."""
    seq_len, heads, head_dim = 2048, 32, 128
    attention = 12 * LAYERS * heads * head_dim * seq_len
    trained = LAYERS * 16 * ((HIDDEN + HIDDEN) + (HIDDEN + KV))
    multiplied = LINEAR + VOCAB * HIDDEN
    lora, full = (priced(a).point.workload.model_flops for a in ("lora:16:q_proj,v_proj", None))
    assert full == pytest.approx(seq_len * (6 * multiplied + attention), rel=0.01)
    assert lora == pytest.approx(seq_len * (4 * multiplied + 6 * trained + attention), rel=0.01)


@pytest.mark.parametrize("mode", Mode)
def test_opening_packed_weights_takes_time(mode: Mode) -> None:
    lora, qlora = (priced(f"{kind}:16:q_proj,v_proj", mode) for kind in ("lora", "qlora"))
    more = qlora.estimate.breakdown["compute"].mid - lora.estimate.breakdown["compute"].mid
    # read in 4 bits and written in 16, in the forward and in the backward of all but the first layer's queries, keys
    # and values
    first = HIDDEN * (HIDDEN + 2 * KV)
    moved = (2 + PACKED_BYTES) * (2 * LINEAR - first)
    in_a_micro_batch = moved / (CLUSTER.device.memory_bytes_per_s * Constants.shipped().memory_share)
    assert 1.99 * in_a_micro_batch < more < 2.2 * in_a_micro_batch
    assert qlora.estimate.stages[0].memory["transient"].mid >= lora.estimate.stages[0].memory["transient"].mid


def test_what_is_in_4_bits_is_priced_and_not_executed() -> None:
    graph = with_adapters(load_model("gpt2"), Adapters(8, ("c_attn",), packed=True))
    request = PlanRequest(graph, Cluster.parse("1x2xh100-sxm5-80gb"), 1024, 8, executed=True)
    with pytest.raises(PinError, match="weights in 4 bits are priced, but not executed"):
        search_plan(request)
    assert search_plan(replace(request, executed=False)).plans


@pytest.mark.parametrize(
    ("kind", "text", "modules"),
    [
        ("llama", "lora:4", {"q_proj", "v_proj"}),
        ("gpt2", "lora:4", {"c_attn"}),
        ("llama", "lora:4:mlp.down_proj", {"down_proj"}),
        (
            "llama",
            "lora:4:all-linear",
            {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        ),
    ],
)
def test_where_adapters_stand(kind: str, text: str, modules: set[str]) -> None:
    graph = with_adapters(graph_of(kind), read_adapters(text))
    trained = [name for name, p in graph.params.items() if p.trainable]
    assert {name.split(".")[-3] for name in trained} == modules
    assert len(trained) == 2 * 3 * len(modules) and f"adapters {text}" in graph.notes[-1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lora", "write lora:16"),
        ("lora:0", "write lora:16"),
        ("dora:16", "write lora:16"),
        ("lora:16:all-linear,q_proj", "leave out the others"),
        ("lora:16:q_proj,wq", "is named wq; there are q_proj, k_proj.*; all-linear is all but the head"),
    ],
)
def test_adapters_that_are_wrong(text: str, message: str) -> None:
    with pytest.raises(PinError, match=message):
        with_adapters(graph_of("llama"), read_adapters(text))


def test_a_request_names_only_adapters_that_its_graph_has() -> None:
    added = with_adapters(graph_of("llama"), read_adapters("lora:16"))
    assert PlanRequest(added, CLUSTER, 128, 8, adapters="lora:16").adapters == "lora:16"
    with pytest.raises(PinError, match=r"all of its parameters are trained; add them: graph=.*with_adapters"):
        PlanRequest(graph_of("llama"), CLUSTER, 128, 8, adapters="lora:16")


def test_adapters_are_written_as_they_are_read() -> None:
    for text in ("lora:16", "qlora:8:all-linear", "lora:4:q_proj,v_proj"):
        assert str(read_adapters(text)) == text
