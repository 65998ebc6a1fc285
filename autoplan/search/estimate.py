"""Price one given configuration, and check the rules that it must keep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from autoplan.config.keys import check_kind
from autoplan.config.numbers import without_numpy
from autoplan.config.offload import state_offload, with_offload
from autoplan.config.parallel import ParallelConfig
from autoplan.config.recompute import FULL, NONE, OFFLOAD, check_choice, kinds_in, modules_of
from autoplan.cost_models.memory.recompute_frontier import recompute_mapping
from autoplan.cost_models.memory.room import Room
from autoplan.cost_models.time.breakdown import estimated
from autoplan.cost_models.time.estimate import Estimate
from autoplan.cost_models.time.price import Pricer, ranges_of
from autoplan.cost_models.work import Workload
from autoplan.ir.graph import ModelGraph
from autoplan.program.context_parallel import frozen
from autoplan.program.context_pins import MethodChoice, chosen_methods
from autoplan.program.expert_degrees import ExpertDegrees
from autoplan.program.facts import Facts, facts_of_model, pipeline_units
from autoplan.program.legality import Scope
from autoplan.schedules.schedule import SCHEDULES, num_copies
from autoplan.search import nearest
from autoplan.search.candidate_layout import CandidateLayout
from autoplan.search.cuts import Cutter
from autoplan.search.interleaved_cuts import even_cuts, fastest
from autoplan.search.layout_problem import cut_of, no_layout
from autoplan.search.layouts import LayoutCache
from autoplan.search.refusals import refusal
from autoplan.search.request import PlanRequest, check_task
from autoplan.search.space import limits_of

# Of a configuration without given stages: cuts that are priced, how much slower one may be that needs less memory, and
# how close to the least memory one comes
_MOST_CUTS = 100
_HARDLY = 0.02
_CLOSE = 0.02


@dataclass(frozen=True)
class Planned:
    """One plan with its price.

    Attributes:
        config: the configuration, with stages and recomputed layers per stage.
    """

    config: ParallelConfig
    estimate: Estimate
    point: CandidateLayout = field(repr=False)


def estimate_config(request: PlanRequest, config: ParallelConfig, like: Planned | None = None) -> Planned:
    """Price one given configuration, whether it fits or not (see `Estimate.fits`).

    Stages that are not given are balanced by time (and memory, if they do not fit), or with several per rank by number
    of layers (`even_cuts`). With more chunks than layers, or if the given stages have no layer at an end, embedding and
    head are chunks of their own.
    A schedule with a fixed number of virtual stages sets it if it is left at 1. With cp and no `context_method`: the
    cheapest methods that fit if the plan is to be executed; else keys and values move as in the frameworks of the mode
    (hidden behind attention with overlap "cp").

    The pins of the request, which are for searches, do not change the configuration; they are checked alone.

    Args:
        like: the same graph at the same degrees under another task: its layouts inside blocks are taken, not searched.

    Raises:
        PinError: degrees that the cluster or model cannot take, or pins of the request that leave no plan.
        InfeasibleError: no layout exists.
        StoppedError: no layout was found in time.

    Example:
        >>> from autoplan import Cluster, ParallelConfig, PlanRequest, estimate_config, load_model
        >>> request = PlanRequest(load_model("gpt2"), Cluster.parse("2xh100"), 1024, 16)
        >>> planned = estimate_config(request, ParallelConfig(dp=2, micro_batch_size=8))
        >>> planned.estimate.fits, planned.estimate.step_time_s.low < planned.estimate.step_time_s.high
        (True, True)
    """
    check_kind("config", config, ParallelConfig, "an autoplan.ParallelConfig")
    config = _with_offload(replace(config, **{f.name: without_numpy(getattr(config, f.name)) for f in fields(config)}))
    pins = {**request.pins, "state_slack": config.state_slack}
    if modules_of(config.recompute):  # kept bytes are known for requested modules only
        config = replace(config, recompute=check_choice(config.recompute))
        pins["recompute"] = config.recompute
    r = replace(request, pins=pins)
    config = _with_chunks(config)
    check_task(r)
    if request.pins and (error := refusal(limits_of(r.facts, r.cluster, r.scope), request.pins)) is not None:
        raise error
    check_config(r, config)
    experts = None
    if facts_of_model(r.graph).num_experts:
        experts = ExpertDegrees(config.ep, config.expert_tp, request.options.dispatcher, request.executed)
    points, ends = LayoutCache(r), ends_apart(r.graph, config)
    if like is not None:
        points.adopt(cut_of(config, experts), like.point.solution)
    if config.cp > 1 and config.context_method is None and r.executed:
        return _cheapest(points, config, experts, ends)
    methods = frozen({block: m.name for block, m in chosen_methods(r.graph, config).items()})
    return _priced(points, config, experts, ends, methods)


def _with_offload(config: ParallelConfig) -> ParallelConfig:
    """Return a configuration whose `offload` is written as a pin may be, with its activations in `recompute`."""
    if config.offload == ():
        return config
    pins = {"offload": config.offload, **({} if config.recompute == NONE else {"recompute": config.recompute})}
    return config.but(offload=state_offload(pins), recompute=with_offload(pins).get("recompute", NONE))


def _cheapest(points: LayoutCache, config: ParallelConfig, experts: ExpertDegrees | None, ends: bool) -> Planned:
    """Return the plan with the fastest methods of context parallelism that fit; if none fits, with the least memory."""
    found = [
        _priced(points, replace(config, context_method=dict(methods)), experts, ends, methods)
        for methods in points.methods_of(config.tp, config.micro_batch_size, config.cp)
    ]
    if not found:
        raise no_layout(points.request, f"tp={config.tp}")

    def worse(p: Planned) -> tuple[bool, float, float]:
        peak = max(points.room.bytes_of(s.memory_bytes) for s in p.estimate.stages)
        fits = peak <= points.room.device_bytes
        return (False, p.estimate.step_time_s.mid, peak) if fits else (True, peak, p.estimate.step_time_s.mid)

    return min(found, key=worse)


def _priced(
    points: LayoutCache, config: ParallelConfig, experts: ExpertDegrees | None, ends: bool, methods: MethodChoice
) -> Planned:
    r = points.request
    chosen = points.for_device if OFFLOAD in kinds_in(config.recompute) else points.get
    point = chosen(config.tp, config.micro_batch_size, config.cp, experts, ends=ends, methods=methods)
    if point is None:
        raise no_layout(r, f"tp={config.tp}")
    pricer = Pricer(point.workload, config, points.costs, points.precision, point.times)
    if config.stages is not None:
        chunks = units_of(config.stages, ends)
    elif config.virtual_stages == 1 and num_copies(config.schedule) == 1:
        how = config.recompute if isinstance(config.recompute, str) else NONE
        chunks = _balanced(pricer, Room(points.room.device_bytes, points.room.host_bytes), how)
    else:
        cuts = even_cuts((1.0,) * pricer.num_units, config.pp, config.virtual_stages)
        chunks = fastest(cuts, lambda cut: pricer.step_s(cut, recompute_counts(pricer, config, cut)))
    recompute = recompute_counts(pricer, config, chunks)
    estimate = estimated(pricer, chunks, recompute, events=True)
    stages = tuple(layers_of(pricer.workload, chunks)) if ends else chunks
    return Planned(replace(config, stages=stages), estimate, point)


def _balanced(pricer: Pricer, room: Room, recompute: str) -> tuple[int, ...]:
    """Return the cut whose stages take most equal times; if it does not fit, a hardly slower one that does.

    If none of these fits, the one whose fullest rank needs about the least memory (bisected).
    """
    even = Cutter(pricer, Room(math.inf), recompute).search(max_evaluated=1)
    if even.chunks is None:
        return (pricer.num_units,)
    cutter = Cutter(pricer, room, recompute)
    if cutter.least_recompute(even.chunks) is not None:
        return even.chunks
    slowest_s = even.step_s * (1 + _HARDLY)
    fitting = cutter.search(slowest_s, _MOST_CUTS).chunks
    if fitting is not None:
        return fitting
    best, low, high = even.chunks, room.device_bytes, cutter.peak_bytes(even.chunks)
    while high > low * (1 + _CLOSE):
        middle = (low + high) / 2
        found = Cutter(pricer, Room(middle), recompute).search(slowest_s, _MOST_CUTS).chunks
        if found is None:
            low = middle
        else:
            best, high = found, cutter.peak_bytes(found)
    return best


def ends_apart(graph: ModelGraph, config: ParallelConfig) -> bool:
    """Return True if a chunk of the pipeline holds no layer: only the embedding, or only the head."""
    if config.stages is not None:
        return 0 in config.stages
    return config.pp * config.virtual_stages > len(pipeline_units(graph))


def units_of(stages: Sequence[int], ends: bool) -> tuple[int, ...]:
    """Return units per chunk from layers per chunk.

    Args:
        ends: embedding and head are units of their own.
    """
    last = len(stages) - 1
    return tuple(n + (ends and k == 0) + (ends and k == last) for k, n in enumerate(stages))


def layers_of(workload: Workload, chunks: Sequence[int]) -> list[int]:
    """Return layers per chunk from units per chunk."""
    return [sum(workload.layers[u] for u in units) for units in ranges_of(chunks)]


def _with_chunks(config: ParallelConfig) -> ParallelConfig:
    """Return the configuration with the number of virtual stages that its schedule fixes (V shape)."""
    rule = SCHEDULES.get(config.schedule)
    if rule is None or config.virtual_stages != 1 or rule.virtual_stages[1] is None:
        return config
    return replace(config, virtual_stages=rule.virtual_stages[1])


def recompute_counts(pricer: Pricer, config: ParallelConfig, chunks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the recomputed layers of each chunk. Raises PinError for more than a chunk has."""
    layers = tuple(layers_of(pricer.workload, chunks))
    if isinstance(config.recompute, tuple):
        nearest.check_with_nearest(config.but(stages=layers), Facts(config.num_devices), Scope.PRICED)
        return config.recompute
    return layers if config.recompute == FULL else (0,) * len(chunks)


