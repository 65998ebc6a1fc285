"""The lines of a stage that cut whole sequences to this rank's part, for context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoplan.ir.graph import Call, ModelGraph, Value
from autoplan.ir.symbols import Expr
from autoplan.ops.sequence_parts import runs_of
from autoplan.ops.text import py

_AXIS = "cp"


def context_cuts(
    graph: ModelGraph, free: Sequence[Call], mine: Sequence[Call], variable: Callable[[str], str]
) -> list[str]:
    """Return the lines that cut what calls read of whole sequences: inputs, and results of calls without parameters.

    After them s is the size of the part.

    Args:
        variable: of a value by name.
    """
    whole, lines = {*graph.inputs, *(v for call in free for v in call.outputs)}, []
    for name in dict.fromkeys(v for call in mine for v in call.inputs if v in whole):
        value, var = graph.values[name], variable(name)
        for dim in (i for i, size in enumerate(value.shape) if "s" in size.symbols):
            lines.append(f"        {var} = {_cut(graph, value, dim, var)}")
    return lines


def _cut(graph: ModelGraph, value: Value, dim: int, var: str) -> str:
    """Return the text of this rank's part of a dim."""
    factors = (value.dims or ())[dim]
    runs = runs_of(factors, graph.factors, graph.parts)
    if runs is not None:
        return f"own_part({var}, {_AXIS!r}, {dim}, {runs!r})"
    if value.shape[dim] == Expr.symbol("s"):
        return f"context_part({var}, {_AXIS!r}, {dim})"
    sizes = [graph.factors[f] for f in factors]  # flattened with the batch
    at = next(k for k, size in enumerate(sizes) if "s" in size.symbols)
    opened = f"{var}.unflatten({dim}, ({', '.join(py(size) for size in sizes)}))"
    part = f"context_part({opened}, {_AXIS!r}, {dim + at})"
    if factors[at] in graph.parts:
        part = f"own_part({opened}, {_AXIS!r}, {dim + at}, {graph.parts[factors[at]]!r})"
    return f"{part}.flatten({dim}, {dim + len(sizes) - 1})"
