"""Token dispatch on one rank: collectives and products of experts that are laid out over ep x etp ranks instead of tp.

The folding is that of Megatron-Core (Liu et al., MoE Parallel Folding, arXiv 2504.14960): the dp * cp * tp ranks of a
pipeline stage are divided a second time, into replicas * ep * etp. With T tokens in a micro-batch, k experts per token,
E experts, hidden size h, inner size f, w bytes per element and tokens spread evenly over the experts:

    rows (a token once per expert)    n = T k / tp       each tp rank routes and dispatches its own share of the tokens
    over ep                           n h w              dispatch and combine, forward and backward
    over etp                          etp n h w          rows gathered for dispatch, reduced and scattered to combine
    products of one rank              etp n rows, E / ep experts of inner size f / etp: the block's flops / tp

The dispatcher (`config.kernels.Dispatcher`) decides how much of these bytes travels over ep: all of them, or each
token once per node and device (kinds `ep_dispatch` and `ep_combine`: see `collectives`). It may send rows to the
experts in 8 bits. Gradients of the combined rows travel the same way.

Rows are also put in order in memory. This is counted in passes over a row of size h, each a read or a write
(Megatron-Core 0.12, transformer/moe/token_dispatcher.py and moe_utils.py):

    alltoall    read once per token and written per expert (`permute`); sorted by local expert on arrival (read and
                written) if a rank has several experts; the same on the way back
    flex        one copy per device: read as it arrived and written per expert, and back; tokens are not copied before
                they are sent

The backward makes as many passes.

If the layout is solved with experts over tp, the collectives that serve only that split are not performed. Values that
are gathered only for the router and the experts stay split, and the result of the experts is not a pending sum: where
the program wants it split over tokens, it already is; where it wants it whole, a gather replaces the all-reduce. Values
that other operations need too (shared experts) are still gathered. The router works on the tokens of its own rank, as
in Megatron under sequence parallelism: where the layout gives it whole values, its operations count 1 / tp of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from autoplan.config.parallel import Dispatcher
from autoplan.cost_models.routing import Routing
from autoplan.cost_models.work import OpWork
from autoplan.errors import LayoutError
from autoplan.ir.graph import Block, Node
from autoplan.ir.layout import ConversionKind, Layout, R
from autoplan.ir.symbols import Expr, product
from autoplan.ops.experts import FIRST, GROUPED
from autoplan.ops.record import OpKind
from autoplan.ops.saved import TensorFacts
from autoplan.ops.table import op_kind
from autoplan.program.expert_degrees import ExpertDegrees, Spread
from autoplan.program.op_costs import OpCosts
from autoplan.program.statements import Collective, Convert, LoweredBlock, Op, Pass, Statement, reads_of, writes_of
from autoplan.program.token_dispatch_layouts import expert_weights, inner_place
from autoplan.units import DTYPE_BYTES

Collectives = tuple[str | None, str | None]  # forward, backward


def token_dispatch(degrees: ExpertDegrees) -> Pass:
    """Return the pass that sends tokens to experts over ep x etp and back, and adapts the conversions around them."""

    def rewritten(lowered: LoweredBlock) -> LoweredBlock:
        weights = expert_weights(lowered.block)
        if not weights:
            return lowered
        spread = {name: _spread(lowered.block, name, degrees) for name in weights}
        params = tuple(
            replace(p, collectives=(), spread=spread[p.value.name]) if p.value.name in weights else p
            for p in lowered.params
        )
        around = lowered if degrees.executed else _rerouted(lowered)
        return replace(around.map_ops(OpKind.EXPERTS, lambda op: _dispatched(lowered, op, degrees)), params=params)

    return rewritten


def _spread(block: Block, name: str, degrees: ExpertDegrees) -> tuple[Spread, ...]:
    inner = (Spread("etp", degrees.etp, *inner_place(block, name)),) if degrees.etp > 1 else ()
    return (Spread("ep", degrees.ep, 0, 0), *inner)


# Collectives (forward, backward) that remain of a conversion, by its kind and target type: _BEFORE for values that only
# the router and the experts read, _AFTER for the result of the experts. A slice of a replicated value is free; its
# gradient is gathered where the value is invariant.
_BEFORE: dict[tuple[ConversionKind, str], Collectives] = {
    (ConversionKind.ALL_GATHER, "R"): (None, None),
    (ConversionKind.ALL_GATHER, "I"): (None, None),
    (ConversionKind.TO_REPLICATE, "R"): (None, "all_gather"),
}
_AFTER: dict[tuple[ConversionKind, str], Collectives] = {
    (ConversionKind.REDUCE_SCATTER, "S"): (None, None),
    (ConversionKind.ALL_REDUCE, "R"): ("all_gather", "reduce_scatter"),
    (ConversionKind.ALL_REDUCE, "I"): ("all_gather", None),
}
_TRANSPOSED: Collectives = ("all_to_all", "all_to_all")  # split over the hidden size: to and from a split over tokens


def _is_experts(statement: Statement) -> bool:
    return not isinstance(statement, Convert) and op_kind(statement.node.op) is OpKind.EXPERTS


def only_for_experts(lowered: LoweredBlock) -> set[int]:
    """Return the statements that only the experts need: the router, and conversions before it."""
    readers: dict[str, set[int]] = {}
    for k, statement in enumerate(lowered.statements):
        for name in reads_of(statement):
            readers.setdefault(name, set()).add(k)
    ends = {k for k, statement in enumerate(lowered.statements) if _is_experts(statement)}
    found: set[int] = set()
    for k in reversed(range(len(lowered.statements))):
        made = writes_of(lowered.statements[k])
        users = set().union(*(readers.get(name, set()) for name in made))
        if users and users <= ends | found and not set(made) & set(lowered.outputs):
            found.add(k)
    return found


def _is_pending(layout: Layout) -> bool:
    return any(t.kind_name == "P" for t in layout)


def _sums_of_experts(lowered: LoweredBlock) -> set[int]:
    """Return the conversions of sums that are pending only because of the experts."""
    pending: set[str] = set()
    found: set[int] = set()
    for k, statement in enumerate(lowered.statements):
        if isinstance(statement, Convert):
            if statement.source in pending:
                found.add(k)
                if _is_pending(statement.result):
                    pending.add(statement.target)
            continue
        args = [a for a in statement.args if a is not None]
        sums = [a for a, layout in zip(args, statement.strategy.inputs, strict=True) if _is_pending(layout)]
        if _is_experts(statement) or (sums and pending.issuperset(sums)):
            made = zip(statement.targets, statement.strategy.outputs, strict=True)
            pending.update(name for name, layout in made if _is_pending(layout))
    return found


def _rerouted(lowered: LoweredBlock) -> LoweredBlock:
    """Return the block with the remaining collectives around experts, and the router on the tokens of its own rank."""
    router, ranks = only_for_experts(lowered), math.prod(axis.size for axis in lowered.axes)
    places = (*((k, _BEFORE) for k in router), *((k, _AFTER) for k in _sums_of_experts(lowered)))
    statements = list(lowered.statements)
    for k, table in places:
        statement = statements[k]
        if isinstance(statement, Op):
            statements[k] = replace(statement, token_ranks=ranks) if _on_whole_values(statement) else statement
            continue
        step, hidden = statement.step, len(statement.value.dims or ()) - 1
        left = table.get((step.kind, step.target.kind_name))
        split = next((t for t in (step.source, step.target) if t.is_shard), None)
        if left is not None:
            left = _TRANSPOSED if split is not None and split.dim == hidden else left
            statements[k] = _left_of(lowered, statement, left)
    return replace(lowered, statements=tuple(statements))


def _left_of(lowered: LoweredBlock, statement: Convert, left: Collectives) -> Convert:
    """Return a conversion with the collectives that remain of it."""
    value, gathers = statement.value, statement.step.source.is_shard
    small, large = (statement.layout, statement.result) if gathers else (statement.result, statement.layout)
    axes, out = tuple(lowered.axes[i].name for i in statement.step.axes), []
    for kind, phase in zip(left, ("forward", "backward"), strict=True):
        if kind is not None and (phase == "forward" or value.requires_grad):
            size = lowered.elements(value, small if kind == "all_to_all" else large)
            out.append(Collective(value.name, kind, axes, size, value.dtype, phase))
    return replace(statement, collectives=tuple(out), copies=statement.copies and left != (None, None))


def _on_whole_values(op: Op) -> bool:
    return not any(t.is_shard for layout in (*op.strategy.inputs, *op.strategy.outputs) for t in layout)


def _dispatched(lowered: LoweredBlock, op: Op, degrees: ExpertDegrees) -> Op:
    """Add the all-to-alls of rows to their experts and back, in both passes, and before them those of the row counts.

    If experts are split over etp, arrived rows go to all parts, and their results are combined.
    """
    tokens = op.strategy.inputs[0]
    if degrees.executed and not all(kind.is_shard and kind.dim == 0 for kind in tokens):
        raise LayoutError(
            f"{op.node.name}: token dispatch needs a layout with different tokens on every rank; solve it with "
            "autoplan.program.token_dispatch_layouts"
        )
    hidden, made = op.inputs[0], op.values[0]
    ranks = math.prod(axis.size for axis in lowered.axes)
    size = product(list(hidden.shape)).scale(Fraction(int(op.node.attrs["top_k"]), ranks))
    counts = Expr.of(int(op.node.attrs["num_experts"]))
    there, kinds = (size, hidden.dtype), ("all_to_all", "all_to_all")
    routing: Routing | None = None
    if degrees.dispatcher is not Dispatcher.ALL_TO_ALL:
        kinds, routing = ("ep_dispatch", "ep_combine"), routing_of(op.node.attrs)
    if degrees.dispatcher is Dispatcher.FLEX_FP8:
        there = (size.scale(_FP8_BYTES), "uint8")
    out: list[Collective] = []

    def travel(axis: str, ways: int, whats: Sequence[str], kinds: Sequence[str], first: tuple[Expr, str]) -> None:
        names = [f"{op.node.name} {what}" for what in ("counts", *whats)]
        out.append(Collective(names[0], "all_to_all", (axis,), counts * ways, "int64", "forward", priced=False))
        for phase, given, taken in (("forward", hidden, made), ("backward", made, hidden)):
            pairs = zip(names[1:] if phase == "forward" else names[:0:-1], (given, taken), kinds, strict=True)
            for (what, value, kind), (num, dtype) in zip(pairs, (first, (size, hidden.dtype)), strict=True):
                if phase == "forward" or value.requires_grad:
                    out.append(Collective(what, kind, (axis,), num * ways, dtype, phase, routing=routing))

    if degrees.ep > 1:
        travel("ep", 1, _OVER_EP, kinds, there)
    if degrees.etp > 1:
        kinds, routing = ("all_to_all", "all_to_all") if degrees.executed else ("all_gather", "reduce_scatter"), None
        travel("etp", degrees.etp, _OVER_ETP, kinds, (size, hidden.dtype))
    over = (("dispatch", "ep"), *((("inner", "etp"),) if degrees.etp > 1 else ()))
    return replace(op, collectives=tuple(out), over=over, experts=degrees)


# What is sent there and back, over the ranks of an expert and over the parts of one; the last word of its name
_OVER_EP, _OVER_ETP = ("dispatch", "combine"), ("gather", "scatter")


def sends_rows(what: str) -> bool:
    """Return True if a collective with this name sends rows of tokens, whose number the router decides."""
    return what.rpartition(" ")[2] in (*_OVER_EP, *_OVER_ETP)


# Bytes per element of rows in 8 bits with a 32-bit scale for each 128 elements (DeepSeek-V3, section 3.3.2).
_FP8_BYTES = Fraction(1) + Fraction(4, 128)


def _ranks(op_costs: OpCosts) -> int:
    return math.prod(axis.size for axis in op_costs.axes)


def on_token_share(work: OpWork, ways: int, op_costs: OpCosts) -> OpWork:
    """Return a router operation on whole values as one of `ways` ranks computes it for its share of the tokens.

    Sizes are divided instead of computed anew: a value counts as split if its first dims are the tokens.
    """
    tokens = op_costs.env["b"] * op_costs.env["s"]

    def own(t: TensorFacts) -> TensorFacts:
        for last in range(len(t.shape)):
            if math.prod(t.shape[: last + 1]) == tokens and t.shape[last] % ways == 0:
                return replace(t, shape=(*t.shape[:last], t.shape[last] // ways, *t.shape[last + 1 :]))
        return t

    inputs, outputs = tuple(map(own, work.inputs)), tuple(map(own, work.outputs))
    if outputs == work.outputs:
        return work
    moved = float(sum(t.num_bytes for t in (*inputs, *outputs))) if work.moved_bytes else 0.0
    return replace(work, inputs=inputs, outputs=outputs, flops=work.flops / ways, moved_bytes=moved)


def _rows(block: Block, node: Node, op_costs: OpCosts) -> float:
    """Return the rows that one rank dispatches: its share of the tokens, once per expert that takes them."""
    tokens = op_costs.number(block.values[node.tensor_inputs[0]].shape[0])
    return tokens * float(node.attrs["top_k"]) / _ranks(op_costs)


def routing_of(attrs: Mapping[str, Any]) -> Routing:
    """Return how tokens choose the experts of a node with these attributes."""
    return Routing(int(attrs["top_k"]), *(int(attrs.get(name, usual)) for name, usual in GROUPED.items()))


def row_passes(routing: Routing, num_local: int, degrees: ExpertDegrees) -> float:
    """Return how often a row of size h is read or written, on average, to put rows in order once (see the module)."""
    if degrees.ep == 1 or degrees.dispatcher is Dispatcher.ALL_TO_ALL:
        sorting = 4.0 if degrees.ep > 1 and num_local > 1 else 0.0
        return 2.0 * (1.0 + 1.0 / routing.top_k) + sorting
    return 2.0 * (1.0 + routing.units(degrees.ep) / routing.top_k)


def travelled_bytes(block: Block, node: Node, op_costs: OpCosts, degrees: ExpertDegrees) -> int:
    """Return the bytes that the runtime keeps for dispatch on top of what experts keep, for evenly spread tokens.

    These are rows as they arrived (each of etp parts of an expert has all of them), rows as they came back, and the
    index of their tokens (runtime/experts.py).
    """
    if degrees.ep * degrees.etp == 1:
        return 0
    hidden = block.values[node.tensor_inputs[0]]
    row = op_costs.number(hidden.shape[-1]) * op_costs.width(hidden)
    returned = row + DTYPE_BYTES["int64"]
    return round(_rows(block, node, op_costs) * (degrees.etp * row + returned))


def local_products(work: OpWork, block: Block, node: Node, op_costs: OpCosts, degrees: ExpertDegrees) -> OpWork:
    """Return the products of one rank: the rows that reach it through its E / ep experts, each split over etp."""
    hidden, index, weights, *experts = work.inputs
    rows = max(1, round(_rows(block, node, op_costs) * degrees.etp))
    whole: Layout = (R,) * len(op_costs.axes)
    own = []
    for name, of in zip(node.tensor_inputs[FIRST:], experts, strict=True):
        shape, (inner, _) = list(op_costs.local(block.name, block.values[name], whole)), inner_place(block, name)
        shape[0] = max(1, shape[0] // degrees.ep)
        shape[inner] = max(1, shape[inner] // degrees.etp)
        own.append(replace(of, shape=tuple(shape)))
    num_local = own[0].shape[0]
    inputs = (
        replace(hidden, shape=(rows, hidden.shape[-1])),
        replace(index, shape=(rows, 1)),
        replace(weights, shape=(rows, 1)),
        *own,
    )
    outputs = (TensorFacts((rows, hidden.shape[-1]), work.outputs[0].dtype, work.outputs[0].requires_grad),)
    moved = float(sum(t.num_bytes for t in (*inputs, *outputs)))
    passes = row_passes(routing_of(node.attrs), num_local, degrees)
    return replace(
        work,
        inputs=inputs,
        outputs=outputs,
        attrs=(*work.attrs, ("row_passes", passes)),
        flops=op_costs.flops(block, node) / _ranks(op_costs),
        moved_bytes=moved,
    )
