"""Where a program reads the sizes b, s and t of a batch."""

from __future__ import annotations

from autoplan.ir.graph import ModelGraph
from autoplan.ir.symbols import SYMBOLS, Expr
from autoplan.runtime.spec import SizeSource


def size_sources(graph: ModelGraph) -> tuple[SizeSource, ...]:
    """Return for every size that an input has the dim it is read from: one of this size, or of the least multiple."""
    out: dict[str, SizeSource] = {}
    for name in graph.inputs:
        for i, size in enumerate(graph.values[name].shape):
            for symbol in (x for x in SYMBOLS if {x} == size.symbols):
                quotient = size.divide(Expr.symbol(symbol))
                times = None if quotient is None else quotient.value
                if times is not None and (symbol not in out or times < out[symbol].times):
                    out[symbol] = SizeSource(symbol, name, i, times)
    return tuple(out[k] for k in sorted(out))
