"""The problem of the layouts inside blocks for one tensor-parallel degree and micro-batch size, and its name."""

from __future__ import annotations

from collections.abc import Sequence

from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.config.precision import precision_of
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Group, Level
from autoplan.cost_models.hardware.collective_kinds import Traffic
from autoplan.cost_models.network.groups import axis_groups
from autoplan.errors import InfeasibleError
from autoplan.ir.layout import Axis
from autoplan.program.expert_degrees import ExpertDegrees
from autoplan.program.parallel_dims import parallel_dims
from autoplan.program.problem import IntraProblem, IntraSettings, Unpriced, build_problem
from autoplan.program.token_dispatch_layouts import with_token_dispatch
from autoplan.program.whole_losses import with_whole_losses
from autoplan.program.with_sequence_parallel import with_sequence_parallelism
from autoplan.program.without_sequence_parallel import without_sequence_parallelism
from autoplan.search.layout_store import ById
from autoplan.search.request import PlanRequest

LayoutCut = tuple[int, int, int, bool]  # tp, micro-batch size, cp, True if every rank dispatches its own tokens


def layout_batches(request: PlanRequest, cut: LayoutCut) -> int:
    """Return the number of micro-batches that a layout is solved for: all devices share the batch."""
    r, (tp, size, cp, _) = request, cut
    return max(1, r.global_batch_size // (size * max(1, r.cluster.num_devices // (tp * cp))))


def prices_key(request: PlanRequest, costs: Costs, cut: LayoutCut) -> object:
    """Return everything that the problem of `layout_problem` depends on, but for the number of micro-batches.

    Of the cluster these are the device and the levels that groups of tensor-parallel ranks cross.
    """
    r, cluster, tp = request, request.cluster, cut[0]
    axes = parallel_dims(r.graph, ParallelConfig(tp=tp)).layout_axes
    seen = tuple(
        (group, traffic, costs.crosses_network(group), _crossed(group, cluster.levels_of(group, traffic)))
        for group in axis_groups([axis.size for axis in axes]).values()
        for traffic in (Traffic if group.size > 1 else ())
    )
    return (*shape_key(request, cut), (r.constants, ById(r.profile)), (cluster.device, cluster.device_type, seen))


def shape_key(request: PlanRequest, cut: LayoutCut) -> tuple[object, ...]:
    """Return everything that the problem of `layout_problem` depends on, but for the prices of its cluster."""
    r, (tp, size, cp, own) = request, cut
    axes = parallel_dims(r.graph, ParallelConfig(tp=tp)).layout_axes
    return (
        ById(r.graph),
        (axes, size, cp, own, tuple(r.env(size, cp).items()), r.precision, r.pins.get("state_slack", 1.02)),
        (r.mode, r.options.of_operations),
    )


def _crossed(group: Group, levels: Sequence[Level]) -> tuple[Level, ...]:
    """Return the levels up to the one that holds a whole group."""
    reach = (group.size - 1) * group.stride
    return tuple(level for i, level in enumerate(levels) if i == 0 or levels[i - 1].size <= reach)


def layout_problem(
    request: PlanRequest, costs: Costs, cut: LayoutCut, number: int | None = None
) -> tuple[tuple[Axis, ...], IntraProblem]:
    """Return the axes that layouts are chosen on, and the problem of choosing them.

    Args:
        cut: tp, micro-batch size, cp, and True if every rank dispatches its own tokens.
        number: micro-batches per step; None: `layout_batches`.

    Raises:
        InfeasibleError: no option is left of some choice.
    """
    r, (tp, size, cp, own) = request, cut
    axes = parallel_dims(r.graph, ParallelConfig(tp=tp)).layout_axes
    steps = layout_batches(request, cut) if number is None else number
    slack = r.pins.get("state_slack", 1.02)
    settings = IntraSettings(axes, costs, r.env(size, cp), steps, slack, precision_of(r.precision), cp)
    unpriced = r.layouts.made(("unpriced", shape_key(r, cut)), Unpriced)
    problem = build_problem(r.graph, settings, unpriced)
    if tp > 1 and r.mode is Mode.FUSED and r.options.sequence_parallel:  # Megatron's layers
        problem = with_sequence_parallelism(problem, r.graph)
    elif not r.options.sequence_parallel:
        problem = without_sequence_parallelism(problem, r.graph)
    if r.options.whole_losses:
        problem = with_whole_losses(problem, r.graph)
    if own:
        problem = with_token_dispatch(problem, r.graph, slack)
    return axes, problem


def cut_of(config: ParallelConfig, experts: ExpertDegrees | None) -> LayoutCut:
    """Return the choices of a configuration that determine the problem of its layouts."""
    return cut_at(config.tp, config.micro_batch_size, config.cp, experts)


def cut_at(tp: int, size: int, cp: int, experts: ExpertDegrees | None) -> LayoutCut:
    """Return the same for given degrees."""
    own = experts is not None and experts.executed and experts.dispatches(tp) and tp > 1
    return tp, size, cp, own


def no_layout(request: PlanRequest, where: str) -> InfeasibleError:
    """Return the error for tensor-parallel degrees, `where`, at which no layout is legal inside blocks."""
    text = f"no layout of {request.graph.name} exists at {where}"
    if not request.options.sequence_parallel:
        text += " without sequence parallelism; allow it (leave out --no-sequence-parallel), or use tp=1"
    return InfeasibleError(text)
