"""Solve the intra-op problem as an ILP (`autoplan.search.linear`: HiGHS, or CBC as the fallback).

    x[c,o]   in {0,1}  option o of choice c;                sum_o x[c,o] = 1
    y[u,a,l] in [0,1]  operand u, native in layout a, is used in layout l
             sum_a y[u,a,l]  = sum of x[c,o] over the options that use u in l
             sum_l y[u,a,l] <= sum of x[c,o] over the options that provide its value in a
    z[v,a,l] in [0,1]  value v is converted from a to l;    z[v,a,l] >= y[u,a,l] for every operand u that is v
    minimise  sum w_c cost[c,o] x[c,o] + sum w_v conversion[v,a,l] z[v,a,l]

Costs are those of a micro-batch, with its part of what is once per step; nothing else depends on their number. Where
the host decides (`autoplan.search.host_layouts`), every collective costs its seconds, too.
y and z are continuous: with integral x their optimal values are integral. The transport rows of y make the relaxation
nearly tight (exact on trees), so that a whole model is solved at the root node.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoplan.cost_models.arrays import Array
from autoplan.errors import AutoplanError, InfeasibleError
from autoplan.ir.layout import Layout
from autoplan.program.choice_kinds import is_strategy
from autoplan.program.problem import IntraProblem, LayoutChoice, Option, ValueKey, evaluate_selection
from autoplan.search.linear import INFEASIBLE, OPTIMAL, Column, MixedProgram, PackedProgram, Solved, Weighted

# Costs are scaled so that the largest cost of one option is _SCALE. Ties are broken by option order and for fewer
# conversions, far below any real difference and above the solver's tolerance (1e-7).
_SCALE = 1e3
_TIE = 1e-6
_WITH_HOST = "where the host decides, layouts count seconds of the device and of the host's collectives"
_EXPLAIN_S = 1.0  # least time to explain why a problem is infeasible


_Use = dict[Layout, list[Column]]  # one operand of one choice: the options that take it in each layout


class _Conversion(NamedTuple):
    """A value that is converted from one layout to another."""

    key: ValueKey
    source: Layout
    target: Layout


class _Cost(NamedTuple):
    """What a column costs.

    Attributes:
        what: the numbers of a choice and of its option, or a conversion: its price.
        tie: added after scaling.
    """

    column: Column
    what: tuple[int, int] | _Conversion
    tie: float


class StoppedError(AutoplanError):
    """Time ran out before an answer: neither a solution nor a proof that there is none."""


@dataclass(frozen=True)
class SendWish:
    """What a layout is solved for besides the seconds of the device.

    Attributes:
        send_s: seconds of the host for every collective.
        fixed: choices that are decided, with the names of their options.
    """

    send_s: float = 0.0
    fixed: tuple[tuple[str, str], ...] = ()


DEVICE_ALONE = SendWish()


@dataclass(frozen=True)
class IntraSolution:
    """The chosen options, the cost in seconds per micro-batch, and the proof: dual bound and status."""

    selection: Mapping[str, Option]
    cost_s: float
    bound_s: float
    status: str
    solver: str
    num_variables: int
    build_time_s: float
    solve_time_s: float
    restrictions: tuple[str, ...]

    @property
    def gap(self) -> float:
        """Relative distance between the cost and the solver's dual bound."""
        return 0.0 if self.cost_s == 0 else max(0.0, (self.cost_s - self.bound_s) / self.cost_s)


def _prune(problem: IntraProblem) -> IntraProblem:
    """Return the problem without options that need a layout which nobody can provide or convert to."""
    choices = list(problem.choices)
    while True:
        native: dict[ValueKey, set[Layout]] = {}
        for choice in choices:
            for option in choice.options:
                for key, layout in option.provides:
                    native.setdefault(key, set()).add(layout)

        def reachable(key: ValueKey, layout: Layout, native: dict[ValueKey, set[Layout]] = native) -> bool:
            have = native.get(key, set())
            return layout in have or any(problem.convert_s(key, a, layout) is not None for a in have)

        kept = []
        for choice in choices:
            options = tuple(o for o in choice.options if all(reachable(k, layout) for k, layout in o.requires))
            if not options:
                raise InfeasibleError(f"{choice.name}: no option can get its operands in the layout it needs")
            kept.append(replace(choice, options=options))
        if all(len(a.options) == len(b.options) for a, b in zip(kept, choices, strict=True)):
            return replace(problem, choices=tuple(kept))
        choices = kept


