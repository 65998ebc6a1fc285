"""Sequences without an order over several ranks: an image, and an image joined with a text.

Every program is compared with the module, loss and gradients in float64.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import joint_models as models
import parity
import pytest
import torch
from harness import pool

import autoplan
from autoplan.capture.export import capture
from autoplan.codegen.check import check_program
from autoplan.codegen.program import Layouts, Program
from autoplan.config.adapters import read_adapters
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import PinError
from autoplan.ir.graph import ModelGraph
from autoplan.ir.layout import Axis
from autoplan.ir.symbols import Expr
from autoplan.ops.batch import context_obstacle
from autoplan.planning import plan_program
from autoplan.plans.layouts import layouts_of
from autoplan.program.adapters import with_adapters
from autoplan.program.choice_kinds import ChoiceKind
from autoplan.program.op_costs import OpCosts
from autoplan.program.passes import executed
from autoplan.program.problem import IntraSettings, build_problem
from autoplan.program.workload import workload
from autoplan.runtime.model import ParallelModel
from autoplan.runtime.spec import evaluate_terms

Made = tuple[torch.nn.Module, dict[str, Any]]
MADE: dict[str, Made] = {
    "split": models.joint(4, 3, 6),
    "sliced": models.joint(2, 3, 10, "sliced"),
    "columns": models.joint(3, 4, 6),  # three rows cannot be shared, so the columns of each are
    "equal": models.joint(4, 4, 16),  # as many tokens of text as of the image
    "cross": models.cross(3, 4, 2),
    "frames": models.cross(8, 3, 2),
    "masked": models.joint(4, 3, 8, "masked"),
    "written": models.joint(4, 3, 6, "written"),
    "refined": models.refined(4, 3, 8, 1),
    "refined twice": models.refined(4, 3, 8, 2),  # the same layer hands on a whole text, and one that is cut
}


def graph_of(name: str) -> ModelGraph:
    return capture(*MADE[name], models.square_error)


def program_of(graph: ModelGraph, world: int, batch: int = 2, **pins: Any) -> Program:
    target_len = graph.bounds.get("t", (None,))[0]  # of a mask, which has as many tokens in every batch
    return plan_program(graph, Cluster.local(world, "cpu"), pins, batch, graph.bounds["s"][0], target_len=target_len)[1]


def parallel(program: Program, module: torch.nn.Module) -> ParallelModel:
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    return ParallelModel(program.spec, program.sources, params, buffers, dtype=torch.float64)


def step_job(rank: int, world: int, program: Program, made: Made) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of a step on this rank; every rank of one mesh of dp 1 has the whole batch."""
    module, batch = made
    pm = parallel(program, module)
    loss = float(pm.step(batch))
    return loss, {n: g.numpy() for n, g in pm.gradients().items()}


def error_of(name: str, program: Program, world: int) -> float:
    """Return the largest error of the loss and of a gradient, relative to its largest entry."""
    module, batch = MADE[name]
    module.zero_grad()
    loss = models.square_error(module(**{k: x for k, x in batch.items() if k != "target"}), batch)
    loss.backward()
    (found, gradients), *_ = pool(world).run(step_job, program, (module, batch))
    errors = [abs(found - loss.item()) / loss.item()]
    wanted = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    assert wanted.keys() == gradients.keys()  # but for those of the last text, which nobody reads
    errors += [float((torch.from_numpy(gradients[n]) - x).abs().max() / x.abs().max()) for n, x in wanted.items()]
    return max(errors)


