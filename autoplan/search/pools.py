"""Plans over several pools of devices: every pipeline stage lies in one pool, with as many layers as its devices merit.

    found = search_pools((on_h100, on_a100))      # one PlanRequest per pool: the same task on the pool's own cluster
    found.best.config.stages, found.best.pools    # layers of every stage, and the pool that it lies in

The degrees are shared by all stages, so a stage has equally many devices in every pool, and a pool has as many stages
as its devices make. Degrees are taken best first by a bound from arithmetic alone (`least_step_s`); cut
and recompute are exact, as for one kind of device (`autoplan.search.cuts`), with the windows of each stage from its
pool. All orders of the pools along the pipeline are tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autoplan.config.offload import NOTHING
from autoplan.config.parallel import ParallelConfig
from autoplan.config.recompute import RecomputeMix, recompute_kind
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.memory.ranks import RankMemory
from autoplan.cost_models.memory.room import Room
from autoplan.cost_models.quantity import Quantity, Tag, total
from autoplan.cost_models.time.breakdown import UNPROFILED_ERROR
from autoplan.cost_models.time.pools import PooledPricer
from autoplan.cost_models.time.price import ranges_of
from autoplan.errors import AutoplanError, InfeasibleError, PinError
from autoplan.program.expert_degrees import ExpertDegrees
from autoplan.schedules.schedule import PLAIN_SCHEDULE
from autoplan.search import clock
from autoplan.search.cuts import Cutter, Shortage, worst_of
from autoplan.search.estimate import layers_of, recompute_of_stages
from autoplan.search.group_bounds import grouped
from autoplan.search.interleaved_cuts import LeastPass
from autoplan.search.intra import StoppedError
from autoplan.search.layout_problem import cut_of
from autoplan.search.layouts import LayoutCache
from autoplan.search.request import PlanRequest, check_task, space_of
from autoplan.search.windows import Windows
from autoplan.stacks.like import equal_stages

MOST_POOLS = 4
RESTRICTIONS = (
    "a stage lies in one pool; all stages have the same tp, cp, dp and ep, and one chunk of the model",
    f"schedule {PLAIN_SCHEDULE}; nothing is offloaded to the host; all devices are used",
)
_DECIDED = ("stages", "schedule", "virtual_stages", "offload", "pp")  # what pools decide, or do without


@dataclass(frozen=True)
class PooledStage:
    """One stage. Seconds are of one micro-batch; `busy_share`: of the step, in which it computes."""

    pool: int
    num_layers: int
    num_recomputed: int
    forward_s: float
    backward_s: float
    busy_share: float
    memory_bytes: Quantity
    capacity_bytes: float


@dataclass(frozen=True)
class PooledPlan:
    """One plan.

    Attributes:
        pools: the pool of every stage.
        mfu: attention counted in full, against the peaks of all devices together.
    """

    config: ParallelConfig
    pools: tuple[int, ...]
    stages: tuple[PooledStage, ...]
    step_time_s: Quantity
    tokens_per_s: float
    mfu: float


@dataclass(frozen=True)
class PooledSearch:
    """The best plan, and what is known of the others.

    Attributes:
        requests: the task on each pool alone.
        equal: the same degrees with equally many layers in all stages; None if they do not fit.
        num_candidates, num_open: configurations times orders of the pools, and those that time left undecided.
        bound_s: no plan of the space has a shorter step.
    """

    requests: tuple[PlanRequest, ...]
    best: PooledPlan
    equal: PooledPlan | None
    num_candidates: int
    num_open: int
    bound_s: float

    @property
    def gap(self) -> float:
        """The share by which a step could be shorter, at most."""
        return 1.0 - self.bound_s / self.best.step_time_s.mid


def least_step_s(seconds: Sequence[Sequence[float]], num_stages: Sequence[int], num_micro_batches: int) -> float:
    """Return a lower bound on the step of every cut and order, from the work inside blocks alone.

    With T the time of the longest stage, pool p does at most n_p T of the work (n_p stages). So for any weights
    w_p >= 0 with sum(w_p n_p) = 1, T is at least the sum over units of min over p of w_p t_p. The weights here make it
    exact if one pool is faster than the other by the same factor in all units.

    Args:
        seconds: t_p of every unit, for each pool: forward and backward of one micro-batch.
        num_stages: n_p.
    """
    totals = [sum(each) for each in seconds]
    used = [p for p, n in enumerate(num_stages) if n]
    scale = sum(num_stages[p] / totals[p] for p in used)
    work = sum(min(seconds[p][u] / totals[p] for p in used) for u in range(len(seconds[0])))
    return num_micro_batches * work / scale


class PooledCutter(Cutter):
    """Cuts of one candidate over pools: the windows of every stage are those of its pool's Cutter."""

    def __init__(
        self,
        pricer: PooledPricer,
        rooms: Sequence[Room],
        recompute: str | Mapping[str, str] | None = None,
        mix: RecomputeMix = RecomputeMix.ANY,
    ) -> None:
        self.pooled = pricer
        self.mix = mix
        self.pools: tuple[int, ...] = pricer.pools
        self.pinned: tuple[int, ...] | None = None
        self.cutters: list[Cutter] = [Cutter(p, room, recompute) for p, room in zip(pricer.pricers, rooms, strict=True)]
        first = self.cutters[0]
        self.pp: int = first.pp
        self.m: int = first.m
        self.num_units: int = first.num_units
        self.fixed: str | Mapping[str, str] | None = first.fixed
        self.after_s: float = min(cutter.after_s for cutter in self.cutters)
        self._free_s = None

    def of(self, stage: int) -> Cutter:
        """Return the cutter of a stage's pool."""
        return self.cutters[self.pools[stage]]

    @cached_property
    def windows(self) -> Windows:
        """The arrays of all stages, each from its pool."""
        return Windows.joined([cutter.windows for cutter in self.cutters], self.pools)

    def _look_below(self, step_s: float) -> Windows:
        return self.windows  # of all cuts

    def _step_s(self, chunks: tuple[int, ...], recompute: tuple[int, ...]) -> float:
        return self.pooled.step_s(chunks, recompute)

    def _least_of(self, stage: int, units: range) -> int | None:
        return self.of(stage)._least_of(stage, units)

    def _fits(self, stage: int, units: range, count: int) -> bool:
        return self.of(stage)._fits(stage, units, count)

    def _counts(self, units: range, layers: int) -> list[int]:
        return self.cutters[0]._counts(units, layers)

    def _num_layers(self, units: range) -> int:
        return self.cutters[0]._num_layers(units)

    def memory_of(self, stage: int, units: range, count: int) -> RankMemory:
        """Return the memory of one stage on its pool."""
        return self.of(stage).memory_of(stage, units, count)

    def shortage(self) -> Shortage:
        """Return how far the pool that lacks most is from fitting."""
        return worst_of([cutter.shortage() for cutter in self.cutters])


