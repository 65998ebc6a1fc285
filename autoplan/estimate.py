"""The price of one given configuration, and the rules that it must keep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoplan.cost_models.config import ParallelConfig, modules_of
from autoplan.cost_models.errors import PinError
from autoplan.cost_models.graph import ModelGraph
from autoplan.cost_models.price import Estimate, Pricer, ranges_of
from autoplan.cost_models.schedule import SCHEDULES, num_copies
from autoplan.cost_models.work import Workload
from autoplan.points import IntraPoint, PlanRequest, Points, check_task, no_layout
from autoplan.search.chunks import even_cuts, fastest
from autoplan.search.context_parallel import frozen
from autoplan.search.context_pins import Chosen, chosen_methods
from autoplan.search.folding import inner_degree
from autoplan.search.offload_pins import check_offload
from autoplan.search.pins import (
    ZERO_STAGES,
    around,
    check_choice,
    check_context,
    check_degrees,
    check_dispatch,
    check_modules,
    check_recompute,
    check_replicas,
    check_schedule,
    divisors,
    is_count,
    pipeline_units,
)
from autoplan.search.stages import Cutter
from autoplan.search.workload import ExpertDegrees

_COUNTS = ("dp", "tp", "pp", "cp", "ep", "micro_batch_size", "num_micro_batches", "virtual_stages", "zero_replicas")


@dataclass(frozen=True)
class Planned:
    """One plan: `config` with stages and layers computed again per stage, and what it costs."""

    config: ParallelConfig
    estimate: Estimate
    point: IntraPoint = field(repr=False)


def estimate_config(request: PlanRequest, config: ParallelConfig) -> Planned:
    """Price one given configuration, whether it fits or not (see `Estimate.fits`).

    Stages that are not given are balanced by time, with several per rank by number of layers (`even_cuts`). With more
    chunks than layers, or where the given stages have no layer at an end, embedding and head are chunks of their own. A
    schedule that fixes the number of virtual stages sets it where it is left at 1. With cp and no `context_method`: the
    cheapest that fits where the plan is to be executed, else keys and values as the frameworks of the mode move them
    (hidden behind attention with overlap "cp"). Raises: PinError for degrees that the cluster or model cannot take;
    InfeasibleError if no layout exists; StoppedError if none was found in time.
    """
    pins = {**request.pins, "state_slack": config.state_slack}
    if modules_of(config.recompute):  # what is kept is known of those that are asked for
        config = replace(config, recompute=check_choice(config.recompute))
        pins["recompute"] = config.recompute
    r = replace(request, pins=pins)
    config = _with_chunks(config)
    check_task(r)
    check_config(r, config)
    experts = None
    if _experts(r.graph):
        experts = ExpertDegrees(config.ep, inner_degree(config), request.options.dispatcher, request.executed)
    points, ends = Points(r), ends_apart(r.graph, config)
    if config.cp > 1 and config.context_method is None and r.executed:
        return _cheapest(points, config, experts, ends)
    methods = frozen({block: m.name for block, m in chosen_methods(r.graph, config).items()})
    return _priced(points, config, experts, ends, methods)


def _cheapest(points: Points, config: ParallelConfig, experts: ExpertDegrees | None, ends: bool) -> Planned:
    """Under the methods of context parallelism that are fastest of those that fit; if none does, need least memory."""
    found = [
        _priced(points, replace(config, context_method=dict(methods)), experts, ends, methods)
        for methods in points.methods_of(config.tp, config.micro_batch_size, config.cp)
    ]
    if not found:
        raise no_layout(points.request, f"tp={config.tp}")

    def worse(p: Planned) -> tuple[bool, float, float]:
        peak = p.estimate.peak_memory_bytes.mid
        fits = peak <= points.capacity_bytes
        return (False, p.estimate.step_time_s.mid, peak) if fits else (True, peak, p.estimate.step_time_s.mid)

    return min(found, key=worse)


def _priced(
    points: Points, config: ParallelConfig, experts: ExpertDegrees | None, ends: bool, methods: Chosen
) -> Planned:
    r = points.request
    point = points.get(config.tp, config.micro_batch_size, config.cp, experts, ends=ends, methods=methods)
    if point is None:
        raise no_layout(r, f"tp={config.tp}")
    pricer = Pricer(point.workload, config, points.costs, points.precision, point.times)
    if config.stages is not None:
        chunks = units_of(config.stages, ends)
    elif config.virtual_stages == 1 and num_copies(config.schedule) == 1:
        how = config.recompute if isinstance(config.recompute, str) else "none"
        relaxed = Cutter(pricer, math.inf, how, host_capacity_bytes=math.inf)
        chunks = relaxed.search(max_evaluated=1).chunks or (pricer.num_units,)
    else:
        cuts = even_cuts((1.0,) * pricer.num_units, config.pp, config.virtual_stages)
        chunks = fastest(cuts, lambda cut: pricer.step_s(cut, recompute_counts(pricer, config, cut)))
    recompute = recompute_counts(pricer, config, chunks)
    estimate = pricer.estimate(chunks, recompute, events=True)
    stages = tuple(layers_of(pricer.workload, chunks)) if ends else chunks
    return Planned(replace(config, stages=stages), estimate, point)


def ends_apart(graph: ModelGraph, config: ParallelConfig) -> bool:
    """True if a chunk of the pipeline holds no layer: only the embedding, or only the head."""
    if config.stages is not None:
        return 0 in config.stages
    return config.pp * config.virtual_stages > len(pipeline_units(graph))


def units_of(stages: Sequence[int], ends: bool) -> tuple[int, ...]:
    """Units per chunk from layers per chunk; `ends`: embedding and head are units of their own."""
    last = len(stages) - 1
    return tuple(n + (ends and k == 0) + (ends and k == last) for k, n in enumerate(stages))


def layers_of(workload: Workload, chunks: Sequence[int]) -> list[int]:
    """Layers per chunk from units per chunk."""
    return [sum(workload.layers[u] for u in units) for units in ranges_of(chunks)]


def _with_chunks(config: ParallelConfig) -> ParallelConfig:
    """With the number of virtual stages that a schedule in V shape implies."""
    rule = SCHEDULES.get(config.schedule)
    if rule is None or config.virtual_stages != 1 or rule.virtual_stages[1] is None:
        return config
    return replace(config, virtual_stages=rule.virtual_stages[1])


def recompute_counts(pricer: Pricer, config: ParallelConfig, chunks: tuple[int, ...]) -> tuple[int, ...]:
    """Layers computed again per chunk. PinError for more than a chunk has."""
    layers = layers_of(pricer.workload, chunks)
    if isinstance(config.recompute, tuple):
        for k, (again, most) in enumerate(zip(config.recompute, layers, strict=True)):
            if again > most:
                raise PinError(
                    f"recompute={','.join(map(str, config.recompute))}: stage {k} has {most} layers, not {again}; "
                    f"nearest legal: {','.join(map(str, map(min, config.recompute, layers)))}"
                )
        return config.recompute
    return tuple(layers) if config.recompute == "full" else (0,) * len(chunks)


def _experts(graph: ModelGraph) -> list[tuple[int, int | None]]:
    """(number of experts, their inner size) of every experts op."""
    found = []
    for block in graph.blocks.values():
        for node in block.nodes:
            if node.op == "experts":
                down = block.values[node.tensor_inputs[4]]
                found.append((int(node.attrs["num_experts"]), down.shape[-1].value))
    return found


def check_config(request: PlanRequest, config: ParallelConfig) -> None:
    """Rules of one given configuration. PinError names the rule and the nearest legal value."""
    devices, c = request.cluster.num_devices, config
    for name in _COUNTS if c.etp is None else (*_COUNTS, "etp"):
        if not is_count(getattr(c, name)):
            raise PinError(f"{name}={getattr(c, name)!r}: must be a whole number of at least 1; nearest legal: 1")
    if not is_count(c.zero_stage, 0) or c.zero_stage not in ZERO_STAGES:
        raise PinError(f"zero_stage={c.zero_stage!r} does not exist; use 0, 1, 2 or 3")
    slack = c.state_slack
    if isinstance(slack, bool) or not isinstance(slack, (int, float)) or not 1 <= slack < math.inf:
        raise PinError(f"state_slack={slack!r}: must be a number of at least 1; nearest legal: 1.0")
    if c.num_devices != devices:
        rest = c.pp * c.cp * c.tp
        nearest = f"dp={devices // rest}" if devices % rest == 0 else "degrees whose product is the number of devices"
        raise PinError(
            f"pp={c.pp} x dp={c.dp} x cp={c.cp} x tp={c.tp} = {c.num_devices} devices, but the cluster has {devices}; "
            f"nearest legal: {nearest}"
        )
    batch = c.dp * c.micro_batch_size * c.num_micro_batches
    if batch != request.global_batch_size:
        raise PinError(
            f"dp={c.dp} x micro_batch_size={c.micro_batch_size} x num_micro_batches={c.num_micro_batches} = {batch}, "
            f"but the global batch is {request.global_batch_size}"
        )
    check_degrees(request.graph, c, ends=True)
    check_replicas(c)
    check_offload(c)
    check_schedule(c)
    if request.seq_len % c.cp:
        near = around(c.cp, set(divisors(request.seq_len)) & set(divisors(c.dp * c.cp)))
        raise PinError(f"cp={c.cp} does not divide the sequence of {request.seq_len}; nearest legal: {near}")
    if c.cp > 1 and request.graph.has_target:
        check_context(request.graph, c)
    _check_experts(request.graph, c)
    if request.executed:
        check_dispatch(request.graph, c)
    _check_recompute(request.graph, c)
    check_modules(c.recompute, request.mode, request.executed)


def _check_experts(graph: ModelGraph, c: ParallelConfig) -> None:
    experts = _experts(graph)
    if not experts:
        for name, value in (("ep", c.ep), ("etp", c.etp)):
            if value not in (None, 1) and (name == "ep" or value != c.tp):
                raise PinError(f"{name}={value}, but {graph.name} has no experts; nearest legal: {name}=1")
        return
    ranks, etp = c.dp * c.cp * c.tp, c.tp if c.etp is None else c.etp
    for count, inner in experts:
        if inner is not None and inner % etp:
            near = around(etp, set(divisors(inner)) & set(divisors(ranks)))
            raise PinError(f"etp={etp} does not divide the experts' inner size of {inner}; nearest legal: etp={near}")
        if count % c.ep:
            legal = set(divisors(count)) & set(divisors(max(1, ranks // etp)))
            raise PinError(f"ep={c.ep} does not divide the {count} experts; nearest legal: ep={around(c.ep, legal)}")
    if ranks % (c.ep * etp):
        legal = {d for d in divisors(max(1, ranks // etp)) if all(count % d == 0 for count, _ in experts)}
        nearest = f"etp={around(etp, divisors(ranks))}" if ranks % etp else f"ep={around(c.ep, legal)}"
        raise PinError(
            f"ep={c.ep} x etp={etp} does not divide dp x cp x tp = {ranks}, which expert parallelism is folded from; "
            f"nearest legal: {nearest}"
        )


def _check_recompute(graph: ModelGraph, c: ParallelConfig) -> None:
    chunks, recompute = c.pp * c.virtual_stages, c.recompute
    if isinstance(recompute, tuple):
        if len(recompute) != chunks:
            raise PinError(f"recompute={recompute} has {len(recompute)} entries for {chunks} stages; give {chunks}")
        if not all(is_count(n, 0) for n in recompute):
            raise PinError(f"recompute={recompute}: must be whole numbers of layers, at least 0; nearest legal: 0")
    elif isinstance(recompute, Mapping):
        for value in recompute.values():
            check_choice(value)
        check_recompute(graph, recompute)
    else:
        check_choice(recompute)
