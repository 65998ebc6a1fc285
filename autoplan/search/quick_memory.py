"""Lower bounds of memory that need no layout."""

from __future__ import annotations

from collections import Counter
from functools import cached_property

from autoplan.config.offload import of_states
from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.config.precision import ONE_SCALE, precision_of
from autoplan.config.recompute import SELECTIVE, modules_of
from autoplan.cost_models.memory.parameters import ParameterMemory, States, stores_8_bits
from autoplan.cost_models.work import ParameterKind, ParamWork
from autoplan.ops.products import packed_weights
from autoplan.ops.record import OpKind, Trait
from autoplan.ops.saved import Form
from autoplan.ops.table import op_record
from autoplan.program.op_costs import OpCosts
from autoplan.program.token_dispatch_layouts import expert_weights
from autoplan.schedules.schedule import num_copies
from autoplan.search.request import PlanRequest, offload_kinds
from autoplan.units import ORDER_OF_SUMS

_CLOSE = 1 + ORDER_OF_SUMS


class QuickMemory:
    """Lower bounds of memory that need no layout.

    The largest value that an operation makes, split over all of tp: every value that is not a view is alive at some
    time, at least by itself. Parameters and optimizer state, split over as many ranks as can be: some rank of a
    pipeline holds at least its share.
    """

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.capacity_bytes: int = request.cluster.device.memory_bytes
        self._largest: dict[int, float] = {}
        self._terms: dict[object, str | None] = {}

    def shortage(self, candidate: ParallelConfig, *, states: bool) -> str | None:
        """Return the term of memory that cannot fit, whatever the layout is; None if all may.

        Args:
            states: also look at parameters and optimizer state. A candidate without offload is then too big only if
                it is with every kind of offload that a search tries.
        """
        c, r = candidate, self.request
        if self.too_big(c):
            return "activations"
        if not states:
            return None
        kinds = (c.offload,) if c.offload or "offload" in r.pins else ((), *offload_kinds(r, c))
        terms = [self._states_term(c.but(offload=of_states(kind))) for kind in kinds]
        return None if None in terms else terms[0]

    def _states_term(self, c: ParallelConfig) -> str | None:
        """Return the term of states that cannot fit at these degrees."""
        copies, r = num_copies(c.schedule), self.request
        key = (
            c.pp,
            c.dp,
            c.cp,
            c.tp,
            c.ep,
            c.etp,
            c.zero_stage,
            c.zero_replicas,
            copies,
            c.offload,
        )
        if key not in self._terms:
            memory = ParameterMemory(
                c,
                precision_of(r.precision),
                r.mode is Mode.FUSED,
                r.options,
                narrow=stores_8_bits(r.cluster.device, r.mode, r.options),
            )
            stored = optimizer = host = 0.0
            for kind, elements in self._elements.items():
                each: States = memory.of(ParamWork("", 1, *kind))
                share = elements * copies / (c.pp * (c.ep * c.expert_tp if kind[2] else c.tp))
                stored, optimizer = (
                    stored + share * each.stored,
                    optimizer + share * each.optimizer,
                )
                host += share * each.host
            self._terms[key] = None
            if host > self.request.cluster.host_memory_bytes * _CLOSE:
                self._terms[key] = "state on the host"
            elif stored + optimizer > self.capacity_bytes * _CLOSE:
                self._terms[key] = "optimizer" if optimizer > stored else "parameters"
        return self._terms[key]

    @cached_property
    def _elements(self) -> Counter[ParameterKind]:
        """The elements of all parameters by kind; those that several calls use count once."""
        r, found = self.request, Counter[ParameterKind]()
        op_costs = OpCosts(r.graph, (), r.env(1), precision=precision_of(r.precision))
        seen = set[str]()
        for call in r.graph.calls:
            block = r.graph.blocks[call.block]
            experts, packed = expert_weights(block), packed_weights(block)
            for local, full in call.params.items():
                if full not in seen:
                    seen.add(full)
                    value = block.values[local]
                    kind = (
                        op_costs.dtype(value),
                        value.requires_grad,
                        local in experts,
                        local in packed,
                        op_costs.precision.matmul == ONE_SCALE,  # other weights than those of products, too
                    )
                    found[kind] += r.graph.params[full].num_elements
        return found

    def too_big(self, candidate: ParallelConfig) -> bool:
        """Return True if the largest value of the graph alone does not fit."""
        return self.largest_bytes(candidate.micro_batch_size) / (candidate.tp * candidate.cp) > self.capacity_bytes

    def largest_bytes(self, size: int) -> float:
        """Return the bytes of the largest value that an operation makes for `size` sequences, on all of tp together."""
        # selective recompute may drop the largest value, which then counts nowhere in the memory model
        pinned = self.request.pins.get("recompute")
        if pinned == SELECTIVE or modules_of(pinned):
            return 0.0
        if size not in self._largest:
            self._largest[size] = self._find(size)
        return self._largest[size]

    def _find(self, size: int) -> float:
        r = self.request
        op_costs = OpCosts(r.graph, (), r.env(size), precision=precision_of(r.precision))
        largest = 0.0
        for block in r.graph.blocks.values():
            for node in block.nodes:
                op = op_record(node.op)
                same = op.kind is OpKind.ELEMENTWISE and Trait.DROPS in op.traits and not node.attrs["p"]
                if Trait.CAST in op.traits:
                    before, after = (block.values[n] for n in (node.tensor_inputs[0], node.outputs[0]))
                    same = op_costs.dtype(before) == op_costs.dtype(after)
                if op.saved is None or op.saved.form is Form.VIEW or same:  # a view, or perhaps one
                    continue
                made = [block.values[n] for n in node.outputs if block.values[n].requires_grad]
                largest = max([largest, *(op_costs.num_bytes(block.name, v, ()) for v in made)])
        return largest
