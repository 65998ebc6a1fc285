"""Lower bounds of the seconds of units at given degrees. They cost microseconds where a `Pricer` costs milliseconds.

They are the terms of a `Pricer` for which degrees of parameters (pp, dp, ZeRO, offload) matter, as numbers instead of
quantities, shared by all candidates that agree in what a term depends on: operations and collectives inside blocks,
ZeRO's traffic as far as it shows, sums of gradients, the update. Left out, because they only add to it: sends, waiting
for ranks and for measured costs of the host, fixed costs of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.config.precision import Precision
from autoplan.config.recompute import FULL, NONE, OFFLOAD, SELECTIVE, recompute_kind, region_groups
from autoplan.cost_models.arrays import Array
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.network.groups import mesh_groups
from autoplan.cost_models.time.blocks import BlockPricer, OpTimes
from autoplan.cost_models.time.states import REPLICAS, StatePricer, narrow, reduced_beside
from autoplan.cost_models.work import BlockWork, Gathered, Workload
from autoplan.schedules.schedule import num_copies
from autoplan.streams import has_streams

# Seconds of parameters by what they depend on, for all workloads of a search. Equal parameters share them.
StateSeconds = dict[object, float]
Passes = tuple[Array, Array]


@dataclass(frozen=True)
class LeastSeconds:
    """Lower bounds of the seconds of units, by kind of unit.

    Attributes:
        forward, backward: of every pass.
        whole: recomputing the layers of a unit in full.
        once: the whole model's traffic of ZeRO once per step.
        update: the update of the whole model.
    """

    forward: Array
    backward: Array
    whole: Array
    once: float
    update: float


@dataclass(frozen=True)
class _Pass:
    """Seconds by block that parameters do not change: operations, collectives inside blocks, waiting for the host.

    `again`: all of full recompute; `computed_again`: its operations.
    """

    forward: Array
    backward: Array
    again: Array
    computed_again: Array
    sent_forward: Array
    sent_backward: Array
    waited_forward: Array
    waited_backward: Array


@dataclass(frozen=True)
class _Unit:
    """The part of a bound that does not depend on the number of stages per rank.

    Attributes:
        seconds: without traffic once per step.
        moved: by block, the seconds of a gather, of a reduction, of sums over replicas.
        passes: forward and backward by block.
    """

    seconds: LeastSeconds
    pricer: StatePricer
    moved: tuple[Array, Array, Array]
    passes: Passes


class LeastTime:
    """The bounds of the module for one workload.

    Args:
        times: `op_times` of the workload.
        known: seconds of parameters, shared by the workloads of a search.
    """

    def __init__(
        self, workload: Workload, times: Mapping[str, OpTimes], costs: Costs, precision: Precision, known: StateSeconds
    ) -> None:
        self.workload = workload
        self.times = times
        self.costs = costs
        self.precision = precision
        self.known = known
        self.blocks: tuple[BlockWork, ...] = tuple(workload.blocks.values())
        self._at = {name: i for i, name in enumerate(workload.blocks)}
        kinds = workload.unit_kinds
        self._first = [kinds.index(kind) for kind in range(max(kinds) + 1)]
        # equal parameters are priced once
        self._params = [known.setdefault((b.params, narrow(b)), float(len(known))) for b in self.blocks]
        counts = [workload.unit_kinds.count(kind) for kind in range(len(self._first))]
        self.counts: Array = np.array(counts, dtype=float)
        self._all = self._matrix(layers_only=False)
        self._layers = self._matrix(layers_only=True)
        self._passes: dict[int, _Pass] = {}
        self._by_kind: dict[int, tuple[Array, Array, Array]] = {}
        self._units: dict[object, _Unit] = {}
        self._terms: dict[object, Array] = {}
        self._found: dict[object, LeastSeconds] = {}

    def _matrix(self, *, layers_only: bool) -> Array:
        """Return how often each block (columns) occurs in a unit of each kind (rows)."""
        out, w = np.zeros((len(self._first), len(self.blocks))), self.workload
        for row, unit in zip(out, self._first, strict=True):
            for name, layer in zip(w.units[unit], w.is_layer[unit], strict=True):
                row[self._at[name]] += layer or not layers_only
        return out

    @cached_property
    def kinds(self) -> NDArray[np.int64]:
        """The kind of every unit."""
        return np.array(self.workload.unit_kinds)

    def least_by_kind(self, values: Array) -> Array:
        """Return the least of values by unit for every kind of unit."""
        out = np.full(len(self.counts), np.inf)
        np.minimum.at(out, self.kinds, values)
        return out

    # -- recompute ----------------------------------------------------------------------------------------------------

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The recompute choices of the model, first `none` and `full`."""
        found = dict.fromkeys(name for choices in self.workload.unit_choices for name in choices)
        return (NONE, FULL, SELECTIVE, *found)

    @cached_property
    def _kept_by_unit(self) -> Array:
        """The bytes that a unit (columns) keeps under a choice (rows); inf if it has none such."""
        w = self.workload
        out = np.full((len(self.names), len(w.units)), np.inf)
        out[0] = w.unit_saved
        for u, layers in enumerate(w.layers):
            choices = {FULL: w.unit_kept[u], SELECTIVE: w.unit_selective[u]} if layers else {}
            choices |= w.unit_choices[u] if layers and w.unit_choices else {}
            for name in self.names[1:]:
                out[self.names.index(name), u] = choices.get(name, np.inf)
        return out

    @cached_property
    def kept(self) -> Array:
        """The fewest bytes that a unit of each kind (columns) keeps under a choice (rows); inf if it has none such.

        Of the last unit those that wait between two parts of a backward.
        """
        waiting = self._kept_by_unit.copy()
        waiting[:, -1] = np.maximum(0.0, waiting[:, -1] - self.workload.last_spent)
        return self._least_of_kinds(waiting)

    @cached_property
    def transient(self) -> Array:
        """Likewise the fewest bytes that its backward needs for a time: what is not kept comes back before it."""
        w, kept = self.workload, self._kept_by_unit
        by_unit = np.array(w.unit_transient) + np.maximum(0.0, np.array(w.unit_saved) - kept)
        by_unit[self.names.index(FULL)] = w.unit_recompute_transient
        return self._least_of_kinds(np.where(np.isinf(kept), np.inf, by_unit))

    def _least_of_kinds(self, by_unit: Array) -> Array:
        out = np.full((len(self.names), len(self._first)), np.inf)
        np.minimum.at(out.T, self.kinds, by_unit.T)
        return out

    @cached_property
    def on_host(self) -> NDArray[np.bool_]:
        """True for the choices that keep activations on the host."""
        return np.array([recompute_kind(name).on_host for name in self.names])

    @cached_property
    def again(self) -> Array:
        """The seconds that a choice adds to the backward of a unit of each kind, but for `full`: 0."""
        if self.costs.measures_host:  # recompute may hide behind waiting for the host
            return np.zeros(self.kept.shape)
        each = np.zeros((len(self.names), len(self.blocks)))
        for i, block in enumerate(self.blocks):
            times = self.times[block.name]
            for k, name in enumerate(self.names):
                if name == SELECTIVE:
                    each[k, i] = times.selective.mid
                elif name == OFFLOAD:
                    each[k, i] = self._moved_s(block)
                elif name not in (NONE, FULL):
                    each[k, i] = sum(times.groups[g].mid for g in region_groups(name) if g in times.groups)
        out: Array = each @ self._layers.T
        return out

    def _moved_s(self, block: BlockWork) -> float:
        """Return the seconds that moving a block's activations to the host and back adds to a backward, at least."""
        costs = self.costs
        if not costs.cluster.offloads:
            return 0.0
        copy = costs.host_copy_s(block.offloaded_bytes).mid
        if not has_streams(costs.cluster.device_type):
            return 2.0 * copy
        return 2.0 * copy * min(1.0, StatePricer(ParallelConfig(), costs, self.precision, {}).contention)

    # -- seconds at given degrees -------------------------------------------------------------------------------------

    def of(self, config: ParallelConfig) -> LeastSeconds:
        """Return the bounds at these degrees."""
        c, copies = config, num_copies(config.schedule)
        beside = reduced_beside(c, self.costs)
        key = (c.pp, c.dp, c.zero_stage, c.zero_replicas, c.num_micro_batches, c.offload, copies, beside)
        if (*key, c.virtual_stages) not in self._found:
            if key not in self._units:
                self._units[key] = self._made(c)
            unit = self._units[key]
            self._found[*key, c.virtual_stages] = replace(unit.seconds, once=self._once(c, unit))
        return self._found[*key, c.virtual_stages]

    def passes(self, config: ParallelConfig) -> tuple[Array, Array, Array]:
        """Return by kind of unit the seconds of a forward, of a backward, and of its part for gradients of weights.

        They are those that parameters do not change.
        """
        copies = num_copies(config.schedule)
        if copies not in self._by_kind:
            p = self._pass_of(config)
            weight = np.array([self.times[block.name].weight.mid for block in self.blocks])
            forward = self._all @ (p.forward + p.sent_forward + p.waited_forward)
            backward = self._all @ (p.backward + p.sent_backward + p.waited_backward)
            self._by_kind[copies] = forward, backward, np.minimum(self._all @ weight, backward)
        return self._by_kind[copies]

    def inputs(self, config: ParallelConfig) -> Array:
        """Return by kind of unit the seconds of a backward without those of gradients of weights, likewise."""
        _, backward, weight = self.passes(config)
        return backward - weight

    def _pass_of(self, config: ParallelConfig) -> _Pass:
        copies = num_copies(config.schedule)
        if copies not in self._passes:
            self._passes[copies] = self._pass(config)
        return self._passes[copies]

    def _made(self, c: ParallelConfig) -> _Unit:
        p = self._pass_of(c)
        pricer = StatePricer(c, self.costs, self.precision, mesh_groups(c, self.workload.axes))
        gather, reduce, across, accumulate, update = self._of_states(pricer)
        forward = p.forward + p.sent_forward + p.waited_forward
        backward = p.backward + p.sent_backward + p.waited_backward + accumulate
        hidden = np.zeros(len(self.blocks))
        each = reduce * pricer.scatters
        if c.zero_stage == 2:
            backward = backward + _beside(each, p.backward * self.costs.options.overlap_zero, pricer)
        elif c.zero_stage == 3:
            again = np.array([b.gathered is Gathered.TWICE or self.costs.mode is Mode.FUSED for b in self.blocks])
            moved, behind = gather * again + each, p.backward + p.sent_backward
            shown = _beside(moved, behind, pricer)
            forward, backward = forward + _beside(gather, p.forward, pricer), backward + shown
            hidden = np.maximum(0.0, shown - _beside(moved, behind + p.computed_again, pricer))
        seconds = LeastSeconds(
            self._all @ forward,
            self._all @ backward,
            np.maximum(0.0, self._layers @ (p.again - hidden)),
            0.0,
            float(self.counts @ self._all @ update),
        )
        return _Unit(seconds, pricer, (gather, reduce, across), (forward, backward))

    def _once(self, c: ParallelConfig, unit: _Unit) -> float:
        """Return the seconds of ZeRO's traffic once per step (`Pricer.moved_once_s`), over all ranks."""
        if not has_streams(self.costs.cluster.device_type):
            return 0.0
        states, passes, (gather, reduce, across) = unit.pricer, unit.passes, unit.moved
        options, count = self.costs.options, self.counts @ self._all
        hides = states.hides if options.overlap_zero else 0.0
        window = ((c.virtual_stages - 1) * min(c.pp, c.num_micro_batches) + 1) / c.virtual_stages
        parts = [(across, passes[1], hides)]
        if not states.scatters:
            parts[0] = (reduce + across, passes[1], hides)
        if c.zero_stage in (1, 2):
            parts.append((gather, passes[0], hides if options.overlap_gather else 0.0))
        out = 0.0
        for sizes, computed, share in parts:
            total = float(count @ sizes)
            # longer passes than these bounds may hide more
            hidden = share * window * float(count @ computed) if self._exact and c.zero_stage < 3 else np.inf
            shown = max(0.0, total - hidden) if share else total
            out += shown + states.contention * (total - shown)
        return out

    @cached_property
    def _exact(self) -> bool:
        """True if the seconds of passes are not only bounds: nothing is measured, and no collective is left out."""
        coupled = any(c.axis in ("dp", "batch") and c.per != "step" for block in self.blocks for c in block.comms)
        return self.costs.profile is None and not coupled

    def _pass(self, config: ParallelConfig) -> _Pass:
        pricer = BlockPricer(self.workload, config, self.costs, self.precision)
        rows = []
        for block in self.blocks:
            times = self.times[block.name]
            forward, backward = pricer.least_s(block, times)
            waited = (0.0, 0.0) if self.costs.measures_host else pricer.waited_s(block, times)
            f, b = times.forward.mid, times.backward.mid
            again = pricer.least_again_s(block, times, forward + waited[0])
            rows.append((f, b, again, times.again.mid, forward - f, backward - b, *waited))
        return _Pass(*np.array(rows).T)

    def _of_states(self, pricer: StatePricer) -> tuple[Array, Array, Array, Array, Array]:
        """Return by block the seconds of a gather, of a reduction, of sums over replicas, of adding, of the update."""
        c, groups = pricer.config, pricer.groups
        shards = (*(groups[name] for name in REPLICAS.values()), pricer.by_tensor, c.offload, pricer.moves_once)
        reduces = c.zero_stage > 0, pricer.reduction, pricer.reduces_beside
        runs = c.num_micro_batches // num_copies(c.schedule)
        shares = (pricer.share(False), pricer.share(True))
        terms: tuple[tuple[object, Callable[[BlockWork], float]], ...] = (
            (("gather", c.zero_stage > 0, *shards), lambda b: pricer.traffic_s(b)[0]),
            (("reduce", *reduces, *shards, pricer.host_sum_copies), lambda b: pricer.traffic_s(b)[1]),
            (("across", *shares, groups["zero_replicas"], pricer.moves_once), lambda b: pricer.across_s(b)),
            (("add", shares if pricer.scatters else 1, c.zero_stage >= 2), lambda b: pricer.added(b).mid),
            (
                ("update", *shares, c.offload, pricer.holds_once),
                lambda b: pricer.optimizer(b).mid + pricer.moved(b).mid,
            ),
        )
        gather, reduce, across, add, update = (self._of_blocks(key, of) for key, of in terms)
        return gather, reduce, across, add * ((runs - 1) / runs), update

    def _of_blocks(self, key: object, of: Callable[[BlockWork], float]) -> Array:
        """Return a term by block; blocks with equal parameters, also of other workloads, share it."""
        found = self._terms.get(key)
        if found is None:
            each = [self._seconds((key, self._params[i]), of, b) for i, b in enumerate(self.blocks)]
            found = self._terms[key] = np.array(each)
        return found

    def _seconds(self, key: object, of: Callable[[BlockWork], float], block: BlockWork) -> float:
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = of(block)
        return found


def _beside(moved: Array, computed: Array, states: StatePricer) -> Array:
    """Return the seconds of ZeRO's traffic beside computing (`states._shown`)."""
    shown = np.maximum(0.0, moved - states.hides * computed)
    out: Array = shown + states.block_contention * (moved - shown)
    return out
