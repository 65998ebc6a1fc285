"""The load balancing loss of routers: that of Hugging Face's own forward, micro-batch by micro-batch, in every plan."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import models
import pytest
import torch
from parity import (
    SEQ,
    Case,
    assert_trains_as_one_device,
    cluster_of,
    compiled,
    fake_group,
    full_tensors,
    global_batch,
    graph_of,
    make_model,
    reference,
    run_simulated,
    spread_out,
    trained,
    worst,
)  # fmt: skip

from autoplan.capture.export import capture
from autoplan.codegen.check import check_program
from autoplan.codegen.program import compile_program
from autoplan.ops.batch import batch_obstacle, context_obstacle
from autoplan.program.facts import pipeline_units
from autoplan.runtime.model import ParallelModel
from autoplan.runtime.spec import evaluate_terms
from experiments.shared.default_plans import make_plan, read_pins

FAMILIES = ("mixtral-aux", "qwen3-moe-aux", "mixtral-padded-aux")


def eager(case: Case) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the untouched model: micro-batch after micro-batch its share of the cross entropy, and of
    the routers' loss its part in the mean over micro-batches."""
    model, whole = make_model(case.family, 0.0), global_batch(case)
    count = int((whole["labels"][:, 1:] != -100).sum())
    total = 0.0
    for i in range(case.num_micro_batches):
        size = whole["labels"].shape[0] // case.num_micro_batches
        batch = {n: x[i * size : (i + 1) * size] for n, x in whole.items()}
        out = model(**batch)
        coefficient = model.config.router_aux_loss_coef
        valid = int((batch["labels"][:, 1:] != -100).sum())
        cross_entropy = (out.loss - coefficient * out.aux_loss) * valid / count
        loss = cross_entropy + coefficient * out.aux_loss / case.num_micro_batches
        loss.backward()
        total += loss.item()
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_one_device_is_hugging_face(family: str, num_micro_batches: int) -> None:
    case = Case(family, labels="unequal", num_micro_batches=num_micro_batches)
    want_loss, want = eager(case)
    program = compiled(case)
    with fake_group(1):
        pm = ParallelModel(
            program.spec, program.sources, *full_tensors(case, torch.float32), num_micro_batches=num_micro_batches
        )
        loss, gradients = pm.step(global_batch(case)).item(), pm.gradients()
    assert loss == pytest.approx(want_loss, rel=1e-6)
    error, name = worst(gradients, want)
    assert error < 2e-6, name


def test_the_loss_of_routers_is_in_it() -> None:
    with_loss, without = (make_model(family, 0.0) for family in ("mixtral-aux", "mixtral"))
    batch = global_batch(Case("mixtral-aux"))
    assert with_loss(**batch).loss - without(**batch).loss > 0.1
    gates = [torch.autograd.grad(m(**batch).loss, m.model.layers[0].mlp.gate.weight)[0] for m in (with_loss, without)]
    assert (gates[0] - gates[1]).abs().max() > 0.1 * gates[1].abs().max()


@pytest.mark.parametrize("family", spread_out(FAMILIES, 2))
def test_layers_hand_on_sums_and_not_the_logits_of_all_routers(family: str) -> None:
    """Behind each layer counts and sums of probabilities of as many experts; layers of one kind are captured once."""
    graph = graph_of(family, 0.0)
    assert batch_obstacle(graph) is None and context_obstacle(graph) is None
    units = pipeline_units(graph)
    assert [len(u) for u in units] == [3, 2, 2, 2]
    assert len({c.block for c in graph.calls if c.name.startswith("model.layers")}) == 1
    behind = [next(c.block for c in graph.calls if c.name == u[-1]) for u in units[:-1]]
    assert behind[0] != behind[1] == behind[2]  # behind the first there is nothing to add to
    calls = {c.name: c for c in graph.calls}
    free = {v for c in graph.calls if c.name in graph.free_calls() for v in c.outputs} | set(graph.inputs)
    experts = next(n.attrs["num_experts"] for b in graph.blocks.values() for n in b.nodes if n.op == "experts")
    for k in range(1, len(units)):
        made = {v for u in units[:k] for name in u for v in calls[name].outputs} - free
        crossing = made & {v for u in units[k:] for name in u for v in calls[name].inputs}
        sizes = sorted(str(graph.values[v].num_elements) for v in crossing)
        assert sizes == [str(32) + "*b*s", str(experts), str(experts)]


