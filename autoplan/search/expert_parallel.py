"""Expert parallelism on one rank: what it sends and computes if experts are laid out over ep x etp ranks, not over tp.

The folding of Megatron-Core (Liu et al., MoE Parallel Folding, arXiv 2504.14960): the dp * cp * tp ranks of a pipeline
stage are divided a second time, into replicas * ep * etp. With T tokens in a micro-batch, k experts per token, E
experts, hidden size h, inner size f, w bytes per element and tokens spread evenly over the experts:

    rows (a token once per expert)    n = T k / tp       each tp rank dispatches its own share of the tokens
    all_to_all over ep                n h w              dispatch and combine, forward and backward
    over etp                          etp n h w          rows gathered for dispatch, reduced and scattered to combine
    products of one rank              etp n rows, E / ep experts of inner size f / etp: the block's flops / tp

The layout was solved with experts over tp; the collectives that it has for that alone are then not performed. Values
that are gathered for the router and the experts only stay as they are, and what the experts return is no pending sum:
where the program wants it split over tokens, it is; where it wants it whole, a gather is left of the all-reduce. What
others need too (shared experts) is still gathered. The router is priced as the layout has it, on whole values: an upper
bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoplan.cost_models.graph import Block, Node
from autoplan.cost_models.layout import ConversionKind, Layout, R
from autoplan.cost_models.work import CommWork, OpWork, TensorWork
from autoplan.search.lower import Convert, LoweredBlock, Statement
from autoplan.search.works import Works

Collectives = tuple[str | None, str | None]  # forward, backward


@dataclass(frozen=True)
class ExpertDegrees:
    """Expert parallelism: experts over `ep` ranks, each expert over `etp`. Folded from dp * cp * tp."""

    ep: int = 1
    etp: int = 1

    def dispatches(self, tp: int) -> bool:
        """False if experts are where tensor parallelism has the rest of the layer: then its layout holds for them."""
        return self.ep > 1 or self.etp != tp


# Conversions of what only the router and the experts read, and of what the experts return: what is left of them by
# kind and target type. A slice of a replicated value is free; its gradient is gathered where the value is invariant.
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


def _names(statement: Statement) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Variables that a statement reads and makes."""
    if isinstance(statement, Convert):
        return (statement.source,), (statement.target,)
    read = tuple(a for a in (*statement.args, statement.bias) if a is not None)
    return read, statement.targets


def _is_experts(statement: Statement) -> bool:
    return not isinstance(statement, Convert) and statement.node.op == "experts"


def _only_for_experts(lowered: LoweredBlock) -> set[int]:
    """Statements that nothing but the experts needs: the router, and conversions before it."""
    readers: dict[str, set[int]] = {}
    for k, statement in enumerate(lowered.statements):
        for name in _names(statement)[0]:
            readers.setdefault(name, set()).add(k)
    ends = {k for k, statement in enumerate(lowered.statements) if _is_experts(statement)}
    found: set[int] = set()
    for k in reversed(range(len(lowered.statements))):
        made = _names(lowered.statements[k])[1]
        users = set().union(*(readers.get(name, set()) for name in made))
        if users and users <= ends | found and not set(made) & set(lowered.outputs):
            found.add(k)
    return found


def _is_pending(layout: Layout) -> bool:
    return any(t.kind_name == "P" for t in layout)


def _sums_of_experts(lowered: LoweredBlock) -> set[int]:
    """Conversions of sums that are pending because of the experts alone."""
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


def rerouted(lowered: LoweredBlock) -> Mapping[int, Collectives]:
    """Conversions around dispatched experts, by statement, with the collectives that are left of each."""
    out: dict[int, Collectives] = {}
    for table, places in ((_BEFORE, _only_for_experts(lowered)), (_AFTER, _sums_of_experts(lowered))):
        for k in sorted(places):
            statement = lowered.statements[k]
            if isinstance(statement, Convert):
                step = statement.step
                left = table.get((step.kind, step.target.kind_name))
                split = next((t for t in (step.source, step.target) if t.is_shard), None)
                if left is not None:
                    hidden = len(statement.value.dims or ()) - 1
                    out[k] = _TRANSPOSED if split is not None and split.dim == hidden else left
    return out


def rerouted_comms(statement: Convert, left: Collectives, axis: str, works: Works, block: str) -> list[CommWork]:
    """What is left of one conversion."""
    sizes = [works.num_bytes(block, statement.value, layout) for layout in (statement.layout, statement.result)]
    out = []
    for kind, phase in zip(left, ("forward", "backward"), strict=True):
        if kind is not None and (phase == "forward" or statement.value.requires_grad):
            size = min(sizes) if kind == "all_to_all" else max(sizes)
            out.append(CommWork(statement.value.name, kind, size, axis, phase))
    return out


def _rows(block: Block, node: Node, works: Works) -> float:
    """Rows that one rank dispatches: its share of the tokens, once per expert that takes them."""
    tp = 1
    for axis in works.axes:
        tp *= axis.size
    return works.number(block.values[node.tensor_inputs[0]].shape[0]) * float(node.attrs["top_k"]) / tp


def dispatch_comms(block: Block, node: Node, works: Works, degrees: ExpertDegrees) -> list[CommWork]:
    """Rows travel to their experts and back, forward and backward (dispatch and combine)."""
    hidden = block.values[node.tensor_inputs[0]]
    size = _rows(block, node, works) * works.number(hidden.shape[-1]) * works.width(hidden)
    phases = ("forward", "backward") if hidden.requires_grad else ("forward",)
    out = []
    for phase in phases:
        gather, scatter = ("dispatch", "combine") if phase == "forward" else ("combine", "dispatch")
        for what in (gather, scatter):
            if degrees.ep > 1:
                out.append(CommWork(what, "all_to_all", size, "ep", phase))
        if degrees.etp > 1:
            out.append(CommWork(gather, "all_gather", size * degrees.etp, "etp", phase))
            out.append(CommWork(scatter, "reduce_scatter", size * degrees.etp, "etp", phase))
    return out


def local_products(work: OpWork, block: Block, node: Node, works: Works, degrees: ExpertDegrees) -> OpWork:
    """The products of one rank: the rows that reach it through its E / ep experts, each split over etp."""
    hidden, index, weights, gate_up, down = work.inputs
    rows = max(1, round(_rows(block, node, works) * degrees.etp))
    whole: Layout = (R,) * len(works.axes)
    shapes = [works.local(block.name, block.values[name], whole) for name in node.tensor_inputs[3:5]]
    num_local = max(1, shapes[0][0] // degrees.ep)
    inputs = (
        replace(hidden, shape=(rows, hidden.shape[-1])),
        replace(index, shape=(rows, 1)),
        replace(weights, shape=(rows, 1)),
        replace(gate_up, shape=(num_local, max(1, shapes[0][1] // degrees.etp), shapes[0][2])),
        replace(down, shape=(num_local, shapes[1][1], max(1, shapes[1][2] // degrees.etp))),
    )
    outputs = (TensorWork((rows, hidden.shape[-1]), work.outputs[0].dtype, work.outputs[0].requires_grad),)
    moved = float(sum(t.num_bytes for t in (*inputs, *outputs)))
    tp = 1
    for axis in works.axes:
        tp *= axis.size
    return replace(work, inputs=inputs, outputs=outputs, flops=works.flops(block, node) / tp, moved_bytes=moved)
