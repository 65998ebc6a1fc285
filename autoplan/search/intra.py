"""Solve the intra-op problem as an ILP (PuLP, HiGHS; CBC as the fallback), and the same by brute force for tests.

    x[c,o]  in {0,1}   option o of choice c;            sum_o x[c,o] = 1
    p[v,l]  = sum of x[c,o] over options that provide v in layout l            (exactly one l per v)
    y[v,l]  in [0,1]   v is needed in layout l:         y[v,l] >= sum of x[c,o] over options of c that require (v,l)
    z[v,a,l]>= 0       v is converted from a to l:      p[v,l] + sum_a z[v,a,l] >= y[v,l],   z[v,a,l] <= p[v,a]
    minimise  sum w_c cost[c,o] x[c,o] + sum w_v conversion[v,a,l] z[v,a,l]

y and z are continuous: with x integral their optimal values are.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pulp

from autoplan.cost_models.errors import InfeasibleError
from autoplan.cost_models.layout import Layout
from autoplan.search.problem import Choice, IntraProblem, Option, ValueKey, evaluate

# ties are broken by option order, at a scale far below any real cost difference
_TIE = 1e-9


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
    """Drop options that need a layout nobody can provide or convert to."""
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

    Done where the value has one consumer and no pending sum can sit between the two (or the consumer passes it on).
    """
    choices = {c.name: c for c in problem.choices}
    changed = True
    while changed:
        changed = False
        provider = {key: c.name for c in choices.values() for o in c.options for key, _ in o.provides}
        consumers: dict[ValueKey, set[str]] = {}
        for c in choices.values():
            for o in c.options:
                for key, _ in o.requires:
                    consumers.setdefault(key, set()).add(c.name)
        for key, names in consumers.items():
            if len(names) != 1:
                continue
            a, b = choices[provider[key]], choices[next(iter(names))]
            if not b.follows or a.name == b.name or a.weight != b.weight or a.name.startswith(_FIXED):
                continue
            merged = _merge(a, b, key)
            if merged is not None:
                del choices[b.name]
                choices[a.name] = merged
                changed = True
                break
    restrictions = (*problem.restrictions, "element-wise chains follow their producer")
    return replace(problem, choices=tuple(choices.values()), restrictions=restrictions)


_FIXED = ("store ", "buffer ", "boundary ")


def _merge(a: Choice, b: Choice, key: ValueKey) -> Choice | None:
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
                )
            )
    if any(dict(x.provides)[key] not in matched for x in a.options):
        return None  # some layout of the producer must be converted before the consumer
    return Choice(a.name, tuple(options), a.weight, a.follows)


def make_solver(time_limit_s: float) -> pulp.LpSolver:
    """HiGHS if it is there, else the CBC that PuLP ships."""
    options = {"msg": False, "timeLimit": time_limit_s, "threads": 1}
    highs = pulp.HiGHS(gapRel=0.0, **options)
    return highs if highs.available() else pulp.PULP_CBC_CMD(**options)