def follow(problem: IntraProblem) -> IntraProblem:
    """Merge element-wise chains into their producer: one choice, no conversion inside the chain.

    A value is merged if it has one consumer and no pending sum can sit between the two (or the consumer passes it on).
    This is a restriction: converting a small operand just before a broadcast, for example, can be cheaper.
    """
    choices = {c.name: c for c in problem.choices}
    keys = {c.name: _keys(c) for c in problem.choices}
    apart: set[tuple[str, str, ValueKey]] = set()
    while merged := _next_merge(choices, keys, apart):
        a, b, both = merged
        del choices[b], keys[b]
        choices[a], keys[a] = both, _keys(both)
        apart = {pair for pair in apart if not {a, b} & set(pair[:2])}
    restrictions = (*problem.restrictions, "element-wise chains follow their producer")
    return replace(problem, choices=tuple(choices.values()), restrictions=restrictions)


_Keys = tuple[tuple[ValueKey, ...], tuple[ValueKey, ...]]  # the values that a choice provides, and those it requires


def _keys(choice: LayoutChoice) -> _Keys:
    """Return the values that the options of a choice provide and require, each once, in the order of the options."""
    gives = dict.fromkeys(key for o in choice.options for key, _ in o.provides)
    takes = dict.fromkeys(key for o in choice.options for key, _ in o.requires)
    return tuple(gives), tuple(takes)


def _next_merge(
    choices: Mapping[str, LayoutChoice],
    keys: Mapping[str, _Keys],
    apart: set[tuple[str, str, ValueKey]],
) -> tuple[str, str, LayoutChoice] | None:
    """Return the first producer and consumer, by name, that can be merged, and the choice that they become.

    A pair between which some layout has to be converted is added to `apart`, and not looked at again.
    """
    provider = {key: name for name in choices for key in keys[name][0]}
    consumers: dict[ValueKey, list[str]] = {}
    for name in choices:
        for key in keys[name][1]:
            consumers.setdefault(key, []).append(name)
    for key, names in consumers.items():
        if len(names) != 1:
            continue
        a, b = choices[provider[key]], choices[names[0]]
        if not b.follows or a.name == b.name or a.weight != b.weight or not is_strategy(a.name):
            continue
        if (a.name, b.name, key) in apart:
            continue
        if (both := _merge(a, b, key)) is not None:
            return a.name, b.name, both
        apart.add((a.name, b.name, key))
    return None


def _merge(a: LayoutChoice, b: LayoutChoice, key: ValueKey) -> LayoutChoice | None:
    options: list[Option] = []
    matched: set[Layout] = set()
    for x in a.options:
        have = dict(x.provides)[key]
        for y in b.options:
            wants = {layout for k, layout in y.requires if k == key}
            if wants != {have}:
                continue
            matched.add(have)
            options.append(
                Option(
                    name=x.name,
                    requires=(*x.requires, *(r for r in y.requires if r[0] != key)),
                    provides=(*x.provides, *y.provides),
                    cost_s=x.cost_s + y.cost_s,
                    state_bytes=x.state_bytes + y.state_bytes,
                    parts=(*(x.parts or ((a.name, x),)), *(y.parts or ((b.name, y),))),
                    once_s=x.once_s + y.once_s,
                    num_sends=x.num_sends + y.num_sends,
                )
            )
    if any(dict(x.provides)[key] not in matched for x in a.options):
        return None  # some layout of the producer must be converted before the consumer
    return LayoutChoice(a.name, tuple(options), a.weight, a.follows)


