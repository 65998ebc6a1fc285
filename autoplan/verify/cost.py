"""Estimate from the graph what its verification costs on this host: seconds and memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autoplan.ir.graph import Block, ModelGraph
from autoplan.ops.record import OpKind
from autoplan.ops.table import op_kind
from autoplan.program.op_costs import OpCosts

LIMIT_S = 5.0  # limit of a verification; more is done only where it is required
USUAL_S = 0.3  # up to this cost, longer sequences are preferred
# per core of a server in float64, small matrices: measured by experiments/plans/verification.py, rounded down
_FLOPS_PER_CORE = 4e9
_BYTES_PER_S = 4e9
_NODE_S = 4e-5  # an operation, forward or backward, in the mode that makes it float64
_RUNS = 2  # module and program
_FORWARD_AND_BACKWARD = 3
_WIDTH = 8
_COPIES = 3  # of the parameters, in float64: values, gradients of the module and of the program
_MEMORY_SHARE = 0.5  # of the free memory: other processes of the job load their models


@dataclass(frozen=True)
class Cost:
    """The cost of one verification: `seconds`, and `num_bytes` of memory."""

    seconds: float
    num_bytes: float

    @property
    def fits(self) -> bool:
        """True if this host has the memory at this moment."""
        return self.num_bytes <= _MEMORY_SHARE * free_bytes()

    def __str__(self) -> str:
        return f"{self.seconds:,.0f} s and {self.num_bytes / 1e9:,.1f} GB"


def free_bytes() -> int:
    """Return the bytes of host memory that are not in use."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def cost_of(graph: ModelGraph, sizes: Mapping[str, int]) -> Cost:
    """Estimate the cost of running module and graph on a batch of these sizes.

    Raises:
        GraphError: for sizes outside the bounds of the graph.
    """
    op_costs, counts = OpCosts(graph, (), sizes), graph.call_counts()
    flops = kept = 0.0
    num_nodes = 0
    for block in graph.blocks.values():
        times = counts[block.name]
        flops += times * sum(op_costs.flops(block, node) for node in block.nodes)
        kept += times * _kept(op_costs, block)
        num_nodes += times * len(block.nodes)
    parameters = cost_of_parameters(graph.num_params)
    arithmetic = _RUNS * _FORWARD_AND_BACKWARD * flops / (_FLOPS_PER_CORE * torch.get_num_threads())
    activations = _RUNS * 2 * _FORWARD_AND_BACKWARD * kept / _BYTES_PER_S
    seconds = arithmetic + activations + _RUNS * _FORWARD_AND_BACKWARD * num_nodes * _NODE_S
    # the module may keep twice as much, with explicit scores
    return Cost(parameters.seconds + seconds, parameters.num_bytes + 2 * kept)


def cost_of_parameters(number: int) -> Cost:
    """Return the cost that every batch has: each parameter is copied, read forward and backward, and has a gradient."""
    stored = float(number * _WIDTH)
    return Cost(_RUNS * 4 * stored / _BYTES_PER_S, _COPIES * stored)


def _kept(op_costs: OpCosts, block: Block) -> float:
    """Return the bytes of all values that a call of the block makes, in float64.

    They include the scores of attention, which the module may keep.
    """
    total = 0.0
    for node in block.nodes:
        total += sum(op_costs.number(block.values[out].num_elements) for out in node.outputs)
        if op_kind(node.op) is OpKind.ATTENTION:
            query, keys = (block.values[x] for x in node.tensor_inputs[:2])
            heads, length = op_costs.number(query.shape[1]), op_costs.number(query.shape[2])
            total += op_costs.number(query.shape[0]) * heads * length * op_costs.number(keys.shape[2])
    return _WIDTH * total
