"""A lower bound of memory that needs no layout."""

from __future__ import annotations

from autoplan.config.parallel import ParallelConfig, precision_of
from autoplan.config.recompute import modules_of
from autoplan.ops.record import Trait
from autoplan.ops.saved import Form
from autoplan.ops.table import op_record
from autoplan.program.op_costs import OpCosts
from autoplan.search.request import PlanRequest


class QuickMemory:
    """A lower bound of memory that needs no layout: the largest value that an operation makes, split over all of tp.

    Every value that is not a view is alive at some time, at least by itself.
    """

    def __init__(self, request: PlanRequest) -> None:
        self.request, self.capacity_bytes = request, request.cluster.device.memory_bytes
        self._largest: dict[int, float] = {}

    def too_big(self, candidate: ParallelConfig) -> bool:
        """Return True if the largest value of the graph alone does not fit."""
        return self.largest_bytes(candidate.micro_batch_size) / (candidate.tp * candidate.cp) > self.capacity_bytes

    def largest_bytes(self, size: int) -> float:
        """Return the bytes of the largest value that an operation makes for `size` sequences, on all of tp together."""
        # selective recompute may drop the largest value, which then counts nowhere in the memory model
        pinned = self.request.pins.get("recompute")
        if pinned == "selective" or modules_of(pinned):
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
                same = Trait.RANDOM in op.traits and not node.attrs["p"]
                if Trait.CAST in op.traits:
                    before, after = (block.values[n] for n in (node.tensor_inputs[0], node.outputs[0]))
                    same = op_costs.dtype(before) == op_costs.dtype(after)
                if op.saved is None or op.saved.form is Form.VIEW or same:  # a view, or perhaps one
                    continue
                made = [block.values[n] for n in node.outputs if block.values[n].requires_grad]
                largest = max([largest, *(op_costs.num_bytes(block.name, v, ()) for v in made)])
        return largest