class _Model:
    """The ILP of a problem.

    Args:
        elastic: operands may stay without a layout; `missing` lists those.
    """

    def __init__(self, problem: IntraProblem, *, elastic: bool = False) -> None:
        self.problem, self.elastic = problem, elastic
        self.linear = MixedProgram()
        self.costs: list[_Cost] = []
        self.state: Weighted = []
        self.missing: list[tuple[Column, str, ValueKey, Layout]] = []
        self.ties = 0.0  # the most that breaking ties may add to the objective
        self.variables: dict[str, list[Column]] = {}
        self._count = 0
        native: dict[ValueKey, dict[Layout, list[Column]]] = {}
        uses: dict[ValueKey, dict[str, tuple[str, _Use]]] = {}
        for i, choice in enumerate(problem.choices):
            for key, use in self._choice(i, choice, native):
                # the same operand twice is one use
                same = repr(list(use.items()))
                uses.setdefault(key, {})[same] = (choice.name, use)
        for key, mine in uses.items():
            self._value(key, native[key], list(mine.values()))

    def _variable(self, name: str) -> Column:
        self._count += 1
        return self.linear.column(f"{name}{self._count}")

    def _choice(
        self, index: int, choice: LayoutChoice, native: dict[ValueKey, dict[Layout, list[Column]]]
    ) -> list[tuple[ValueKey, _Use]]:
        """Add the variables of one choice; return the operands it uses."""
        xs = [self.linear.column(f"x{index}_{k}", integer=True) for k in range(len(choice.options))]
        self.variables[choice.name] = xs
        self.linear.row([(x, 1.0) for x in xs], low=1.0, high=1.0)
        self.ties += (len(xs) - 1) * _TIE
        uses: dict[tuple[ValueKey, int], _Use] = {}
        for k, (x, option) in enumerate(zip(xs, choice.options, strict=True)):
            self.costs.append(_Cost(x, (index, k), k * _TIE))
            if option.state_bytes:
                self.state.append((x, choice.weight * option.state_bytes))
            for key, layout in option.provides:
                native.setdefault(key, {}).setdefault(layout, []).append(x)
            seen: dict[ValueKey, int] = {}
            for key, layout in option.requires:
                seen[key] = seen.get(key, 0) + 1
                uses.setdefault((key, seen[key]), {}).setdefault(layout, []).append(x)
        return [(key, use) for (key, _), use in uses.items()]

    def _value(self, key: ValueKey, native: Mapping[Layout, list[Column]], uses: list[tuple[str, _Use]]) -> None:
        """Add the rows that give every use of one value its layout."""
        targets = list(dict.fromkeys(layout for _, use in uses for layout in use))
        convert = self.problem.convert_s
        pairs = [
            (source, target)
            for source, target in itertools.product(native, targets)
            if source == target or convert(key, source, target) is not None
        ]
        self.ties += len(targets) * _TIE
        paid: dict[tuple[Layout, Layout], Column] = {}
        for consumer, use in uses:
            taken: dict[Layout, list[Column]] = {}
            given: dict[Layout, list[Column]] = {}
            for source, target in pairs:
                if target not in use:
                    continue
                move = self._variable("y")
                taken.setdefault(source, []).append(move)
                given.setdefault(target, []).append(move)
                if source == target:
                    continue
                if len(uses) == 1:
                    self.costs.append(_Cost(move, _Conversion(key, source, target), _TIE))
                else:  # paid once, however many uses share it
                    if (source, target) not in paid:
                        paid[source, target] = self._variable("z")
                        self.costs.append(_Cost(paid[source, target], _Conversion(key, source, target), _TIE))
                    self.linear.row([(move, 1.0), (paid[source, target], -1.0)], high=0.0)
            for target, takers in use.items():
                if self.elastic:
                    miss = self._variable("e")
                    given.setdefault(target, []).append(miss)
                    self.missing.append((miss, consumer, key, target))
                self.linear.row(_less(given.get(target, []), takers), low=0.0, high=0.0)
            for source, moves in taken.items():
                self.linear.row(_less(moves, native[source]), high=0.0)

    def solve(self, objective: Weighted, time_limit_s: float) -> Solved:
        """Minimise an objective."""
        return self.linear.solve(objective, time_limit_s)


