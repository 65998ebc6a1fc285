"""The emitted program: what it says, that it type-checks, and that its collectives are those of the ledger."""

from __future__ import annotations

import ast
import math
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from parity import SEQ, TARGET, Case, cluster_of, compiled, global_batch, graph_of, run_simulated, spread_out
from spmd_types import SpmdTypeError

from autoplan.codegen.check import check_program
from autoplan.codegen.program import compile_program
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Group
from autoplan.cost_models.quantity import ZERO
from autoplan.program.problem import IntraSettings, build_problem
from autoplan.program.problem import evaluate_selection as evaluate_cost
from autoplan.runtime.spec import SPEC_VERSION, LedgerEntry, ProgramSpec, evaluate_terms
from experiments.shared.default_plans import make_plan, read_pins

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")

GOLDEN = Path(__file__).parents[1] / "golden"

CASES = [
    Case(tp=2, prices="bandwidth"),
    Case(tp=2, prices="latency"),
    Case(tp=4, prices="bandwidth"),
    Case(family="gpt", tp=2, prices="bandwidth"),
    Case(family="gpt", tp=4, pp=2, prices="latency"),
    Case(family="gpt-untied", tp=2, dp=2, dropout=0.25, prices="bandwidth"),
    Case(family="llama-tied", tp=2, pp=2, prices="bandwidth"),
    Case(family="mistral", tp=2, prices="bandwidth"),
    Case(family="mixtral", tp=2, prices="bandwidth"),
    Case(family="qwen3-moe", tp=4, prices="latency"),
    Case(family="deepseek", tp=2, pp=2, prices="bandwidth"),
    Case(family="encdec", tp=2, pp=4, prices="bandwidth"),
    Case(family="encdec", tp=2, prices="latency"),
    Case(family="skips", tp=2, pp=4, prices="bandwidth"),
]


@pytest.mark.parametrize("case", spread_out(CASES, 3), ids=str)
def test_type_checks(case: Case) -> None:
    program = compiled(case)
    check_program(program.spec, program.sources, sequence=SEQ)


# what is left out, and in which layouts it occurs
DROPPED = {
    "all_reduce": r"= all_reduce\((\w+), 'tp', dst=\w\)",
    "reduce_scatter": r"= reduce_scatter\((\w+), 'tp', dim=\d\)",
    "to_replicate": r"= to_replicate\((\w+), 'tp'\)",
    "all_gather": r"= all_gather\((\w+), 'tp', dim=\d, dst=\w\)",
}


@pytest.mark.parametrize("what", list(DROPPED))
def test_a_dropped_conversion_does_not_type_check(what: str) -> None:
    """Every single conversion of both layouts, left out one at a time, is refused: by its types or by its shapes."""
    tried = 0
    for family, prices in (("llama", "bandwidth"), ("llama", "latency"), ("mixtral", "bandwidth")):
        program = compiled(Case(family, tp=2, prices=prices))
        ((name, text),) = program.sources.items()
        for found in re.finditer(DROPPED[what], text):
            broken = text[: found.start()] + f"= {found.group(1)}" + text[found.end() :]
            with pytest.raises((SpmdTypeError, RuntimeError, ValueError)):
                check_program(program.spec, {name: broken}, sequence=SEQ)
            tried += 1
    assert tried, f"no layout has a {what}"


def expected(entries: tuple[LedgerEntry, ...], case: Case, per: str) -> Counter[tuple[str, str, int, str]]:
    size = len(next(iter(global_batch(case).values()))) // case.dp // case.num_micro_batches
    env = {"b": size, "s": SEQ, "t": TARGET}
    out: Counter[tuple[str, str, int, str]] = Counter()
    for e in entries:
        if e.per == per and e.kind != "send_recv":
            out[e.kind, e.axis, evaluate_terms(e.bytes, env), e.phase] += (
                case.num_micro_batches if per == "micro_batch" else 1
            )
    return out


LEDGER = [*CASES, Case(tp=2, dp=2, num_micro_batches=3), Case(tp=2, num_micro_batches=2, recompute="full")]


@pytest.mark.parametrize("case", spread_out(LEDGER, 2), ids=str)
def test_collectives_equal_the_ledger(case: Case) -> None:
    """Every collective that runs is in the price list, with its bytes, and the other way round."""
    records: list = []
    run_simulated(case, torch.float32, records=records)
    spec = compiled(case).spec
    want = expected(spec.ledger, case, "micro_batch")
    assert want
    got = Counter((r.kind, r.axis, r.bytes, r.phase) for r in records if r.phase != "recompute")
    assert got == want
    again = Counter((r.kind, r.axis, r.bytes) for r in records if r.phase == "recompute")
    layers = {c for c, how in spec.recompute if how == "full"}
    inside = expected(tuple(e for e in spec.ledger if e.call in layers and e.phase == "forward"), case, "micro_batch")
    assert set(again) <= {k[:3] for k in inside}  # the checkpoint stops early: at most what the forward did
    assert bool(again) == bool(layers and inside)


