"""The layouts of a plan that was written down: found again by name in a graph, or solved again and compared.

A plan names one option per choice (an operation's strategy, a parameter's storage, the layout in which one block hands
a value to the next). The options of a choice follow from the graph and the degrees, not from prices, so that the names
say everything.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest

from autoplan.codegen.program import Layouts
from autoplan.config.choices import options_of
from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import InfeasibleError, LayoutError, PinError
from autoplan.ir.graph import ModelGraph
from autoplan.plans.record import Plan, layouts_for, plan_of_planned, recompute_of_calls
from autoplan.program.expert_degrees import ExpertDegrees
from autoplan.program.facts import pipeline_units, stage_calls
from autoplan.program.parallel_dims import parallel_dims
from autoplan.program.problem import IntraProblem, Selection, evaluate_selection
from autoplan.search.layout_problem import cut_of, layout_problem
from autoplan.search.planner import estimate_config
from autoplan.search.request import PlanRequest


def layouts_of(plan: Plan, graph: ModelGraph) -> Layouts:
    """Return the layouts of a plan for the graph that it was made for (autoplan.plans.differences compares graphs).

    Raises:
        LayoutError: the plan names a choice, an option or a stage that this graph has not; names it.
    """
    config = plan.config
    axes = tuple((a.name, a.size) for a in parallel_dims(graph, config).mesh.axes)
    if axes != plan.axes:
        raise LayoutError(f"the plan names the mesh axes {_shown(plan.axes)}, its degrees make {_shown(axes)}")
    stages = stages_of(graph, config)
    if stages != plan.stages:
        pairs = enumerate(zip_longest(stages, plan.stages, fillvalue=()))
        at, mine, given = next((i, ", ".join(a), ", ".join(b)) for i, (a, b) in pairs if a != b)
        raise LayoutError(f"stage {at} of the plan holds {given or 'nothing'}; its degrees make it {mine or 'nothing'}")
    again = recompute_of_calls(graph, config)
    if dict(plan.recompute) != again:
        call = next(name for name in (*again, *plan.recompute) if plan.recompute.get(name) != again.get(name))
        held, made = plan.recompute.get(call, "not in it"), again.get(call, "not in the graph")
        raise LayoutError(
            f"recompute of {call!r} is {held} in the program of the plan and {made} by its choices: one of the two was "
            "changed; price the plan again with autoplan estimate PLAN --json"
        )
    selection = _named(_problem(plan, graph), plan.layout)
    return layouts_for(graph, config, selection, stages, plan.precision)


def stages_of(graph: ModelGraph, config: ParallelConfig) -> tuple[tuple[str, ...], ...]:
    """Return the calls of every stage. LayoutError for another number of layers than the graph has."""
    units = pipeline_units(graph)
    counts = config.stages or (len(units),)
    if sum(counts) != len(units):
        raise LayoutError(f"the stages {list(counts)} hold {sum(counts)} layers, {graph.name} has {len(units)}")
    return stage_calls(units, counts)


def _shown(axes: tuple[tuple[str, int], ...]) -> str:
    return " ".join(f"{name}={size}" for name, size in axes)


def _problem(plan: Plan, graph: ModelGraph) -> IntraProblem:
    """Return the problem that the layouts answer; its prices are not read."""
    config, task = plan.config, plan.document.get("request", {})
    request = PlanRequest(
        graph,
        Cluster.local(config.num_devices, graph.autocast.partition(" ")[2] or "cpu"),
        int(task.get("seq_len", 2)),
        plan.global_batch_size,
        {"state_slack": config.state_slack},
        precision=plan.precision,
        mode=Mode(task.get("mode", Mode.EAGER)),
        options=options_of({"sequence_parallel": task.get("sequence_parallel")}),
        target_len=task.get("target_len"),
        executed=True,
    )
    experts = None
    if config.spreads_experts:
        experts = ExpertDegrees(config.ep, config.expert_tp, request.options.dispatcher, executed=True)
    return layout_problem(request, Costs(request.cluster), cut_of(config, experts))[1]


def _named(problem: IntraProblem, layout: Mapping[str, str]) -> Selection:
    """Return the option of every choice that has the name in `layout`."""
    names = [choice.name for choice in problem.choices]
    unknown = [name for name in layout if name not in set(names)]
    if unknown:
        near = "".join(f"; nearest: {name!r}" for name in difflib.get_close_matches(unknown[0], names, 1))
        raise LayoutError(f"the plan has a layout of {unknown[0]!r}, which the graph has not{near}")
    selection = {}
    for choice in problem.choices:
        if choice.name not in layout:
            raise LayoutError(f"the plan has no layout of {choice.name!r}")
        found = [option for option in choice.options if option.name == layout[choice.name]]
        if len(found) != 1:
            known = ", ".join(repr(option.name) for option in choice.options)
            raise LayoutError(f"{choice.name!r} cannot be {layout[choice.name]!r} at these degrees; it can be {known}")
        selection[choice.name] = found[0]
    if math.isinf(evaluate_selection(replace(problem, state_budget_bytes=None), selection)):
        raise LayoutError("the layouts of the plan do not fit together: a value needs a conversion that does not exist")
    return selection


def solved_again(plan: Plan, request: PlanRequest) -> tuple[Plan, Layouts]:
    """Return a plan whose text leaves the layouts open with its layouts, solved as they were when it was priced.

    Args:
        request: the task that the plan answers, with the graph that will run.

    Raises:
        PinError: the step has another price now, so that the layouts may be others.
    """
    planned = estimate_config(request, plan.config)
    step_s = planned.estimate.step_time_s.mid
    if plan.estimate is not None and not math.isclose(step_s, plan.estimate.step_time_s.mid, rel_tol=1e-9):
        raise PinError(
            f"the step of the plan has the price {plan.estimate.step_time_s.mid:.9g} s in its file and {step_s:.9g} s "
            "now: its layouts, which the file leaves open, may have been others; plan again"
        )
    proof = {name: value for name, value in plan.certificate.items() if name != "prices"}
    made, layouts = plan_of_planned(request.graph, planned, proof, plan.certificate.get("prices", ""), plan.precision)
    return replace(made, compiled=plan.compiled, document=plan.document), layouts


def check_executed(plan: Plan) -> None:
    """Raise InfeasibleError if parts of a plan have a price only, as the rules of legality said when it was made."""
    priced = plan.document.get("priced_not_executed") or []
    if priced:
        raise InfeasibleError(
            f"autoplan's runtime does not execute this plan: {'; '.join(priced)}; plan with --runnable (in Python "
            "autoplan.plan) for one that it executes"
        )