def test_what_transformers_hooks_put_aside_is_not_left_behind() -> None:
    """The hooks that transformers installs for the router logits go with the capture."""
    model = models.make_mixtral(**models.ROUTER_LOSS)
    capture(model, models.token_batch(2, SEQ))
    assert not any(m._forward_hooks for m in model.modules())
    assert model(**models.token_batch(2, SEQ)).aux_loss is not None


SIMULATED = [
    Case("mixtral-aux", dp=2),
    Case("mixtral-aux", dp=2, num_micro_batches=3, labels="unequal"),
    Case("mixtral-aux", tp=2, dp=2, num_micro_batches=2, labels="unequal"),
    Case("mixtral-aux", tp=2, prices="latency"),
    Case("qwen3-moe-aux", tp=4, dp=2, pp=2, num_micro_batches=2, recompute="full"),
    Case("qwen3-moe-aux", dp=4, num_micro_batches=3),
    Case("mixtral-padded-aux", dp=2, tp=2, num_micro_batches=2),
    Case("gpt-balanced-aux", dp=2, num_micro_batches=3, labels="unequal"),
    Case("gpt-balanced-aux", tp=2),
    Case("gpt-balanced-aux", dp=2, tp=2, pp=2, num_micro_batches=2, recompute="full"),
]


@pytest.mark.parametrize("case", spread_out(SIMULATED, 6), ids=str)
def test_equal_to_one_device_with_the_same_micro_batches(case: Case) -> None:
    loss, gradients = run_simulated(case)
    want_loss, want = reference(case)
    assert loss == pytest.approx(want_loss, rel=1e-12)
    error, name = worst(gradients, want)
    assert error < 1e-12, name


CONTROLS = {
    "every rank by itself": (r"all_reduce\((\w+), 'dp', dst=R\)", r"(2 * \1)"),
    "not summed": (r"all_reduce\((\w+), 'dp', dst=R\)", r"\1"),
    "rows of one rank": (r"/ \(8 \* b \* s\)", r"/ (4 * b * s)"),
    "not averaged over micro-batches": (r" \* loss_share", ""),
}


@pytest.mark.parametrize("control", spread_out(CONTROLS, 2))
def test_negative_control(control: str) -> None:
    """The comparison sees a loss made of each rank's own counts, and the other ways to get it wrong."""
    case = Case("mixtral-aux", dp=2, num_micro_batches=2)
    old, new = CONTROLS[control]
    ((name, text),) = compiled(case).sources.items()
    broken, count = re.subn(old, new, text)
    assert count
    _, gradients = run_simulated(case, sources={name: broken})
    assert worst(gradients, reference(case)[1])[0] > 1e-3


def test_micro_batches_are_those_of_all_ranks() -> None:
    """One device with other micro-batches computes another loss: what the reference is made of matters."""
    case = Case("mixtral-aux", dp=2, num_micro_batches=2)
    apart = replace(case, dp=1, num_micro_batches=4)
    assert worst(reference(case)[1], reference(apart)[1])[0] > 1e-3


def test_a_loss_of_routers_by_hand_is_what_it_says() -> None:
    """Of a user's own layers, which hand out what their routers thought; means as sums over all that share a batch."""
    case = Case("gpt-balanced-aux", labels="unequal")
    # counts are float32, as captured: 128 tokens divide them exactly
    model, batch = make_model(case.family, 0.0).double(), global_batch(case, samples=8)
    loss = models.balanced_loss(model(batch["ids"]), batch)
    loss.backward()
    got_loss, got = reference(case, torch.float64, batch)
    assert got_loss == pytest.approx(loss.item(), rel=1e-12)
    assert worst(got, {n: p.grad for n, p in model.named_parameters()})[0] < 1e-12


