"""The layouts of the candidates of a request: one per tensor-parallel degree and micro-batch size."""

from __future__ import annotations

import functools
import math
import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from autoplan.config.context_methods import ContextMethod, neighbours_of, read_method
from autoplan.config.mesh import folds
from autoplan.config.offload import ACTIVATIONS
from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.config.precision import Precision, precision_of
from autoplan.config.recompute import NONE, OFFLOAD, RecomputeMix, kinds_in, modules_of, recompute_kind
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.memory.least import LeastMemory
from autoplan.cost_models.memory.room import Room
from autoplan.cost_models.time.blocks import BlockPricer, OpTimes, op_times
from autoplan.cost_models.time.host import host_send_s
from autoplan.cost_models.time.least import LeastTime, StateSeconds
from autoplan.cost_models.time.price import Pricer
from autoplan.cost_models.work import BlockWork
from autoplan.errors import InfeasibleError, PinError
from autoplan.ir.layout import Axis
from autoplan.program.context_parallel import frozen
from autoplan.program.context_pins import (
    MethodChoice,
    chosen_methods,
    combinations,
    legal_methods,
    worth_looking_at,
)
from autoplan.program.expert_degrees import ExpertDegrees
from autoplan.program.megatron_kernels import Kernels
from autoplan.program.op_costs import OpCosts
from autoplan.program.parallel_dims import parallel_dims
from autoplan.program.problem import IntraProblem
from autoplan.program.workload import LoweredModel, lower_all, workload
from autoplan.schedules.schedule import PLAIN_SCHEDULE, SCHEDULES, num_copies
from autoplan.search.candidate_layout import CandidateLayout, least_pass_of
from autoplan.search.cuts import Cutter
from autoplan.search.host_layouts import passes_of, with_host
from autoplan.search.interleaved_cuts import ChunkCutter, LeastPass, even_cuts
from autoplan.search.intra import DEVICE_ALONE, IntraSolution, LayoutProgram, ProgramShape, SendWish, StoppedError
from autoplan.search.layout_files import LayoutFiles, folder_of_layouts, layout_data, layout_of
from autoplan.search.layout_problem import (
    LayoutCut,
    cut_at,
    cut_of,
    layout_batches,
    layout_problem,
    no_layout,
    prices_key,
    shape_key,
)
from autoplan.search.layout_store import ById, layouts_in
from autoplan.search.request import PlanRequest, offload_kinds, without_activations
from autoplan.search.state_bounds import Simulated, StateBounds

ILP_LIMIT_S = 120.0  # time limit of one integer program of layouts
ENOUGH_TOKENS = 4096  # on a rank; micro-batches with more share a layout

_Key = tuple[int, int, int, ExpertDegrees | None, bool, MethodChoice]
_Layout = tuple[tuple[Axis, ...], IntraSolution]
_Chosen = frozenset[object]  # `layouts_in` a selection
_Pass = tuple[int, int]  # id of a layout, ranks that hold each chunk
_Solved = list[tuple[int, dict[str, Any]]]  # numbers of micro-batches and their layouts, as data


