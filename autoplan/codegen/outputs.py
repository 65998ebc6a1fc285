"""Outputs besides the loss: the stage of a program that makes them, and the parts that ranks hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoplan.ir.graph import Result, Runs, Value
from autoplan.ir.layout import Layout
from autoplan.ir.symbols import Expr
from autoplan.program.statements import LoweredBlock, Op
from autoplan.runtime.spec import OutputSpec, ShardSpec, Terms


def terms(size: Expr) -> Terms:
    """Return the plain form of a size for the runtime."""
    return tuple((c.numerator, c.denominator, m) for m, c in size.terms)


@dataclass(frozen=True)
class FoundOutput:
    """A result of the model: the statement of the block that makes it, in which variable, and its form on the ranks."""

    statement: int
    variable: str
    spec: OutputSpec


def find_output(
    lowered: LoweredBlock, result: Result, stage: int, block: str, *, cut: bool, parts: Mapping[str, Runs]
) -> FoundOutput | None:
    """Return the statement of a block that makes a result, if possible one that leaves no pending sum.

    None if no statement makes it (a view that another one took in), or if the batch is not its slowest factor in a dim.

    Args:
        stage, block: the stage and the name there of the call that makes it.
        cut: sequences are cut over ranks.
        parts: the runs of factors, if they are cut so.
    """
    places = list(_places(lowered, result.value))
    if not places:
        return None
    at, variable, value, layout = next((p for p in places if not _pending(lowered, p[3])), places[0])
    sizes = [[lowered.factors[f] for f in dim] for dim in value.dims or ()]
    batch = [i for i, dim in enumerate(sizes) if dim and dim[0] == Expr.symbol("b")]
    lengths = _lengths(sizes) if cut else []
    runs = _runs(value, sizes, lengths, parts)
    if len(batch) != 1 or runs is None:
        return None
    kinds = zip(lowered.axes, layout, strict=True)
    spec = OutputSpec(
        name=result.name,
        stage=stage,
        block=block,
        sizes=tuple(tuple(map(terms, dim)) for dim in sizes),
        batch_dim=batch[0],
        shards=tuple(ShardSpec(axis.name, kind.dim, kind.factor) for axis, kind in kinds if kind.is_shard),
        pending=_pending(lowered, layout),
        lengths=tuple(lengths),
        runs=runs,
    )
    return FoundOutput(at, variable, spec)


def _pending(lowered: LoweredBlock, layout: Layout) -> tuple[str, ...]:
    return tuple(axis.name for axis, kind in zip(lowered.axes, layout, strict=True) if kind.kind_name == "P")


def _lengths(sizes: Sequence[Sequence[Expr]]) -> list[tuple[int, int]]:
    """Return the dim and position of the factors that depend on the length of the sequence."""
    return [(i, j) for i, dim in enumerate(sizes) for j, size in enumerate(dim) if "s" in size.symbols]


def _runs(
    value: Value, sizes: Sequence[Sequence[Expr]], lengths: Sequence[tuple[int, int]], parts: Mapping[str, Runs]
) -> tuple[Runs, ...] | None:
    """Return the runs of the lengths that have some; None if one has none and is not that of the sequence."""
    dims = value.dims or ()
    if any(sizes[i][j] != Expr.symbol("s") and dims[i][j] not in parts for i, j in lengths):
        return None
    return tuple(parts[dims[i][j]] for i, j in lengths if dims[i][j] in parts)


def _places(lowered: LoweredBlock, name: str) -> Iterator[tuple[int, str, Value, Layout]]:
    """Yield the statements that make a value, with the variable and its layout."""
    for at, statement in enumerate(lowered.statements):
        if isinstance(statement, Op):
            for variable, value, layout in zip(
                statement.targets, statement.values, statement.strategy.outputs, strict=True
            ):
                if value.name == name:
                    yield at, variable, value, layout
        elif statement.value.name == name:
            yield at, statement.target, statement.value, statement.result
