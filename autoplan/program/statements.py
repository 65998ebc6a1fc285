"""Statements of a lowered block: operations and conversions, each with the collectives that it performs.

Prices, the ledger and the emitted text all derive from these. `autoplan.program.lower` makes them from layouts.
`autoplan.program.passes` rewrites them for features that layouts do not express: token dispatch, context parallelism,
sums over a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from autoplan.cost_models.routing import Routing
from autoplan.ir.graph import Block, Node, Value
from autoplan.ir.layout import Axis, ConversionStep, Layout
from autoplan.ir.symbols import Expr, product
from autoplan.ops.record import OpKind, Trait
from autoplan.ops.strategies import Strategy
from autoplan.ops.table import op_has, op_kind
from autoplan.program.expert_degrees import ExpertDegrees, Spread
from autoplan.units import dtype_bytes


@dataclass(frozen=True)
class Collective:
    """One collective that a statement performs in every micro-batch, or for a parameter once per step.

    Attributes:
        what: name of the value that is sent.
        kind: a name of `cost_models.hardware.collective_kinds`; ep_dispatch and ep_combine are priced only.
        axes: names of the mesh: one axis or product, or the adjacent sub-axes of a product.
        num_elements: elements of the gathered or reduced tensor on one rank (all_to_all: of the local tensor).
        dtype: dtype of the value in the graph. A price uses the dtype that it is computed in.
        phase: forward or backward.
        per: micro_batch or step.
        of_layout: it follows from the layouts alone: a conversion, a loss over a sharded vocabulary, a gradient.
        priced: False for a few integers beside the rest (numbers of rows, ids of documents).
        routing, part, behind_attention: see `cost_models.work.CommWork`.
    """

    what: str
    kind: str
    axes: tuple[str, ...]
    num_elements: Expr
    dtype: str
    phase: str
    per: str = "micro_batch"
    of_layout: bool = False
    priced: bool = True
    routing: Routing | None = None
    part: tuple[int, int] | None = None
    behind_attention: int = 0

    @property
    def num_bytes(self) -> Expr:
        """Bytes in the dtype of the graph."""
        return self.num_elements * dtype_bytes(self.dtype)


@dataclass(frozen=True)
class Convert:
    """`target = conversion(source)`.

    Attributes:
        layout, result: layouts of the value before and after the step.
        copies: the conversion copies what it sends or cuts out.
    """

    target: str
    source: str
    value: Value
    step: ConversionStep
    layout: Layout
    result: Layout
    collectives: tuple[Collective, ...] = ()
    copies: bool = False


@dataclass(frozen=True)
class Op:
    """`targets = op(args)` under a strategy.

    Attributes:
        values, inputs: the values that `targets` and `args` name.
        bias: variable of a fused addition.
        collectives: collectives of the operation's runtime function.
        over: keyword arguments of that function with the axes that it works over.
        experts: how the experts of the operation are spread if the strategy does not say it. Priced.
        token_ranks: ranks that each compute the operation for their own part of the tokens. Priced.
        logits_dtype: dtype of the logits as the product left them, for a fused loss that reads them and for the cast
            that it makes needless. Priced.
    """

    targets: tuple[str, ...]
    node: Node
    args: tuple[str | None, ...]
    strategy: Strategy
    values: tuple[Value, ...]
    inputs: tuple[Value, ...]
    bias: str | None = None
    collectives: tuple[Collective, ...] = ()
    over: tuple[tuple[str, str], ...] = ()
    experts: ExpertDegrees | None = None
    token_ranks: int = 1
    logits_dtype: str | None = None


Statement = Convert | Op


@dataclass(frozen=True)
class BlockParam:
    """A parameter as the emitted block holds it.

    Attributes:
        used: the layout that its uses take; differs from `stored` if the reduction of its gradient is deferred.
        collectives: that reduction, once per step.
        spread: axes that split the parameter instead of `stored`, for experts under token dispatch.
    """

    attr: str
    value: Value
    stored: Layout
    used: Layout
    collectives: tuple[Collective, ...] = ()
    spread: tuple[Spread, ...] = ()


@dataclass(frozen=True)
class BlockInput:
    """An input of an emitted block: its variable, its value, and the layout in which it arrives."""

    var: str
    value: Value
    layout: Layout


@dataclass(frozen=True)
class LoweredBlock:
    """One emitted class: the statements of a block on the sub-axes that its layouts are chosen on."""

    block: Block
    factors: Mapping[str, Expr]
    axes: tuple[Axis, ...]
    class_name: str
    inputs: tuple[BlockInput, ...]
    params: tuple[BlockParam, ...]
    buffers: tuple[tuple[str, Value], ...]
    statements: tuple[Statement, ...]
    outputs: tuple[str, ...]
    output_layouts: tuple[Layout, ...]
    num_draws: int

    def elements(self, value: Value, layout: Layout) -> Expr:
        """Return the number of elements of a value on one rank."""
        return product(self.shape(value, layout))

    def shape(self, value: Value, layout: Layout) -> list[Expr]:
        """Return the local size of every dim."""
        return local_shape(value, layout, self.factors, self.axes)

    def map_ops(self, kind: OpKind, change: Callable[[Op], Op]) -> LoweredBlock:
        """Return the block with `change` applied to its operations of a kind."""
        if all(op_kind(node.op) is not kind for node in self.block.nodes):
            return self
        statements = (change(s) if isinstance(s, Op) and op_kind(s.node.op) is kind else s for s in self.statements)
        return replace(self, statements=tuple(statements))


Pass = Callable[[LoweredBlock], LoweredBlock]


def local_factors(value: Value, layout: Layout, factors: Mapping[str, Expr], axes: Sequence[Axis]) -> list[list[Expr]]:
    """Return the local sizes of the factors of every dim."""
    out = [[factors[f] for f in dim] for dim in value.dims or ()]
    for axis, kind in zip(axes, layout, strict=True):
        if kind.is_shard:
            out[kind.dim][kind.factor] = out[kind.dim][kind.factor].scale(Fraction(1, axis.size))
    return out


def local_shape(value: Value, layout: Layout, factors: Mapping[str, Expr], axes: Sequence[Axis]) -> list[Expr]:
    """Return the local size of every dim."""
    return [product(dim) for dim in local_factors(value, layout, factors, axes)]


def local_bytes(value: Value, layout: Layout, factors: Mapping[str, Expr], axes: Sequence[Axis]) -> Expr:
    """Return the bytes of the local tensor."""
    return product(local_shape(value, layout, factors, axes)) * dtype_bytes(value.dtype)


def reads_of(statement: Statement) -> tuple[str, ...]:
    """Return the variables that a statement reads."""
    if isinstance(statement, Convert):
        return (statement.source,)
    return tuple(a for a in (*statement.args, statement.bias) if a is not None)


def writes_of(statement: Statement) -> tuple[str, ...]:
    """Return the variables that a statement makes."""
    return (statement.target,) if isinstance(statement, Convert) else statement.targets


def with_gradient(statements: Sequence[Statement], wanted: Iterable[str]) -> set[str]:
    """Return the variables of a block that get a gradient if these variables do; of parameters `self.` and their name.

    A statement whose results get none has no backward, and performs none of its collectives there.
    """
    found = set(wanted)
    for statement in reversed(statements):
        if found.isdisjoint(writes_of(statement)) or not _passes_gradients(statement):
            continue
        found |= set(reads_of(statement))
    return found


def _passes_gradients(statement: Statement) -> bool:
    if isinstance(statement, Convert):
        return statement.value.requires_grad
    return not op_has(statement.node.op, Trait.STOPS_GRADIENT) and any(x.requires_grad for x in statement.values)
