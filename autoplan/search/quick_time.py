"""A lower bound of the step that needs no layout: products at the highest rate that any of them reaches.

All devices together do all products, and under every schedule some micro-batch passes forward through all stages and
back (where backwards are split, only the gradients of inputs are on its way). The bound is weak, by all that is not a
product, but there is one for every candidate at any time. So candidates that it excludes need no layout, and a search
that is stopped before it has better ones still says how much faster a plan may be.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from autoplan.config.parallel import ParallelConfig
from autoplan.config.precision import precision_of
from autoplan.cost_models.kernels.gpu import kernels_of
from autoplan.ir.graph import Block, Node
from autoplan.ops.record import OpKind
from autoplan.ops.table import op_record
from autoplan.program.op_costs import OpCosts
from autoplan.schedules.schedule import SCHEDULES
from autoplan.search.cuts import step_factor
from autoplan.search.request import PlanRequest
from autoplan.units import ORDER_OF_SUMS, REAL_PARTS

_CLOSE = 1 - ORDER_OF_SUMS


class _Least(NamedTuple):
    """Seconds of the products of one sequence on one device: all, and those on the way of a split backward."""

    total_s: float
    chain_s: float


class QuickTime:
    """The bound of the module for one request. It is 0 with a profile, whose devices may be faster than their peak."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request

    def bound_s(self, candidate: ParallelConfig) -> float:
        """Return the least seconds of a step of a candidate, whatever its layout, cut and recompute are."""
        c = candidate
        if self.request.profile is not None:
            return 0.0
        schedule, share = SCHEDULES[c.schedule], c.micro_batch_size / (c.tp * c.cp) * _CLOSE
        total = self._sequence.total_s * share
        if schedule.windows:
            return total * step_factor(c.pp, c.num_micro_batches)
        chain = self._sequence.chain_s * share if schedule.split_backward else total
        return max(c.num_micro_batches * total / c.pp, chain)

    @cached_property
    def _sequence(self) -> _Least:
        """Forward and backward of one sequence."""
        r = self.request
        costs = OpCosts(r.graph, (), r.env(1), precision=precision_of(r.precision))
        by_block = dict.fromkeys(r.graph.blocks, _Least(0.0, 0.0))
        for name, block in r.graph.blocks.items():
            found = [self._product(costs, block, node) for node in block.nodes]
            by_block[name] = _Least(sum(each.total_s for each in found), sum(each.chain_s for each in found))
        each = [by_block[call.block] for call in r.graph.calls]
        return _Least(sum(e.total_s for e in each), sum(e.chain_s for e in each))

    def _product(self, costs: OpCosts, block: Block, node: Node) -> _Least:
        """Return the seconds of a product; zeros for other operations, and attention, which may skip what is masked."""
        op, precision, device = op_record(node.op), precision_of(self.request.precision), self.request.cluster.device
        if not op.multiplies or op.kind is OpKind.ATTENTION:
            return _Least(0.0, 0.0)
        inputs = [block.values[n] for n in node.tensor_inputs]
        dtypes = {d for v in inputs if "float" in (d := REAL_PARTS.get(costs.dtype(v), costs.dtype(v)))}
        dtypes |= {precision.matmul} if precision.matmul else set()
        kernels = kernels_of(device, self.request.constants)
        share = 1.0  # of the peak; vectors have no kernel model
        if kernels is not None and len(block.values[node.outputs[0]].shape) > 1:
            share = max(map(kernels.most_of_peak, dtypes))
        forward = costs.flops(block, node) / (max(map(device.flops, dtypes)) * share)
        data, *others = (v.requires_grad for v in inputs[:2])
        backward = forward * (data + sum(others))
        delayed = 0.0  # of the backward, if it is split, as prices do it
        if any(inputs[i].requires_grad for i in op.weights):
            delayed = backward / 2 if data else backward
        return _Least(forward + backward, forward + backward - delayed)