def solve(problem: IntraProblem, time_limit_s: float = 120.0, *, merge_chains: bool = True) -> IntraSolution:
    """Proved optimum of the problem.

    InfeasibleError if nothing satisfies it; a stop by time is labelled in `status`.
    """
    start = time.perf_counter()
    whole = problem
    problem = _prune(problem)
    if merge_chains:
        problem = follow(problem)
    lp = pulp.LpProblem("intra_op", pulp.LpMinimize)
    objective: list[tuple[pulp.LpVariable, float]] = []
    native: dict[ValueKey, dict[Layout, list[pulp.LpVariable]]] = {}
    needed: dict[tuple[ValueKey, Layout], list[list[pulp.LpVariable]]] = {}
    scale = 1.0 / max(1e-12, max(c.weight * o.cost_s for c in problem.choices for o in c.options))
    variables: dict[str, list[pulp.LpVariable]] = {}
    for i, choice in enumerate(problem.choices):
        xs = [lp.add_variable(f"x{i}_{k}", cat="Binary") for k in range(len(choice.options))]
        variables[choice.name] = xs
        lp += pulp.lpSum(xs) == 1
        per_need: dict[tuple[ValueKey, Layout], list[pulp.LpVariable]] = {}
        for k, (x, option) in enumerate(zip(xs, choice.options, strict=True)):
            objective.append((x, choice.weight * option.cost_s * scale + k * _TIE))
            for key, layout in option.provides:
                native.setdefault(key, {}).setdefault(layout, []).append(x)
            for need in set(option.requires):
                per_need.setdefault(need, []).append(x)
        for need, terms in per_need.items():
            needed.setdefault(need, []).append(terms)
    for n, ((key, layout), consumers) in enumerate(needed.items()):
        _conversion_rows(lp, objective, problem, n, key, layout, native[key], consumers, scale)
    if problem.state_budget_bytes is not None:
        state = [
            (x, c.weight * o.state_bytes / problem.state_budget_bytes)
            for c in problem.choices
            for x, o in zip(variables[c.name], c.options, strict=True)
            if o.state_bytes
        ]
        lp += pulp.LpAffineExpression(state) <= 1.0
    lp.setObjective(pulp.LpAffineExpression(objective))
    built = time.perf_counter()
    solver = make_solver(time_limit_s)
    lp.solve(solver)
    status = pulp.LpStatus[lp.status]
    if status not in ("Optimal", "Not Solved") or any(x.value() is None for xs in variables.values() for x in xs):
        raise InfeasibleError(f"the intra-op problem has no solution (solver says {status})")
    selection: dict[str, Option] = {}
    for choice in problem.choices:
        best = max(range(len(choice.options)), key=lambda k: variables[choice.name][k].value())
        option = choice.options[best]
        selection.update(option.parts or ((choice.name, option),))
    cost = evaluate(whole, selection)
    bound = _dual_bound(lp, solver)
    proved = status == "Optimal" and lp.sol_status == pulp.LpSolutionOptimal
    return IntraSolution(
        selection=selection,
        cost_s=cost,
        bound_s=cost if bound is None else min(cost, bound / scale),
        status="optimal" if proved else "stopped by time limit",
        solver=type(solver).__name__,
        num_variables=lp.numVariables(),
        build_time_s=built - start,
        solve_time_s=time.perf_counter() - built,
        restrictions=problem.restrictions,
    )


def _conversion_rows(
    lp: pulp.LpProblem,
    objective: list[tuple[pulp.LpVariable, float]],
    problem: IntraProblem,
    index: int,
    key: ValueKey,
    layout: Layout,
    native: Mapping[Layout, list[pulp.LpVariable]],
    consumers: list[list[pulp.LpVariable]],
    scale: float,
) -> None:
    """The rows of one (value, needed layout): who needs it, and where it comes from."""
    supply: list[pulp.LpVariable] = list(native.get(layout, []))
    for k, (source, providers) in enumerate(native.items()):
        if source == layout:
            continue
        cost = problem.convert_s(key, source, layout)
        if cost is None:
            continue
        z = lp.add_variable(f"z{index}_{k}", 0, 1)
        lp += z <= pulp.lpSum(providers)
        objective.append((z, problem.weights[key] * cost * scale))
        supply.append(z)
    for terms in consumers:
        lp += pulp.lpSum(supply) >= pulp.lpSum(terms)


def _dual_bound(lp: pulp.LpProblem, solver: pulp.LpSolver) -> float | None:
    """HiGHS's own dual bound; None where the solver does not say (CBC proves optimality by its status)."""
    model = getattr(lp, "solverModel", None)
    if not isinstance(solver, pulp.HiGHS) or model is None:
        return None
    return float(model.getInfo().mip_dual_bound)


def brute_force(problem: IntraProblem, limit: int = 2_000_000) -> tuple[float, Mapping[str, Option]]:
    """Least cost over every selection; for tests of small problems. ValueError beyond `limit` selections."""
    total = 1
    for choice in problem.choices:
        total *= len(choice.options)
    if total > limit:
        raise ValueError(f"{total} selections are too many to enumerate (limit {limit})")
    best: tuple[float, Mapping[str, Option]] = (float("inf"), {})
    for combo in itertools.product(*(c.options for c in problem.choices)):
        selection = {c.name: o for c, o in zip(problem.choices, combo, strict=True)}
        cost = evaluate(problem, selection)
        if cost < best[0]:
            best = (cost, selection)
    return best
