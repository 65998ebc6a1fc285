"""What it costs to verify a graph on this host, before it is tried: seconds and memory, from the graph."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autoplan.ir.graph import Block, ModelGraph
from autoplan.ops.record import OpKind
from autoplan.ops.table import op_kind
from autoplan.program.op_costs import OpCosts

LIMIT_S = 5.0  # what verification may cost; more is done only where it is required
USUAL_S = 0.3  # up to here longer sequences are worth it
# of a core of a server in float64, small matrices: measured by experiments/plans/verification.py, rounded down
_FLOPS_PER_CORE = 4e9
_BYTES_PER_S = 4e9
_NODE_S = 4e-5  # an operation, forward or backward, under the mode that makes it float64
_RUNS = 2  # module and program
_FORWARD_AND_BACKWARD = 3
_WIDTH = 8
_COPIES = 3  # of the parameters, in float64: values, gradients of the module and of the program
_MEMORY_SHARE = 0.5  # of what is free: other processes of the job load their models


@dataclass(frozen=True)
class Cost:
    """Of one verification."""

    seconds: float
    num_bytes: float

    @property
    def fits(self) -> bool:
        """True if this host has the memory now."""
        return self.num_bytes <= _MEMORY_SHARE * free_bytes()

    def __str__(self) -> str:
        return f"{self.seconds:,.0f} s and {self.num_bytes / 1e9:,.1f} GB"


def free_bytes() -> int:
    """Memory of the host that is not in use."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def cost_of(graph: ModelGraph, sizes: Mapping[str, int]) -> Cost:
    """The estimated cost of running module and graph on a batch of these sizes.

    Raises: GraphError for sizes that the graph is not for.
    """
    works, counts = OpCosts(graph, (), sizes), graph.call_counts()
    flops = kept = 0.0
    num_nodes = 0
    for block in graph.blocks.values():
        times = counts[block.name]
        flops += times * sum(works.flops(block, node) for node in block.nodes)
        kept += times * _kept(works, block)
        num_nodes += times * len(block.nodes)
    parameters = cost_of_parameters(graph.num_params)
    arithmetic = _RUNS * _FORWARD_AND_BACKWARD * flops / (_FLOPS_PER_CORE * torch.get_num_threads())
    activations = _RUNS * 2 * _FORWARD_AND_BACKWARD * kept / _BYTES_PER_S
    seconds = arithmetic + activations + _RUNS * _FORWARD_AND_BACKWARD * num_nodes * _NODE_S
    # the module may keep twice as much: explicit scores
    return Cost(parameters.seconds + seconds, parameters.num_bytes + 2 * kept)


def cost_of_parameters(number: int) -> Cost:
    """The part that any batch costs: each parameter is copied, read forward and backward, and has a gradient."""
    stored = float(number * _WIDTH)
    return Cost(_RUNS * 4 * stored / _BYTES_PER_S, _COPIES * stored)


def _kept(works: OpCosts, block: Block) -> float:
    """Bytes of all that a call of the block makes, in float64; of attention its scores, which the module may keep."""
    total = 0.0
    for node in block.nodes:
        total += sum(works.number(block.values[out].num_elements) for out in node.outputs)
        if op_kind(node.op) is OpKind.ATTENTION:
            query, keys = (block.values[x] for x in node.tensor_inputs[:2])
            heads, length = works.number(query.shape[1]), works.number(query.shape[2])
            total += works.number(query.shape[0]) * heads * length * works.number(keys.shape[2])
    return _WIDTH * total