def _less(some: Iterable[Column], others: Iterable[Column]) -> Weighted:
    """Return the terms of the sum of some columns minus the sum of others."""
    return [(x, 1.0) for x in some] + [(x, -1.0) for x in others]


@dataclass(frozen=True)
class ProgramShape:
    """The program of a problem without its prices. Problems that differ in prices alone share it.

    Attributes:
        variables: by choice, the columns of its options.
        ties: the most that breaking ties may add to the objective.
        costs: what costs something; `columns` are its columns, `of_choices` says which are those of options.
    """

    program: PackedProgram
    variables: Mapping[str, list[Column]]
    ties: float
    costs: tuple[_Cost, ...]
    columns: NDArray[np.int64]
    of_choices: NDArray[np.bool_]

    @classmethod
    def of(cls, problem: IntraProblem) -> ProgramShape:
        """Return the shape of a problem whose options can all get their operands."""
        model = _Model(problem)
        if problem.state_budget_bytes is not None:
            state = [(x, size / problem.state_budget_bytes) for x, size in model.state]
            model.linear.row(state, high=1.0)
        columns = np.array([cost.column for cost in model.costs])
        of_choices = np.array([not isinstance(cost.what, _Conversion) for cost in model.costs])
        return cls(model.linear.packed(), model.variables, model.ties, tuple(model.costs), columns, of_choices)

    def prices(self, problem: IntraProblem) -> Array:
        """Return of all that costs something the seconds of every micro-batch, those once per step, sends, and tie."""
        return np.array([(*self._price(problem, cost.what), cost.tie) for cost in self.costs]).T

    @staticmethod
    def _price(problem: IntraProblem, what: tuple[int, int] | _Conversion) -> tuple[float, float, float]:
        if isinstance(what, _Conversion):
            each_s, weight = problem.convert_s(*what), problem.weights[what.key]
            if each_s is None:
                raise ValueError(f"no such conversion in this problem: {what}")
            return each_s * weight, problem.convert_once_s(*what) * weight, problem.num_sends(*what) * weight
        choice = problem.choices[what[0]]
        option = choice.options[what[1]]
        return choice.weight * option.cost_s, choice.weight * option.once_s, choice.weight * option.num_sends


