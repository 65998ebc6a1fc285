"""The device grid of a model under a configuration: what `autoplan.config.mesh` needs to know of the graph."""

from __future__ import annotations

from autoplan.config.mesh import ParallelDims, tensor_axes
from autoplan.config.parallel import ParallelConfig
from autoplan.ir.graph import ModelGraph
from autoplan.program.facts import expert_counts, kv_ranks


def parallel_dims(graph: ModelGraph, config: ParallelConfig) -> ParallelDims:
    """Return the grid of a model under a configuration."""
    return ParallelDims(config, tensor_axes(config.tp, kv_ranks(graph, config.tp)), bool(expert_counts(graph)))
