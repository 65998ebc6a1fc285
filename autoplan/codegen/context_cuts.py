"""The lines of a stage that cut whole sequences to this rank's part, for context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoplan.ir.graph import Call, ModelGraph
from autoplan.ir.symbols import Expr
from autoplan.ops.text import py


def context_cuts(
    graph: ModelGraph, free: Sequence[Call], mine: Sequence[Call], variable: Callable[[str], str]
) -> list[str]:
    """Return the lines that cut what calls read of whole sequences: inputs, and results of calls without parameters.

    After them s is the size of the part.

    Args:
        variable: of a value by name.
    """
    whole = {*graph.inputs, *(v for call in free for v in call.outputs)}
    axis, lines = "cp", []
    for name in dict.fromkeys(v for call in mine for v in call.inputs if v in whole):
        value = graph.values[name]
        dims = [i for i, size in enumerate(value.shape) if "s" in size.symbols]
        for dim in dims:
            var = variable(name)
            if value.shape[dim] == Expr.symbol("s"):
                cut = f"context_part({var}, {axis!r}, {dim})"
            else:  # flattened with the batch
                sizes = [graph.factors[f] for f in (value.dims or ())[dim]]
                at = dim + next(k for k, size in enumerate(sizes) if "s" in size.symbols)
                parts = f"{var}.unflatten({dim}, ({', '.join(py(size) for size in sizes)}))"
                cut = f"context_part({parts}, {axis!r}, {at}).flatten({dim}, {dim + len(sizes) - 1})"
            lines.append(f"        {var} = {cut}")
    return lines
