"""Parity over real processes: gloo, torch's FSDP2 and pipelining, three optimizer steps, float64 against one device."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from parity import (
    Case,
    assert_trains_as_one_device,
    compiled,
    global_batch,
    settled_bytes,
    spread_out,
    train_reference,
    trained,
    worst,
)

from autoplan.runtime.spec import evaluate_terms

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning"),
]

CASES = [
    Case("llama", tp=2, labels="unequal"),
    Case("gpt", tp=2, prices="latency", dropout=0.25, num_micro_batches=2),
    Case("llama", tp=2, dropout=0.25, num_micro_batches=2),
    Case("llama", dp=2, zero=0, num_micro_batches=3, labels="unequal"),
    Case("gpt", dp=2, zero=1, num_micro_batches=2, dropout=0.25),
    Case("gpt-untied", dp=2, zero=2, num_micro_batches=2, labels="unequal", recompute="full"),
    Case("llama-tied", dp=2, zero=3, num_micro_batches=2, labels="unequal"),
    Case("llama", pp=2, stages=(3, 1), num_micro_batches=3, labels="unequal"),
    Case("gpt", pp=2, stages=(1, 3), num_micro_batches=4, dropout=0.25),
    Case("llama-tied", pp=2, num_micro_batches=1, recompute="full"),
    Case("llama", dp=2, tp=2, zero=3, num_micro_batches=2, labels="unequal", recompute="full"),
    Case("gpt", dp=2, tp=2, zero=2, prices="latency", dropout=0.25),
    Case("gpt-untied", dp=2, tp=2, zero=0, num_micro_batches=3, labels="unequal"),
    Case("llama", pp=2, tp=2, num_micro_batches=2, labels="unequal", prices="latency"),
    Case("gpt", pp=2, tp=2, num_micro_batches=3, dropout=0.25, stages=(3, 1)),
    Case("llama-tied", pp=2, dp=2, zero=1, num_micro_batches=3, labels="unequal"),
    Case("gpt", pp=2, dp=2, zero=3, num_micro_batches=2, recompute="full"),
    Case("llama-frozen", dp=2, tp=2, zero=3, num_micro_batches=2),
    Case("qwen2-mixed", dp=2, tp=2, zero=3, num_micro_batches=2, recompute="full"),
    Case("mixtral", dp=2, tp=2, zero=3, num_micro_batches=2, labels="unequal"),
    Case("qwen3-moe", dp=2, tp=2, zero=1, num_micro_batches=2, prices="latency"),
    Case("deepseek", pp=2, tp=2, num_micro_batches=2, recompute="full", labels="unequal"),
    Case("deepseek", pp=2, dp=2, zero=2, num_micro_batches=3),
    Case("mixtral", dp=2, ep=2, zero=0, num_micro_batches=2, labels="unequal"),
    Case("qwen3-moe", dp=2, ep=2, zero=3, num_micro_batches=2, recompute="full"),
    Case("qwen3-moe", dp=4, ep=2, zero=0, labels="unequal"),
    Case("mixtral", dp=4, ep=2, zero=1, num_micro_batches=3),
    Case("deepseek", dp=4, ep=2, zero=3, num_micro_batches=3, labels="unequal", recompute="full"),
    Case("mixtral", dp=4, ep=4, zero=2),
    Case("deepseek", dp=2, ep=2, pp=2, zero=1, num_micro_batches=3),
    Case("mixtral", tp=2, ep=2, etp=1, num_micro_batches=2, labels="unequal", prices="latency"),
    Case("qwen3-moe", dp=2, tp=2, ep=4, etp=1, zero=3, num_micro_batches=3, recompute="full"),
    Case("mixtral", tp=4, ep=2, etp=1, zero=3, labels="unequal"),  # replicas of experts inside tp
    Case("mixtral", dp=2, tp=2, ep=1, etp=1, zero=2),
    Case("deepseek", dp=2, tp=2, ep=2, etp=2, zero=1, num_micro_batches=3, labels="unequal"),
    Case("qwen3-moe", cp=2, dp=2, ep=2, zero=3, num_micro_batches=2, labels="unequal"),
    Case("mixtral", cp=2, tp=2, ep=4, etp=1, zero=1, labels="unequal", recompute="full"),
    Case("mixtral", cp=4, ep=2, context_method="ulysses2xring2", num_micro_batches=2, labels="unequal"),
    Case("deepseek", cp=4, ep=4, context_method="ulysses2xgather2", zero=1, recompute="full"),
    Case("qwen3-moe", dp=2, cp=4, ep=4, context_method="ulysses2xring2", zero=3, labels="unequal"),
    Case("mixtral", cp=4, tp=2, ep=4, etp=1, context_method="ulysses2xring2", num_micro_batches=2),
    Case("llama", cp=2, zero=0, num_micro_batches=2, labels="unequal"),
    Case("gpt", cp=2, zero=3, recompute="full"),
    Case("llama-tied", cp=2, tp=2, zero=1, labels="unequal"),
    Case("gpt-untied", cp=4, zero=2, num_micro_batches=2),
    Case("qwen2-mixed", dp=2, cp=2, zero=3, num_micro_batches=3, labels="unequal", recompute="full"),
    Case("llama", cp=2, pp=2, num_micro_batches=3, prices="latency"),
    Case("deepseek", cp=2, tp=2, num_micro_batches=2),
    Case("llama", pp=2, dp=2, zero=3, num_micro_batches=3, schedule="GPipe", labels="unequal"),
    Case("gpt", pp=4, num_micro_batches=6, schedule="GPipe", dropout=0.25, recompute="full"),
    Case("llama-tied", pp=2, tp=2, num_micro_batches=4, schedule="GPipe"),
    Case("llama", tp=4, labels="unequal"),
    Case("llama", pp=4, num_micro_batches=6, recompute="full"),
    Case("gpt", pp=2, dp=2, tp=2, zero=2, num_micro_batches=3, labels="unequal", dropout=0.25),
    Case(
        "llama-tied", pp=2, dp=2, tp=2, zero=3, num_micro_batches=2, labels="unequal", recompute="full", stages=(1, 3)
    ),
    Case("mixtral-of-two", dp=4, ep=2, zero=3, num_micro_batches=3),
    Case("mixtral-of-two", dp=4, zero=2, num_micro_batches=3),
]


@pytest.mark.all_cases
@pytest.mark.parametrize("case", spread_out(CASES, 14), ids=str)
def test_training_equals_one_device(case: Case) -> None:
    assert_trains_as_one_device(case)


@pytest.mark.parametrize(
    "case",
    [
        Case("gpt-detached", pp=2, num_micro_batches=2),
        Case("gpt-detached", pp=2, dp=2, zero=1, num_micro_batches=2),
        Case("gpt-detached", pp=2, schedule="ZBV", virtual=2, num_micro_batches=4),
    ],
    ids=str,
)
def test_a_tied_use_without_a_gradient(case: Case) -> None:
    """The head of the last stage gives the embedding's weight none; the first stage waits for its part of the sum."""
    assert_trains_as_one_device(case)