@pytest.mark.parametrize(
    ("name", "length", "runs"),
    [
        ("split", 2, {((1, 4),), ((1, 6),), ((1, 6), (1, 12))}),
        ("sliced", 2, {((1, 2),), ((1, 10),), ((1, 10), (1, 6))}),
        ("columns", 2, {((1, 4),), ((1, 6),), ((1, 6), (3, 4))}),
        ("equal", 4, {((1, 4),)}),
        ("cross", 4, {((1, 4),)}),
        ("frames", 8, {((1, 8),)}),
        ("masked", 4, {((1, 4),), ((1, 8),), ((1, 12),), ((1, 8), (1, 12))}),
    ],
)
def test_which_tokens_ranks_share(name: str, length: int, runs: set[Any]) -> None:
    """Rows of the image, or its frames or columns if more powers of two divide them, and what is joined with them."""
    graph = graph_of(name)
    assert context_obstacle(graph) is None
    assert graph.bounds["s"] == (length, length) and set(graph.parts.values()) == runs
    assert ModelGraph.from_json(graph.to_json()) == graph


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("causal", "causal=True sees keys by their place, and the ranks' parts of joined tokens have none"),
        ("turned", r"ranks would have parts of dim 1 of \[b, 12, 16\] of float64 .* and dim 1 of \[b, 6, 16\]"),
        ("beside", ""),
        ("added", r"its mask \[b, 1, 1, 18\] of float64 made at .*:\d+ is not one of keys alone; a mask of bool, "),
        ("pairs", r"ranks would have parts of dim 3 of \[b, 1, 1, 18\] of bool .* and dim 2 of \[b, 1, 18, 1\]"),
    ],
)
def test_what_sees_an_order_is_refused_by_name(how: str, why: str) -> None:
    """A causal mask over joined parts, values joined in another order than keys, a split beside the joint, masks."""
    graph = capture(*models.joint(4, 3, 6, how), models.square_error)
    assert not graph.parts and ModelGraph.from_json(graph.to_json()) == graph
    with pytest.raises(PinError, match=rf"cp=2: of 18 tokens .* at .*:\d+ cannot be computed for a part.*: {why}"):
        plan_program(graph, Cluster.local(2, "cpu"), {"cp": 2}, 2, 8, target_len=6 if how in models.MASKED else None)


def test_a_model_without_tokens_says_so() -> None:
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(4, 3, 3, padding=1)
    )
    batch = {"input": torch.randn(2, 3, 8, 8), "target": torch.randn(2, 3, 8, 8)}
    graph = capture(module, batch, models.square_error)
    assert (context_obstacle(graph) or "").startswith(
        "no input has a sequence of a length that may change, and no attention"
    )
    again = replace(graph, no_sequence="")
    assert again.content_hash == graph.content_hash  # plans do not depend on it


def test_tokens_that_cannot_be_shared_are_named() -> None:
    graph = capture(*models.joint(4, 3, 7), models.square_error)
    with pytest.raises(PinError, match="7 tokens of Joint cannot be cut into equal parts over cp=2"):
        program_of(graph, 2, cp=2)
    with pytest.raises(PinError, match=r"seq_len=9: the tokens of Joint are those of its example.*: seq_len=2"):
        plan_program(graph_of("split"), Cluster.local(1, "cpu"), {}, 2, 9)
    with pytest.raises(PinError, match=r"6 tokens of Joint cannot be cut into equal parts over cp=4.*: cp=2"):
        program_of(graph_of("split"), 4, cp=4)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "method"),
    [("split", "gather"), ("sliced", "ring"), ("columns", "ulysses"), ("equal", "ring"), ("cross", "gather"),
     ("frames", "ring"), ("masked", "gather"), ("masked", "ring"), ("masked", "ulysses"), ("written", "gather"),
     ("refined", "ring"), ("refined twice", "gather")],
)  # fmt: skip
def test_ranks_that_share_tokens_compute_what_the_module_does(name: str, method: str) -> None:
    """Odd parts, too: nine tokens per rank of "split" and "columns"."""
    program = program_of(graph_of(name), 2, cp=2, context_method=method)
    assert f"{method}='cp'" in program.sources["stage0.py"]
    assert error_of(name, program, 2) < 1e-9


def test_a_text_with_layers_of_its_own_stays_whole_until_it_is_joined() -> None:
    """Attention of the text under a mask over pairs sees all of it on every rank; joint layers have its part."""
    graph = graph_of("refined twice")
    lengths = {
        call.name: {graph.blocks[call.block].values[n.inputs[0] or ""].shape[2] for n in nodes}
        for call in graph.calls
        if (nodes := [n for n in graph.blocks[call.block].nodes if n.op == "attention"])
    }
    s = Expr.symbol("s")
    assert set(graph.parts.values()) == {((1, 4),), ((1, 8),), ((1, 12),), ((1, 8), (1, 12))}
    assert [lengths[f"refiners.{i}"] for i in range(2)] == [{Expr.of(8)}] * 2
    assert [lengths[f"layers.{i}"] for i in range(2)] == [{5 * s}] * 2
    assert ModelGraph.from_json(graph.to_json()) == graph


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "method"),
    [("masked", "ulysses2xring2"), ("cross", "ulysses2xgather2"), ("refined twice", "ulysses2xring2")],
)
def test_methods_of_two_axes(name: str, method: str) -> None:
    """Four ranks: pairs of them exchange heads, and the pairs see each other's keys."""
    program = program_of(graph_of(name), 4, cp=4, context_method=method)
    assert error_of(name, program, 4) < 1e-9


