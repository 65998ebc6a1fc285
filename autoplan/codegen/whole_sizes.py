"""Local sizes that only some batches and lengths make whole numbers: the runtime refuses the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoplan.codegen.outputs import terms
from autoplan.ir.graph import Value
from autoplan.ir.layout import Layout
from autoplan.ir.symbols import Expr
from autoplan.program.statements import LoweredBlock, Op, local_factors
from autoplan.runtime.spec import Terms


def whole_sizes(blocks: Sequence[LoweredBlock]) -> tuple[Terms, ...]:
    """Return the sizes of these blocks that must be whole numbers: split factors of b, s and t."""
    found: dict[str, Expr] = {}
    for lowered in {block.block.name: block for block in blocks}.values():
        for value, layout in _made(lowered):
            if value.dims is None or not any(kind.is_shard for kind in layout):
                continue
            for dim in local_factors(value, layout, lowered.factors, lowered.axes):
                for size in dim:
                    if size.symbols and any(c.denominator != 1 for _, c in size.terms):
                        found[str(size)] = size
    return tuple(terms(found[k]) for k in sorted(found))


def _made(lowered: LoweredBlock) -> Iterator[tuple[Value, Layout]]:
    """Yield the inputs and results of a block, each with its layout."""
    yield from ((given.value, given.layout) for given in lowered.inputs)
    for statement in lowered.statements:
        if isinstance(statement, Op):
            yield from zip(statement.values, statement.strategy.outputs, strict=True)
        else:
            yield statement.value, statement.result
