"""What is planned for, and the layouts of its candidates: one per tensor-parallel degree and micro-batch size."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autoplan.cost_models.blocks import OpTimes, op_times
from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.config import Mode, ParallelConfig, RunOptions, precision_of
from autoplan.cost_models.constants import Constants
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.errors import InfeasibleError, PinError
from autoplan.cost_models.graph import ModelGraph
from autoplan.cost_models.layout import Axis
from autoplan.cost_models.price import Pricer
from autoplan.cost_models.profile import Profile
from autoplan.cost_models.schedule import SCHEDULES
from autoplan.cost_models.work import Workload
from autoplan.rules.saved import RULES, Form
from autoplan.search.chunks import ChunkCutter
from autoplan.search.handwritten import Kernels
from autoplan.search.intra import IntraSolution, StoppedError, solve
from autoplan.search.pins import is_count, make_mesh
from autoplan.search.problem import IntraSettings, build_problem
from autoplan.search.space import Candidate
from autoplan.search.stages import Cutter
from autoplan.search.whole_tokens import with_whole_tokens
from autoplan.search.workload import ExpertDegrees, workload
from autoplan.search.works import Works

ILP_LIMIT_S = 120.0  # of one integer program of layouts


@dataclass(frozen=True)
class PlanRequest:
    """What to plan for.

    Attributes:
        global_batch_size: sequences per step over all data-parallel ranks.
        pins: fixed choices (autoplan.search.space.KNOWN_PINS).
        precision: a name of autoplan.cost_models.config.PRECISIONS.
        options: kernels of attention, how kernels are started, what overlaps.
        constants: of the cost model; those of this version, or what `autoplan calibrate` made of measured steps.
        constants_file: where they were read from, for reports.
        profile: measured times that override the cluster's figures.
        top: how many plans to return, best first, each with other degrees.
        time_limit_s: then the best plan so far is returned; while there is none, the search goes on for a while.
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
    options: RunOptions = field(default_factory=RunOptions)
    constants: Constants = field(default_factory=Constants.shipped)
    constants_file: str | None = None
    top: int = 1
    time_limit_s: float = 60.0
    memory_margin: float = 0.05
    executed: bool = False

    @property
    def costs(self) -> Costs:
        """What operations and collectives cost in this task."""
        return Costs(self.cluster, self.profile, self.mode, self.options, self.constants)


@dataclass(frozen=True)
class IntraPoint:
    """The layout inside blocks for one (tp, micro-batch size), and the work it makes."""

    mesh_axes: tuple[Axis, ...]
    solution: IntraSolution
    workload: Workload
    times: Mapping[str, OpTimes]


_Key = tuple[int, int, int, ExpertDegrees | None, bool]


