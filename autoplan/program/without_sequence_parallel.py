"""Layouts without sequence parallelism: values between blocks are whole on every rank of tensor parallelism.

Shoeybi et al., Megatron-LM, 2019: an all-reduce after each pair of products; every rank computes norms and residuals in
full, and keeps tp times as many of their bytes as with sequence parallelism (Korthikanti et al., 2022).
"""

from __future__ import annotations

from dataclasses import replace

from autoplan.ir.graph import ModelGraph
from autoplan.ir.layout import Layout
from autoplan.program.problem import IntraProblem, LayoutChoice, Option, ValueKey
from autoplan.program.with_sequence_parallel import crossing_factors

_RESTRICTION = "no sequence parallelism: values between blocks are whole on every tensor-parallel rank"


def without_sequence_parallelism(problem: IntraProblem, graph: ModelGraph) -> IntraProblem:
    """Return the problem without options that split an activation over a factor of the values between blocks.

    These factors are batch, sequence and hidden size.
    """
    crossing = crossing_factors(graph)
    params = {(b.name, name) for b in graph.blocks.values() for name in b.params}

    def splits(key: ValueKey, layout: Layout) -> bool:
        block, name = key
        value = graph.blocks[block].values[name]
        if key in params or not value.requires_grad:
            return False
        dims = value.dims or ()
        return any(kind.is_shard and dims[kind.dim][kind.factor] in crossing for kind in layout)

    def whole(choice: LayoutChoice, option: Option) -> bool:
        return not any(splits(key, layout) for key, layout in (*option.provides, *option.requires))

    filtered = problem.filtered(whole)
    return replace(filtered, restrictions=(*filtered.restrictions, _RESTRICTION))
