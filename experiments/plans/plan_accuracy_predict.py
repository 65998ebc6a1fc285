"""What plan_accuracy.py predicts: this machine's profile, and the price of every plan from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoplan.capture.export import capture
from autoplan.codegen.program import Program, compile_program
from autoplan.config.parallel import ParallelConfig
from autoplan.config.precision import precision_of
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.profile import Profile
from autoplan.errors import AutoplanError
from autoplan.ir.graph import ModelGraph
from autoplan.plans.record import searched_plan
from autoplan.profiler.ops import MeasureTask
from autoplan.profiler.run import measure
from autoplan.profiler.tasks import model_tasks
from autoplan.program.op_costs import OpCosts
from autoplan.program.parallel_dims import parallel_dims
from autoplan.search.planner import Certificate, Planned, PlanRequest, estimate_config
from experiments.plans.plan_accuracy_worker import Trial
from experiments.shared.models import Size, make_llama, token_batch


@dataclass(frozen=True)
class Predicted:
    """Seconds of a step, and bytes of the fullest rank, with what they are made of."""

    step_s: float
    low_s: float
    high_s: float
    tag: str
    breakdown_s: dict[str, float]
    peak_bytes: float
    memory_bytes: list[dict[str, float]]
    forward_s: list[float]  # of one micro-batch, per stage
    backward_s: list[float]


def graph_of(size: Size) -> ModelGraph:
    """Return the model as the planner sees it."""
    return capture(make_llama(size), token_batch(size))


def _tasks(graph: ModelGraph, size: Size, trials: Sequence[Trial]) -> list[MeasureTask]:
    """Every operation that some plan may run."""
    found: dict[str, MeasureTask] = {}
    for tp, share in sorted({(t.tp, size.batch // t.dp // t.num_micro_batches) for t in trials}):
        axes = parallel_dims(graph, ParallelConfig(tp=tp)).layout_axes
        works = OpCosts(graph, axes, {"b": share, "s": size.seq}, precision=precision_of("native"))
        for task in model_tasks(works):
            found.setdefault(task.work.key, task)
    return list(found.values())


def measure_profile(size: Size, trials: Sequence[Trial], processes: int, budget_s: float) -> Profile:
    """Operations of all plans, collectives and fixed costs, measured by as many processes as the plans use."""
    return measure("plan-accuracy", processes=processes, budget_s=budget_s, tasks=_tasks(graph_of(size), size, trials))


def predict(
    size: Size, trials: Sequence[Trial], processes: int, profile: Profile
) -> list[tuple[Predicted, Program] | str]:
    """The price of every plan and the program that does just that; or why it is refused."""
    graph = graph_of(size)
    cluster = Cluster.local(processes)
    request = PlanRequest(graph, cluster, size.seq, size.batch, precision="native", profile=profile, executed=True)
    out: list[tuple[Predicted, Program] | str] = []
    for t in trials:
        config = ParallelConfig(
            dp=t.dp,
            tp=t.tp,
            pp=t.pp,
            zero_stage=t.zero_stage,
            micro_batch_size=size.batch // t.dp // t.num_micro_batches,
            num_micro_batches=t.num_micro_batches,
            recompute=t.recompute,
            stages=t.stages,
        )
        try:
            planned = estimate_config(request, config)
            out.append((_predicted(planned), _program(graph, planned)))
        except AutoplanError as exc:
            out.append(f"{type(exc).__name__}: {exc}")
    return out


def _predicted(planned: Planned) -> Predicted:
    estimate = planned.estimate
    step = estimate.step_time_s
    return Predicted(
        step.mid,
        step.low,
        step.high,
        str(step.tag),
        {name: q.mid for name, q in estimate.breakdown.items()},
        estimate.peak_memory_bytes.mid,
        [{name: q.mid for name, q in s.memory.items()} for s in estimate.stages],
        [s.forward_s.mid for s in estimate.stages],
        [s.backward_s.mid for s in estimate.stages],
    )


def _program(graph: ModelGraph, planned: Planned) -> Program:
    nothing_searched = Certificate(
        considered=1, illegal=0, too_big=0, bounded_out=0, solved=1, open=0, gap=0.0, solve_time_s=0.0,
        restrictions=("given, not searched",), status="complete", illegal_by_rule={}, too_big_by_term={}, by_phase_s={},
        intra_gap=0.0,
    )  # fmt: skip
    return compile_program(graph, searched_plan(graph, planned, nothing_searched, "profile")[1])