def search_pools(
    requests: Sequence[PlanRequest], *, nic_gbit_s: float | None = None, told: Callable[[str], None] | None = None
) -> PooledSearch:
    """Return the best plan over the devices of all pools.

    Args:
        requests: the task on the cluster of each pool; they differ in the cluster and the settings that follow from it.
        nic_gbit_s: the network between pools, Gbit/s per device and direction; None: the slower of their own.
        told: called with a line of progress.

    Raises:
        PinError: pools that cannot share a pipeline, or pins that contradict it.
        InfeasibleError: nothing fits.
        StoppedError: no plan was found in time.
    """
    _check(requests)
    return _PoolSearch(requests, nic_gbit_s, told).run()


def _check(requests: Sequence[PlanRequest]) -> None:
    if not 2 <= len(requests) <= MOST_POOLS:
        raise PinError(
            f"the number of pools, {len(requests)}, must be from 2 to {MOST_POOLS}; for one pool use autoplan plan"
        )
    for request in requests:
        check_task(request)
        if request.cluster.fabric is not None:
            raise PinError(f"pool {request.cluster}: a fabric is a graph of one cluster; give pools by levels")
    first = requests[0]
    for name in ("seq_len", "target_len", "global_batch_size", "precision", "mode"):
        values = [getattr(r, name) for r in requests]
        if len(set(values)) > 1:
            raise PinError(f"{name} must be the same on all pools, not {', '.join(map(str, values))}; give it")
    pinned = [name for name in _DECIDED if name in first.pins]
    if pinned:
        raise PinError(
            f"{pinned[0]}={first.pins[pinned[0]]} cannot be pinned over pools, which decide it", (pinned[0],)
        )