class LayoutProgram:
    """A problem made ready for a solver, for any number of micro-batches: only what is once per step depends on it.

    It keeps what a solver needs. The objects that it was made of, which take more memory, are freed.

    Args:
        merge_chains: let element-wise chains follow their producer: fewer variables, and a restriction of the space.
        shape_of: returns the shape of a problem, perhaps that of another one with the same options.

    Raises:
        InfeasibleError: an operand of some choice cannot get its layout.
    """

    def __init__(
        self,
        problem: IntraProblem,
        *,
        merge_chains: bool = True,
        shape_of: Callable[[IntraProblem], ProgramShape] = ProgramShape.of,
    ) -> None:
        start = time.perf_counter()
        self.whole: IntraProblem = problem
        self.merged: bool = merge_chains
        problem = _prune(problem)
        self.problem: IntraProblem = follow(problem) if merge_chains else problem
        self.shape: ProgramShape = shape_of(self.problem)
        self.seconds: Array = self.shape.prices(self.problem)
        self.build_time_s: float = time.perf_counter() - start

    def solve(
        self,
        num_micro_batches: int,
        time_limit_s: float = 120.0,
        wish: SendWish = DEVICE_ALONE,
    ) -> IntraSolution:
        """Return the proved optimum; a stop by time is labelled in `status`.

        Raises:
            InfeasibleError: nothing satisfies the problem; the message names the obstacle.
            StoppedError: time ran out before any solution was found.
        """
        start = time.perf_counter()
        shape, (each, once, sends, ties) = self.shape, self.seconds
        seconds = each + once / num_micro_batches + sends * wish.send_s
        scale = _SCALE / max(1e-12, float(seconds[shape.of_choices].max()))
        costs = np.zeros(len(shape.program.order))
        costs[shape.columns] = seconds * scale + ties
        solved = shape.program.solve(costs, time_limit_s, self._excluded(dict(wish.fixed)))
        whole = replace(self.whole, num_micro_batches=num_micro_batches, send_s=wish.send_s)
        if solved.status == INFEASIBLE:
            left = max(0.0, time_limit_s - (time.perf_counter() - start))
            if self.merged:  # perhaps only a conversion inside a chain helps
                return LayoutProgram(whole, merge_chains=False).solve(num_micro_batches, left, wish)
            raise _explain(self.problem, max(_EXPLAIN_S, left))
        if solved.status != OPTIMAL:
            said = f"solver says {solved.status}"
            raise StoppedError(f"no layout found within {time_limit_s:.3g} s ({said}); raise the time limit")
        selection: dict[str, Option] = {}
        for choice in self.problem.choices:
            pairs = zip(shape.variables[choice.name], choice.options, strict=True)
            taken = max(pairs, key=lambda pair: solved.values[pair[0]])[1]
            selection.update(taken.parts or ((choice.name, taken),))
        cost = evaluate_selection(whole, selection)
        known = cost if solved.proved else 0.0  # CBC reports no bound
        bound_s = known if solved.bound is None else min(cost, max(0.0, solved.bound - shape.ties) / scale)
        return IntraSolution(
            selection=selection,
            cost_s=cost,
            bound_s=bound_s,
            status="optimal" if solved.proved else "stopped by time limit",
            solver=solved.solver,
            num_variables=len(shape.program.order),
            build_time_s=self.build_time_s,
            solve_time_s=time.perf_counter() - start,
            restrictions=(*self.problem.restrictions, *([_WITH_HOST] if wish.send_s else [])),
        )

    def _excluded(self, fixed: Mapping[str, str]) -> list[Column]:
        """Return the columns of the options that decided choices do not take."""
        return [
            column
            for choice in self.problem.choices
            if choice.name in fixed
            for column, option in zip(self.shape.variables[choice.name], choice.options, strict=True)
            if option.name != fixed[choice.name]
        ]


def solve(problem: IntraProblem, time_limit_s: float = 120.0, *, merge_chains: bool = True) -> IntraSolution:
    """Return the proved optimum of a problem (see `LayoutProgram`, which raises the same)."""
    start = time.perf_counter()
    program = LayoutProgram(problem, merge_chains=merge_chains)
    left_s = max(0.0, time_limit_s - (time.perf_counter() - start))
    return program.solve(problem.num_micro_batches, left_s, SendWish(problem.send_s))


def _explain(problem: IntraProblem, time_limit_s: float) -> InfeasibleError:
    """Return the reason why a problem is infeasible: an operand that cannot get its layout, or the budget."""
    model = _Model(problem, elastic=True)
    solved = model.solve([(miss, 1.0) for miss, *_ in model.missing], time_limit_s)
    stuck = [(c, k, t) for miss, c, k, t in model.missing if solved.values and solved.values[miss] > 0.5]
    if stuck:
        choice, key, layout = stuck[0]
        return InfeasibleError(
            f"{choice} cannot get {'/'.join(key)} as {' '.join(map(str, layout))} with any combination of options"
        )
    if problem.state_budget_bytes is None:
        return InfeasibleError(f"the intra-op problem has no solution (solver says {solved.status})")
    model = _Model(problem)
    solved = model.solve(model.state, time_limit_s)
    if solved.status != OPTIMAL or not solved.proved:
        return InfeasibleError(
            f"no combination of options keeps stored state within {problem.state_budget_bytes:,.0f} bytes"
        )
    least = sum(size * solved.values[x] for x, size in model.state)
    sizes = {c.name: c.weight * min(o.state_bytes for o in c.options) for c in problem.choices}
    largest = max(sizes, key=lambda name: sizes[name])
    return InfeasibleError(
        f"stored state needs at least {least:,.0f} bytes per rank, the budget is {problem.state_budget_bytes:,.0f}; "
        f"the largest part is {largest!r} with {sizes[largest]:,.0f}"
    )