class Points:
    """Layouts and workloads by (tp, micro-batch size, context, expert degrees), solved when first asked for.

    Attributes:
        phases: seconds by phase, added to.
        gap: the largest gap of a layout's proof; `all_proved`: no layout was stopped by time.
    """

    def __init__(self, request: PlanRequest, phases: dict[str, float] | None = None) -> None:
        self.request = request
        self.phases: dict[str, float] = defaultdict(float) if phases is None else phases
        self.precision = precision_of(request.precision)
        self.costs = request.costs
        self.capacity_bytes = request.cluster.device.memory_bytes * (1.0 - request.memory_margin)
        self.gap, self.all_proved = 0.0, True
        self._found: dict[_Key, IntraPoint | None] = {}
        self._cutters: dict[Candidate, Cutter] = {}
        self._stopped: dict[_Key, float] = {}  # the limit that did not do

    def get(
        self,
        tp: int,
        size: int,
        cp: int = 1,
        experts: ExpertDegrees | None = None,
        limit_s: float = ILP_LIMIT_S,
        ends: bool = False,
    ) -> IntraPoint | None:
        """None where no layout exists. `ends`: embedding and head are units of their own (`pipeline_units`).

        Raises: StoppedError if that is not decided within `limit_s`.
        """
        key = (tp, size, cp, experts, ends)
        if key in self._found:
            return self._found[key]
        if limit_s <= self._stopped.get(key, -math.inf):
            raise StoppedError(f"no layout found within {limit_s:.3g} s at tp={tp} and micro_batch_size={size}")
        try:
            self._found[key] = self._solve(tp, size, cp, experts, limit_s, ends)
        except InfeasibleError:
            self._found[key] = None
        except StoppedError:
            self._stopped[key] = limit_s
            self.all_proved = False
            raise
        return self._found[key]

    def _solve(
        self, tp: int, size: int, cp: int, experts: ExpertDegrees | None, limit_s: float, ends: bool
    ) -> IntraPoint:
        r, start = self.request, time.perf_counter()
        _, axes = make_mesh(r.graph, ParallelConfig(tp=tp))
        env = {"b": size, "s": r.seq_len // cp}
        steps = max(1, r.global_batch_size // (size * max(1, r.cluster.num_devices // (tp * cp))))
        slack = r.pins.get("state_slack", 1.02)
        settings = IntraSettings(
            axes,
            r.cluster,
            env,
            steps,
            slack,
            r.profile,
            r.mode,
            self.precision,
            cp,
            options=r.options,
            constants=r.constants,
        )
        problem = build_problem(r.graph, settings)
        if not r.options.sequence_parallel:
            problem = with_whole_tokens(problem, r.graph)
        built = time.perf_counter()
        try:
            solution = solve(problem, limit_s)
        finally:
            solved = time.perf_counter()
            self.phases["intra-op build"] += built - start
            self.phases["intra-op solve"] += solved - built
        works = Works(
            r.graph,
            axes,
            env,
            context=cp,
            precision=self.precision,
            device_type=r.cluster.device_type,
            kernels=Kernels(
                r.mode,
                r.options.attention_in(r.mode),
                float8=self.precision.matmul is not None,
                fused_loss=r.options.fused_loss,
                context=cp,
            ),
        )
        work = workload(r.graph, solution.selection, works, experts, ends)
        point = IntraPoint(axes, solution, work, op_times(work, settings.costs))
        self.gap = max(self.gap, solution.gap)
        self.all_proved = self.all_proved and solution.status == "optimal"
        self.phases["workloads"] += time.perf_counter() - solved
        return point

    def of(self, candidate: Candidate, limit_s: float = ILP_LIMIT_S) -> IntraPoint | None:
        """The layout of a candidate; None where there is none. Raises: StoppedError."""
        spread = None
        if candidate.ep > 1:
            spread = ExpertDegrees(candidate.ep, candidate.tp, self.request.options.dispatcher)
        return self.get(candidate.tp, candidate.micro_batch_size, candidate.cp, spread, limit_s)

    def pricer(self, candidate: Candidate, limit_s: float = ILP_LIMIT_S) -> Pricer | None:
        """None where no layout exists. Raises: StoppedError."""
        point = self.of(candidate, limit_s)
        if point is None:
            return None
        config = candidate_config(candidate, self.request.pins)
        return Pricer(point.workload, config, self.costs, self.precision, point.times)

    def cutter(self, candidate: Candidate, limit_s: float = ILP_LIMIT_S) -> Cutter | ChunkCutter | None:
        """None where no layout exists. Raises: StoppedError."""
        pins = self.request.pins
        stages, recompute = pins.get("stages"), pins.get("recompute")
        stages = tuple(stages) if stages is not None else None
        if candidate.virtual_stages > 1 or SCHEDULES[candidate.schedule].split_backward:
            plain = self._plain(replace(candidate, schedule="1F1B", virtual_stages=1), limit_s)
            if plain is None:
                return None
            return ChunkCutter(
                plain, candidate.schedule, candidate.virtual_stages, self.capacity_bytes, recompute, stages
            )
        return self._plain(candidate, limit_s, stages)

    def _plain(self, candidate: Candidate, limit_s: float, stages: tuple[int, ...] | None = None) -> Cutter | None:
        """With one stage per rank and full backwards; remembered, since other schedules are bounded by it."""
        if candidate not in self._cutters:
            pricer = self.pricer(candidate, limit_s)
            if pricer is None:
                return None
            recompute = self.request.pins.get("recompute")
            self._cutters[candidate] = Cutter(pricer, self.capacity_bytes, recompute, stages)
        return self._cutters[candidate]


def no_layout(request: PlanRequest, where: str) -> InfeasibleError:
    """The error for tensor-parallel degrees, `where`, at which nothing is legal inside blocks."""
    text = f"no layout of {request.graph.name} exists at {where}"
    if not request.options.sequence_parallel:
        text += " without sequence parallelism; allow it (leave out --no-sequence-parallel), or use tp=1"
    return InfeasibleError(text)


def candidate_config(candidate: Candidate, pins: Mapping[str, Any]) -> ParallelConfig:
    """The configuration of a candidate, without stages."""
    c = candidate
    return ParallelConfig(
        dp=c.dp,
        tp=c.tp,
        pp=c.pp,
        ep=c.ep,
        cp=c.cp,
        zero_stage=c.zero_stage,
        micro_batch_size=c.micro_batch_size,
        num_micro_batches=c.num_micro_batches,
        schedule=c.schedule,
        virtual_stages=c.virtual_stages,
        recompute=pins.get("recompute", "none"),
        state_slack=pins.get("state_slack", 1.02),
        zero_replicas=c.zero_replicas,
    )


def least_memory_first(candidate: Candidate) -> tuple[int, int, int, int]:
    """Sorting key: what most likely fits comes first."""
    return candidate.micro_batch_size, -candidate.zero_stage, -candidate.tp, -candidate.pp


class QuickMemory:
    """A lower bound of memory that needs no layout: the largest value that an operation makes, split over all of tp.

    Every value that is not a view is alive at some time, by itself at least.
    """

    def __init__(self, request: PlanRequest, capacity_bytes: float) -> None:
        self.request, self.capacity_bytes = request, capacity_bytes
        self._largest: dict[int, float] = {}

    def too_big(self, candidate: Candidate) -> bool:
        """True if the largest value of the graph alone does not fit."""
        return self.largest_bytes(candidate.micro_batch_size) / (candidate.tp * candidate.cp) > self.capacity_bytes

    def largest_bytes(self, size: int) -> float:
        """Of the values that operations make for `size` sequences, on all of tp together."""
        # what selective recompute drops may be the largest value, and then it counts nowhere in the memory model
        if self.request.pins.get("recompute") == "selective":
            return 0.0
        if size not in self._largest:
            self._largest[size] = self._find(size)
        return self._largest[size]

    def _find(self, size: int) -> float:
        r = self.request
        works = Works(r.graph, (), {"b": size, "s": r.seq_len}, precision=precision_of(r.precision))
        largest = 0.0
        for block in r.graph.blocks.values():
            for node in block.nodes:
                rule = RULES.get(node.op)
                same = node.op == "dropout" and not node.attrs["p"]
                if node.op == "to":
                    before, after = (block.values[n] for n in (node.tensor_inputs[0], node.outputs[0]))
                    same = works.dtype(before) == works.dtype(after)
                if rule is None or rule.form is Form.VIEW or same:  # a view, or perhaps one
                    continue
                made = [block.values[n] for n in node.outputs if block.values[n].requires_grad]
                largest = max([largest, *(works.num_bytes(block.name, v, ()) for v in made)])
        return largest


def check_task(request: PlanRequest) -> None:
    """PinError for a sequence, margin or time limit that cannot be."""
    r = request
    if not is_count(r.seq_len):
        raise PinError(f"seq_len={r.seq_len!r}: must be a whole number of at least 1")
    parts = 2 * r.pins.get("cp", 1)
    if parts > 2 and r.seq_len % parts:
        near = max(parts, r.seq_len // parts * parts)
        raise PinError(
            f"seq_len={r.seq_len} cannot be cut into {parts} equal chunks over cp={parts // 2}; nearest legal: "
            f"seq_len={near}"
        )
    if not 0 <= r.memory_margin < 1:
        raise PinError(f"memory_margin={r.memory_margin!r}: must be at least 0 and less than 1")
    if not r.time_limit_s >= 0:
        raise PinError(f"time_limit_s={r.time_limit_s!r}: must be a number of seconds, at least 0")
    for block in r.graph.blocks.values():
        for node in block.nodes:
            if node.op == "embedding":
                table, index = (block.values[n] for n in node.tensor_inputs[:2])
                symbols = {name for size in index.shape for name in size.symbols}
                rows = table.shape[0].value
                if symbols == {"s"} and rows is not None and rows < r.seq_len:
                    raise PinError(
                        f"seq_len={r.seq_len}, but {r.graph.name} has {rows} learned positions; nearest legal: {rows}"
                    )
