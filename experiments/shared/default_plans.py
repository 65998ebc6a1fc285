"""Plans without a search: open degrees get their defaults (`read_pins`), layouts are those of the integer program.

The defaults: tp = 1, pp = 1, dp = all remaining devices, ZeRO 1, no recompute, 1F1B, stages of balanced arithmetic, and
one micro-batch without a pipeline or 2 * pp with one. The planner searches these instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoplan.codegen.program import Layouts
from autoplan.config.parallel import ParallelConfig
from autoplan.config.pins import Pins
from autoplan.config.precision import executed_precision
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.ir.graph import ModelGraph
from autoplan.ops.table import flops, rule_for
from autoplan.plans.record import Plan, plan_of
from autoplan.program.facts import Facts, ModelFacts, pipeline_units, stage_calls
from autoplan.program.legality import Scope, check_legal
from autoplan.program.parallel_dims import parallel_dims
from autoplan.program.problem import IntraProblem, IntraSettings, build_problem
from autoplan.program.token_dispatch_layouts import with_token_dispatch
from autoplan.search.intra import IntraSolution, solve
from autoplan.search.nearest import check_with_nearest


def read_pins(pins: Mapping[str, Any], num_devices: int) -> ParallelConfig:
    """Check pins, as far as is possible without a model, and fill in the defaults.

    Raises:
        PinError: a pin breaks a rule, which the message names.
    """
    config = Pins(pins).completed(num_devices)
    check_legal(config, Facts(num_devices), Scope.SEARCHED)
    return config


def _split_stages(graph: ModelGraph, config: ParallelConfig, env: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
    """Return the calls of every stage: as pinned, else contiguous with the least maximal arithmetic."""
    units = pipeline_units(graph)
    num_stages = config.pp * config.virtual_stages
    if num_stages == 1:
        return (tuple(n for unit in units for n in unit),)
    if config.stages is not None:
        counts: Sequence[int] = config.stages
    else:
        cost = {
            b: sum(float(flops(n, blk.values, rule_for(n, blk.values)).evaluate(env)) for n in blk.nodes)
            for b, blk in graph.blocks.items()
        }
        by_name = {c.name: cost[c.block] for c in graph.calls}
        counts = _balance([sum(by_name[n] for n in unit) for unit in units], num_stages)
    return stage_calls(units, counts)


def make_plan(
    graph: ModelGraph,
    cluster: Cluster,
    config: ParallelConfig,
    env: Mapping[str, int],
    precision: str = "native",
    revised: Callable[[IntraProblem], IntraProblem] = lambda problem: problem,
) -> tuple[Plan, Layouts, IntraSolution]:
    """Decide everything that the degrees leave open: sub-axes, stages, and the layout inside by the intra-op ILP.

    Args:
        config: the degrees.
        env: the sizes that the layout is priced for: `b` (micro-batch per data-parallel rank) and `s`.
        precision: the dtypes of a step; `graph` was captured in it.
        revised: gives the problem of the layouts that is solved; by default the one of the prices.

    Raises:
        PinError: for degrees that the model cannot take.
        InfeasibleError: if nothing satisfies the constraints.
        StoppedError: if the solver was stopped.
    """
    if config.cp > 1 and config.context_method is None:
        config = replace(config, context_method="gather")  # a stated default, like all in this module
    check_with_nearest(
        config, Facts(config.num_devices, ModelFacts(graph), precision=precision), Scope.EXECUTED, "pin "
    )
    axes = parallel_dims(graph, config).layout_axes
    settings = IntraSettings(
        axes, Costs(cluster), env, config.num_micro_batches, config.state_slack, precision=executed_precision(precision)
    )
    problem = build_problem(graph, settings)
    if axes and config.spreads_experts:
        problem = with_token_dispatch(problem, graph, config.state_slack)
    solution = solve(revised(problem))
    certificate = {
        "status": solution.status,
        "gap": solution.gap,
        "solver": solution.solver,
        "num_variables": solution.num_variables,
        "build_time_s": solution.build_time_s,
        "solve_time_s": solution.solve_time_s,
        "restrictions": list(solution.restrictions),
        "prices": f"{cluster.device.source} device and link figures",
    }
    stages = _split_stages(graph, config, env)
    return *plan_of(graph, config, solution, stages, certificate, precision=precision), solution


def _balance(weights: Sequence[float], parts: int) -> list[int]:
    """Return the sizes of contiguous parts with the least maximal sum (dynamic programme)."""
    n = len(weights)
    prefix = [0.0]
    for w in weights:
        prefix.append(prefix[-1] + w)
    best = [[math.inf] * (n + 1) for _ in range(parts + 1)]
    cut = [[0] * (n + 1) for _ in range(parts + 1)]
    best[0][0] = 0.0
    for p in range(1, parts + 1):
        for j in range(p, n + 1):
            for i in range(p - 1, j):
                value = max(best[p - 1][i], prefix[j] - prefix[i])
                if value < best[p][j]:
                    best[p][j], cut[p][j] = value, i
    counts, j = [], n
    for p in range(parts, 0, -1):
        counts.append(j - cut[p][j])
        j = cut[p][j]
    return counts[::-1]
