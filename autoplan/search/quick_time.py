"""A lower bound of the step that needs no layout: products at the peak of all devices together.

It is weak, by the share of the peak that a plan does not reach, but there is one for every candidate at any time. So a
search that is stopped before it has better ones still says how much faster a plan may be.
"""

from __future__ import annotations

from functools import cached_property

from autoplan.config.parallel import ParallelConfig
from autoplan.config.precision import precision_of
from autoplan.ops.record import OpKind
from autoplan.ops.table import op_record
from autoplan.program.op_costs import OpCosts
from autoplan.schedules.schedule import SCHEDULES
from autoplan.search.cuts import spread_s
from autoplan.search.request import PlanRequest
from autoplan.units import ORDER_OF_SUMS

_CLOSE = 1 - ORDER_OF_SUMS


class QuickTime:
    """The bound of the module for one request. It is 0 with a profile, whose devices may be faster than their peak."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request

    def bound_s(self, candidate: ParallelConfig) -> float:
        """Return the least seconds of a step of a candidate, whatever its layout, cut and recompute are."""
        c = candidate
        if self.request.profile is not None:
            return 0.0
        total = self._sequence_s * c.micro_batch_size / (c.tp * c.cp) * _CLOSE
        if SCHEDULES[c.schedule].windows:
            return spread_s(total, c.pp, c.num_micro_batches)
        return c.num_micro_batches * total / c.pp

    @cached_property
    def _sequence_s(self) -> float:
        """The seconds of all products of one sequence on one device that reaches its peak, forward and backward."""
        r, precision = self.request, precision_of(self.request.precision)
        device = r.cluster.device
        costs = OpCosts(r.graph, (), r.env(1), precision=precision)
        by_block = dict.fromkeys(r.graph.blocks, 0.0)
        for name, block in r.graph.blocks.items():
            for node in block.nodes:
                if not op_record(node.op).multiplies or op_record(node.op).kind is OpKind.ATTENTION:
                    continue  # kernels of attention may skip what is masked
                inputs = [block.values[n] for n in node.tensor_inputs]
                dtypes = {costs.dtype(v) for v in inputs if "float" in costs.dtype(v)}
                peak = max(map(device.flops, dtypes | ({precision.matmul} if precision.matmul else set())))
                passes = 1 + sum(v.requires_grad for v in inputs[:2])
                by_block[name] += passes * costs.flops(block, node) / peak
        return sum(by_block[call.block] for call in r.graph.calls)
