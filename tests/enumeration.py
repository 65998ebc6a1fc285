"""Every plan of a small space, priced one by one: what a search must find the best of."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import models

from autoplan.capture.export import capture
from autoplan.config.offload import SEARCHED_OFFLOADS
from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.config.precision import precision_of
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Cluster, Device, Level
from autoplan.cost_models.memory.ranks import RankMemory
from autoplan.cost_models.memory.room import Room
from autoplan.cost_models.time.price import Pricer, ranges_of
from autoplan.ir.graph import ModelGraph
from autoplan.search.interleaved_cuts import even_cuts
from autoplan.search.planner import PlanRequest, estimate_config, search_plan
from autoplan.search.space import space

SEQ = 64


@functools.cache
def graph() -> ModelGraph:
    return capture(models.make_llama(), models.token_batch(2, 16))


def cluster(devices: int, memory_bytes: int, latency_s: float = 1e-6, host: tuple[int, float] | None = None) -> Cluster:
    """`host`: bytes of its memory per device, and bytes per second to it; None: nothing is offloaded."""
    device = Device("made up", 1e12, 1e11, memory_bytes, "made up")
    if host is not None:
        device = replace(device, host_memory_bytes=host[0], host_bytes_per_s=host[1])
    return Cluster(1, devices, device, Level(latency_s, 1e10, "made up"), "cpu")


def request(devices: int = 4, memory_bytes: int = 1 << 40, **kw: Any) -> PlanRequest:
    kw = {"precision": "native", "mode": Mode.COMPILED, "time_limit_s": 1e9, **kw}
    kw = {"memory_risk": 0.5, "equal_within": 0.0, "gap": 0.0, **kw}
    made = cluster(devices, memory_bytes, host=kw.pop("host", None))
    return PlanRequest(graph(), made, SEQ, kw.pop("batch", 8), **kw)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, total), parts - 1):
        ends = (0, *cuts, total)
        yield tuple(b - a for a, b in itertools.pairwise(ends))


def room(pricer: Pricer, capacity: float, guard: float = 0.0) -> Room:
    """A device with this memory, its part of the host's, and what of the uncertainty has to fit."""
    return Room(capacity, pricer.costs.cluster.host_memory_bytes, guard)


def fits(pricer: Pricer, held: RankMemory, capacity: float, guard: float = 0.0) -> bool:
    """On the device and on its host."""
    device, host = ([(q.mid, q.high) for q in terms.values()] for terms in (held.terms, held.host))
    needed = [sum((1 - guard) * mid + guard * high for mid, high in each) for each in (device, host)]
    return needed[0] <= capacity and needed[1] <= pricer.costs.cluster.host_memory_bytes


def brute_cut(pricer: Pricer, capacity: float, guard: float = 0.0) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
    """Every way to cut and every step down the ladder of recompute, by `price` alone."""
    best: tuple[float, tuple[int, ...], tuple[int, ...]] = (math.inf, (), ())
    for chunks in compositions(pricer.num_units, pricer.config.pp):
        ranges, at = [], 0
        for count in chunks:
            ranges.append(range(at, at + count))
            at += count
        for recompute in itertools.product(*(range(pricer.frontier.height(r) + 1) for r in ranges)):
            held = pricer.memory.stages(ranges, recompute)
            if all(fits(pricer, h, capacity, guard) for h in held):
                step = pricer.step_s(chunks, recompute)
                if step < best[0] * (1 - 1e-12):
                    best = (step, chunks, recompute)
    return best


def brute_schedule(pricer: Pricer, capacity: float) -> float:
    """The fastest of the even cuts, the first of which is the most even one of all by time, and on every rank every
    number of layers computed again, one of each stage in turn."""
    p = pricer
    each = tuple(f + b for f, b in zip(p.forward, p.backward, strict=True))
    everything = compositions(p.num_units, p.config.pp * p.config.virtual_stages)
    most_even = min(everything, key=lambda cut: sum(sum(each[u] for u in units) ** 2 for units in ranges_of(cut)))
    cuts = even_cuts(each, p.config.pp, p.config.virtual_stages)
    assert cuts[0] == tuple(most_even)
    chunks = min(cuts, key=lambda cut: p.step_s(cut, [0] * len(cut)))
    ranges = ranges_of(chunks)
    layers = [p.frontier.height(r) for r in ranges]
    best = math.inf
    for counts in itertools.product(*(range(sum(layers[k] for k in mine) + 1) for mine in p.chunks_of)):
        recompute = [0] * len(chunks)
        for count, mine in zip(counts, p.chunks_of, strict=True):
            left = count
            while left:
                for k in mine:
                    if left and recompute[k] < layers[k]:
                        recompute[k], left = recompute[k] + 1, left - 1
        held = p.memory.stages(ranges, recompute)
        if all(fits(pricer, h, capacity) for h in held):
            best = min(best, p.step_s(chunks, recompute))
    return best


def brute_force(r: PlanRequest) -> float:
    """Every candidate of the space, each with everything that may be on the host."""
    best = math.inf
    kinds = ((), *SEARCHED_OFFLOADS) if r.cluster.device.host_memory_bytes is not None else ((),)
    for c, kind in itertools.product(space(r.graph, r.cluster, r.global_batch_size, r.pins).candidates, kinds):
        if "parameters" in kind and (c.zero_stage == 0 or c.dp == 1):
            continue  # nothing is sharded
        config = c.but(offload=tuple(name for name in kind if name != "activations"))
        best = min(best, best_of(r, config, "activations" in kind))
    return best


def best_of(r: PlanRequest, config: ParallelConfig, activations: bool = False) -> float:
    """Of all cuts, and all that may be computed again or (`activations`) wait on the host, at given degrees."""
    one = estimate_config(replace(r, pins={}), config)
    costs, precision = Costs(r.cluster, None, r.mode), precision_of(r.precision)
    pricer = Pricer(one.point.workload, config, costs, precision, None, r.mode is Mode.EAGER, activations)
    memory = r.cluster.device.memory_bytes
    return brute_cut(pricer, memory)[0] if config.schedule == "1F1B" else brute_schedule(pricer, memory)


@functools.cache
def least_memory(devices: int) -> int:
    """Memory at which the fastest plan no longer fits, so that the search has something to do."""
    found = search_plan(request(devices))
    return int(found.plans[0].estimate.peak_memory_bytes.mid)
