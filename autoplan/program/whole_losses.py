"""Layouts whose losses are computed whole: every rank of tensor parallelism gathers all logits and computes the loss.

So do programs whose head is a column-parallel product with a gathered output (`colwise_gather_output` of transformers'
plans of tensor parallelism, Megatron's ColumnParallelLinear with gather_output) and whose loss is PyTorch's.
"""

from __future__ import annotations

from dataclasses import replace

from autoplan.ir.graph import ModelGraph
from autoplan.ops.record import OpKind
from autoplan.ops.table import op_kind
from autoplan.program.problem import IntraProblem, LayoutChoice, Option

_RESTRICTION = "whole losses: every tensor-parallel rank gathers all logits and computes the loss"


def with_whole_losses(problem: IntraProblem, graph: ModelGraph) -> IntraProblem:
    """Return the problem without options of losses that read or make a part of a value."""
    losses = {
        f"{block.name}/{node.name}"
        for block in graph.blocks.values()
        for node in block.nodes
        if op_kind(node.op) is OpKind.LOSS
    }

    def whole(choice: LayoutChoice, option: Option) -> bool:
        layouts = (layout for _, layout in (*option.requires, *option.provides))
        return choice.name not in losses or not any(kind.is_shard for layout in layouts for kind in layout)

    filtered = problem.filtered(whole)
    return replace(filtered, restrictions=(*filtered.restrictions, _RESTRICTION))