class _PoolSearch:
    """One search."""

    def __init__(
        self, requests: Sequence[PlanRequest], nic_gbit_s: float | None, told: Callable[[str], None] | None
    ) -> None:
        self.requests, self.told, self.start = tuple(requests), told or (lambda text: None), clock.now_s()
        self.counts = [r.cluster.num_devices for r in requests]
        total = sum(self.counts)
        whole = [replace(r, cluster=_enlarged(r.cluster, total)) for r in requests]
        self.caches = [LayoutCache(r) for r in whole]
        self.rooms = [cache.room for cache in self.caches]
        self.across = [r.costs if nic_gbit_s is None else _joined(r, nic_gbit_s) for r in whole]
        self.recompute = requests[0].pins.recompute
        self.orders = tuple(itertools.permutations(range(len(requests))))
        self.limit_s = self.open_bound_s = math.inf  # of the best plan; the least of what its cuts leave open
        self.best: tuple[PooledCutter, tuple[int, ...], tuple[int, ...]] | None = None  # with its cut and steps
        self.shortages: list[Shortage] = []

    def run(self) -> PooledSearch:
        """Take candidates best first until no other can be better, or time is over, or Ctrl-C comes after a plan."""
        bounds, undecided = self._bounds(self._candidates())
        num_decided = 0
        try:
            for bound, candidate in bounds:
                if bound >= self.limit_s or (self.best is not None and self._out_of_time()):
                    break
                self.told(f"{len(bounds) - num_decided:,} of {len(bounds):,} degrees left")
                self._look_at(candidate)
                num_decided += 1
        except KeyboardInterrupt:
            if self.best is None:
                raise
        left = [bound for bound, _ in bounds[num_decided:] if bound < self.limit_s]
        num_open = (undecided + len(left)) * len(self.orders)
        if self.best is None:
            raise self._nothing(num_open)
        cutter, chunks, steps = self.best
        proved = min(self.limit_s, self.open_bound_s, *left, 0.0 if undecided else math.inf)
        num = (len(bounds) + undecided) * len(self.orders)
        plan = self._plan(cutter, chunks, steps)
        return PooledSearch(self.requests, plan, self._equal(cutter), num, num_open, proved)

    def _look_at(self, candidate: ParallelConfig) -> None:
        """Search the cuts of a candidate under every order of the pools."""
        for order in self.orders:
            cutter = self._cutter(candidate, order)
            cut = cutter.search(self.limit_s)
            if not cut.exact:
                self.open_bound_s = min(self.open_bound_s, cut.bound_s)
            if cut.chunks is not None:
                self.limit_s, self.best = cut.step_s, (cutter, cut.chunks, cut.recompute)
            elif self.best is None and cut.bound_s == math.inf:
                self.shortages.append(cutter.shortage())

    def _out_of_time(self) -> bool:
        return clock.now_s() - self.start > self.requests[0].time_limit_s

    def _candidates(self) -> list[ParallelConfig]:
        """Return the configurations whose stages fill every pool."""
        first, total = self.requests[0], sum(self.counts)
        per_node = math.gcd(*(r.cluster.devices_per_node for r in self.requests))
        cluster = first.cluster.with_(nodes=total // per_node, devices_per_node=per_node)
        pins = {**first.pins, "schedule": PLAIN_SCHEDULE, "offload": NOTHING}
        legal = space_of(replace(first, cluster=cluster, pins=pins)).candidates
        found = [c for c in legal if all(n % c.stage_ranks == 0 for n in self.counts)]
        if not found:
            most = math.gcd(*self.counts)
            raise PinError(
                f"pools of {' and '.join(map(str, self.counts))} devices: no legal degrees fill all of them with "
                f"stages of one size, which is at most {most} devices; leave devices out, or pin less"
            )
        return found

    def _bounds(self, candidates: Sequence[ParallelConfig]) -> tuple[list[tuple[float, ParallelConfig]], int]:
        """Return the candidates that have a layout, by their bounds, and the number of those without a bound."""
        out: list[tuple[float, ParallelConfig]] = []
        undecided = 0
        for alike in grouped(candidates):
            if self._out_of_time() and out:
                undecided += len(alike)
                continue
            try:
                out += self._bounded(alike)
            except StoppedError:
                undecided += len(alike)
        return sorted(out, key=lambda pair: pair[0]), undecided

    def _bounded(self, candidates: Sequence[ParallelConfig]) -> list[tuple[float, ParallelConfig]]:
        """Return candidates with their methods of context parallelism and their bounds; empty without a layout."""
        out: list[tuple[float, ParallelConfig]] = []
        for members in grouped(map(self.caches[0].decided, candidates)):
            passes = self._passes(members[0])
            if passes is not None:
                seconds = [p.seconds for p in passes]
                out += [(least_step_s(seconds, self._num_stages(c), c.num_micro_batches), c) for c in members]
        return out

    def _passes(self, candidate: ParallelConfig) -> list[LeastPass] | None:
        """Return the least seconds of units on each pool, with the layouts of the first; None without a layout."""
        point = self.caches[0].of(candidate)
        if point is None:
            return None
        experts = None
        if candidate.spreads_experts:
            r = self.requests[0]
            experts = ExpertDegrees(candidate.ep, candidate.expert_tp, r.options.dispatcher, r.executed)
        for cache in self.caches[1:]:
            cache.adopt(cut_of(candidate, experts), point.solution)
        found = [cache.least_pass(candidate) for cache in self.caches]
        return [p for p in found if p is not None]  # all: they have the layout of the first

    def _num_stages(self, candidate: ParallelConfig) -> list[int]:
        return [n // candidate.stage_ranks for n in self.counts]

    def _pools(self, candidate: ParallelConfig, order: Sequence[int]) -> tuple[int, ...]:
        """Return the pool of every stage, with the pools in this order along the pipeline."""
        num = self._num_stages(candidate)
        return tuple(pool for pool in order for _ in range(num[pool]))

    def _cutter(self, candidate: ParallelConfig, order: Sequence[int]) -> PooledCutter:
        made = [cache.pricer(candidate) for cache in self.caches]
        prices = [pricer for pricer in made if pricer is not None]  # all: it has a bound
        pooled = PooledPricer(prices, self._pools(candidate, order), self.across)
        return PooledCutter(pooled, self.rooms, self.recompute, self.requests[0].recompute_mix)

    def _nothing(self, num_open: int) -> AutoplanError:
        if num_open:
            return StoppedError(
                f"no plan was found in time; {num_open:,} candidates are undecided: raise the time limit"
            )
        if not self.shortages:
            return InfeasibleError("no layout exists on these pools")
        least = min(self.shortages, key=lambda s: s.needed_bytes / s.available_bytes)
        return InfeasibleError(
            f"nothing fits on these pools: the plan that comes closest needs {least.needed_bytes / 1e9:.1f} GB on "
            f"stage {least.stage} of {least.available_bytes / 1e9:.1f} GB; its largest term is {least.term}"
        )

    def _equal(self, cutter: PooledCutter) -> PooledPlan | None:
        """Return the plan with equally many layers in all stages, as it would be without knowledge of the devices."""
        w, pp = cutter.pooled.workload, cutter.pp
        layers = equal_stages(sum(w.layers), pp, 1)
        if layers is None or cutter.num_units != sum(w.layers):
            whole, rest = divmod(cutter.num_units, pp)
            layers = tuple(whole + (k < rest) for k in range(pp))
        steps = cutter.least_recompute(layers)
        return None if steps is None else self._plan(cutter, layers, steps)

    def _plan(self, cutter: PooledCutter, chunks: tuple[int, ...], steps: tuple[int, ...]) -> PooledPlan:
        pooled, w = cutter.pooled, cutter.pooled.workload
        low, mid, high = (pooled.step_s(chunks, steps, which) for which in ("low", "mid", "high"))
        ranges, timeline = ranges_of(chunks), pooled.timeline(chunks, steps)
        taken = [pooled.of(s).recomputed(units, steps[s]) for s, units in enumerate(ranges)]
        layers, times = layers_of(w, chunks), pooled.chunk_times(chunks, steps)
        stages = tuple(
            PooledStage(
                pool,
                layers[s],
                sum(recompute_kind(how).recomputes for how in taken[s].values()),
                times[s].forward_s,
                times[s].backward_s,
                timeline.busy_s[s] / mid,
                total(list(cutter.memory_of(s, ranges[s], steps[s]).terms.values())),
                self.rooms[pool].device_bytes,
            )
            for s, pool in enumerate(cutter.pools)
        )
        c = replace(pooled.config, stages=tuple(layers), recompute=recompute_of_stages(w, chunks, taken))
        peak = sum(pricer.peak_flops * num for pricer, num in zip(pooled.pricers, self.counts, strict=True))
        runs = c.num_micro_batches * c.dp
        # no published run mixes devices
        step = Quantity(low / (1 + UNPROFILED_ERROR), mid, high * (1 + UNPROFILED_ERROR), Tag.ASSUMED)
        return PooledPlan(c, cutter.pools, stages, step, w.tokens * runs / mid, w.model_flops * runs / mid / peak)


def _enlarged(cluster: Cluster, devices: int) -> Cluster:
    """Return a cluster of such nodes with at least this many devices."""
    return cluster.with_(nodes=math.ceil(devices / cluster.devices_per_node))


def _joined(request: PlanRequest, nic_gbit_s: float) -> Costs:
    return replace(request, cluster=request.cluster.with_(nic=nic_gbit_s)).costs