def chosen_recompute(
    pricer: Pricer, chunks: tuple[int, ...], steps: tuple[int, ...]
) -> Mapping[str, str] | tuple[int, ...]:
    """Return the choices behind steps along the frontier: layers per stage if all are full, else a choice per layer."""
    taken = [pricer.recomputed(units, level) for units, level in zip(ranges_of(chunks), steps, strict=True)]
    return recompute_of_stages(pricer.workload, chunks, taken)


def recompute_of_stages(
    workload: Workload, chunks: Sequence[int], taken: Sequence[Mapping[int, str]]
) -> Mapping[str, str] | tuple[int, ...]:
    """Return recompute choices by stage and unit as a configuration holds them."""
    w, counts = workload, []
    chosen: dict[int, str] = {}
    for units, mine in zip(ranges_of(chunks), taken, strict=True):
        layers = [u for u in units if w.layers[u]]
        chosen |= mine
        counts.append(len(mine) if mine == dict.fromkeys(layers[: len(mine)], FULL) else -1)
    if min(counts) >= 0:
        return tuple(counts)
    layers_of_units = [
        tuple(c for c, layer in zip(calls, marked, strict=True) if layer)
        for calls, marked in zip(w.unit_calls, w.is_layer, strict=True)
    ]
    return recompute_mapping(chosen, layers_of_units)


def check_config(request: PlanRequest, config: ParallelConfig) -> None:
    """Raise PinError with the nearest legal choices if a configuration is illegal (`autoplan.program.legality`)."""
    legality = Scope.EXECUTED if request.executed else Scope.PRICED
    nearest.check_with_nearest(config, request.facts, legality)