@pytest.mark.processes
@pytest.mark.parametrize("name", ["sliced", "masked", "refined"])
def test_beside_tensor_parallelism(name: str) -> None:
    program = program_of(graph_of(name), 4, cp=2, tp=2)
    check_program(program.spec, program.sources)
    assert error_of(name, program, 4) < 1e-9


def output_job(rank: int, world: int, program: Program, made: Made) -> torch.Tensor:
    module, batch = made
    pm = parallel(program, module)
    _, found = pm.eval_outputs(batch)
    (output,) = found.values()
    return output


@pytest.mark.processes
@pytest.mark.parametrize("name", ["split", "columns"])
def test_outputs_are_put_together(name: str) -> None:
    module, batch = MADE[name]
    want = module(**{k: x for k, x in batch.items() if k != "target"})
    for found in pool(2).run(output_job, program_of(graph_of(name), 2, cp=2), MADE[name]):
        assert (found - want).abs().max() < 1e-9


@pytest.mark.processes
def test_a_joint_that_is_ignored_is_seen() -> None:
    """The same program with tables of positions that are cut as one sequence."""
    program = program_of(graph_of("split"), 2, cp=2, context_method="gather")
    text = program.sources["stage0.py"]
    wrong = text.replace("((1, 6), (1, 12))", "((1, 18),)")
    assert text.count("((1, 6), (1, 12))") == 2  # cosines and sines
    assert error_of("split", Program(program.spec, {"stage0.py": wrong}), 2) > 1e-3


@pytest.mark.processes
def test_a_mask_of_other_tokens_is_seen() -> None:
    """The same program with a mask whose part is that of other tokens of the text."""
    program = program_of(graph_of("masked"), 2, cp=2, context_method="ring")
    text = program.sources["stage0.py"]
    wrong = text.replace("seen = own_part(seen, 'cp', 1, ((1, 8),))", "seen = own_part(seen, 'cp', 1, ((2, 4),))")
    assert wrong != text and error_of("masked", Program(program.spec, {"stage0.py": wrong}), 2) > 1e-3


