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
from numpy.typing import NDArray

from autoplan.cost_models.arrays import Array

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
        costs = np.zeros(len(self.names))
        for column, cost in objective:
            costs[column] = cost
        return self.packed().solve(costs, time_limit_s)

    def packed(self) -> PackedProgram:
        """Return the program as arrays."""
        order = np.array(sorted(range(len(self.names)), key=lambda column: self.names[column]), dtype=np.int32)
        rows = [[(column, factor) for column, factor in terms.items() if factor] for terms, _, _ in self.rows]
        starts = np.array([0, *accumulate(map(len, rows))][: len(rows)], dtype=np.int32)
        columns, factors = zip(*chain.from_iterable(rows), strict=True) if any(rows) else ((), ())
        lows, highs = (np.array([row[side] for row in self.rows], dtype=float) for side in (1, 2))
        integers = np.flatnonzero(self.integers).astype(np.int32)
        return PackedProgram(order, integers, starts, np.array(columns, dtype=np.int32), np.array(factors), lows, highs)


@dataclass(frozen=True)
class PackedProgram:
    """A program as arrays, to be solved for one objective after another.

    Attributes:
        order: the columns as a solver gets them, by name as PuLP has it.
        integers: columns that are whole.
        starts, columns, factors: terms of all rows, and where each row begins in them.
        lows, highs: the numbers that rows lie between.
    """

    order: NDArray[np.int32]
    integers: NDArray[np.int32]
    starts: NDArray[np.int32]
    columns: NDArray[np.int32]
    factors: Array
    lows: Array
    highs: Array

    def solve(self, costs: Array, time_limit_s: float, excluded: Sequence[Column] = ()) -> Solved:
        """Minimise the sum of columns times costs with one thread. `excluded`: columns that are 0."""
        most = np.ones(len(self.order))
        most[list(excluded)] = 0.0
        return (self._by_highs if has_highs() else self._by_cbc)(costs, time_limit_s, most)

    def _by_highs(self, costs: Array, time_limit_s: float, most: Array) -> Solved:
        import highspy

        new: Any = highspy.Highs  # without types
        order, starts = self.order, self.starts
        at = np.empty(len(order), dtype=np.int32)
        at[order] = np.arange(len(order), dtype=np.int32)
        highs, nothing = new(), np.array([], dtype=np.int32)
        options: dict[str, Any] = {"output_flag": False, "mip_rel_gap": 0.0, "mip_abs_gap": 0.0, "threads": 1}
        options["mip_heuristic_run_feasibility_jump"] = False  # a tenth of the time, for solutions far from the best
        for name, value in (options | {"time_limit": float(time_limit_s)}).items():
            highs.setOptionValue(name, value)
        zeros = np.zeros(len(order))
        highs.addCols(len(order), costs[order], zeros, most[order], 0, nothing, nothing, np.array([]))
        integers = at[self.integers]
        kinds = np.full(len(integers), int(highspy.HighsVarType.kInteger), dtype=np.uint8)
        highs.changeColsIntegrality(len(integers), integers, kinds)
        columns = at[self.columns]
        highs.addRows(len(starts), self.lows, self.highs, len(columns), starts, columns, self.factors)
        if highs.run() == highspy.HighsStatus.kError:  # another user of HiGHS in this process had more threads
            new.resetGlobalScheduler(True)
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

    def _by_cbc(self, costs: Array, time_limit_s: float, most: Array) -> Solved:
        """Solve by an installed CBC, or the one that PuLP ships."""
        import pulp

        program, whole = pulp.LpProblem("layouts", pulp.LpMinimize), set(self.integers.tolist())
        columns: list[Any] = [None] * len(self.order)
        for i, column in enumerate(self.order.tolist()):
            kind = pulp.LpInteger if column in whole else pulp.LpContinuous
            columns[column] = program.add_variable(f"x{i:09d}", 0, float(most[column]), kind)
        used = np.flatnonzero(costs).tolist()
        program.setObjective(pulp.LpAffineExpression([(columns[column], float(costs[column])) for column in used]))
        terms = list(zip(self.columns.tolist(), self.factors.tolist(), strict=True))
        ends = [*self.starts.tolist()[1:], len(terms)]
        for start, end, low, high in zip(self.starts.tolist(), ends, self.lows, self.highs, strict=True):
            total = pulp.LpAffineExpression([(columns[column], factor) for column, factor in terms[start:end]])
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
