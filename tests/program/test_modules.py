"""Megatron's `--recompute-modules`: what is kept and what runs again; published pairs are in test_ablations.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from autoplan.catalog import load_model
from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.config.recompute import GROUPS, MODULES, modules_choice, modules_of, region_groups
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import PinError
from autoplan.ir.graph import ModelGraph
from autoplan.program.facts import ModelFacts
from autoplan.program.megatron_modules import modules
from autoplan.program.regions import Flow, Region
from autoplan.search.estimate import Planned, estimate_config
from autoplan.search.planner import search_plan
from autoplan.search.request import PlanRequest
from experiments.published.graphs import graph_of
from experiments.published.rows import Kind, Shape

SEQ, HIDDEN, FFN, TOP_K, EXPERT_FFN = 128, 64, 192, 2, 96
TOKENS, WIDTH = SEQ, 2  # one sequence, bfloat16
DENSE = Shape(2, HIDDEN, FFN, 4, 2, 512, SEQ, 0, 0, 0, 0, 0, Kind(True, False, 16))
PLAIN = Shape(2, HIDDEN, 4 * HIDDEN, 4, 4, 512, SEQ, 0, 0, 0, 0, 0, Kind(False, True, 16))
EXPERTS = Shape(3, HIDDEN, FFN, 4, 4, 512, SEQ, 8, TOP_K, EXPERT_FFN, 96, 1, Kind(True, False, 128, True, 1536))


@lru_cache
def graph(shape: Shape) -> ModelGraph:
    return graph_of(shape)


def planned(shape: Shape, recompute: str, tp: int = 1, precision: str = "bf16", **given: Any) -> Planned:
    settings: dict[str, Any] = {"precision": precision, "mode": Mode.FUSED, **given}
    request = PlanRequest(graph(shape), Cluster.parse(f"1x{tp}xh100-sxm5-80gb"), SEQ, 1, **settings)
    return estimate_config(request, ParallelConfig(tp=tp, zero_stage=0, recompute=recompute))


def kept(shape: Shape, recompute: str, tp: int = 1, precision: str = "bf16") -> list[float]:
    """Bytes that each layer keeps."""
    workload = planned(shape, recompute, tp, precision).point.workload
    sizes = workload.unit_saved if recompute == "none" else [c[recompute] for c in workload.unit_choices]
    return [size for size, layer in zip(sizes, workload.layers, strict=True) if layer]


def again(shape: Shape, recompute: str, block: str, tp: int = 1) -> tuple[list[str], list[str]]:
    """Operations with arithmetic and collectives that one call of a block runs again."""
    found = planned(shape, recompute, tp).point.workload.blocks[block]
    assert found.modules is not None
    ops = [found.ops[i].op for i in sorted(found.modules.ops)]
    return [op for op in ops if op in ("linear", "attention", "experts")], [c.kind for c in found.modules.comms]


def test_a_dense_mlp_keeps_only_what_its_norm_reads() -> None:
    """Gone are the first product's input, gate, up and their product; the residual stream is kept by the norm
    already."""
    for tp in (1, 2):
        freed = [a - b for a, b in zip(kept(DENSE, "none", tp), kept(DENSE, "modules:mlp", tp), strict=True)]
        assert freed == [(TOKENS * HIDDEN / tp + 3 * TOKENS * FFN / tp) * WIDTH] * 2, tp
    assert again(DENSE, "modules:mlp", "layer") == (["linear"] * 3, [])
    assert again(DENSE, "modules:mlp", "layer", tp=2) == (["linear"] * 3, ["all_gather", "reduce_scatter"])


def test_what_sequence_parallelism_sends_is_sent_again() -> None:
    """The gather before the MLP and the sum behind it; of the sum before it nothing."""
    request = PlanRequest(load_model("llama-3.1-8b"), Cluster.parse("1x2xh100-sxm5-80gb"), 4096, 1, mode=Mode.FUSED)
    found = estimate_config(request, ParallelConfig(tp=2, recompute="modules:mlp")).point.workload
    block = found.blocks["layer"]
    assert block.modules is not None
    assert [c.kind for c in block.modules.comms] == ["all_gather", "reduce_scatter"]
    assert [c.kind for c in block.comms if c.phase == "forward"] == ["all_gather", "reduce_scatter"] * 2
    tokens, hidden, inner = 4096, 4096, 14336  # of the input's shard, gate, up and their product
    freed = found.unit_saved[1] - found.unit_choices[1]["modules:mlp"]
    assert freed == (tokens * hidden / 2 + 3 * tokens * inner / 2) * 2


def test_an_mlp_in_8_bits() -> None:
    """What its products keep are copies of 8 bits, which go with it."""
    freed = [a - b for a, b in zip(kept(DENSE, "none", 1, "fp8"), kept(DENSE, "modules:mlp", 1, "fp8"), strict=True)]
    assert freed == [TOKENS * HIDDEN + TOKENS * FFN * (2 * WIDTH + 1)] * 2


def test_an_mlp_without_a_gate() -> None:
    """Mean and variance that the norm keeps are gone, too; a bias of the second product is not its."""
    freed = [a - b for a, b in zip(kept(PLAIN, "none"), kept(PLAIN, "modules:mlp"), strict=True)]
    assert freed == [(TOKENS * HIDDEN + 2 * TOKENS * 4 * HIDDEN) * WIDTH + 2 * TOKENS * 4] * 2


def test_the_attention_core_is_what_selective_is() -> None:
    core, selective = planned(DENSE, "modules:core_attn"), planned(DENSE, "selective")
    assert core.estimate.peak_memory_bytes.mid == selective.estimate.peak_memory_bytes.mid
    assert again(DENSE, "modules:core_attn", "layer") == (["attention"], [])
    assert kept(DENSE, "modules:core_attn") == pytest.approx([*_selective(DENSE)])


def _selective(shape: Shape) -> list[float]:
    workload = planned(shape, "selective").point.workload
    return [size for size, layer in zip(workload.unit_selective, workload.layers, strict=True) if layer]


def test_norms_that_are_in_a_product_are_not_computed_again() -> None:
    """LayerNormLinear has both norms of a dense layer; with experts and latent attention they are kernels."""
    assert kept(DENSE, "modules:layernorm") == kept(DENSE, "none")
    assert again(DENSE, "modules:layernorm", "layer") == ([], [])
    freed = [a - b for a, b in zip(kept(EXPERTS, "none"), kept(EXPERTS, "modules:layernorm"), strict=True)]
    norm = TOKENS * HIDDEN * WIDTH
    assert freed == [norm, 2 * norm, 2 * norm]  # the first layer's MLP is dense


def test_activations_of_experts() -> None:
    """The product of gate and up, of every row; time for reading both and writing it, no product."""
    freed = [a - b for a, b in zip(kept(EXPERTS, "none"), kept(EXPERTS, "modules:moe_act"), strict=True)]
    assert freed == [0, *[TOKENS * TOP_K * EXPERT_FFN * WIDTH] * 2]
    block = planned(EXPERTS, "modules:moe_act").point.workload.blocks["layer1"]
    assert block.modules is not None and not block.modules.ops and not block.modules.comms
    (op,) = block.modules.beside
    assert op.moved_bytes == TOKENS * TOP_K * 3 * EXPERT_FFN * WIDTH


def test_whole_experts_with_those_that_are_shared() -> None:
    """Router, experts and shared experts; the layer keeps no more than what the norm made."""
    ops, comms = again(EXPERTS, "modules:moe", "layer1", tp=2)
    assert ops == ["linear", "experts", "linear", "linear", "linear"] and comms
    assert again(EXPERTS, "modules:shared_experts", "layer1")[0] == ["linear"] * 3
    alone, whole = kept(EXPERTS, "modules:shared_experts"), kept(EXPERTS, "modules:moe")
    first, *rest = zip(kept(EXPERTS, "none"), alone, whole, strict=True)
    assert first[0] == first[1] == first[2] and all(a > b > c for a, b, c in rest)


def test_up_projections_of_latent_attention() -> None:
    """Queries, and keys with values, from what is compressed; the norms of it with them. Queries, keys and values are
    dropped, and so is what the norms made."""
    assert again(EXPERTS, "modules:mla_up_proj", "layer") == (["linear", "linear"], [])
    assert planned(EXPERTS, "modules:mla_up_proj,core_attn").config.recompute == "modules:core_attn,mla_up_proj"
    both = kept(EXPERTS, "modules:core_attn,mla_up_proj")
    assert all(
        a > b > c for a, b, c in zip(kept(EXPERTS, "none"), kept(EXPERTS, "modules:mla_up_proj"), both, strict=True)
    )


def test_it_costs_time_and_saves_memory() -> None:
    """In the price of the step, in the breakdown under its name."""
    shape, none = "modules:core_attn,mlp", planned(DENSE, "none").estimate
    found = planned(DENSE, shape)
    assert found.config.recompute == shape
    assert found.estimate.breakdown["recompute"].mid > 0 and found.estimate.step_time_s.mid > none.step_time_s.mid
    assert found.estimate.stages[0].memory["activations"].mid < none.stages[0].memory["activations"].mid
    full = planned(DENSE, "full").estimate
    assert none.step_time_s.mid < found.estimate.step_time_s.mid < full.step_time_s.mid


def test_names() -> None:
    assert modules_of("modules:mlp,core_attn") == ("core_attn", "mlp")
    assert modules_choice(m for m in ("mlp", "core_attn")) == "modules:core_attn,mlp"
    for other in (*GROUPS, "none", "full", "attention+mlp", None, (1, 2), {"layer": "full"}):
        assert modules_of(other) == ()
    assert region_groups(modules_choice(MODULES)) == ()  # `mlp` the module is not `mlp` the region


@pytest.mark.parametrize(
    ("shape", "recompute", "given", "text"),
    [
        (DENSE, "modules:mpl", {}, "'mpl' is not a module.*did you mean mlp"),
        (DENSE, "modules:", {}, "'' is not a module"),
        (DENSE, "modules:moe_act", {}, "has the module 'moe_act'; there are core_attn, layernorm, mlp"),
        (DENSE, "modules:mla_up_proj", {}, "has the module 'mla_up_proj'"),
        (DENSE, "modules:mlp", {"mode": Mode.EAGER}, "mode fused.*nearest legal: recompute='full'"),
        (DENSE, "modules:mlp", {"executed": True, "mode": Mode.EAGER}, "not executed"),
    ],
)
def test_what_cannot_be(shape: Shape, recompute: str, given: dict[str, Any], text: str) -> None:
    with pytest.raises(PinError, match=text):
        planned(shape, recompute, **given)


def test_estimate_and_plan_name_modules_that_layers_have() -> None:
    """Both refuse by the same rule, and name what is left of the choice."""
    facts = ("modules:core_attn,moe", "no layer of .* has the module 'moe'; there are core_attn, layernorm, mlp")
    with pytest.raises(PinError, match=f"{facts[1]}; nearest legal: recompute='modules:core_attn'"):
        planned(DENSE, facts[0])
    request = PlanRequest(graph(DENSE), Cluster.parse("1x1xh100-sxm5-80gb"), SEQ, 1, mode=Mode.FUSED)
    with pytest.raises(PinError, match=f"pin recompute=.*{facts[1]}"):
        search_plan(replace(request, pins={"recompute": facts[0]}))


@pytest.mark.parametrize("shape", [DENSE, PLAIN, EXPERTS])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_graph_has_the_modules_that_its_statements_have(
    monkeypatch: pytest.MonkeyPatch, shape: Shape, tp: int
) -> None:
    """The rule looks at the graph, before layouts; pricing looks at statements, with conversions and fused biases."""
    of_graph, of_statements = ModelFacts(graph(shape)).modules, set[str]()

    def noted(flow: Flow, outputs: Sequence[str]) -> dict[str, tuple[Region, ...]]:
        found = modules(flow, outputs)
        of_statements.update(found)
        return found

    monkeypatch.setattr("autoplan.program.activations.modules", noted)
    planned(shape, modules_choice(of_graph), tp)
    assert of_graph and set(of_graph) == of_statements


def test_not_for_some_layers_alone() -> None:
    request = PlanRequest(graph(DENSE), Cluster.parse("1x1xh100-sxm5-80gb"), SEQ, 1, mode=Mode.FUSED)
    name = next(c.name for c in graph(DENSE).calls if c.params and c.name.endswith(".0"))
    with pytest.raises(PinError, match="in all layers or in none"):
        estimate_config(request, ParallelConfig(recompute={name: "modules:mlp"}))


def test_a_plan_with_modules_pinned() -> None:
    """The search takes them as given; where it is to be executed they are refused."""
    given = load_model("llama-3.2-1b"), Cluster.parse("1x2xh100-sxm5-80gb"), 1024, 4
    pins = {"recompute": "modules:mlp"}
    found = search_plan(PlanRequest(*given, mode=Mode.FUSED, pins=pins))
    assert found.plans[0].config.recompute == "modules:mlp"
    assert found.plans[0].estimate.breakdown["recompute"].mid > 0
    with pytest.raises(PinError, match="not executed"):
        search_plan(PlanRequest(*given, pins=pins, executed=True))
