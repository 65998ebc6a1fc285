"""What is sent is written once: the prices of a layout, the ledger of its program and the collectives that processes
perform are the same, for attention over cut sequences, experts that tokens travel to, and sums over a batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from parity import SEQ, TARGET, Case, cluster_of, global_batch, graph_of, trained

from autoplan.codegen.program import Layouts, compile_program
from autoplan.cost_models.network.groups import mesh_groups
from autoplan.cost_models.work import BlockWork, Workload
from autoplan.ir.graph import ModelGraph
from autoplan.program.lower import BlockLowering
from autoplan.program.op_costs import OpCosts
from autoplan.program.passes import executed, rewritten
from autoplan.program.workload import workload
from autoplan.runtime.spec import LedgerEntry, evaluate_terms
from experiments.shared.default_plans import make_plan, read_pins

Sent = Counter[tuple[str, str, int]]  # kind, phase, bytes

CASES = {
    "ring": Case(cp=2, context_method="ring", num_micro_batches=2),
    "ulysses": Case(cp=2, context_method="ulysses"),
    "gather": Case(cp=2, context_method="gather"),
    "product": Case(cp=4, context_method="ulysses2xring2"),
    "dispatch": Case("mixtral", dp=2, ep=2, num_micro_batches=2),
    "split experts": Case("mixtral", dp=2, tp=2, ep=2, etp=2),
    "batch sums": Case("mixtral-aux", dp=2),
    "sums over parts": Case("qwen3-moe-aux", cp=2, context_method="ring"),
    "documents": Case("llama-packed", cp=2, context_method="gather"),
}
PERFORMED = {name: case for name, case in CASES.items() if case.world == 2 and name != "sums over parts"}
# of what a rank sends for experts, bytes follow from what others chose; and how many there are is not priced
ROWS = {"counts", "dispatch", "combine", "gather", "scatter"}


def plan_of(case: Case) -> tuple[ModelGraph, Layouts]:
    """As `parity.compiled` plans the case."""
    graph, env = graph_of(case.family, case.dropout), {"b": 2, "s": SEQ, "t": TARGET}
    config = read_pins(case.pins, case.world)
    return graph, make_plan(graph, cluster_of(case.world, case.prices), config, env)[1]


def env_of(case: Case) -> dict[str, int]:
    """Sizes of one micro-batch of one rank."""
    samples = len(next(iter(global_batch(case).values())))
    return {"b": samples // case.dp // case.num_micro_batches, "s": SEQ // case.cp, "t": TARGET}


def priced(case: Case, graph: ModelGraph, layouts: Layouts) -> Workload:
    experts = executed(layouts.mesh, layouts.context).experts
    op_costs = OpCosts(graph, layouts.axes, env_of(case), context=case.cp, methods=layouts.context)
    return workload(graph, layouts.selection, op_costs, experts)


def sent_by(case: Case, graph: ModelGraph, work: Workload) -> Sent:
    """What a price counts in one micro-batch."""
    groups, out = mesh_groups(read_pins(case.pins, case.world), work.axes), Sent()
    for call in graph.calls:
        block: BlockWork = work.blocks[call.block]
        for c in block.comms:
            if c.per == "micro_batch" and (c.part is not None or groups[c.axis].size > 1):
                out[c.kind, c.phase, round(c.num_bytes)] += 1
    return out


def listed(case: Case, entries: tuple[LedgerEntry, ...]) -> Sent:
    """What the ledger lists of it."""
    return Counter(
        (e.kind, e.phase, evaluate_terms(e.bytes, env_of(case)))
        for e in entries
        if e.per == "micro_batch" and e.axis != "pp"
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_ledger_is_what_is_priced(case: Case) -> None:
    """Collective by collective. Left out of prices: numbers of rows, and whose tokens are whose."""
    graph, layouts = plan_of(case)
    entries = compile_program(graph, layouts).spec.ledger
    integers = {v.name for b in graph.blocks.values() for v in b.values.values() if v.dtype == "int64"}
    small = [e for e in entries if e.what.endswith(" counts") or (e.kind == "all_gather" and e.what in integers)]
    counted = tuple(e for e in entries if e not in small)
    assert sent_by(case, graph, priced(case, graph, layouts)) == listed(case, counted)
    assert bool(small) == (case.family == "llama-packed" or layouts.mesh.has("ep"))


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")
@pytest.mark.parametrize("case", PERFORMED.values(), ids=PERFORMED)
def test_the_ledger_is_what_processes_perform(case: Case) -> None:
    """Every line of it as often as there are micro-batches, in both passes."""
    graph, layouts = plan_of(case)
    got = trained(case, "float32", 1, "sgd")
    want, rows, seen = Counter[tuple[str, str, str, int]](), Counter[tuple[str, str, str]](), Counter(got.ledger)
    for e in compile_program(graph, layouts).spec.ledger:
        if e.per == "micro_batch" and e.what.split()[-1] in ROWS and e.kind == "all_to_all":
            rows[e.kind, e.axis, e.phase] += case.num_micro_batches
        elif e.per == "micro_batch":
            want[e.kind, e.axis, e.phase, evaluate_terms(e.bytes, env_of(case))] += case.num_micro_batches
    assert want or rows
    assert {(k, a, p, n): seen[k, a, n, p] for k, a, p, n in want} == want
    axes = {axis for _, axis, *_ in (*want, *rows)}
    others = Counter((k, a, p) for k, a, _, p in seen.elements() if k != "all_reduce" and a in axes and a != "dp")
    assert others == rows + Counter((k, a, p) for k, a, p, _ in want.elements() if k != "all_reduce")


def test_a_pass_that_is_left_out_is_seen() -> None:
    """Negative control: without context parallelism, attention sends nothing."""
    case = CASES["ring"]
    graph, layouts = plan_of(case)
    stack = executed(layouts.mesh, layouts.context)
    for change, there in ((stack, True), (replace(stack, context=1), False)):
        sends = [
            c.kind
            for block in graph.blocks.values()
            for s in rewritten(BlockLowering(graph, block, layouts.selection, layouts.axes).run(), change).statements
            for c in s.collectives
        ]
        assert ("send_recv" in sends) == there