PROCESSES = [
    Case("gpt-balanced-aux", dp=2, pp=2, num_micro_batches=2, zero=1),
    Case("mixtral-aux", dp=4, ep=2, zero=1, num_micro_batches=3, labels="unequal"),
    Case("qwen3-moe-aux", tp=2, ep=2, etp=1, num_micro_batches=2),
    Case("mixtral-aux", cp=2, dp=2, num_micro_batches=2, labels="unequal"),
    Case("qwen3-moe-aux", cp=2, context_method="ring"),
    Case("mixtral-aux", cp=2, context_method="ulysses", recompute="attention+mlp+norms"),
    Case("mixtral-aux", dp=2, pp=2, zero=3, num_micro_batches=3, labels="unequal"),
    Case("qwen3-moe-aux", pp=2, num_micro_batches=6, schedule="Interleaved1F1B", virtual=2),
    Case("mixtral-aux", pp=4, num_micro_batches=3, recompute="full"),
    Case("mixtral-aux", pp=2, num_micro_batches=4, schedule="ZB-H1"),
    Case("qwen3-moe-aux", pp=2, dp=2, zero=1, num_micro_batches=6, schedule="ZBV", virtual=2, labels="unequal"),
    Case("mixtral-padded-aux", cp=2, dp=2, num_micro_batches=2),
    Case("mixtral-padded-aux", pp=2, num_micro_batches=2),
]


@pytest.mark.parametrize("case", spread_out(PROCESSES, 7), ids=str)
def test_training_equals_one_device(case: Case) -> None:
    assert_trains_as_one_device(case)


@pytest.mark.parametrize("case", [Case("mixtral-aux", dp=2, num_micro_batches=2), Case("mixtral-aux", cp=2)], ids=str)
def test_the_ledger_has_one_sum_of_as_many_numbers_as_experts(case: Case) -> None:
    """Of every micro-batch, and no gradient of it: only counts are sent."""
    got, spec = trained(case, "float32", 1, "sgd"), compiled(case).spec
    (entry,) = [e for e in spec.ledger if e.call == "head" and e.kind == "all_reduce" and e.per == "micro_batch"]
    assert evaluate_terms(entry.bytes, {"b": 1, "s": SEQ}) == 4 * 4 and entry.phase == "forward"
    seen: Counter[Any] = Counter(r for r in got.ledger if r[0] == "all_reduce" and r[2] == 16)
    assert seen == {("all_reduce", entry.axis, 16, "forward"): case.num_micro_batches}


@pytest.mark.parametrize(
    "case",
    [Case("mixtral-aux", dp=2, tp=2, pp=2, num_micro_batches=2), Case("qwen3-moe-aux", tp=4, prices="latency")],
    ids=str,
)
def test_programs_type_check(case: Case) -> None:
    program = compiled(case)
    check_program(program.spec, program.sources)


def test_a_mean_over_a_cut_sequence_is_by_the_length_of_all_parts() -> None:
    """The model divides by its own sequence length, of which a rank of context parallelism has a part."""
    batch = {"ids": models.token_batch(2, SEQ)["input_ids"]}
    graph = capture(models.make_gpt(tied=False), batch, lambda out, batch: out.square().mean())
    texts = {}
    for cp in (1, 2):
        config = read_pins({"cp": cp} if cp > 1 else {}, cp)
        _, layouts, _ = make_plan(graph, cluster_of(cp, "bandwidth"), config, {"b": 2, "s": SEQ})
        (texts[cp],) = compile_program(graph, layouts).sources.values()
    assert "/ (96 * s)" in texts[1] and "/ (192 * s)" in texts[2]  # behind `s = context_length(s, 'cp')`
