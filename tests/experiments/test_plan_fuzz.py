"""Random plans on real processes (experiments.compatibility.plan_fuzz): an equal one, and defects that are seen."""

from __future__ import annotations

import pytest
from plan_fuzz_processes import Processes

from experiments.compatibility.plan_fuzz.cases import Case, Optimizer, Plan, Step
from experiments.compatibility.plan_fuzz.draw import draw_case
from experiments.compatibility.plan_fuzz.examine import EQUAL, FINDING, Examiner
from experiments.compatibility.plan_fuzz.shrink import shrink

pytestmark = pytest.mark.processes


CASE = Case(
    model="gpt",
    options={"dropout": 0.2, "tied": True},
    optimizer=Optimizer("adamw", "patterns", clip=0.05),
    plan=Plan({"dp": 2, "zero_stage": 2, "num_micro_batches": 2}),
    other=Plan({"pp": 2, "num_micro_batches": 2}),
    steps=(
        Step(batches=2, unequal=True, after="move"),
        Step(before="outputs", update="leave out"),
        Step(update="skip"),
    ),
)


def test_a_case_is_equal_and_survives_json() -> None:
    assert Case.from_json(CASE.to_json()) == CASE
    found = Examiner(Processes).examine(CASE)
    assert found.outcome == EQUAL and found.num_steps == 3 and len(found.notes) == 2, found


def test_cases_are_the_same_for_a_seed() -> None:
    cases = [draw_case(5, number) for number in range(30)]
    assert cases == [draw_case(5, number) for number in range(30)] and len({c.to_json() for c in cases}) == 30
    assert all(Case.from_json(c.to_json()) == c for c in cases)


@pytest.mark.parametrize(
    ("breaker", "kind"), [("gradient", "norm"), ("disagree", "ranks disagree"), ("fail", "KeyError: 'fail'")]
)
def test_a_broken_program_is_found(breaker: str, kind: str) -> None:
    """A gradient that is 0.1 % too large, losses that differ from rank to rank, a rank that fails."""
    found = Examiner(Processes, breaker=breaker).examine(CASE)
    assert (found.outcome, found.kind) == (FINDING, kind)


def test_a_finding_is_made_small() -> None:
    """What does not matter is left out."""
    small = shrink(CASE, lambda case: case.plan.pins.get("dp") == 2 and any(s.batches == 2 for s in case.steps), 60)
    assert small == Case(plan=Plan({"dp": 2}), steps=(Step(batches=2),))
