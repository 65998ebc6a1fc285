"""Workloads: model flops as published, what dispatched experts send and compute, what fused kernels keep."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
from parity import spread_out

from autoplan.catalog import load_model
from autoplan.config.parallel import Attention, Dispatcher, Mode, ParallelConfig, RunOptions
from autoplan.config.precision import precision_of
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.routing import Routing
from autoplan.cost_models.work import BlockWork, CommWork, OpWork, Workload
from autoplan.ir.graph import ModelGraph
from autoplan.ir.layout import I, R
from autoplan.program.expert_degrees import ExpertDegrees
from autoplan.program.op_costs import OpCosts
from autoplan.program.parallel_dims import parallel_dims
from autoplan.program.problem import IntraSettings, LayoutChoice, Option, Selection, build_problem
from autoplan.program.workload import workload
from autoplan.search.intra import solve
from autoplan.search.layouts import LayoutCache
from autoplan.search.planner import PlanRequest, estimate_config

SEQ_LEN = 4096
NO_OPTIONS = RunOptions()


def keep_all(choice: LayoutChoice, option: Option) -> bool:
    return True


@lru_cache(maxsize=8)
def solved(
    model: str, tp: int, seq_len: int = SEQ_LEN, cp: int = 1, keep: Callable[[LayoutChoice, Option], bool] = keep_all
) -> tuple[ModelGraph, Selection, OpCosts]:
    graph = load_model(model)
    axes = parallel_dims(graph, ParallelConfig(tp=tp)).layout_axes
    env, precision = {"b": 1, "s": seq_len // cp}, precision_of("bf16")
    cluster = Cluster.parse("2x8xh100-sxm5-80gb")
    settings = IntraSettings(axes, Costs(cluster), env, 4, 1.02, precision, cp)
    works = OpCosts(graph, axes, env, context=cp, precision=precision, device_type="cuda")
    return graph, solve(build_problem(graph, settings).filtered(keep)).selection, works


def work_of(model: str, tp: int, experts: ExpertDegrees | None = None, seq_len: int = SEQ_LEN, cp: int = 1) -> Workload:
    return workload(*solved(model, tp, seq_len, cp), experts)


def layer(work: Workload) -> BlockWork:
    (found,) = [b for b in work.blocks.values() if any(o.op == "experts" for o in b.ops)]
    return found


def products(block: BlockWork) -> OpWork:
    (found,) = [o for o in block.ops if o.op == "experts"]
    return found


def sent(comms: Sequence[CommWork], axis: str) -> dict[tuple[str, str, str], float]:
    return {(c.what, c.kind, c.phase): c.num_bytes for c in comms if c.axis == axis and c.per == "micro_batch"}


def test_model_flops_are_those_of_palm() -> None:
    """6 N per token of what is multiplied, and 12 L H Q S for attention: nothing is halved for a causal mask."""
    graph = load_model("llama-3.1-8b")
    seq_len, num_layers, heads, head_dim, vocab, hidden = 8192, 32, 32, 128, 128256, 4096
    multiplied = graph.num_params - vocab * hidden  # the embedding is looked up
    expected = seq_len * (6 * multiplied + 12 * num_layers * heads * head_dim * seq_len)
    work = work_of("llama-3.1-8b", 1, seq_len=seq_len)
    assert work.model_flops == pytest.approx(expected, rel=0.01)
    # two context-parallel ranks share the same work, and the time model keeps the half that a causal kernel computes
    assert work_of("llama-3.1-8b", 1, seq_len=seq_len, cp=2).model_flops == pytest.approx(work.model_flops, rel=1e-9)
    attention = next(o for b in work.blocks.values() for o in b.ops if o.op == "attention")
    assert attention.flops == pytest.approx(2 * heads * seq_len**2 * head_dim)


HIDDEN, INNER, TOP, NUM_EXPERTS, TP = 4096, 14336, 2, 8, 8
WHOLE = SEQ_LEN * HIDDEN * 2.0  # bytes of the hidden states of a micro-batch
ROWS = SEQ_LEN * TOP / TP  # that one rank dispatches
DISPATCHED = ROWS * HIDDEN * 2.0


def test_experts_over_ep_do_not_pay_for_tp_too() -> None:
    """Mixtral at tp 8, sequence parallel: the gather before and the scatter after the experts make room for ep's."""
    plain = layer(work_of("mixtral-8x7b", TP))
    apart = layer(work_of("mixtral-8x7b", TP, ExpertDegrees(8, 1)))
    attention = {("mul_1", "all_gather", "forward"): WHOLE, ("mul_1", "reduce_scatter", "backward"): WHOLE}
    attention |= {("o_proj", "reduce_scatter", "forward"): WHOLE, ("o_proj", "all_gather", "backward"): WHOLE}
    assert sent(apart.comms, "tp") == attention
    before = sent(plain.comms, "tp")  # scores of the router may be gathered too, by what is cheaper
    assert sum(what != "gate" for what, _, _ in before) == 8
    rows = {
        (f"experts {w}", "all_to_all", p): DISPATCHED for w in ("dispatch", "combine") for p in ("forward", "backward")
    }
    assert sent(apart.comms, "ep") == rows and not sent(apart.comms, "etp")
    assert {c.axis for c in apart.comms} == {"tp", "ep"}
    # as many copies less as conversions are gone
    gathered = 2 + any(what == "gate" for what, _, _ in before)
    assert sum(o.op == "clone" for o in plain.ops) == sum(o.op == "clone" for o in apart.ops) + gathered


