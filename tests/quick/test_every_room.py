"""One path through every room: capture, rules, schedules, search, emission, two processes, prices, command line.

`make quick` runs this after the linters. Each test takes the smallest case of a claim; the folder of its room under
tests/ holds the others.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import command_line
import enumeration
import models
import pytest
from parity import SEQ, Case, assert_trains_as_one_device, compiled, graph_of
from rule_case import FACTORS
from rule_cases import CASES
from schedule_bounds import lower_bound_1f1b

from autoplan.codegen.check import check_program
from autoplan.cost_models.time.simulation import ChunkTimes, simulate
from autoplan.errors import PinError
from autoplan.ir.graph import ModelGraph, check
from autoplan.schedules.schedule import actions
from autoplan.search.planner import search_plan
from autoplan.verify.check import verify_whole
from autoplan.verify.runs import VerifyTask
from experiments.shared.op_parity import MESHES, Reference, check_types, ranks, run, strategies_of

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")

ROOT = Path(__file__).resolve().parents[2]


def test_capture_finds_the_layers_once_and_keeps_the_loss() -> None:
    graph = enumeration.graph()
    check(graph)
    assert graph.call_counts()["layer"] == 4 and graph.loss_count == "tokens"
    assert ModelGraph.from_json(graph.to_json()) == graph


def test_the_captured_graph_computes_what_the_model_does() -> None:
    model, batch = models.make_llama(), models.token_batch(2, SEQ)
    outcome = verify_whole(VerifyTask(model, graph_of("llama", 0.0), batch, None, None))
    assert outcome.done and "of the module" in outcome.text


def test_every_way_to_split_a_linear_layer_computes_it_and_type_checks() -> None:
    axes = MESHES["2"]
    with ranks(axes, FACTORS) as (mesh, context):
        case = next(c for c in CASES if c.op == "linear")
        reference = Reference(case)
        strategies = strategies_of(case, axes)
        assert len(strategies) >= 4
        for strategy in strategies:
            run(reference, strategy, mesh, context)
            check_types(case, strategy, context, mesh)


def test_a_schedule_takes_what_its_closed_form_says() -> None:
    """1F1B of p equal stages and m micro-batches: m + p - 1 of them one after the other."""
    for p, m in ((1, 1), (2, 4), (4, 8)):
        end_s = simulate(actions("1F1B", p, m), [ChunkTimes(1.0, 2.0)] * p).end_s
        assert end_s == pytest.approx(3.0 * (m + p - 1)) and lower_bound_1f1b([3.0] * p, m) <= end_s


def test_the_search_finds_the_best_of_all_plans() -> None:
    request = enumeration.request(2, enumeration.least_memory(2))
    found = search_plan(request)
    assert found.plans[0].estimate.step_time_s.mid == pytest.approx(enumeration.brute_force(request), rel=1e-9)


def test_what_cannot_be_is_refused_with_what_can() -> None:
    with pytest.raises(PinError, match=r"pin tp=3 does not divide the 4 devices; nearest legal: tp=2 or 4"):
        search_plan(enumeration.request(4, pins={"tp": 3}))


def test_the_emitted_program_is_the_golden_one_and_type_checks() -> None:
    program = compiled(Case(tp=2))
    check_program(program.spec, program.sources, sequence=SEQ)
    assert program.sources["stage0.py"] == (ROOT / "tests" / "golden" / "llama_tp2.py.txt").read_text()


@pytest.mark.processes
@pytest.mark.parametrize(
    "case",
    [
        Case("llama", tp=2, labels="unequal"),
        Case("gpt", pp=2, num_micro_batches=3, dropout=0.25),
        Case("mixtral", dp=2, ep=2, zero=1, num_micro_batches=2),
        Case("llama", cp=2, zero=3, recompute="full", labels="unequal"),
    ],
    ids=str,
)
def test_two_processes_train_as_one(case: Case) -> None:
    """Float64: losses, gradients, clip norm and parameters after three steps."""
    assert_trains_as_one_device(case)


def test_every_40th_price_is_the_frozen_one() -> None:
    command = [sys.executable, "tests/golden/prices.py", "--check", "--every", "40", "--no-plans"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0 and done.stdout == "nothing differs\n", done.stdout + done.stderr


def test_the_command_line_plans_and_says_why_not() -> None:
    result = command_line.run("plan", *command_line.TASK, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["estimate"]["step_time_s"]["mid"] > 0
    line = command_line.one_line_error(command_line.run("plan", *command_line.TASK, "--pin", "tpp=2"), 2)
    assert "did you mean 'tp'?" in line