class LayoutCache:
    """Layouts by (tp, micro-batch size, context), made on demand.

    Workloads are also by expert degrees and methods of context parallelism.

    Attributes:
        phases: seconds by phase, added to.
        gap: the largest gap of a layout's proof.
        all_proved: no layout was stopped by time.
        halves: the half of the search, 0 or 1, that bounds candidates of a tp, micro-batch size and cp.
    """

    def __init__(self, request: PlanRequest, phases: dict[str, float] | None = None) -> None:
        self.request = request
        self.phases: dict[str, float] = defaultdict(float) if phases is None else phases
        self.precision: Precision = precision_of(request.precision)
        self.costs: Costs = request.costs
        self.room: Room = request.room
        self.gap: float = 0.0
        self.all_proved: bool = True
        self._files = LayoutFiles(folder_of_layouts() if request.uses_cache else None)
        self._found: dict[_Key, CandidateLayout] = {}
        self._for_device: dict[_Key, CandidateLayout] = {}
        self._layouts: dict[LayoutCut, _Layout | None] = {}
        self._given: set[LayoutCut] = set()  # layouts that were not chosen here
        self._lowered: dict[tuple[LayoutCut, _Chosen, MethodChoice], LoweredModel] = {}
        # under the methods that were asked for first
        self._first_lowered: dict[tuple[LayoutCut, _Chosen], LoweredModel] = {}
        self._op_times = self._shared_op_times()
        self._stopped: dict[LayoutCut, float] = {}  # the limit that was too short
        self._worth: dict[tuple[int, int, int], list[MethodChoice]] = {}
        self._cutters: dict[ParallelConfig, Cutter] = {}
        self._least: dict[int, LeastMemory] = {}  # by the id of a layout, which this cache keeps
        self._passes: dict[_Pass, LeastPass] = {}  # likewise
        self._state_bounds: dict[_Pass, StateBounds] = {}  # likewise
        self._state_seconds: StateSeconds = self._shared_state_seconds()
        # of either half of the work of a search: what is simulated in one process is not known in the other
        self._simulated: tuple[Simulated, Simulated] = ({}, {})
        self.halves: dict[Hashable, int] = {}
        self._log: dict[LayoutCut, _Solved] = defaultdict(list)  # in the order in which they were solved

    def _shared_op_times(self) -> dict[int, tuple[BlockWork, OpTimes]]:
        """Return the times of blocks by their id, shared with searches of the same device."""
        r, c = self.request, self.request.cluster
        key = "op times", c.device, c.device_type, r.mode, r.options, r.constants, ById(r.profile)
        return r.layouts.made(key, dict)

    def _shared_state_seconds(self) -> StateSeconds:
        """Return seconds of parameters, shared with searches of the same cluster."""
        r, c = self.request, replace(self.request.cluster, price=None)
        key = "state seconds", c, r.precision, r.mode, r.options, r.constants, ById(r.profile), ById(r.graph)
        return r.layouts.made(key, dict)

    def get(
        self,
        tp: int,
        size: int,
        cp: int = 1,
        experts: ExpertDegrees | None = None,
        limit_s: float = ILP_LIMIT_S,
        ends: bool = False,
        methods: MethodChoice = (),
    ) -> CandidateLayout | None:
        """Return the layout and its work; None if no layout exists.

        Args:
            ends: embedding and head are units of their own (`pipeline_units`).
            methods: (block, name of its context-parallel method); empty: keys and values move as in frameworks.

        Raises:
            StoppedError: the layout is not decided within `limit_s`.
        """
        key = (tp, size, cp, experts, ends, methods)
        if key not in self._found:
            first = self.for_device(*key[:4], limit_s, *key[4:])
            if first is None:
                return None
            self._found[key] = self._with_host(first, key, limit_s)
        return self._found[key]

    def for_device(
        self,
        tp: int,
        size: int,
        cp: int,
        experts: ExpertDegrees | None,
        limit_s: float = ILP_LIMIT_S,
        ends: bool = False,
        methods: MethodChoice = (),
    ) -> CandidateLayout | None:
        """Return the layout that is the fastest for the device, and its work, as `get` does."""
        key = (tp, size, cp, experts, ends, methods)
        cut = cut_at(tp, size, cp, experts)
        layout = self._layout(cut, limit_s)
        if layout is not None and key not in self._for_device:
            self._for_device[key] = self._worked(layout, cut, key)
        return None if layout is None else self._for_device[key]

    def _worked(self, layout: _Layout, cut: LayoutCut, key: _Key) -> CandidateLayout:
        start = time.perf_counter()
        made = self._work(*layout, cut, key[3], key[4], key[5])
        self.phases["workloads"] += time.perf_counter() - start
        return made

    def _with_host(self, first: CandidateLayout, key: _Key, limit_s: float) -> CandidateLayout:
        """Return the layout, or one with fewer collectives where the host decides (`search.host_layouts`)."""
        tp, size, cp, experts = key[:4]
        cut, send_s = cut_at(tp, size, cp, experts), host_send_s(self.costs)
        if tp == 1 or not send_s or self.request.of_framework or self._solved_cut(cut) in self._given:
            return first
        return with_host(
            first,
            send_s,
            self.room.device_bytes,
            lambda wish: self._worked(self._solve(*self._solved_cut(cut), limit_s, wish), cut, key),
            lambda point: passes_of(point, cut, experts, self.costs, self.precision),
        )

    def _layout(self, cut: LayoutCut, limit_s: float) -> _Layout | None:
        key = self._solved_cut(cut)
        if key in self._layouts:
            return self._layouts[key]
        if limit_s <= self._stopped.get(key, -math.inf):
            raise StoppedError(f"no layout found within {limit_s:.3g} s at tp={key[0]} and micro_batch_size={key[1]}")
        try:
            self._layouts[key] = self._solve(*key, limit_s)
        except InfeasibleError:
            self._layouts[key] = None
        except StoppedError:
            self._stopped[key] = limit_s
            self.all_proved = False
            raise
        return self._layouts[key]

    def adopt(self, cut: LayoutCut, solution: IntraSolution) -> None:
        """Take a layout that was solved for another task with the same graph and `cut` (see `layout_problem`)."""
        axes = parallel_dims(self.request.graph, ParallelConfig(tp=cut[0])).layout_axes
        self._layouts[self._solved_cut(cut)] = axes, solution
        self._given.add(self._solved_cut(cut))

    # -- layouts that another process of the same search solved ------------------------------------------------------

    def open_cuts(self, candidates: Iterable[ParallelConfig]) -> list[LayoutCut]:
        """Return the cuts of candidates whose layouts are not known."""
        cuts = dict[LayoutCut, None]()
        for c in candidates:
            cuts[self._solved_cut(cut_of(c, self._experts(c)))] = None
            if c.cp > 1 and not c.methods:
                cuts[self._solved_cut((c.tp, c.micro_batch_size, c.cp, False))] = None
        return [cut for cut in cuts if cut not in self._layouts]

    def open_methods(self, candidates: Iterable[ParallelConfig]) -> list[tuple[int, int, int]]:
        """Return tp, micro-batch size and cp of candidates whose methods of context parallelism are to be compared."""
        asked = dict.fromkeys((c.tp, c.micro_batch_size, c.cp) for c in candidates if c.cp > 1 and not c.methods)
        return [key for key in asked if key not in self._worth] if "context_method" not in self.request.pins else []

    def solve(self, cut: LayoutCut, limit_s: float) -> None:
        """Solve the layout of a cut, unless `limit_s` is too short."""
        with suppress(StoppedError):
            self._layout(cut, limit_s)

    def solved(self, cut: LayoutCut) -> tuple[_Solved, bool, float | None]:
        """Return what `solve` found for a cut: layouts, whether there is one, and the limit that was too short."""
        return self._log[cut], self._layouts.get(cut) is not None, self._stopped.get(cut)

    def take(self, cut: LayoutCut, found: tuple[_Solved, bool, float | None]) -> None:
        """Take what another process found for a cut, as if it had been found here."""
        known, exists, stopped_s = found
        key = prices_key(self.request, self.costs, cut)
        made = [(number, *layout_of(data)) for number, data in known]
        for each in made:
            self.request.layouts.keep(key, *each)
        if exists and all(solution.status == "optimal" for _, _, solution in made):
            self._layouts[cut] = self._solve(*cut, 0.0)  # it is in the store
        elif exists:
            self._layouts[cut] = self._counted(*made[-1][1:])
        elif stopped_s is None:
            self._layouts[cut] = None
        else:
            self._stopped[cut], self.all_proved = stopped_s, False

    def learn_methods(self, key: tuple[int, int, int], found: list[MethodChoice] | None) -> None:
        """Take the methods of a tp, micro-batch size and cp that another process compared; None: it has none."""
        if found is not None:
            self._worth[key] = found

    def known_methods(self, key: tuple[int, int, int]) -> list[MethodChoice] | None:
        """Return the methods that were compared; None if they are not known."""
        return self._worth.get(key)

    def _solved_cut(self, cut: LayoutCut) -> LayoutCut:
        tp, size, cp, own = cut
        return tp, self._solved_size(tp, size, cp), cp, own

    def _solved_size(self, tp: int, size: int, cp: int) -> int:
        """Return the micro-batch for which the layout of another is solved: the least with as large a part of tp.

        It has at least `ENOUGH_TOKENS`: from there on times are all but proportional to the tokens.
        """
        least = math.ceil(ENOUGH_TOKENS * cp / self.request.seq_len)
        part = math.gcd(size, tp)
        return next((n for n in range(least, size) if math.gcd(n, tp) == part), size)

    def _solve(self, tp: int, size: int, cp: int, own: bool, limit_s: float, wish: SendWish = DEVICE_ALONE) -> _Layout:
        """Return the layout of a cut, from an earlier search of the request's store if it is known there."""
        cut, until = (tp, size, cp, own), time.perf_counter() + limit_s
        prices, number = prices_key(self.request, self.costs, cut), layout_batches(self.request, cut)
        key = prices if wish is DEVICE_ALONE else (prices, wish)

        def kept_or_solved(number: int) -> _Layout:
            began = time.perf_counter() - self._solving_s()
            try:
                found = self._files.get(key, number, lambda: self._solve_anew(prices, cut, until, number, wish))
                if wish is DEVICE_ALONE:
                    self._log[cut].append((number, layout_data(*found)))
                return found
            finally:
                self.phases["layout files"] += time.perf_counter() - self._solving_s() - began

        return self._counted(*self.request.layouts.get(key, number, kept_or_solved))

    def _counted(self, axes: tuple[Axis, ...], solution: IntraSolution) -> _Layout:
        self.gap = max(self.gap, solution.gap)
        self.all_proved = self.all_proved and solution.status == "optimal"
        return axes, solution

    def _solving_s(self) -> float:
        return sum(self.phases.get(name, 0.0) for name in ("intra-op build", "intra-op solve"))

    def _solve_anew(self, prices: object, cut: LayoutCut, until_s: float, number: int, wish: SendWish) -> _Layout:
        """Solve the program of a cut, which is made once for all numbers of micro-batches."""
        start = time.perf_counter()
        built = start
        try:
            axes, program = self.request.layouts.made(("program", prices), lambda: self._program(cut))
            built = time.perf_counter()
            return axes, program.solve(number, max(0.0, until_s - built), wish)
        finally:
            self.phases["intra-op build"] += built - start
            self.phases["intra-op solve"] += time.perf_counter() - built

    def _program(self, cut: LayoutCut) -> tuple[tuple[Axis, ...], LayoutProgram]:
        axes, problem = layout_problem(self.request, self.costs, cut)

        def shape_of(given: IntraProblem) -> ProgramShape:
            key = "shape", shape_key(self.request, cut)
            return self.request.layouts.made(key, lambda: ProgramShape.of(given))

        return axes, LayoutProgram(problem, shape_of=shape_of)

    def _work(
        self,
        axes: tuple[Axis, ...],
        solution: IntraSolution,
        cut: LayoutCut,
        experts: ExpertDegrees | None,
        ends: bool,
        methods: MethodChoice,
    ) -> CandidateLayout:
        r, store = self.request, self.request.layouts
        sizes = axes, cut, tuple(r.env(*cut[1:3]).items())
        settings = (
            r.precision,
            r.cluster.device_type,
            r.mode,
            r.options.of_operations,
            modules_of(r.pins.get("recompute")),
        )
        chosen = store.made(("layouts", ById(solution.selection)), lambda: layouts_in(solution.selection))
        key = ById(r.graph), chosen, sizes, settings, methods  # no price: devices share it
        made = self._lowered.get((cut, chosen, methods))  # shared by all degrees of experts
        if made is None:
            first = self._first_lowered.get((cut, chosen))

            def lowered() -> LoweredModel:
                return lower_all(r.graph, solution.selection, self._op_costs(axes, cut, methods), first)

            made = self._lowered[cut, chosen, methods] = store.made(("lowered", key), lowered)
            self._first_lowered.setdefault((cut, chosen), made)
        shared = made
        work = store.made(
            ("work", key, experts, ends),
            lambda: workload(r.graph, solution.selection, shared.op_costs, experts, ends, shared),
        )
        if (like := self.request.facts.like) is not None:  # recompute that the stack cannot do is not looked at
            able = like.can.recompute
            choices = ({h: v for h, v in c.items() if recompute_kind(h).name in able} for c in work.unit_choices)
            work = replace(work, unit_choices=tuple(choices))
        return CandidateLayout(solution, work, op_times(work, self.costs, self._op_times))

    def _op_costs(self, axes: tuple[Axis, ...], cut: LayoutCut, methods: MethodChoice) -> OpCosts:
        r, (_, size, cp, _) = self.request, cut
        return OpCosts(
            r.graph,
            axes,
            r.env(size, cp),
            context=cp,
            precision=self.precision,
            device_type=r.cluster.device_type,
            kernels=Kernels(
                r.mode,
                r.options.attention_in(r.mode),
                float8=self.precision.matmul is not None,
                loss=r.options.fused_loss,
                context=cp,
                modules=modules_of(r.pins.get("recompute")),
                fused_accumulation=r.options.fused_accumulation,
                fused_norms=r.options.fused_norms and r.mode is Mode.EAGER,
            ),
            methods={block: read_method(name, cp) for block, name in methods},
        )

    # -- methods of context parallelism -----------------------------------------------------------------------------

    def with_methods(self, candidate: ParallelConfig, limit_s: float = ILP_LIMIT_S) -> list[ParallelConfig]:
        """Return one candidate per useful combination of context-parallel methods.

        It is the candidate itself if there is nothing to decide; empty if its tp excludes the pinned methods. A method
        is left out if another one of the same block is at least as good in both passes and in every memory term.

        Raises:
            StoppedError: the layout is not decided within `limit_s`.
        """
        c = candidate
        if c.cp == 1 or c.methods or self._layout((c.tp, c.micro_batch_size, c.cp, False), limit_s) is None:
            return [c]
        found = self.methods_of(c.tp, c.micro_batch_size, c.cp, limit_s)
        if c.spreads_experts:  # the sub-axes of products must hold the experts, too
            neighbours = [neighbours_of((name for _, name in chosen), c.cp) for chosen in found]
            degrees = (c.dp, c.cp, c.tp, c.ep, c.expert_tp)
            found = [x for x, n in zip(found, neighbours, strict=True) if folds(*degrees, n, c.zero_replicas)]
        return [c.but(context_method=dict(chosen) or None) for chosen in found]

    def decided(self, candidate: ParallelConfig, limit_s: float = ILP_LIMIT_S) -> ParallelConfig:
        """Return the candidate with methods: of several, those that keep least. Raises StoppedError."""
        found = self.with_methods(candidate, limit_s)
        return min(found, key=lambda c: self._kept(c, limit_s)) if len(found) > 1 else (*found, candidate)[0]

    def methods_of(self, tp: int, size: int, cp: int, limit_s: float = ILP_LIMIT_S) -> list[MethodChoice]:
        """Return the combinations of `with_methods`; empty if no layout exists."""
        key, pinned = (tp, size, cp), self.request.pins.get("context_method")
        if pinned is not None:
            try:
                chosen = chosen_methods(self.request.graph, ParallelConfig(tp=tp, cp=cp, context_method=pinned))
            except PinError:  # not possible with this tp
                return []
            return [frozen({block: method.name for block, method in chosen.items()})]
        if key not in self._worth:
            if self._layout((*key, False), limit_s) is None:
                return []
            legal = legal_methods(self.request.graph, cp, tp)
            self._worth[key] = combinations(worth_looking_at(legal, functools.partial(self._figures, key)))
        return self._worth[key]

    def _figures(
        self, key: tuple[int, int, int], method: ContextMethod, blocks: Sequence[str]
    ) -> dict[str, tuple[float, ...]]:
        """Return for each of these blocks under one method the seconds of both passes, and all kinds of bytes."""
        tp, size, cp = key
        methods = tuple((block, method.name) for block in sorted(blocks))
        point = self.for_device(tp, size, cp, None, methods=methods)
        if point is None:
            return {}
        config = ParallelConfig(tp=tp, cp=cp, zero_stage=0, micro_batch_size=size)
        pricer = BlockPricer(point.workload, config, self.costs, self.precision)
        out = {}
        for block in blocks:
            cost = pricer.cost(point.workload.blocks[block], point.times[block])
            out[block] = (cost.forward_s.mid, cost.backward_s.mid, *map(float, point.workload.activation_bytes[block]))
        return out

    def of(self, candidate: ParallelConfig, limit_s: float = ILP_LIMIT_S) -> CandidateLayout | None:
        """Return the layout of a candidate; None if there is none. Raises StoppedError."""
        c = self.decided(candidate, limit_s)
        on_host = ACTIVATIONS in c.offload or OFFLOAD in kinds_in(self.request.pins.recompute or NONE)
        chosen = self.for_device if on_host else self.get
        return chosen(c.tp, c.micro_batch_size, c.cp, self._experts(c), limit_s, methods=c.methods)

    def _experts(self, candidate: ParallelConfig) -> ExpertDegrees | None:
        c, r = candidate, self.request
        return ExpertDegrees(c.ep, c.expert_tp, r.options.dispatcher, r.executed) if c.spreads_experts else None

    def known(self, candidate: ParallelConfig) -> CandidateLayout:
        """Return the layout of a candidate that has one; InfeasibleError if there is none."""
        point = self.of(candidate)
        if point is None:
            raise no_layout(self.request, f"tp={candidate.tp}")
        return point

    def _kept(self, candidate: ParallelConfig, limit_s: float) -> float:
        point = self.of(candidate, limit_s)
        return math.inf if point is None else sum(point.workload.unit_saved)

    def least_memory(self, point: CandidateLayout) -> LeastMemory:
        """Return the lower bound of the memory of a workload."""
        known = self._least.get(id(point))
        if known is None:
            r, pinned = self.request, self.request.pins.recompute
            on_host = pinned is not None and OFFLOAD in kinds_in(pinned)
            made = LeastMemory(point.workload, self.precision, r.cluster, r.mode, r.options, on_host, pinned is None)
            known = self._least[id(point)] = made
        return known

    def shortage(self, candidate: ParallelConfig) -> str | None:
        """Return the memory term of a candidate that cannot fit, whatever its cut and recompute are; None if it may."""
        point, least = self.of(candidate), self.least_pass(candidate)
        if point is None or least is None:
            return None
        cuts: tuple[tuple[int, ...], ...] | None = None
        if candidate.stages is not None:
            cuts = (candidate.stages,)
        elif not SCHEDULES[candidate.schedule].windows:
            cuts = even_cuts(least.seconds, candidate.pp, candidate.virtual_stages)
        return self.least_memory(point).shortage(candidate, self.room, cuts)

    def least_pass(self, candidate: ParallelConfig, limit_s: float = ILP_LIMIT_S) -> LeastPass | None:
        """Return the seconds of units that pp, dp and ZeRO do not change; None if there is no layout.

        Raises:
            StoppedError: the layout is not decided within `limit_s`.
        """
        return self._least_pass(self.of(candidate, limit_s), candidate)

    def device_pass(self, candidate: ParallelConfig, limit_s: float = ILP_LIMIT_S) -> LeastPass | None:
        """Return those of the layout that is the fastest for the device. Whichever is taken, the device takes as long.

        Raises: as `least_pass`.
        """
        c = self.decided(candidate, limit_s)
        point = self.for_device(c.tp, c.micro_batch_size, c.cp, self._experts(c), limit_s, methods=c.methods)
        return self._least_pass(point, candidate)

    def _least_pass(self, point: CandidateLayout | None, candidate: ParallelConfig) -> LeastPass | None:
        if point is None:
            return None
        key = id(point), num_copies(candidate.schedule)
        if key not in self._passes:
            pricer = BlockPricer(point.workload, candidate, self.costs, self.precision)
            self._passes[key] = least_pass_of(point, pricer)
        return self._passes[key]

    def state_bounds(
        self, members: Sequence[ParallelConfig], below_s: float = math.inf
    ) -> list[tuple[float, float]] | None:
        """Return the bounds of `autoplan.search.state_bounds` for candidates with the same work inside blocks.

        None if there is no layout.

        Raises:
            StoppedError: the layout is not decided.
        """
        known = self._bounds_of(members[0])
        return None if known is None else known.of(members, self.room, below_s)

    def offloaded_bounds_s(self, members: Sequence[ParallelConfig], below_s: float = math.inf) -> list[float]:
        """Return bounds of candidates with the same work inside blocks, with any kind of offload that is searched.

        Args:
            below_s: bounds that are not below it are not made stronger.

        Raises:
            StoppedError: the layout is not decided.
        """
        known = self._bounds_of(members[0].but(offload=(ACTIVATIONS,)))
        if known is None:
            return [0.0] * len(members)
        return known.offloaded_s(members, [offload_kinds(self.request, c) for c in members], self.room, below_s)

    def _bounds_of(self, c: ParallelConfig) -> StateBounds | None:
        """Return the bounds for candidates with the work of this one in blocks; None if there is no layout."""
        point, least = self.of(c), self.least_pass(c)
        if point is None or least is None:
            return None
        key = id(point), num_copies(c.schedule)
        known = self._state_bounds.get(key)
        if known is None:
            seconds = LeastTime(point.workload, point.times, self.costs, self.precision, self._state_seconds)
            fixed = self.request.pins.recompute is not None
            simulated = self._simulated[self.halves.get((c.tp, c.micro_batch_size, c.cp), 0)]
            known = StateBounds(seconds, self.least_memory(point), least.seconds, fixed, simulated)
            self._state_bounds[key] = known
        return known

    def pricer(self, candidate: ParallelConfig, limit_s: float = ILP_LIMIT_S) -> Pricer | None:
        """Return the prices of a candidate; None if no layout exists. Raises StoppedError."""
        point = self.of(candidate, limit_s)
        if point is None:
            return None
        config = without_activations(candidate)
        # with fused kernels the bytes and seconds of single regions are not known
        searched = "recompute" not in self.request.pins and self.request.mode is Mode.EAGER
        activations = ACTIVATIONS in candidate.offload
        alike = self.request.recompute_mix is not RecomputeMix.ANY
        return Pricer(point.workload, config, self.costs, self.precision, point.times, searched, activations, alike)

    def known_pricer(self, candidate: ParallelConfig) -> Pricer:
        """Return the prices of a candidate that has a layout; InfeasibleError if there is none."""
        pricer = self.pricer(candidate)
        if pricer is None:
            raise no_layout(self.request, f"tp={candidate.tp}")
        return pricer

    def cutter(
        self, candidate: ParallelConfig, limit_s: float = ILP_LIMIT_S, kept: ChunkCutter | None = None
    ) -> Cutter | ChunkCutter | None:
        """Return the cutter of a candidate, None if no layout exists. `kept`: see ChunkCutter. Raises StoppedError."""
        stages, recompute = candidate.stages, self.request.pins.recompute
        if not SCHEDULES[candidate.schedule].windows:
            plain = self._plain(replace(candidate, schedule=PLAIN_SCHEDULE, virtual_stages=1), limit_s)
            if plain is None:
                return None
            least = self.least_pass(candidate, limit_s)
            if least is None:
                return None
            return ChunkCutter(plain, candidate.schedule, candidate.virtual_stages, least, recompute, stages, kept)
        return self._plain(candidate, limit_s, stages)

    def _plain(self, candidate: ParallelConfig, limit_s: float, stages: tuple[int, ...] | None = None) -> Cutter | None:
        """Return the cutter for one stage per rank and full backwards; cached, since it bounds other schedules."""
        if candidate not in self._cutters:
            pricer = self.pricer(candidate, limit_s)
            if pricer is None:
                return None
            pinned, mix = self.request.pins.recompute, self.request.recompute_mix
            self._cutters[candidate] = Cutter(pricer, self.room, pinned, stages, mix)
        return self._cutters[candidate]