@pytest.mark.parametrize("case", spread_out([CASES[0], CASES[5], CASES[6], CASES[18]], 2), ids=str)
def test_float32_with_sgd(case: Case) -> None:
    got = trained(case, "float32", 3, "sgd")
    want = train_reference(case, torch.float32, 3, "sgd")
    assert got.losses == pytest.approx(want.losses, rel=1e-5)
    error, name = worst(got.gradients, want.gradients)
    assert error < 2e-5, name
    floating = {n: p for n, p in want.parameters.items() if p.is_floating_point()}
    assert worst({n: got.parameters[n] for n in floating}, floating)[0] < 1e-4


@pytest.mark.parametrize(
    "case", [Case(tp=2, num_micro_batches=2), Case("gpt", tp=2, prices="latency", num_micro_batches=3)], ids=str
)
def test_ledger_over_processes(case: Case) -> None:
    """What one step of real processes sends on the tensor-parallel axis is the ledger, the once-per-step reductions
    included."""
    got = trained(case, "float32", 1, "sgd")
    spec = compiled(case).spec
    size = next(iter(global_batch(case).values())).shape[0] // case.num_micro_batches
    env = {"b": size, "s": 16}
    want: Counter[tuple[str, str, int, str]] = Counter()
    deferred = 0
    for e in spec.ledger:
        if e.per == "micro_batch":
            want[e.kind, e.axis, evaluate_terms(e.bytes, env), e.phase] += case.num_micro_batches
        else:
            deferred += evaluate_terms(e.bytes, env)
    seen = Counter(r for r in got.ledger if r[1] == "tp")
    seen.subtract([("all_reduce", "tp", settled_bytes(1), "forward")])  # of all ranks: do the batches fit?
    assert min(seen.values()) >= 0
    assert sum((want - seen).values()) == 0
    rest = seen - want  # gradients of parameters used as R: one message per dtype
    assert sum(r[2] * n for r, n in rest.items()) == deferred
    assert all(kind == "all_reduce" for kind, *_ in rest)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (Case("llama", dp=2, zero=3, num_micro_batches=2), {"embed": "drop", "head": "keep"}),
        (Case("gpt", dp=2, zero=3, num_micro_batches=2, recompute="full"), {"embed": "drop", "head": "keep"}),
        (Case("llama", dp=2, pp=2, zero=3, num_micro_batches=3), {"embed": "drop"}),
        (Case("llama", dp=2, zero=2, num_micro_batches=2), {}),
    ],
    ids=str,
)
def test_zero_3_gathers_again_what_a_backward_needs(case: Case, options: dict[str, str]) -> None:
    """Every forward and backward gathers a block, but not the backward of an embedding, nor that of the last block,
    which directly follows its forward."""
    got, program = trained(case, "float32", 1, "sgd"), compiled(case)
    stage = program.spec.stages[0]  # rank 0 reports
    for block in {p.block for p in stage.params}:
        (line,) = re.findall(rf"^ *'{block}': \w+\((.*)\),$", program.sources[stage.source], re.MULTILINE)
        found = re.search("gathered='([a-z]+)'", line)
        assert (found and found.group(1)) == options.get(block), line
    times = {None: 2, "drop": 1, "keep": 1}
    each = [times[options.get(block)] for block in {p.block for p in stage.params}]
    want = case.num_micro_batches * sum(each) if case.zero == 3 else 1  # small blocks share a message
    assert sum(kind == "all_gather" and axis == "dp" for kind, axis, *_ in got.ledger) == want


