"""The intra-op ILP against brute force, its certificate, its refusals, and against Megatron's layouts of a Llama."""

import functools
import itertools
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from models import make_llama, token_batch
from torch import nn

from autoplan.capture.export import capture
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Cluster, Device, Level
from autoplan.cost_models.network.collectives import wire_bytes
from autoplan.errors import InfeasibleError, LayoutError
from autoplan.ir.graph import ModelGraph
from autoplan.ir.layout import Axis, AxisType, I, Layout, P, R, shard
from autoplan.program.problem import (
    IntraProblem,
    IntraSettings,
    LayoutChoice,
    Option,
    Selection,
    ValueKey,
    build_problem,
    copy_work,
    evaluate_selection,
)
from autoplan.search import linear
from autoplan.search.intra import IntraSolution, LayoutProgram, SendWish, StoppedError, follow, solve
from autoplan.units import GB, GIB, MICRO, TERA

DEVICE = Device("gpu", 400 * TERA, 2000.0 * GB, 64 * GIB, "assumed")
CLUSTER = Cluster(1, 8, DEVICE, Level(10 * MICRO, 100.0 * GB, "assumed"), "cuda")


def brute_force(problem: IntraProblem, limit: int = 2_000_000) -> tuple[float, Mapping[str, Option]]:
    """Return the least cost over every selection. ValueError for more than `limit` selections."""
    total = math.prod(len(choice.options) for choice in problem.choices)
    if total > limit:
        raise ValueError(f"{total} selections are too many to enumerate (limit {limit})")
    names = [choice.name for choice in problem.choices]
    selections = (
        dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*(c.options for c in problem.choices))
    )
    return min(((evaluate_selection(problem, s), s) for s in selections), key=lambda found: found[0])


# ---------------------------------------------------------------------------------------------------------------------
# Random problems.

LAYOUTS: list[Layout] = [(R,), (I,), (P,), (shard(0),)]


