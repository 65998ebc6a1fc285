"""Rounds of random programs: what every round examines, and the counts of what became of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import hypothesis
from hypothesis import strategies as st

from experiments.compatibility.fuzz.examine import Crashed, Finding, Outcome, examine
from experiments.compatibility.fuzz.plans import plans
from experiments.compatibility.fuzz.programs import programs
from experiments.compatibility.fuzz.stateful import ALL_OPERATIONS
from experiments.compatibility.one_by_one import CRASHED, EQUAL, WRONG, Row
from experiments.shared.op_parity import MESHES

_STRETCH = 160  # characters of a refusal by which it is counted


@dataclass(frozen=True)
class Level:
    """A size of programs: at most `most` statements, with layers or not, under some plans, with splits of nodes."""

    most: int
    with_layers: bool
    num_plans: int
    splits: bool


LEVELS: Mapping[str, Level] = MappingProxyType(
    {"ops": Level(3, False, 1, True), "models": Level(8, True, 3, False)},
)


@dataclass
class Counts:
    """What became of programs: numbers by what they count, and refusals by their words without numbers."""

    numbers: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        """Count one program."""
        self.numbers["programs"] += 1
        self.numbers["says nothing"] += bool(outcome.skipped)
        self.numbers["runs equal to the module"] += len(outcome.equal)
        self.numbers["refused"] += len(outcome.refused)
        self.numbers["splits of nodes"] += outcome.num_splits
        for where, why in outcome.refused:
            stage = "capture" if where == "capture" else "plan"
            self.refusals[f"{stage}: " + re.sub(r"\d+", "N", why)[:_STRETCH]] += 1


def draw_and_examine(data: st.DataObject, level: Level, names: Sequence[str] = tuple(ALL_OPERATIONS)) -> Outcome:
    """Draw a program of families of operations with its plans and examine it.

    Raises:
        Finding: a defect.
    """
    program = data.draw(programs(level.most, level.with_layers, names))
    drawn = [data.draw(plans("class Layer" in program.text)) for _ in range(level.num_plans)]
    mesh = data.draw(st.sampled_from(list(MESHES))) if level.splits else ""
    return examine(program, drawn, mesh)


def settings(examples: int, **more: Any) -> hypothesis.settings:
    """Return the settings of a round."""
    checks = list(hypothesis.HealthCheck)
    return hypothesis.settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=checks, print_blob=False, **more
    )


def run_round(level: str, seed: int, examples: int, names: Sequence[str] = tuple(ALL_OPERATIONS)) -> Row:
    """Examine programs until one is a finding, which is then made as small as possible.

    Args:
        names: of the families of operations that are drawn.

    Returns:
        A row whose `why` has the finding and `parity` the counts.
    """
    counts, found = Counts(), list[str]()

    @hypothesis.seed(seed)
    @settings(examples, report_multiple_bugs=False)
    @hypothesis.given(st.data())
    def run(data: st.DataObject) -> None:
        try:
            counts.add(draw_and_examine(data, LEVELS[level], names))
        except Finding as exc:
            if not found:  # making it smaller takes minutes, and may be ended
                found.append(str(exc))
                print(f"{level} seed {seed}, as it was drawn: {type(exc).__name__}: {exc}", flush=True)
            raise

    outcome, why = EQUAL, ""
    try:
        run()
    except Finding as exc:
        outcome, why = CRASHED if isinstance(exc, Crashed) else WRONG, f"{type(exc).__name__}: {exc}"
    told = [(name, str(n)) for c in (counts.numbers, counts.refusals) for name, n in c.items()]
    return Row(level, f"seed {seed}", outcome, why, parity=tuple(told))
