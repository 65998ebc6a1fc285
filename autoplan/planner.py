"""The planner: the best plan of a stated space, with its certificate. No torch, no processes, no device.

    result = search_plan(PlanRequest(graph, cluster, seq_len=8192, global_batch_size=1024))
    result.plans[0].config, result.plans[0].estimate, result.certificate

One integer program over degrees, cuts and layouts:

    minimise over (pp, dp, tp, zero, b), cuts u_1 < ... < u_pp, layers computed again r_1 .. r_pp, layouts x
             step(pp, dp, tp, zero, b, u, r, x)          the event simulation of `price`
    subject to   memory_s(...) <= capacity                for every stage s
                 x legal on tp                            (autoplan.search.problem)

Its inner problems decompose once the degrees are fixed, so its degree binaries are branched on here: layouts are the
intra-op integer program per (tp, b), solved by HiGHS; the cut and the recompute are exact by a dynamic programme with
branch and bound (autoplan.search.stages); degrees are taken best first by a lower bound for all at once, until the
least open bound is not below the best *evaluated* plan. What narrows the space is named in `restrictions`.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.config import Mode, ParallelConfig, precision_of
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.errors import InfeasibleError, PinError
from autoplan.cost_models.graph import ModelGraph
from autoplan.cost_models.layout import Axis
from autoplan.cost_models.price import Estimate, OpTimes, Pricer, op_times
from autoplan.cost_models.profile import Profile
from autoplan.cost_models.work import Workload
from autoplan.search.intra import IntraSolution, solve
from autoplan.search.pins import check_degrees, make_mesh
from autoplan.search.problem import IntraSettings, build_problem
from autoplan.search.space import Candidate, Space, divisors, space
from autoplan.search.stages import Cutter, Shortage
from autoplan.search.workload import ExpertDegrees, workload
from autoplan.search.works import Works

# Simulated actions one candidate may cost before its open bound counts as a gap: deterministic, unlike a time limit.
_MAX_ACTIONS = 100_000
_RESTRICTIONS = (
    "one layout per tensor-parallel degree and micro-batch size, the fastest, with the least stored state",
    "layouts weigh what happens once per step as without a pipeline",
    "recompute: none or full, the first layers of a stage",
    "schedule 1F1B",
)


@dataclass(frozen=True)
class PlanRequest:
    """What to plan for.

    Attributes:
        global_batch_size: sequences per step over all data-parallel ranks.
        pins: fixed choices (autoplan.search.space.KNOWN_PINS).
        precision: a name of autoplan.cost_models.config.PRECISIONS.
        profile: measured times that override the cluster's figures.
        top: how many plans to return, best first, each with other degrees.
        memory_margin: share of a device's memory that the expected need leaves free.
        executed: True: only what the runtime executes today.
    """

    graph: ModelGraph
    cluster: Cluster
    seq_len: int
    global_batch_size: int
    pins: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "bf16"
    mode: Mode = Mode.EAGER
    profile: Profile | None = None
    top: int = 1
    time_limit_s: float = 60.0
    memory_margin: float = 0.05
    executed: bool = False


@dataclass(frozen=True)
class Planned:
    """One plan: `config` with stages and layers computed again per stage, and what it costs."""

    config: ParallelConfig
    estimate: Estimate
    point: IntraPoint = field(repr=False)


@dataclass(frozen=True)
class IntraPoint:
    """The layout inside blocks for one (tp, micro-batch size), and the work it makes."""

    mesh_axes: tuple[Axis, ...]
    solution: IntraSolution
    workload: Workload
    times: Mapping[str, OpTimes]


@dataclass(frozen=True)
class Certificate:
    """How good the best plan provably is, at these prices and within these restrictions.

    `considered` = `illegal` + `too_big` + `bounded_out` + `solved`. `gap`: how far, relatively, the best evaluated plan
    may be above the best of the space.
    """

    considered: int
    illegal: int
    too_big: int
    bounded_out: int
    solved: int
    gap: float
    solve_time_s: float
    restrictions: tuple[str, ...]
    status: str
    illegal_by_rule: Mapping[str, int]
    too_big_by_term: Mapping[str, int]
    by_phase_s: Mapping[str, float]
    intra_gap: float


@dataclass(frozen=True)
class SearchResult:
    """Plans, best first, and the certificate of the first."""

    plans: tuple[Planned, ...]
    certificate: Certificate


@dataclass(frozen=True)
class InfeasibleReport:
    """Why nothing fits, and the cheapest change that would."""

    stage: int
    term: str
    needed_bytes: float
    available_bytes: float
    config: str
    cheapest_change: str


class NothingFits(InfeasibleError):
    """No plan of the space fits the memory; `report` says what stands in the way."""

    def __init__(self, message: str, report: InfeasibleReport) -> None:
        super().__init__(message)
        self.report = report


class _Points:
    """Layouts and workloads by (tp, micro-batch size, context, expert degrees), solved when first asked for."""

    def __init__(self, request: PlanRequest, phases: dict[str, float]) -> None:
        self.request, self.phases = request, phases
        self.precision = precision_of(request.precision)
        self.found: dict[tuple[int, int, int, ExpertDegrees | None], IntraPoint | None] = {}
        self.gap = 0.0

    def get(self, tp: int, size: int, cp: int = 1, experts: ExpertDegrees | None = None) -> IntraPoint | None:
        """None where no layout exists."""
        key = (tp, size, cp, experts)
        if key not in self.found:
            try:
                self.found[key] = self._solve(tp, size, cp, experts)
            except InfeasibleError:
                self.found[key] = None
        return self.found[key]

    def _solve(self, tp: int, size: int, cp: int, experts: ExpertDegrees | None) -> IntraPoint:
        r, start = self.request, time.perf_counter()
        _, axes = make_mesh(r.graph, ParallelConfig(tp=tp))
        env = {"b": size, "s": r.seq_len // cp}
        steps = max(1, r.global_batch_size // (size * max(1, r.cluster.num_devices // (tp * cp))))
        slack = r.pins.get("state_slack", 1.02)
        settings = IntraSettings(axes, r.cluster, env, steps, slack, r.profile, r.mode, self.precision, cp)
        problem = build_problem(r.graph, settings)
        built = time.perf_counter()
        solution = solve(problem)
        solved = time.perf_counter()
        works = Works(r.graph, axes, env, context=cp, precision=self.precision, device_type=r.cluster.device_type)
        work = workload(r.graph, solution.selection, works, experts)
        point = IntraPoint(axes, solution, work, op_times(work, settings.costs))
        self.gap = max(self.gap, solution.gap)
        self.phases["intra-op build"] += built - start
        self.phases["intra-op solve"] += solved - built
        self.phases["workloads"] += time.perf_counter() - solved
        return point


def _config(candidate: Candidate, request: PlanRequest) -> ParallelConfig:
    c = candidate
    recompute = request.pins.get("recompute", "none")
    return ParallelConfig(
        dp=c.dp,
        tp=c.tp,
        pp=c.pp,
        zero_stage=c.zero_stage,
        micro_batch_size=c.micro_batch_size,
        num_micro_batches=c.num_micro_batches,
        schedule=request.pins.get("schedule", "1F1B"),
        recompute=recompute,
        state_slack=request.pins.get("state_slack", 1.02),
    )


class _Search:
    def __init__(self, request: PlanRequest) -> None:
        self.request, self.start = request, time.perf_counter()
        self.phases: dict[str, float] = defaultdict(float)
        self.points = _Points(request, self.phases)
        self.costs = Costs(request.cluster, request.profile, request.mode)
        self.precision = precision_of(request.precision)
        if not 0 <= request.memory_margin < 1:
            raise PinError(f"memory_margin={request.memory_margin!r}: must be at least 0 and less than 1")
        self.capacity = request.cluster.device.memory_bytes * (1.0 - request.memory_margin)
        self.best: list[tuple[float, Candidate, tuple[int, ...], tuple[int, ...]]] = []
        self.too_big: Counter[str] = Counter()
        self.shortages: list[tuple[Shortage, Candidate]] = []
        self.stopped, self.no_layout = "", 0

    def cutter(self, candidate: Candidate) -> Cutter | None:
        """None where no layout exists."""
        point = self.points.get(candidate.tp, candidate.micro_batch_size)
        if point is None:
            return None
        pins, config = self.request.pins, _config(candidate, self.request)
        pricer = Pricer(point.workload, config, self.costs, self.precision, point.times)
        stages = tuple(pins["stages"]) if pins.get("stages") is not None else None
        return Cutter(pricer, self.capacity, pins.get("recompute"), stages)

    def run(self) -> SearchResult:
        """Bound all, then refine and evaluate best first."""
        r = self.request
        checked = self._space()
        heap: list[tuple[float, int, Candidate, Cutter]] = []
        unseen = False
        quick = _QuickMemory(r, self.capacity)
        try:
            for candidate in checked.candidates:
                if heap and self._out_of_time():  # what was not looked at is open
                    unseen = True
                    break
                if quick.too_big(candidate):
                    self.too_big["activations"] += 1
                    continue
                with self._phase("bounds"):
                    cutter = self.cutter(candidate)
                    if cutter is None:
                        self.no_layout += 1
                        continue
                    heap.append((cutter.quick_bound_s(), 0, candidate, cutter))
            num_solved, least_open = self._best_first(heap)
            least_open = 0.0 if unseen else least_open
        except KeyboardInterrupt:
            if not self.best:
                raise
            self.stopped, num_solved, least_open = "interrupted", len(self.best), 0.0
        if not self.best:
            raise self._nothing_fits(checked)
        plans = tuple(self._planned(entry) for entry in self.best[: r.top])
        best = self.best[0][0]
        illegal = dict(checked.illegal)
        if self.no_layout:
            illegal["no layout exists at this tp"] = self.no_layout
        certificate = Certificate(
            considered=checked.num_considered,
            illegal=sum(illegal.values()),
            too_big=self.too_big.total(),
            bounded_out=checked.num_considered - sum(illegal.values()) - self.too_big.total() - num_solved,
            solved=num_solved,
            gap=max(0.0, (best - least_open) / best) if least_open < best else 0.0,
            solve_time_s=time.perf_counter() - self.start,
            restrictions=(
                *_RESTRICTIONS,
                f"{r.memory_margin:.0%} of the memory left free",
                *plans[0].point.solution.restrictions,
                *checked.restrictions,
            ),
            status=self.stopped or "complete",
            illegal_by_rule=illegal,
            too_big_by_term=dict(self.too_big),
            by_phase_s=dict(self.phases),
            intra_gap=self.points.gap,
        )
        return SearchResult(plans, certificate)

    def _space(self) -> Space:
        r, start = self.request, time.perf_counter()
        check_sequence(r.graph, r.seq_len)
        found = space(r.graph, r.cluster, r.global_batch_size, r.pins, executed=r.executed)
        if r.pins.get("stages") is not None:
            for pp, tp, dp in sorted({(c.pp, c.tp, c.dp) for c in found.candidates})[:1]:
                check_degrees(r.graph, ParallelConfig(pp=pp, tp=tp, dp=dp, stages=tuple(r.pins["stages"])))
        self.phases["space"] += time.perf_counter() - start
        return found

    def _out_of_time(self) -> bool:
        if time.perf_counter() - self.start > self.request.time_limit_s:
            self.stopped = "stopped by time limit"
        return bool(self.stopped)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to a phase, without that of phases inside it."""
        began, before = time.perf_counter(), sum(self.phases.values())
        try:
            yield
        finally:
            self.phases[name] += time.perf_counter() - began - (sum(self.phases.values()) - before)

    def _best_first(self, heap: list[tuple[float, int, Candidate, Cutter]]) -> tuple[int, float]:
        """Take the least bound; refine it the first time, evaluate it the second.

        Returns: how many were evaluated, and the least bound that is still open among them.
        """
        solved, least_open = 0, math.inf
        heapq.heapify(heap)
        while heap:
            bound, refined, candidate, cutter = heap[0]
            cutoff = self.best[self.request.top - 1][0] if len(self.best) >= self.request.top else math.inf
            if bound >= cutoff:
                break
            if self.best and self._out_of_time():
                return solved, min(least_open, bound)
            heapq.heappop(heap)
            if not refined:
                with self._phase("bounds"):
                    bound = cutter.bound_s()
                    if bound == math.inf:
                        self._too_big(candidate, cutter)
                    else:
                        heapq.heappush(heap, (bound, 1, candidate, cutter))
                continue
            with self._phase("evaluation"):
                actions = 2 * candidate.pp * candidate.num_micro_batches
                cut = cutter.search(cutoff, max(2, min(2000, _MAX_ACTIONS // actions)))
            if cut.chunks is None and cut.exact and cutoff == math.inf:
                self._too_big(candidate, cutter)
                continue
            solved += 1
            if cut.chunks is not None:
                self.best.append((cut.step_s, candidate, cut.chunks, cut.recompute))
                self.best.sort(key=lambda e: (e[0], e[1]))
            if not cut.exact:
                least_open = min(least_open, cut.bound_s)
        return solved, least_open

    def _too_big(self, candidate: Candidate, cutter: Cutter) -> None:
        shortage = cutter.shortage()
        self.too_big[shortage.term] += 1
        self.shortages.append((shortage, candidate))

    def _planned(self, entry: tuple[float, Candidate, tuple[int, ...], tuple[int, ...]]) -> Planned:
        _, candidate, chunks, recompute = entry
        point = self.points.get(candidate.tp, candidate.micro_batch_size)
        if point is None:
            raise InfeasibleError(f"no layout exists at tp={candidate.tp}")
        config = _config(candidate, self.request)
        pricer = Pricer(point.workload, config, self.costs, self.precision, point.times)
        estimate = pricer.estimate(chunks, recompute, events=True)
        searched = "recompute" not in self.request.pins
        config = replace(config, stages=chunks, recompute=recompute if searched else config.recompute)
        return Planned(config, estimate, point)

    def _nothing_fits(self, checked: Space) -> InfeasibleError:
        r = self.request
        if not self.shortages:
            for candidate in sorted(checked.candidates, key=lambda c: (c.micro_batch_size, -c.tp, -c.zero_stage))[:8]:
                cutter = self.cutter(candidate)
                if cutter is not None:
                    self.shortages.append((cutter.shortage(), candidate))
        if not self.shortages:
            return InfeasibleError(f"no layout of {r.graph.name} exists at any tensor-parallel degree that is allowed")
        shortage, candidate = min(self.shortages, key=lambda e: (e[0].needed_bytes, e[1]))
        c = candidate
        name = f"pp={c.pp} dp={c.dp} tp={c.tp} zero_stage={c.zero_stage} micro_batch_size={c.micro_batch_size}"
        change = self._cheapest_change(shortage)
        report = InfeasibleReport(
            shortage.stage, shortage.term, shortage.needed_bytes, shortage.available_bytes, name, change
        )
        message = (
            f"nothing fits: the closest plan ({name}) needs {shortage.needed_bytes / 1e9:.1f} GB on stage "
            f"{shortage.stage}, a plan may use {shortage.available_bytes / 1e9:.1f} of a device's "
            f"{r.cluster.device.memory_bytes / 1e9:.1f} GB; the largest term is "
            f"{shortage.term}. {change}"
        )
        return NothingFits(message, report)

    def _cheapest_change(self, shortage: Shortage) -> str:
        """Dropping one pin costs nothing; else a shorter sequence is another task, so more devices; else memory."""
        r = self.request
        for name in r.pins:
            pins = {k: v for k, v in r.pins.items() if k != name}
            if _feasible(replace(r, pins=pins)):
                return f"Without the pin {name}={r.pins[name]} it fits."
        if not r.executed:
            pins = {k: v for k, v in r.pins.items() if k in ("state_slack",)}
            for factor in (2, 4, 8, 16, 32):
                cluster = r.cluster.with_(nodes=r.cluster.num_nodes * factor)
                batch = max(r.global_batch_size, 1)
                if _feasible(replace(r, cluster=cluster, pins=pins, global_batch_size=batch)):
                    others = " and without pins" if r.pins else ""
                    return f"With {cluster.num_nodes} nodes ({cluster.num_devices} devices){others} it fits."
        missing = shortage.needed_bytes - shortage.available_bytes
        return f"With {missing / 1e9:.1f} GB more memory per device it fits."


class _QuickMemory:
    """A lower bound of memory that needs no layout: the largest value and the values between units, split over tp."""

    def __init__(self, request: PlanRequest, capacity: float) -> None:
        self.capacity = capacity
        graph, env = request.graph, {"b": 1, "s": request.seq_len}
        works = Works(graph, (), env, precision=precision_of(request.precision))
        sizes = [
            works.num_bytes(b.name, v, ())
            for b in graph.blocks.values()
            for v in b.values.values()
            if v.requires_grad and v.name not in b.params
        ]
        self.largest = max(sizes, default=0.0)

    def too_big(self, candidate: Candidate) -> bool:
        """True if the largest value of the graph alone does not fit."""
        return self.largest * candidate.micro_batch_size / candidate.tp > self.capacity


def check_sequence(graph: ModelGraph, seq_len: int) -> None:
    """PinError for a sequence that is no count, or longer than a table of learned positions."""
    if isinstance(seq_len, bool) or not isinstance(seq_len, int) or seq_len < 1:
        raise PinError(f"seq_len={seq_len!r}: must be a whole number of at least 1")
    for block in graph.blocks.values():
        for node in block.nodes:
            if node.op == "embedding":
                table, index = (block.values[n] for n in node.tensor_inputs[:2])
                symbols = {name for size in index.shape for name in size.symbols}
                rows = table.shape[0].value
                if symbols == {"s"} and rows is not None and rows < seq_len:
                    raise PinError(
                        f"seq_len={seq_len}, but {graph.name} has {rows} learned positions; nearest legal: {rows}"
                    )


def search_plan(request: PlanRequest) -> SearchResult:
    """The best plans of the space, and the certificate.

    Raises: PinError for pins that leave nothing legal; NothingFits, with a report, if no plan fits the memory.
    """
    return _Search(request).run()


def _feasible(request: PlanRequest) -> bool:
    """True if some plan fits."""
    search = _Search(request)
    try:
        candidates = search._space().candidates
    except PinError:
        return False
    quick = _QuickMemory(request, search.capacity)
    for candidate in sorted(candidates, key=lambda c: (c.micro_batch_size, -c.zero_stage, -c.tp, -c.pp)):
        if search._out_of_time():
            return False
        if quick.too_big(candidate):
            continue
        cutter = search.cutter(candidate)
        if cutter is not None and cutter.bound_s() < math.inf and cutter.search(math.inf, 4).chunks is not None:
            return True
    return False


def estimate_config(request: PlanRequest, config: ParallelConfig) -> Planned:
    """Price one given configuration, whether it fits or not (see `Estimate.fits`).

    Stages that are not given are balanced by time. Raises: PinError for degrees that the cluster or model cannot take.
    """
    r = request
    check_sequence(r.graph, r.seq_len)
    _check_config(r, config)
    phases: dict[str, float] = defaultdict(float)
    experts = None
    if any(n.op == "experts" for b in r.graph.blocks.values() for n in b.nodes):
        experts = ExpertDegrees(config.ep, config.tp if config.etp is None else config.etp)
    point = _Points(r, phases).get(config.tp, config.micro_batch_size, config.cp, experts)
    if point is None:
        raise InfeasibleError(f"no layout of {r.graph.name} exists at tp={config.tp}")
    pricer = Pricer(point.workload, config, Costs(r.cluster, r.profile, r.mode), precision_of(r.precision), point.times)
    num_chunks = config.pp * config.virtual_stages
    if config.stages is not None:
        chunks = config.stages
    elif config.virtual_stages == 1:
        relaxed = Cutter(pricer, math.inf, config.recompute if isinstance(config.recompute, str) else "none")
        chunks = relaxed.search(max_evaluated=1).chunks or (pricer.num_units,)
    else:
        n = pricer.num_units
        chunks = tuple((k + 1) * n // num_chunks - k * n // num_chunks for k in range(num_chunks))
    recompute = _recompute_counts(pricer, config, chunks)
    estimate = pricer.estimate(chunks, recompute, events=True)
    return Planned(replace(config, stages=chunks), estimate, point)


def _recompute_counts(pricer: Pricer, config: ParallelConfig, chunks: tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(config.recompute, tuple):
        if len(config.recompute) != len(chunks):
            raise PinError(f"recompute={config.recompute} has {len(config.recompute)} entries for {len(chunks)} stages")
        return config.recompute
    if config.recompute != "full":
        return (0,) * len(chunks)
    out, at = [], 0
    for count in chunks:
        out.append(sum(pricer.workload.layers[at : at + count]))
        at += count
    return tuple(out)


def _check_config(request: PlanRequest, config: ParallelConfig) -> None:
    """Rules of one given configuration."""
    devices, c = request.cluster.num_devices, config
    for name in ("dp", "tp", "pp", "cp", "ep", "micro_batch_size", "num_micro_batches", "virtual_stages"):
        value = getattr(c, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PinError(f"{name}={value!r}: must be a whole number of at least 1; nearest legal: 1")
    if c.zero_stage not in (0, 1, 2, 3):
        raise PinError(f"zero_stage={c.zero_stage!r} does not exist; use 0, 1, 2 or 3")
    if c.num_devices != devices:
        rest = c.pp * c.cp * c.tp
        nearest = f"dp={devices // rest}" if devices % rest == 0 else "degrees whose product is the number of devices"
        raise PinError(
            f"pp={c.pp} x dp={c.dp} x cp={c.cp} x tp={c.tp} = {c.num_devices} devices, but the cluster has {devices}; "
            f"nearest legal: {nearest}"
        )
    check_degrees(request.graph, replace(c, stages=None) if c.virtual_stages > 1 else c)
    if request.seq_len % c.cp:
        near = max(d for d in divisors(request.seq_len) if d <= c.cp)
        raise PinError(f"cp={c.cp} does not divide the sequence of {request.seq_len}; nearest legal: {near}")
    num_experts = [
        int(n.attrs["num_experts"]) for b in request.graph.blocks.values() for n in b.nodes if n.op == "experts"
    ]
    etp = c.tp if c.etp is None else c.etp
    if c.ep > 1 and not num_experts:
        raise PinError(f"ep={c.ep}, but {request.graph.name} has no experts; nearest legal: ep=1")
    if num_experts and min(num_experts) % c.ep:
        near = max(d for d in divisors(min(num_experts)) if d <= c.ep)
        raise PinError(f"ep={c.ep} does not divide the {min(num_experts)} experts; nearest legal: ep={near}")
    if (c.dp * c.cp * c.tp) % (c.ep * etp):
        raise PinError(
            f"ep={c.ep} x etp={etp} does not divide dp x cp x tp = {c.dp * c.cp * c.tp}, which expert parallelism is "
            "folded from"
        )
    batch = c.dp * c.micro_batch_size * c.num_micro_batches
    if batch != request.global_batch_size:
        raise PinError(
            f"dp={c.dp} x micro_batch_size={c.micro_batch_size} x num_micro_batches={c.num_micro_batches} = {batch}, "
            f"but the global batch is {request.global_batch_size}"
        )