def random_problem(rng: random.Random) -> IntraProblem:
    """A few choices, each providing a value and using some earlier ones; whole numbers, so that costs are exact."""
    prices: dict[tuple[ValueKey, Layout, Layout], float | None] = {}
    once_prices: dict[tuple[ValueKey, Layout, Layout], float] = {}
    sends: dict[tuple[ValueKey, Layout, Layout], int] = {}
    choices: list[LayoutChoice] = []
    keys: list[ValueKey] = []
    for i in range(rng.randint(2, 5)):
        key = ("block", f"v{i}")
        used = rng.sample(keys, rng.randint(0, min(2, len(keys))))
        if used and rng.random() < 0.15:
            used.append(used[0])  # the same value twice
        options = []
        for k in range(rng.randint(1, 3)):
            requires = tuple((u, rng.choice(LAYOUTS)) for u in used)
            cost, state = float(rng.randint(0, 20)), float(rng.choice((0, 0, 5, 10)))
            once = float(rng.choice((0, 0, 12, 24)))
            made = ((key, rng.choice(LAYOUTS)),)
            options.append(Option(f"o{k}", requires, made, cost, state, once_s=once, num_sends=rng.choice((0, 0, 2))))
        weight = float(rng.choice((1, 1, 3)))
        choices.append(LayoutChoice(f"c{i}", tuple(options), weight, follows=rng.random() < 0.5))
        keys.append(key)
        for a in LAYOUTS:
            for b in LAYOUTS:
                prices[key, a, b] = None if rng.random() < 0.2 else float(rng.randint(0, 15))
                once_prices[key, a, b] = float(rng.choice((0, 0, 12)))
                sends[key, a, b] = rng.choice((0, 1, 2))
    weights = {key: float(rng.choice((1, 2))) for key in keys}
    budget = float(rng.randint(5, 40)) if rng.random() < 0.4 else None
    return IntraProblem(
        tuple(choices),
        weights,
        lambda k, a, b: prices[k, a, b],
        state_budget_bytes=budget,
        convert_once_s=lambda k, a, b: once_prices[k, a, b],
        num_micro_batches=rng.choice((1, 2, 3)),
        num_sends=lambda k, a, b: sends[k, a, b],
        send_s=rng.choice((0.0, 0.0, 4.0)),
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 10**9))
def test_the_ilp_is_brute_force_on_random_problems(seed: int) -> None:
    problem = random_problem(random.Random(seed))
    least, _ = brute_force(problem)
    if least == float("inf"):
        for merge in (False, True):
            with pytest.raises(InfeasibleError):
                solve(problem, merge_chains=merge)
        return
    exact = solve(problem, merge_chains=False)
    assert exact.cost_s == pytest.approx(least, rel=1e-12)
    assert exact.cost_s == evaluate_selection(problem, exact.selection)
    assert exact.status == "optimal" and set(exact.selection) == {c.name for c in problem.choices}
    assert exact.bound_s <= least and exact.gap < 1e-3
    merged = solve(problem, merge_chains=True)
    assert merged.cost_s >= least * (1 - 1e-12) and merged.bound_s <= merged.cost_s
    program = LayoutProgram(problem, merge_chains=False)  # made once, for all numbers of micro-batches
    assert program.solve(problem.num_micro_batches, wish=SendWish(problem.send_s)).selection == exact.selection
    other = replace(problem, num_micro_batches=4, send_s=3.0)
    assert program.solve(4, wish=SendWish(3.0)).cost_s == pytest.approx(brute_force(other)[0], rel=1e-12)
    fixed = {name: option.name for name, option in list(exact.selection.items())[:2]}
    inside = other.filtered(lambda c, o: fixed.get(c.name, o.name) == o.name)
    found = program.solve(4, wish=SendWish(3.0, tuple(fixed.items())))
    assert found.cost_s == pytest.approx(brute_force(inside)[0], rel=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# Small real graphs.


class Residual(nn.Module):
    def __init__(self, dim: int, norm: bool, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)
        self.norm = nn.LayerNorm(dim) if norm else nn.Identity()
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Toy(nn.Module):
    """Linear, gelu, linear with a residual between an embedding and a loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.tok = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(
            Residual(16, kind == "norm", F.silu if kind == "silu" else F.gelu) for _ in range(3)
        )
        self.head = nn.Linear(16, 32, bias=kind == "bias")

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tok(input_ids)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def toy_loss(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(out.view(-1, 32), batch["labels"].view(-1))


@functools.cache
def toy_graph(kind: str) -> ModelGraph:
    torch.manual_seed(0)
    return capture(Toy(kind), token_batch(2, 8, vocab=32), toy_loss)


TOY_CLUSTERS = {
    "latency": Cluster(1, 4, DEVICE, Level(1e-6, 100.0 * GB, "assumed"), "cuda"),
    "bandwidth": Cluster(1, 4, Device("d", 1e9, 1e9, GIB, "assumed"), Level(1e-7, 1e9, "assumed"), "cuda"),
}


def intra(
    graph: ModelGraph,
    tp: tuple[int, ...],
    cluster: Cluster = CLUSTER,
    s: int = 2048,
    slack: float | None = 1.02,
    m: int = 1,
) -> IntraProblem:
    axes = tuple(Axis(f"tp{i}", n) for i, n in enumerate(tp))
    return build_problem(graph, IntraSettings(axes, Costs(cluster), {"b": 1, "s": s}, m, slack))


@pytest.mark.parametrize("prices", TOY_CLUSTERS)
@pytest.mark.parametrize("kind", ["plain", "norm", "silu", "bias"])
def test_the_ilp_is_brute_force_on_small_graphs(kind: str, prices: str) -> None:
    """The options of each choice are cut down at random, so that all selections can be tried."""
    rng, solved = random.Random(f"{kind} {prices}"), 0
    for tp in ((2,), (4,), (2, 2)):
        problem = intra(toy_graph(kind), tp, TOY_CLUSTERS[prices], s=8, slack=rng.choice((None, 1.02, 1.5)))
        full = solve(problem, merge_chains=False)
        merged = solve(problem, merge_chains=True)
        assert merged.cost_s == pytest.approx(full.cost_s, rel=1e-9)
        for _ in range(4):
            left = 3000
            keep: dict[str, list[str]] = {}
            for choice in rng.sample(problem.choices, len(problem.choices)):
                count = min(len(choice.options), 3 if left >= 3 else 2 if left >= 2 else 1)
                taken = {full.selection[choice.name].name, *(o.name for o in rng.sample(choice.options, count - 1))}
                keep[choice.name] = sorted(taken)
                left //= len(taken)
            small = problem.filtered(lambda c, o, keep=keep: o.name in keep[c.name])  # type: ignore[misc]
            small = replace(small, state_budget_bytes=rng.choice((None, problem.state_budget_bytes)))
            least, _ = brute_force(small, limit=20_000)
            found = solve(small, merge_chains=False)
            assert found.cost_s == pytest.approx(least, rel=1e-9), (tp, keep)
            assert found.bound_s <= least
            assert solve(small, merge_chains=True).cost_s >= least * (1 - 1e-9)
            solved += 1
    assert solved == 12


def test_restrictions_are_named() -> None:
    problem = intra(toy_graph("plain"), (2,))
    assert "element-wise chains follow their producer" in solve(problem, merge_chains=True).restrictions
    assert "element-wise chains follow their producer" not in solve(problem, merge_chains=False).restrictions
    assert any("1.02" in r for r in problem.restrictions)
    assert not any("1.02" in r for r in intra(toy_graph("plain"), (2,), slack=None).restrictions)


def test_element_wise_chains_become_one_choice() -> None:
    """A chain of three behind a product is merged into it, option by option; a value that two read, and a consumer that
    needs a layout of its own, are not."""
    kinds: tuple[Layout, ...] = ((R,), (shard(0),))

    def makes(name: str, of: str | None, layouts: tuple[Layout, ...] = kinds) -> LayoutChoice:
        reads = () if of is None else (("b", of),)
        options = (Option(str(a), tuple((k, a) for k in reads), ((("b", name), a),), 1.0) for a in layouts)
        return LayoutChoice(name, tuple(options), follows=of is not None)

    chain = (makes("w", None), makes("x", "w"), makes("y", "x"), makes("z", "y"))
    branches = (makes("p", "z"), makes("q", "z"), makes("last", "q", layouts=((R,),)))
    weights = {("b", c.name): 1.0 for c in (*chain, *branches)}
    merged = follow(IntraProblem((*chain, *branches), weights, lambda k, a, b: 1.0)).choices
    assert [c.name for c in merged] == ["w", "p", "q", "last"]
    for option, kind in zip(merged[0].options, kinds, strict=True):
        assert [name for name, _ in option.parts] == ["w", "x", "y", "z"] and option.cost_s == 4.0
        assert dict(option.provides)["b", "z"] == kind and option.requires == ()


def test_a_value_is_converted_once_for_all_that_share_it() -> None:
    key = ("b", "x")

    def uses(name: str, layout: Layout) -> LayoutChoice:
        return LayoutChoice(name, (Option("only", ((key, layout),), ((("b", name), layout),), 0.0),))

    source = LayoutChoice("source", (Option("only", (), ((key, (P,)),), 1.0),))
    choices = (source, uses("q", (R,)), uses("k", (R,)), uses("v", (R,)), uses("w", (I,)))
    weights = {("b", n): 2.0 for n in ("x", "q", "k", "v", "w")}
    problem = IntraProblem(choices, weights, lambda k, a, b: 10.0)
    assert (
        solve(problem).cost_s == brute_force(problem)[0] == 1.0 + 2 * 10.0 * 2
    )  # R once, I once, both times two calls


# ---------------------------------------------------------------------------------------------------------------------
# Prices, by hand.


def test_prices_of_conversions() -> None:
    problem = intra(toy_graph("plain"), (4,), s=1024, m=8)
    key = next(k for k in problem.weights if k[1] == "up")  # [1, s, 32] float32, made by a linear
    full, link = 1024 * 32 * 4, CLUSTER.link

    def price(a: AxisType, b: AxisType) -> float:
        found = problem.convert_s(key, (a,), (b,))
        assert found is not None
        return found

    reduce_s = 6 * link.latency_s + 2 * full * 3 / 4 / link.bytes_per_s
    half_s = 3 * link.latency_s + full * 3 / 4 / link.bytes_per_s
    copy_s, quarter_copy_s = (Costs(CLUSTER).forward_s(copy_work(n, "float32")).mid for n in (full, full / 4))
    expected = {
        (P, R): 2 * reduce_s,
        (P, I): reduce_s,
        (I, R): reduce_s,
        (P, shard(1)): 2 * half_s + copy_s,
        (shard(1), R): 2 * half_s + copy_s,
        (shard(1), I): half_s + copy_s,
        (I, shard(2)): half_s + copy_s,
        (R, shard(2)): copy_s,
        (R, P): copy_s,
        (shard(1), shard(2)): 2 * (3 * link.latency_s + full / 4 * 3 / 4 / link.bytes_per_s) + quarter_copy_s,
    }
    for (a, b), seconds in expected.items():
        assert price(a, b) == pytest.approx(seconds, rel=1e-12), (a, b)
    assert problem.convert_s(key, (R,), (I,)) is None
    weight = next(k for k in problem.weights if k[1] == "up.weight")
    size = 32 * 16 * 4
    once = 6 * link.latency_s + 2 * size * 3 / 4 / link.bytes_per_s  # its gradient is reduced once per step
    assert problem.convert_once_s(weight, (I,), (R,)) == pytest.approx(once, rel=1e-12)
    assert problem.convert_s(weight, (I,), (R,)) == 0.0 == problem.convert_once_s(key, (P,), (R,))
    assert problem.convert_s(weight, (shard(0),), (R,)) is None


def test_prices_of_collectives() -> None:
    assert wire_bytes("all_reduce", 1000, 4) == 1500 and wire_bytes("all_gather", 1000, 4) == 750
    assert wire_bytes("send_recv", 1000, 4) == 1000 and wire_bytes("all_to_all", 1000, 1) == 0
    with pytest.raises(LayoutError, match="'all_reduse'"):
        wire_bytes("all_reduse", 1.0, 2)


# ---------------------------------------------------------------------------------------------------------------------
# Refusals and limits.


def state_of(problem: IntraProblem, selection: Selection) -> float:
    return sum(c.weight * selection[c.name].state_bytes for c in problem.choices)


def test_the_state_budget_is_kept() -> None:
    free = intra(toy_graph("plain"), (2,), slack=None)
    loose = solve(free)
    whole = sum(c.weight * max(o.state_bytes for o in c.options) for c in free.choices)
    assert state_of(free, loose.selection) == whole  # a small model is cheapest replicated
    for slack in (1.0, 1.3, 1.7):
        problem = intra(toy_graph("plain"), (2,), slack=slack)
        assert problem.state_budget_bytes is not None
        found = solve(problem)
        assert state_of(problem, found.selection) <= problem.state_budget_bytes * (1 + 1e-9) < whole
        assert found.cost_s >= loose.cost_s
    over = {**loose.selection}
    assert evaluate_selection(replace(free, state_budget_bytes=whole * 0.9), over) == float("inf")


def test_infeasible_problems_say_what_stands_in_the_way() -> None:
    problem = intra(toy_graph("plain"), (2,))
    with pytest.raises(InfeasibleError, match=r"no layout of layer/up is allowed; tried were R, I, S\(s\)"):
        problem.filtered(lambda c, o: c.name != "layer/up")
    with pytest.raises(InfeasibleError, match=r"stored state needs at least [\d,]+ bytes per rank, the budget is 100"):
        solve(replace(problem, state_budget_bytes=100.0))
    with pytest.raises(InfeasibleError, match=r"the largest part is 'store layer/down\.weight' with 12,288"):
        solve(replace(problem, state_budget_bytes=100.0))

    def only(
        choice: LayoutChoice, option: Option
    ) -> bool:  # stored in shards of its rows, used whole: never gathered here
        wanted = {"store layer/up.weight": "S(out)", "layer/up": "I"}
        return wanted.get(choice.name, option.name) == option.name

    with pytest.raises(InfeasibleError, match="layer/up"):
        solve(problem.filtered(only))


def test_a_conflict_of_two_choices_is_found() -> None:
    """Each option has a partner, but no selection has all of them: neither pruning nor a budget explains it."""
    a, b = ("b", "x"), ("b", "y")
    choices = (
        LayoutChoice(
            "source", (Option("R", (), ((a, (R,)), (b, (R,))), 1.0), Option("I", (), ((a, (I,)), (b, (I,))), 1.0))
        ),
        LayoutChoice("left", (Option("only", ((a, (R,)),), (), 0.0),)),
        LayoutChoice("right", (Option("only", ((b, (I,)),), (), 0.0),)),
    )
    problem = IntraProblem(choices, {a: 1.0, b: 1.0}, lambda k, s, t: None)
    with pytest.raises(InfeasibleError, match=r"(left cannot get b/x as R|right cannot get b/y as I)"):
        solve(problem)


def test_a_stop_by_time_is_no_proof() -> None:
    """Of nothing: neither a solution nor its absence, so it is no InfeasibleError."""
    problem = intra(llama(1024), (2,))
    with pytest.raises(StoppedError, match="within 0 s"):
        solve(problem, 0.0)
    assert not issubclass(StoppedError, InfeasibleError)


def test_another_user_of_the_solver_may_have_had_more_threads() -> None:
    """HiGHS has one scheduler per process, with the number of threads of its first user."""
    highspy = pytest.importorskip("highspy")
    highspy.Highs.resetGlobalScheduler(True)
    other = highspy.Highs()
    other.setOptionValue("output_flag", False)
    other.setOptionValue("threads", 2)
    x = [other.addVariable(0, 1) for _ in range(3)]
    other.changeColIntegrality(0, highspy.HighsVarType.kInteger)
    other.addConstr(x[0] + x[1] + x[2] >= 1.5)
    other.minimize(x[0] + 2 * x[1] + 3 * x[2])
    model = linear.MixedProgram()
    a, b = model.column("a", integer=True), model.column("b")
    model.row([(a, 1.0), (b, 1.0)], low=1.0, high=1.0)
    found = model.solve([(a, 3.0), (b, 2.0)], 10.0)
    assert found.proved and found.values == [0.0, 1.0]


# PuLP 4 will not ship CBC any more; until then it is there
@pytest.mark.filterwarnings("ignore:PULP_CBC_CMD is deprecated:DeprecationWarning")
def test_cbc_is_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = intra(toy_graph("norm"), (2,))
    best = solve(problem)
    assert best.solver == "HiGHS"
    monkeypatch.setattr(linear, "has_highs", lambda: False)
    fallback = solve(problem)
    assert fallback.solver in ("COIN_CMD", "PULP_CBC_CMD") and fallback.status == "optimal"
    assert fallback.cost_s == pytest.approx(best.cost_s, rel=1e-9) and fallback.bound_s == fallback.cost_s


# ---------------------------------------------------------------------------------------------------------------------
# Llama against Megatron.


@functools.cache
def llama(hidden: int, kv: int = 8) -> ModelGraph:
    with torch.device("meta"):
        model = make_llama(
            hidden_size=hidden,
            intermediate_size=hidden * 7 // 2,
            num_attention_heads=hidden // 128,
            num_key_value_heads=kv,
            vocab_size=32000,
            num_hidden_layers=32,
        )
    return capture(model, token_batch(2, 16))


COLUMN = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"}
ROW = {"o_proj", "down_proj"}
ON_HIDDEN = {"pow_scalar", "mean", "add_scalar", "rsqrt", "mul", "mul_1"}  # the first norm of a block
ON_HIDDEN |= {"add_2", "pow_scalar_1", "mean_1", "add_scalar_1", "rsqrt_1", "mul_6", "mul_7", "add_3"}


def megatron(problem: IntraProblem, sequence_parallel: bool) -> IntraProblem:
    """Column, row, column, row; what stands between is a shard of the sequence, or invariant. Embedding left free."""

    def between(layout: Layout) -> bool:
        return all((t.is_shard and t.dim == 1) if sequence_parallel else t is I for t in layout)

    def allowed(choice: LayoutChoice, option: Option) -> bool:
        block, _, name = choice.name.partition("/")
        if choice.name == "boundary layer/hidden":
            return between(option.provides[0][1])
        if option.strategy is None or block not in ("layer", "head"):
            return True
        made = option.strategy.outputs[0]
        if name in COLUMN:
            return all(t.is_shard and t.dim == 2 for t in made)
        if name in ROW:
            return all(t is P for t in made)
        if name in ON_HIDDEN:
            return between(made)
        return name != "cross_entropy_sum" or option.strategy.special is not None

    names = {choice.name for choice in problem.choices}
    assert {f"layer/{n}" for n in (COLUMN | ROW | ON_HIDDEN) - {"lm_head"}} | {"head/lm_head"} <= names
    return problem.filtered(allowed)


def layouts(solution: IntraSolution, *names: str) -> list[str]:
    strategies = [solution.selection[f"layer/{name}"].strategy for name in names]
    return [str(s.outputs[0][0]) for s in strategies if s is not None]


@pytest.mark.parametrize("hidden", [1024, 4096])
def test_megatron_is_found_and_never_beaten_by(hidden: int) -> None:
    for tp in (2, 4, 8):
        problem = intra(llama(hidden), (tp,), m=8)
        best = solve(problem)
        with_sequence, plain = (solve(megatron(problem, sp)) for sp in (True, False))
        # weights split as far as possible: then nothing is cheaper than Megatron with sequence parallelism
        assert best.cost_s == pytest.approx(with_sequence.cost_s, rel=1e-9), tp
        assert best.cost_s < plain.cost_s
        assert layouts(best, "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") == ["S(2.0)"] * 5
        assert layouts(best, "o_proj", "down_proj", "add_2", "add_3") == ["P", "P", "S(1.0)", "S(1.0)"]
        assert solve(problem, merge_chains=False).cost_s == pytest.approx(best.cost_s, rel=1e-9)
        # free to replicate weights, it may find better and never worse
        free = intra(llama(hidden), (tp,), slack=None, m=8)
        hybrid = solve(free)
        assert hybrid.cost_s <= best.cost_s * (1 + 1e-9)
        for sp in (True, False):
            assert hybrid.cost_s <= solve(megatron(free, sp)).cost_s * (1 + 1e-9)


def test_with_freedom_o_proj_is_replicated_at_tp_8() -> None:
    """An all-to-all of the attention output instead of a reduce-scatter and a gather twice its size."""
    best = solve(intra(llama(4096), (8,), slack=None, m=8))
    assert layouts(best, "o_proj", "down_proj", "q_proj") == ["S(1.0)", "P", "S(2.0)"]
    assert best.selection["store layer/self_attn.o_proj.weight"].name == "I"
    # priced out by replicas that must be updated and reduced: Megatron again
    dear = replace(CLUSTER, device=replace(DEVICE, memory_bytes_per_s=2.0 * GB))
    problem = intra(llama(4096), (8,), cluster=dear, slack=None)
    assert layouts(solve(problem), "o_proj", "down_proj") == ["P", "P"]


def test_where_messages_cost_and_bytes_do_not_plain_tensor_parallelism_wins() -> None:
    """Sequence parallelism sends the same bytes in twice as many messages."""
    slow_start = replace(CLUSTER, link=Level(1e-3, 1e15, "assumed"))
    problem = intra(llama(1024), (2,), cluster=slow_start, m=8)
    assert solve(megatron(problem, False)).cost_s < solve(megatron(problem, True)).cost_s
    assert solve(problem).cost_s <= solve(megatron(problem, False)).cost_s * (1 + 1e-9)


def test_two_sub_axes_for_few_key_value_heads() -> None:
    """tp 4 with 2 key-value heads: attention splits k and v over the major sub-axis and has them whole on the minor."""
    problem = intra(llama(1024, 2), (2, 2), m=8)
    best = solve(problem)
    assert best.status == "optimal" and best.gap < 1e-6
    q = best.selection["layer/q_proj"].strategy
    core = next(best.selection[c.name].strategy for c in problem.choices if c.name.startswith("layer/attention"))
    assert q is not None and core is not None
    assert all(t.is_shard for t in q.outputs[0])
    for k in core.inputs[1:3]:
        assert k[0].is_shard and not k[1].is_shard
    assert solve(problem, merge_chains=False).cost_s == pytest.approx(best.cost_s, rel=1e-9)


def test_solving_is_deterministic(tmp_path: Path) -> None:
    """Twice in one process, and in processes that hash differently."""
    graph = tmp_path / "graph.json"
    graph.write_text(llama(1024, 2).to_json())
    code = (
        "import json, sys\n"
        "from autoplan.cost_models.costs import Costs\n"
        "from autoplan.cost_models.hardware.cluster import Cluster\n"
        "from autoplan.ir.graph import ModelGraph\n"
        "from autoplan.ir.layout import Axis\n"
        "from autoplan.search.intra import LayoutProgram, solve\n"
        "from autoplan.program.problem import IntraSettings, build_problem\n"
        "graph = ModelGraph.from_json(open(sys.argv[1]).read())\n"
        "settings = IntraSettings((Axis('a', 2), Axis('b', 2)), Costs(Cluster.local(4, 'cuda')), {'b': 1, 's': 2048})\n"
        "found = [{k: o.name for k, o in solve(build_problem(graph, settings)).selection.items()} for _ in range(2)]\n"
        "assert found[0] == found[1] and 'torch' not in sys.modules\n"
        "print(json.dumps(found[0]))\n"
    )
    outputs = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code, str(graph)], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outputs.append(json.loads(done.stdout))
    assert outputs[0] == outputs[1] and len(outputs[0]) > 50