def test_what_is_sent_is_priced() -> None:
    """Keys and values of joint attention; nothing for attention to a text that every rank has."""
    for name, num_gathers in (("split", 2), ("cross", 2)):
        graph = graph_of(name)
        plan, program = plan_program(
            graph, Cluster.local(2, "cpu"), {"cp": 2, "context_method": "gather"}, 2, graph.bounds["s"][0]
        )
        layouts: Layouts = layouts_of(plan, graph)
        env = {"b": plan.config.micro_batch_size, "s": graph.bounds["s"][0] // 2, "t": 7}
        costs = OpCosts(graph, layouts.axes, env, context=2, methods=layouts.context)
        work = workload(graph, layouts.selection, costs, executed(layouts.mesh, layouts.context).experts)
        counted = Counter(
            (c.kind, c.phase, round(c.num_bytes))
            for call in graph.calls
            for c in work.blocks[call.block].comms
            if c.axis == "cp"
        )
        listed = Counter((e.kind, e.phase, evaluate_terms(e.bytes, env)) for e in program.spec.ledger if e.axis == "cp")
        listed = Counter({key: n for key, n in listed.items() if key[1] in ("forward", "backward")})
        assert counted == listed
        assert sum(n for (kind, *_), n in counted.items() if kind == "all_gather") == num_gathers * 2  # of two layers


def test_arithmetic_is_shared_out() -> None:
    """A rank of two has half of the products of joint attention, and of attention to a text."""
    for name in ("split", "cross"):
        graph, total = graph_of(name), []
        for cp in (1, 2):
            pins = {"cp": cp, "tp": 1, "pp": 1, "recompute": "none", "num_micro_batches": 1}
            plan, _ = plan_program(graph, Cluster.local(cp, "cpu"), pins, 2, graph.bounds["s"][0])
            layouts = layouts_of(plan, graph)
            env = {"b": 2, "s": graph.bounds["s"][0] // cp, "t": 7}
            costs = OpCosts(graph, layouts.axes, env, context=cp, methods=layouts.context)
            work = workload(graph, layouts.selection, costs)
            total.append(sum(op.flops for c in graph.calls for op in work.blocks[c.block].ops if op.op == "attention"))
        assert total[0] == 2 * total[1] > 0


def test_whole_sequences_are_cut_before_tensor_parallelism_splits_them() -> None:
    """Tables that calls without parameters make are handed over whole: their split is not that of a rank's part."""
    llama = parity.graph_of("llama", 0.0)
    for graph, context, whole in ((graph_of("split"), 1, True), (llama, 2, True), (llama, 1, False)):
        env, axes = {"b": 2, "s": graph.bounds.get("s", (8,))[0]}, (Axis("tp", 2),)
        settings = IntraSettings(axes, Costs(Cluster.local(2, "cpu")), env, context=context)
        free = {name for call in graph.calls if call.name in graph.free_calls() for name in call.outputs}
        tables = {
            (call.block, formal)
            for call in graph.bound_calls()
            for actual, formal in zip(call.inputs, graph.blocks[call.block].inputs, strict=True)
            if actual in free
        }
        found = [
            {layout[0].kind_name for option in choice.options for key, layout in option.provides if key in tables}
            for choice in build_problem(graph, settings).choices
            if choice.name.startswith(ChoiceKind.BOUNDARY.value)
        ]
        kinds = set[str]().union(*found)
        assert tables and (kinds == {"R"} if whole else "S" in kinds)


def test_the_search_shares_long_sequences() -> None:
    """One image of 16,384 patches on four devices: without a pin, sequences are shared among them."""
    module, batch = models.joint(128, 128, 128)
    batch = {name: x[:1] for name, x in batch.items()}
    found = autoplan.plan(
        module.float(), "4xh100", example_inputs={n: x.float() for n, x in batch.items()}, loss_fn=models.square_error,
        global_batch_size=1, verify=False,
    )  # fmt: skip
    assert found.config.cp > 1, found


@pytest.mark.parametrize("made", [models.joint(4, 4, 8, "masked"), models.refined(4, 4, 8, 1)])
def test_a_plan_of_two_axes_rehearses(made: Made) -> None:
    """Collectives, arithmetic and memory of one rank of four are the plan's, with a mask of keys."""
    module, batch = made
    example = {n: x.float() if x.is_floating_point() else x for n, x in batch.items()}
    plan = autoplan.plan(
        module.float(), "4xh100", example_inputs=example, loss_fn=models.square_error, global_batch_size=2,
        pins={"cp": 4, "context_method": "ulysses2xring2"}, verify=False,
    )  # fmt: skip
    assert not autoplan.rehearse(plan, "3").differences


@pytest.mark.parametrize("name", ["split", "masked", "refined"])
def test_adapters_keep_the_parts(name: str) -> None:
    """Factors are inferred again when layers get adapters, and keep their runs under their new names."""
    graph = graph_of(name)
    adapted = with_adapters(graph, read_adapters("lora:2:all-linear"))
    assert set(adapted.parts.values()) == set(graph.parts.values())
    assert context_obstacle(adapted) is None
    assert {adapted.factors[name] for name in adapted.parts} == {graph.factors[name] for name in graph.parts}


def test_only_the_text_stays_whole() -> None:
    """The rows of the image are cut from the start, though the text that it is joined with is not."""
    graph = graph_of("refined")
    of_inputs = {
        name: {f for dim in graph.values[name].dims or () for f in dim} for name in ("image", "text", "target")
    }
    assert {name: not of.isdisjoint(graph.parts) for name, of in of_inputs.items()} == {
        "image": True, "text": False, "target": True,
    }  # fmt: skip
