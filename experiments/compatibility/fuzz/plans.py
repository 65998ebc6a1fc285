"""Random plans: degrees, micro-batches, recompute, and a layout that no price would choose."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from autoplan.codegen.program import Program, compile_program
from autoplan.cost_models.hardware.cluster import Cluster, Device, Level
from autoplan.errors import InfeasibleError
from autoplan.ir.graph import ModelGraph
from autoplan.program.problem import IntraProblem
from experiments.compatibility.fuzz.scope import Draw
from experiments.shared.default_plans import make_plan, read_pins

_CHEAP = 1e-3  # the price of a conversion beside those of choices, which are random


@dataclass(frozen=True)
class FuzzPlan:
    """Degrees and settings. `layout`: 0 for the layout of the prices, else the seed of random prices."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    zero: int = 0
    num_micro_batches: int = 1
    recompute: str = "none"
    layout: int = 0

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.tp * self.dp * self.pp

    def __str__(self) -> str:
        layout = f", layout {self.layout}" if self.layout else ""
        return (
            f"tp {self.tp}, dp {self.dp}, pp {self.pp}, ZeRO {self.zero}, {self.num_micro_batches} micro-batches, "
            f"recompute {self.recompute}{layout}"
        )

    def compiled(self, graph: ModelGraph, env: Mapping[str, int]) -> Program:
        """Return the program of a graph under this plan.

        Raises:
            AutoplanError: the model cannot take these degrees.
        """
        pins: dict[str, Any] = {
            "tp": self.tp, "dp": self.dp, "pp": self.pp, "zero_stage": self.zero, "recompute": self.recompute,
            "num_micro_batches": self.num_micro_batches,
        }  # fmt: skip
        device = Device("made up", 1e12, 1e9, 1 << 36, "made up")
        cluster = Cluster(1, self.world, device, Level(0.0, 1e9, "made up"), "cpu")
        config = read_pins(pins, self.world)
        try:
            _, layouts, _ = make_plan(graph, cluster, replace(config, state_slack=1.0), env, revised=self.revised)
        except InfeasibleError:  # some of the state cannot be cut as far
            _, layouts, _ = make_plan(graph, cluster, replace(config, state_slack=None), env, revised=self.revised)
        return compile_program(graph, layouts)

    @property
    def revised(self) -> Callable[[IntraProblem], IntraProblem]:
        """The function that puts random prices in place of the problem's own."""
        if not self.layout:
            return lambda problem: problem
        drawn = random.Random(self.layout)

        def revise(problem: IntraProblem) -> IntraProblem:
            choices = tuple(
                replace(c, options=tuple(replace(o, cost_s=drawn.random(), once_s=0.0) for o in c.options))
                for c in problem.choices
            )

            def convert_s(key: Any, source: Any, target: Any) -> float | None:
                return None if problem.convert_s(key, source, target) is None else _CHEAP

            return replace(problem, choices=choices, convert_s=convert_s, convert_once_s=lambda *_: 0.0)

        return revise


@st.composite
def plans(draw: Draw[Any], pipelines: bool = False) -> FuzzPlan:
    """Draw plans of at most eight ranks, of one pipeline stage or also of two."""
    tp, dp, pp = (draw(st.sampled_from(x)) for x in ((2, 1, 4), (1, 2), (1, 2) if pipelines else (1,)))
    return FuzzPlan(
        tp, dp, pp,
        draw(st.sampled_from((0, 1, 2, 3))) if dp > 1 else 0,
        draw(st.sampled_from((1, 2))),
        draw(st.sampled_from(("none", "full", "selective", "attention", "mlp", "norms", "mlp+norms"))),
        draw(st.integers(0, 1000)),
    )  # fmt: skip