def test_what_is_left_of_other_conversions_around_experts() -> None:
    """Split over the hidden size: all-to-alls to and from tokens. Whole on every rank: a gather of what comes back."""
    hidden_split = layer(work_of("mixtral-8x7b", TP, ExpertDegrees(8, 1), seq_len=SEQ_LEN - 1))  # 8 does not divide it
    local = (SEQ_LEN - 1) * HIDDEN * 2.0 / TP
    found = sent(hidden_split.comms, "tp")
    turned = {(v, "all_to_all", p): local for v in ("reshape_4", "reshape_5") for p in ("forward", "backward")}
    assert {k: v for k, v in found.items() if k[0].startswith("reshape")} == turned

    def whole(choice: LayoutChoice, option: Option) -> bool:
        stream = ("hidden", "to_2", "add_2", "to_4", "add_3")
        return all(t in (R, I) for (_, v), layout in option.provides for t in layout if v in stream)

    graph, selection, works = solved("mixtral-8x7b", TP, keep=whole)
    plain, apart = (layer(workload(graph, selection, works, e)) for e in (None, ExpertDegrees(8, 1)))
    before, after = sent(plain.comms, "tp"), sent(apart.comms, "tp")
    assert before["reshape_5", "all_reduce", "forward"] == WHOLE
    left = {("reshape_5", "all_gather", "forward"): WHOLE, ("reshape_5", "reduce_scatter", "backward"): WHOLE}
    assert after == {k: v for k, v in before.items() if not k[0].startswith(("reshape", "gate"))} | left


