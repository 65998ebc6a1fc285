"""Mixed-integer programs, given to HiGHS as arrays; without HiGHS to CBC, through PuLP.

    model = MixedProgram()
    x, y = model.column("x", integer=True), model.column("y")       # from 0 to 1
    model.row([(x, 1.0), (y, 1.0)], low=1.0, high=1.0)              # low <= x + y <= high
    model.solve([(x, 3.0), (y, 2.0)], 10.0).values                  # minimise 3 x + 2 y: {x: 0.0, y: 1.0}

PuLP makes an object of every term: that took twice as long as HiGHS takes to solve the layouts of a model.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np

Column = int
Weighted = list[tuple[Column, float]]
OPTIMAL, INFEASIBLE, NOT_SOLVED = "Optimal", "Infeasible", "Not Solved"


@dataclass(frozen=True)
class Solved:
    """The end of a solver.

    Attributes:
        status: OPTIMAL if there is a solution, INFEASIBLE if there is none, else what the solver says.
        values: of every column; empty without a solution.
        proved: the solution is proved to be the best.
        bound: dual bound of the objective; None if the solver reports none.
        solver: its name.
    """

    status: str
    values: Sequence[float]
    proved: bool
    bound: float | None
    solver: str


def has_highs() -> bool:
    """Return True if HiGHS is installed."""
    return importlib.util.find_spec("highspy") is not None


class MixedProgram:
    """A program over columns between 0 and 1, and rows of terms between two numbers."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.integers: list[bool] = []
        self.rows: list[tuple[dict[Column, float], float, float]] = []

    def column(self, name: str, *, integer: bool = False) -> Column:
        """Add a column and return its number."""
        self.names.append(name)
        self.integers.append(integer)
        return len(self.names) - 1

    def row(self, terms: Iterable[tuple[Column, float]], low: float = -math.inf, high: float = math.inf) -> None:
        """Require that a sum lies between `low` and `high`; terms of the same column are added."""
        merged: dict[Column, float] = {}
        for column, factor in terms:
            merged[column] = merged.get(column, 0.0) + factor
        self.rows.append((merged, low, high))

    def solve(self, objective: Weighted, time_limit_s: float) -> Solved:
        """Minimise a sum with one thread."""
        return (self._by_highs if has_highs() else self._by_cbc)(objective, time_limit_s)

    def _by_highs(self, objective: Weighted, time_limit_s: float) -> Solved:
        import highspy

        new: Any = highspy.Highs  # without types
        order = sorted(range(len(self.names)), key=lambda column: self.names[column])  # as PuLP has it
        at = np.empty(len(order), dtype=np.int32)
        at[order] = np.arange(len(order), dtype=np.int32)
        costs = np.zeros(len(order))
        for column, cost in objective:
            costs[at[column]] = cost
        highs, nothing = new(), np.array([], dtype=np.int32)
        options: dict[str, Any] = {"output_flag": False, "mip_rel_gap": 0.0, "mip_abs_gap": 0.0, "threads": 1}
        for name, value in (options | {"time_limit": float(time_limit_s)}).items():
            highs.setOptionValue(name, value)
        zeros, ones = np.zeros(len(order)), np.ones(len(order))
        highs.addCols(len(order), costs, zeros, ones, 0, nothing, nothing, np.array([]))
        integers = at[np.flatnonzero(self.integers)]
        kinds = np.full(len(integers), int(highspy.HighsVarType.kInteger), dtype=np.uint8)
        highs.changeColsIntegrality(len(integers), integers, kinds)
        rows = [[(column, factor) for column, factor in terms.items() if factor] for terms, _, _ in self.rows]
        starts = np.array([0, *accumulate(map(len, rows))][: len(rows)], dtype=np.int32)
        columns, factors = zip(*chain.from_iterable(rows), strict=True) if any(rows) else ((), ())
        lows, highes = (np.array([row[side] for row in self.rows]) for side in (1, 2))
        highs.addRows(len(rows), lows, highes, len(columns), starts, at[list(columns)], np.array(factors))
        highs.run()
        return self._read(highs, at)

    def _read(self, highs: Any, at: Any) -> Solved:
        from highspy import HighsModelStatus as Status

        found, info = highs.getModelStatus(), highs.getInfo()
        stopped = (Status.kTimeLimit, Status.kInterrupt, Status.kIterationLimit)
        status = highs.modelStatusToString(found)
        if found in (Status.kInfeasible, Status.kUnboundedOrInfeasible):
            status = INFEASIBLE
        elif found is Status.kOptimal or (found in stopped and math.isfinite(highs.getObjectiveValue())):
            status = OPTIMAL
        elif found in stopped:
            status = NOT_SOLVED
        values = np.array(highs.getSolution().col_value)[at].tolist() if status == OPTIMAL else []
        return Solved(status, values, found == Status.kOptimal, float(info.mip_dual_bound), "HiGHS")

    def _by_cbc(self, objective: Weighted, time_limit_s: float) -> Solved:
        """Solve by an installed CBC, or the one that PuLP ships."""
        import pulp

        program = pulp.LpProblem("layouts", pulp.LpMinimize)
        columns = [
            program.add_variable(name, 0, 1, pulp.LpInteger if integer else pulp.LpContinuous)
            for name, integer in zip(self.names, self.integers, strict=True)
        ]
        program.setObjective(pulp.LpAffineExpression([(columns[column], cost) for column, cost in objective]))
        for terms, low, high in self.rows:
            total = pulp.LpAffineExpression([(columns[column], factor) for column, factor in terms.items()])
            if low == high:
                program += total == low
                continue
            if low > -math.inf:
                program += total >= low
            if high < math.inf:
                program += total <= high
        options = {"msg": False, "timeLimit": time_limit_s, "threads": 1}
        solver = pulp.COIN_CMD(**options)
        solver = solver if solver.available() else pulp.PULP_CBC_CMD(**options)
        program.solve(solver)
        status, values = str(pulp.LpStatus[program.status]), [x.value() for x in columns]
        if status == OPTIMAL and None in values:
            status = NOT_SOLVED
        proved = program.sol_status == pulp.LpSolutionOptimal
        return Solved(status, values if status == OPTIMAL else [], proved, None, type(solver).__name__)