@pytest.mark.parametrize("case", spread_out(LEDGER, 2), ids=str)
def test_the_ledger_is_what_was_priced(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With arithmetic and memory for free, the ILP's cost of the chosen layout is the cost of the ledger's entries."""
    graph, config = graph_of(case.family, case.dropout), read_pins(case.pins, case.world)
    cluster, env = cluster_of(case.world, case.prices), {"b": 2, "s": SEQ, "t": TARGET}
    _, layouts, solution = make_plan(graph, cluster, config, env)
    for phase in ("forward_s", "backward_s"):
        monkeypatch.setattr(Costs, phase, lambda self, work: ZERO)
    settings = IntraSettings(layouts.axes, Costs(cluster), env, config.num_micro_batches, config.state_slack)
    problem = build_problem(graph, settings)
    chosen = {
        c.name: next(o for o in c.options if (o.requires, o.provides) == (mine.requires, mine.provides))
        for c in problem.choices
        for mine in [solution.selection[c.name]]
    }
    spec = compile_program(graph, layouts).spec
    sizes = dict(spec.axes)
    sizes |= {name: math.prod(sizes[m] for m in members) for name, members in spec.groups}
    costs, strides, total = Costs(cluster), {"tp": 1, "tp1": 1, "tp0": sizes.get("tp1", 1)}, 0.0
    for e in spec.ledger:
        if e.kind != "send_recv":
            group = Group(sizes[e.axis], strides[e.axis])
            seconds = costs.collective_s(e.kind, evaluate_terms(e.bytes, env), group).mid
            total += seconds / (config.num_micro_batches if e.per == "step" else 1)
    assert total > 0
    assert evaluate_cost(problem, chosen) == pytest.approx(total, rel=1e-9)


def test_a_collective_outside_the_ledger_is_seen() -> None:
    """Negative control of the comparison above."""
    case = Case(tp=2, prices="latency")
    program = compiled(case)
    ((name, text),) = program.sources.items()
    doubled, count = re.subn(
        r"= all_reduce\((\w+), 'tp', dst=I\)",
        r"= all_reduce(all_reduce(\1, 'tp', dst=R) / 2, 'tp', dst=I)",
        text,
        count=1,
    )
    assert count == 1
    records: list = []
    run_simulated(case, torch.float32, {name: doubled}, records)
    assert Counter((r.kind, r.axis, r.bytes, r.phase) for r in records) != expected(
        program.spec.ledger, case, "micro_batch"
    )


def test_spec_round_trip() -> None:
    spec = compiled(CASES[4]).spec
    assert ProgramSpec.from_json(spec.to_json()) == spec
    with pytest.raises(ValueError, match="version 99"):
        ProgramSpec.from_json(spec.to_json().replace(f'"version": {SPEC_VERSION}', '"version": 99'))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_source_is_plain_python(case: Case) -> None:
    """No device constants, no views, no group names; every line that makes a tensor says its shape and type.

    A program that draws nothing is given no numbers to draw by.
    """
    program = compiled(case)
    assert program.spec.draws == any("rng=rng" in text for text in program.sources.values()) == bool(case.dropout)
    for text in program.sources.values():
        ast.parse(text)
        assert ".view(" not in text and "'cpu'" not in text and "cuda" not in text
        body = [
            line
            for line in text.splitlines()
            if re.match(r"        \w[\w, ]* = .*", line) and "self" not in line.split("=")[0]
        ]
        in_blocks = [
            line
            for line in body
            if ".shape[" not in line and ".device" not in line and "self." not in line.split("=")[1][:6]
        ]
        assert all("# " in line for line in in_blocks)


@pytest.mark.parametrize(("name", "case"), [("llama_tp2", CASES[0]), ("gpt_tp2", CASES[3])])
def test_golden(name: str, case: Case, request: pytest.FixtureRequest) -> None:
    """The emitted text, as reviewed. `pytest --update-golden` rewrites it."""
    (text,) = compiled(case).sources.values()
    path = GOLDEN / f"{name}.py.txt"
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text


def test_check_command(tmp_path: Path) -> None:
    compiled(CASES[0]).write(tmp_path)
    out = subprocess.run(
        [sys.executable, "-m", "autoplan.codegen.check", str(tmp_path), "--sequence", str(SEQ)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert out.returncode == 0, out.stderr
    assert "1 stage(s) type-check" in out.stdout