def test_products_are_those_of_the_local_experts() -> None:
    total = SEQ_LEN * TOP * 6 * HIDDEN * INNER
    for degrees in (ExpertDegrees(8, 1), ExpertDegrees(2, 4), ExpertDegrees(1, 2), ExpertDegrees(4, 8)):
        block = layer(work_of("mixtral-8x7b", TP, degrees))
        work, ep, etp = products(block), degrees.ep, degrees.etp
        assert work.flops == pytest.approx(total / TP)
        assert work.inputs[3].shape == (NUM_EXPERTS // ep, 2 * INNER // etp, HIDDEN)
        assert work.inputs[4].shape == (NUM_EXPERTS // ep, HIDDEN, INNER // etp)
        weights = NUM_EXPERTS * 3 * INNER * HIDDEN // (ep * etp)
        assert sum(p.num_elements for p in block.params if p.expert) == weights
        rows = 2 * (2.0 * ROWS * etp * HIDDEN)  # read and written, 2 bytes each
        assert work.moved_bytes == pytest.approx(2 * weights + rows, rel=0.01)
        gathered = {("experts gather", "all_gather", "forward"): DISPATCHED * etp}
        gathered |= {("experts scatter", "reduce_scatter", "forward"): DISPATCHED * etp}
        gathered |= {("experts scatter", "all_gather", "backward"): DISPATCHED * etp}
        gathered |= {("experts gather", "reduce_scatter", "backward"): DISPATCHED * etp}
        assert sent(block.comms, "etp") == (gathered if etp > 1 else {})
        assert bool(sent(block.comms, "ep")) == (ep > 1)


def test_dispatchers_differ_in_kind_bytes_and_passes() -> None:
    """Flex: collectives of its own with the number of copies, rows copied less; FP8 only on the way to the experts."""
    found = {}
    for dispatcher in Dispatcher:
        block = layer(work_of("mixtral-8x7b", TP, ExpertDegrees(4, 1, dispatcher)))
        found[dispatcher] = sent(block.comms, "ep"), dict(products(block).attrs)["row_passes"]
        assert {c.routing for c in block.comms if c.axis == "ep"} == {
            None if dispatcher is Dispatcher.ALL_TO_ALL else Routing(TOP)
        }
    sent_out, sent_back = "experts dispatch", "experts combine"
    there = {(sent_out, "ep_dispatch", "forward"): DISPATCHED, (sent_back, "ep_dispatch", "backward"): DISPATCHED}
    home = {(sent_back, "ep_combine", "forward"): DISPATCHED, (sent_out, "ep_combine", "backward"): DISPATCHED}
    assert found[Dispatcher.FLEX][0] == there | home
    eight_bits = {key: size * (1 + 4 / 128) / 2 for key, size in there.items()}
    assert found[Dispatcher.FLEX_FP8][0] == pytest.approx(eight_bits | home)
    # gathered and put back once per token and expert, sorted by the two local experts; of 2 copies 1.75 arrive
    passes = [found[d][1] for d in (Dispatcher.ALL_TO_ALL, Dispatcher.FLEX)]
    assert passes == pytest.approx([2 * (1 + 1 / 2) + 4, 2 * (1 + 1.75 / 2)])
    one_each = products(layer(work_of("mixtral-8x7b", TP, ExpertDegrees(8, 1))))
    assert dict(one_each.attrs)["row_passes"] == 3.0  # nothing to sort


def test_a_router_works_on_its_own_tokens() -> None:
    """At tp 8 each rank scores an eighth of the tokens; where experts lie over tp, all of them."""

    def scores(experts: ExpertDegrees | None) -> set[tuple[int, ...]]:
        ops = layer(work_of("mixtral-8x7b", TP, experts)).ops
        return {o.outputs[0].shape for o in ops if o.op == "softmax"}

    (whole,), (own,) = scores(None), scores(ExpertDegrees(8, 1))
    assert own == (SEQ_LEN // TP, NUM_EXPERTS) and whole[0] in (SEQ_LEN, SEQ_LEN // TP)
    ops = layer(work_of("mixtral-8x7b", TP, ExpertDegrees(8, 1))).ops
    (gate,) = [o for o in ops if o.op == "linear" and o.outputs[0].shape[-1] == NUM_EXPERTS]
    assert gate.flops == pytest.approx(2 * SEQ_LEN / TP * HIDDEN * NUM_EXPERTS)


def test_the_dispatcher_of_a_run_is_priced() -> None:
    """Over two nodes, 2 copies of a token: what crosses the network is less if it goes to a node once."""
    steps = {}
    for dispatcher in (Dispatcher.ALL_TO_ALL, Dispatcher.FLEX):
        request = PlanRequest(
            load_model("qwen3-30b-a3b"), Cluster.parse("2x8xh100-sxm5-80gb"), 1024, 16,
            mode=Mode.FUSED, options=RunOptions(dispatcher=dispatcher),
        )  # fmt: skip
        estimate = estimate_config(request, ParallelConfig(dp=16, ep=16, num_micro_batches=1)).estimate
        steps[dispatcher] = estimate.breakdown["ep_comm"].mid
    assert steps[Dispatcher.FLEX] < 0.7 * steps[Dispatcher.ALL_TO_ALL]


def test_experts_where_tensor_parallelism_is_are_as_the_layout_says() -> None:
    assert layer(work_of("mixtral-8x7b", TP, ExpertDegrees(1, TP))) == layer(work_of("mixtral-8x7b", TP))


def test_shared_experts_still_need_their_tokens() -> None:
    """DeepSeek at tp 8: what the shared expert reads and returns is gathered and scattered as before."""
    plain, apart = (layer(work_of("deepseek-v3", TP, e)) for e in (None, ExpertDegrees(8, 1)))
    before, after = sent(plain.comms, "tp"), sent(apart.comms, "tp")
    assert set(after) <= set(before) and sum(k[1] == "reduce_scatter" for k in after) >= 2


def test_context_and_tensor_parallel_axes_are_told_apart() -> None:
    work = work_of("llama-3.1-8b", 2, seq_len=8192, cp=2)
    assert {c.axis for b in work.blocks.values() for c in b.comms} == {"tp", "cp"}


# -- activations of fused kernels --------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def priced(
    model: str, mode: Mode, seq_len: int, tp: int = 1, precision: str = "bf16", options: RunOptions = NO_OPTIONS
) -> Workload:
    cluster = Cluster.parse("1x8xh100-sxm5-80gb")
    request = PlanRequest(load_model(model), cluster, seq_len, 8, mode=mode, precision=precision, options=options)
    return estimate_config(request, ParallelConfig(dp=8 // tp, tp=tp, num_micro_batches=tp)).point.workload


def saved_per_layer(model: str, mode: Mode, seq_len: int, hidden: int = 0, **kw: Any) -> float:
    """Bytes that one layer keeps of one token and hidden unit (of what blocks hand over, if `hidden` is not given)."""
    found = priced(model, mode, seq_len, **kw)
    return found.unit_saved[5] / seq_len / (hidden or found.cut_bytes[5] / 2 / seq_len)


def test_fused_kernels_keep_what_the_rest_follows_from() -> None:
    """GPT: 34 s b h of Korthikanti et al., 2022, section 4.1, less two dropout masks. Llama: inputs of two norms (4),
    of the products behind them (4), queries 2, keys and values 2 * 2 / 4, what attention gives 2, gate, up and their
    product 3 * 2 * 14336 / 4096; eager norms keep float32 besides, and the activation its result."""
    assert saved_per_layer("gpt3-175b", Mode.FUSED, 2048) == pytest.approx(32, abs=0.1)
    assert saved_per_layer("llama-3.1-8b", Mode.FUSED, 8192) == pytest.approx(4 + 4 + 2 + 1 + 2 + 21, abs=0.1)
    assert saved_per_layer("llama-3.1-8b", Mode.EAGER, 8192) > 1.4 * 34


@pytest.mark.parametrize("model", spread_out(["qwen3-8b", "gpt3-175b", "llama-3.1-8b"], 2))
def test_compiled_blocks_keep_no_more_than_their_operations(model: str) -> None:
    eager, compiled = (saved_per_layer(model, mode, 2048) for mode in (Mode.EAGER, Mode.COMPILED))
    assert compiled <= eager * (1 + 1e-9)


def test_compiled_experts_of_one_rank_keep_what_their_decomposition_does() -> None:
    """More than the one operator of the runtime, to the byte (test_partition.py). Beside attention and norms, as in
    Llama: of two rows per token the input 2 * 2, gate and up 2 * 2 * 2 * 14336 / 4096 and their product, half of that;
    orders, weights and the router are under 0.1."""
    eager, compiled = (saved_per_layer("mixtral-8x7b", mode, 2048) for mode in (Mode.EAGER, Mode.COMPILED))
    assert compiled == pytest.approx(4 + 4 + 2 + 1 + 2 + 4 + 28 + 14, abs=0.1)
    assert eager < compiled


def test_products_keep_shards_of_what_is_gathered() -> None:
    """As the sum of Korthikanti et al., 2022, section 4.2.2: 34 s b h / t. What is compiled keeps what it gathers."""
    assert saved_per_layer("llama-3.1-8b", Mode.FUSED, 8192, 4096, tp=4) == pytest.approx(34 / 4, abs=0.1)
    compiled = saved_per_layer("llama-3.1-8b", Mode.COMPILED, 8192, 4096, tp=4)
    assert compiled == pytest.approx(34 / 4 + 2 * 2 * 3 / 4, abs=0.1)


def test_products_in_8_bits_keep_8_bits() -> None:
    """Inputs of the four products (2 + 2 + 2 + 7 bytes above) halve, but what attention gives is kept by it as well."""
    for tp in (1, 4):
        found = saved_per_layer("llama-3.1-8b", Mode.FUSED, 8192, 4096, tp=tp, precision="fp8")
        assert found == pytest.approx((34 - 1 - 1 + 1 - 3.5) / tp, abs=0.1)
    assert saved_per_layer("llama-3.1-8b", Mode.COMPILED, 8192, precision="fp8") == pytest.approx(34, abs=0.1)


def test_unfused_attention_keeps_its_scores() -> None:
    """2 a s^2 b bytes of Korthikanti et al., 2022, section 4.1 (dropout is off); selective recompute drops them."""
    heads, hidden, seq_len = 96, 12288, 2048
    unfused = priced("gpt3-175b", Mode.FUSED, seq_len, options=RunOptions(Attention.UNFUSED))
    scores = 2.0 * heads * seq_len / hidden
    assert unfused.unit_saved[5] / seq_len / hidden == pytest.approx(32 + scores, abs=0.1)
    assert unfused.unit_selective[5] / seq_len / hidden == pytest.approx(32, abs=0.1)
    flash = priced("gpt3-175b", Mode.FUSED, seq_len)
    again = (
        unfused.unit_recompute_transient[5] - flash.unit_recompute_transient[5]
    )  # they come back, the log-sum-exp does not
    assert again == pytest.approx(2.0 * heads * seq_len**2, rel=0.01)


def test_the_loss_is_computed_in_place() -> None:
    """Kept: 4 bytes per logit, inputs of the norm and of the product (2 each). Then the gradient in bf16 beside it."""
    tokens, hidden, vocab = 8192, 4096, 128256
    fused, eager = (priced("llama-3.1-8b", mode, tokens) for mode in (Mode.FUSED, Mode.EAGER))
    saved, transient = fused.unit_saved[-1] - fused.unit_saved[5], fused.unit_transient[-1]  # of the head alone
    assert saved == pytest.approx(tokens * (4 * vocab + 4 * hidden), rel=2e-3)
    assert transient == pytest.approx(2 * tokens * vocab, rel=2e-3)
    assert eager.unit_saved[-1] - eager.unit_saved[5] + eager.unit_transient[-1] > 1.3 * (saved + transient)


def test_experts_keep_nothing_that_they_return() -> None:
    """Mixtral: rows, gate and up, their product, for both experts of a token; attention and norms as in Llama."""
    attention = 4 + 4 + 2 + 1 + 2
    experts = 2 * 2 * (1 + 3 * INNER / HIDDEN)
    assert saved_per_layer("mixtral-8x7b", Mode.FUSED, 4096) == pytest.approx(attention + experts, abs=0.2)
    attention_8, experts_8 = attention - 1 - 1 + 1, 2 * (1 + 5 * INNER / HIDDEN)
    found = saved_per_layer("mixtral-8x7b", Mode.FUSED, 4096, precision="fp8")
    assert found == pytest.approx(attention_8 + experts_8, abs=0.2)


def test_frameworks_split_norms_and_residuals_where_whole_ones_would_be_faster() -> None:
    """Few tokens on fast memory: the program of layouts alone keeps them whole, and 2.7 times the bytes."""
    cluster = Cluster.parse("1x8xgb200-nvl72")
    base = PlanRequest(load_model("gpt3-175b"), cluster, 1024, 8)
    own, framework = (
        LayoutCache(replace(base, cache=False, like=like)).for_device(8, 1, 1, None)
        for like in (None, "megatron-bridge@25.11")
    )
    assert own is not None and framework is not None
    assert own.workload.cut_bytes[5] == 8 * framework.workload.cut_bytes[5] == 1024 * 12288 * 2
    norms = {c: o.name for c, o in framework.solution.selection.items() if "/ln_" in c and not c.startswith("store")}
    assert norms and set(norms.values()) == {"S(s)"}
    assert "sequence parallelism: norms" in " ".join(framework.solution.restrictions)


def test_biases_by_position_are_split_over_heads_by_frameworks_too() -> None:
    """They have no batch, and two sequences: cut along one of them, all would be gathered in every layer."""
    r = PlanRequest(load_model("t5-11b"), Cluster.parse("1x8xh100-sxm5-80gb"), 512, 8, mode=Mode.FUSED, cache=False)
    point = LayoutCache(r).for_device(4, 1, 1, None)
    assert point is not None
    handed = [o.name for c, o in point.solution.selection.items() if c.startswith("boundary")]
    assert {"S(kv)", "S(kv2)", "S(s)", "S(t)"} <= set(handed)


def test_without_sequence_parallelism_blocks_hand_over_whole_values() -> None:
    plain, whole = (
        priced("gpt3-175b", Mode.FUSED, 2048, tp=8, options=RunOptions(sequence_parallel=parallel))
        for parallel in (True, False)
    )
    assert whole.cut_bytes[5] == 2048 * 12288 * 2 == 8 * plain.cut_bytes[5]
    assert whole.unit_kept[5] == 8 * plain.unit_kept[5]
    (kinds,) = [{c.kind for c in b.comms if c.axis == "tp"} for b in whole.blocks.values() if b.name == "layer"]
    assert kinds == {"all_reduce"}
    # section 4.2.1 of the same paper: 10 + 24 / t, of which dropout masks are not kept
    assert whole.unit_saved[5] / 2048 / 12288 == pytest.approx(8 + 24 / 8, abs=0.1)