LEDGER_CASES = [
    Case("mixtral", dp=2, ep=2, num_micro_batches=2),
    Case("mixtral", tp=2, ep=2, etp=1, num_micro_batches=2),
    Case("mixtral", cp=2, tp=2, ep=4, etp=1, num_micro_batches=2),
    Case("mixtral", dp=2, tp=2, ep=2, etp=2, num_micro_batches=2),
]


@pytest.mark.parametrize("case", spread_out(LEDGER_CASES, 2), ids=str)
def test_ledger_of_travelling_tokens(case: Case) -> None:
    """Experts: how many rows go where, and rows there and back in both passes, where they are split to all parts, too.
    What a rank sends first and what comes back to it is a row per token and choice; what others choose of its experts
    is as many on average. Of what tp does beside, no gradient of an expert is reduced."""
    got = trained(case, "float32", 1, "sgd")
    spec = compiled(case).spec
    env = {"b": 12 // case.dp // case.num_micro_batches, "s": 16 // case.cp}
    entries = [e for e in spec.ledger if e.kind == "all_to_all" and " " in e.what]
    whats = {"counts": 4, "dispatch": 8, "combine": 8}  # of 4 layers
    split = {"counts": 8, "gather": 8, "scatter": 8} if case.etp == 2 else {}
    assert Counter(e.what.split()[-1] for e in entries) == {**whats, **split}
    axes = {axis for axis, size in spec.axes if size > 1}
    assert {e.axis for e in entries} <= axes | set(dict(spec.groups))
    rows = [r for r in got.ledger if r[0] == "all_to_all"]
    every = [(e.axis, e.phase) for e in spec.ledger if e.kind == "all_to_all"]
    assert Counter((axis, phase) for _, axis, _, phase in rows) == Counter(every * case.num_micro_batches)
    exact: Counter[tuple[str, str, int, str]] = Counter()
    sent_first = {("counts", "forward"), ("dispatch", "forward"), ("combine", "backward")}
    for e in entries:
        if (e.what.split()[-1], e.phase) in sent_first:
            exact[e.kind, e.axis, evaluate_terms(e.bytes, env), e.phase] += case.num_micro_batches
    assert not exact - Counter(rows)
    assert not any(e.per == "step" and "experts" in e.what and "gate_up" in e.what for e in spec.ledger)


@pytest.mark.parametrize("scale", [1.0 + 1e-6])
def test_negative_control(scale: float) -> None:
    """The comparison sees a gradient that is off by one part in a million."""
    want = train_reference(CASES[0], torch.float64, 1, "sgd")
    off = {n: g * scale for n, g in want.gradients.items()}
    assert worst(off, want.gradients)[0] > 1e-11
