"""Decide whether the batch or the sequence can be split, from the same rules as the layouts.

Data parallelism and micro-batches compute the loss in parts and add them up. So along the batch every value must be a
shard (it has the batch), replicated (it does not have it), or a pending sum, and the loss must end as a pending sum. A
mean over the batch, a sum that goes through a non-linear op, or a term that is the same in every part would be counted
wrongly; such ops are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from autoplan.ir.graph import OF_PARTS, OF_THE_WHOLE_BATCH, Block, ModelGraph, Node, Value
from autoplan.ir.layout import AxisType, P, R, shard
from autoplan.ir.symbols import Expr
from autoplan.ops.generic import FUNCTION, POINTWISE
from autoplan.ops.record import OpKind, OpRecord, Trait
from autoplan.ops.sequence_parts import at_joints
from autoplan.ops.strategies import axis_choices
from autoplan.ops.table import op_has, op_kind, op_record
from autoplan.ops.views import OWN_PART
from autoplan.ops.whole_attention import described, whole_attention


def _places(value: Value, factors: Mapping[str, Expr], symbol: str) -> list[AxisType]:
    """Return the places of the batch, or of the sequence, in a value."""
    return [
        shard(dim, position)
        for dim, names in enumerate(value.dims or ())
        for position, name in enumerate(names)
        if symbol in factors[name].symbols
    ]


def _result(
    node: Node, block: Block, types: Mapping[str, AxisType], graph: ModelGraph, symbol: str
) -> list[AxisType] | None:
    """Return the types of a node's outputs, or None if it cannot be computed in parts."""
    factors, inputs = graph.factors, tuple(types[n] for n in node.tensor_inputs)
    places = [_places(block.values[n], factors, symbol) for n in node.outputs]
    if max(map(len, places)) > 1 or (symbol == "b" and node.attrs.get(OF_THE_WHOLE_BATCH)):
        return None
    op = op_record(node.op)
    if symbol == "b" and not _numbered_by_sample(op, block.values[node.outputs[0]], factors):
        return None
    if symbol in node.attrs.get("over" if op.kind is OpKind.COLLECTIVE else OF_PARTS, ()):
        return None if any(places) else _over_all_parts(op, inputs)
    if Trait.CAST in op.traits and inputs == (P,) and "float" in block.values[node.outputs[0]].dtype:
        return [P]  # a term of the loss: each part is rounded
    if symbol == "s":
        if _makes_parts(node, op, inputs, block, graph, cut=any(places)):
            return [p[0] for p in places]
        if (node.op == OWN_PART and any(places)) or not _of_a_sequence(node, op, inputs, block, graph):
            return None
    return _split(node, block, factors, inputs, places)


def _makes_parts(
    node: Node, op: OpRecord, inputs: tuple[AxisType, ...], block: Block, graph: ModelGraph, *, cut: bool
) -> bool:
    """Return True for an op of sequences that makes the parts of its results by a rule of its own.

    Args:
        cut: it makes some.
    """
    if counts_tokens(node, block):
        return True
    if not cut:
        return False
    if node.op == OWN_PART:
        return inputs == (R,)
    if graph.parts and at_joints(node, block, inputs, graph.factors, graph.parts, graph.bounds["s"][0]):
        return True
    return op.kind is OpKind.ATTENTION and _of_a_sequence(node, op, inputs, block, graph)


def _numbered_by_sample(op: OpRecord, value: Value, factors: Mapping[str, Expr]) -> bool:
    """Return False for what draws numbers where a rank does not know the sample of each of its elements.

    It does if the batch is a factor of its own, or absent.
    """
    if Trait.RANDOM not in op.traits:
        return True
    sizes = [factors[name] for dim in value.dims or () for name in dim]
    return all(size == Expr.symbol("b") for size in sizes if "b" in size.symbols)


def counts_tokens(node: Node, block: Block) -> bool:
    """Return True for the places of all tokens, which a block with parameters takes for its part of a cut sequence.

    Blocks without parameters may be free calls, which make whole sequences.
    """
    whole = node.op == "arange" and (node.attrs["start"], node.attrs["end"]) == (0, Expr.symbol("s"))
    return whole and bool(block.params)


_JOIN_PARTS = {Trait.SUMS_RANKS, Trait.EXTREME_OF_RANKS}


def _over_all_parts(op: OpRecord, inputs: tuple[AxisType, ...]) -> list[AxisType] | None:
    if op.kind is not OpKind.COLLECTIVE:  # an extreme of this part, which only that over all parts takes
        return [P] if len(inputs) == 1 and inputs[0].is_shard else None
    before, after = (P, R) if op.traits & _JOIN_PARTS else (R, P)
    return [after] if inputs == (before,) else None


def _of_a_sequence(node: Node, op: OpRecord, inputs: tuple[AxisType, ...], block: Block, graph: ModelGraph) -> bool:
    """Return False for ops that need the whole sequence.

    These are what draws by the place in the sequence, as dropout does, unless a dim is that of all tokens, and
    attention for the reasons of `whole_attention` (its runtime, autoplan.runtime.context, sees the keys of all parts).
    """
    draws, factors = Trait.RANDOM in op.traits and node.attrs.get("p") != 0, graph.factors
    if op.kind is OpKind.ATTENTION:
        return not (draws and graph.parts) and whole_attention(node, inputs, block, _length(graph)) is None
    sizes = [factors[name] for dim in block.values[node.outputs[0]].dims or () for name in dim]
    cut = [size for size in sizes if "s" in size.symbols]
    return not draws or all(size == Expr.symbol("s") and not graph.parts for size in cut)


def _length(graph: ModelGraph) -> int:
    """Return the tokens that `s` stands for, if they have no order; else 0."""
    return graph.bounds["s"][0] if graph.parts else 0


def _split(
    node: Node,
    block: Block,
    factors: Mapping[str, Expr],
    inputs: tuple[AxisType, ...],
    places: list[list[AxisType]],
) -> list[AxisType] | None:
    """Return output types by the choice of the op that has these input types.

    None if there is no such choice, or if it averages over a part.
    """
    if set(inputs) <= {R} and (op_has(node.op, Trait.FILLS) or not any(places)):
        return [p[0] if p else R for p in places]
    for choice in axis_choices(node, block.values, factors, pending_counts=True):
        shards = [[t] if t.is_shard else [] for t in choice.outputs]
        if choice.inputs == inputs and shards == places and choice.special is None:
            averaged = op_has(node.op, Trait.AVERAGES) and choice.factor is not None and P in choice.outputs
            return None if averaged else list(choice.outputs)
    return None


def _name(node: Node) -> str:
    """Return the name of an op, of one without a record that of PyTorch."""
    call = node.attrs.get("call")
    return node.op if call is None else str(call).partition("(")[0].removeprefix("torch.ops.")


def _why_whole(node: Node, inputs: tuple[AxisType, ...], block: Block, graph: ModelGraph) -> str:
    """Return what hinders an operation to compute a part of a sequence, and what would work."""
    if Trait.RANDOM in op_record(node.op).traits and node.attrs.get("p") != 0 and graph.parts:
        return "it draws a number for every token, and parts of joined tokens have no places; a rate of 0 works"
    if op_kind(node.op) is OpKind.ATTENTION:
        return whole_attention(node, inputs, block, _length(graph)) or ""
    cut = [
        f"dim {kind.dim} of {described(block.values[name], block, _length(graph))}"
        for kind, name in zip(inputs, node.tensor_inputs, strict=True)
        if kind.is_shard
    ]
    return f"ranks would have parts of {' and '.join(dict.fromkeys(cut))}" if cut else ""


def batch_obstacle(graph: ModelGraph) -> str | None:
    """Return why the batch of this model cannot be computed in parts (naming op and source line), or None if it can."""
    found, loss = _obstacle(graph, "b", frozenset())
    if found is not None:
        return f"{found} cannot be computed sample by sample and added up"
    return "the loss is not a sum over the samples of the batch" if loss is not P else None


def uses_batch_size(graph: ModelGraph) -> bool:
    """Return True if a number that the program computes with is the size of a micro-batch, of all ranks that share it.

    Shapes are those of a rank's own part.
    """
    nodes = (node for block in graph.blocks.values() for node in block.nodes)
    numbers = (x for n in nodes for name, x in n.attrs.items() if name == "scalar" or n.op in (POINTWISE, FUNCTION))
    return any(isinstance(x, Expr) and "b" in x.symbols for x in numbers)


def context_obstacle(graph: ModelGraph) -> str | None:
    """Return why the sequence of this model cannot be computed in parts, or None if it can.

    Calls that depend on no parameter make whole sequences, which are then cut. Attention sees the keys of all parts.
    """
    if graph.no_sequence:
        return graph.no_sequence
    found, loss = _obstacle(graph, "s", graph.free_calls())
    if found is not None:
        operation, _, why = found.partition(": ")
        return f"{operation} cannot be computed for a part of the sequence{why and f': {why}'}"
    return "the loss is not a sum over the tokens of the sequence" if loss is not P else None


def _obstacle(graph: ModelGraph, symbol: str, whole: Set[str]) -> tuple[str | None, AxisType]:
    """Return the first operation that cannot be computed in parts, and the type of the loss.

    Args:
        whole: calls that are not computed in parts.
    """
    factors = graph.factors
    top: dict[str, AxisType] = {}
    values = [*graph.inputs, *(v for call in graph.calls if call.name in whole for v in call.outputs)]
    for name in values:
        places = _places(graph.values[name], factors, symbol)
        top[name] = places[0] if places else R
    known: dict[tuple[str, tuple[AxisType, ...]], list[AxisType]] = {}  # layers are equal calls of one block
    for call in graph.calls:
        if call.name in whole:
            continue
        block, given = graph.blocks[call.block], tuple(top[actual] for actual in call.inputs)
        if (block.name, given) not in known:
            types = dict(zip(block.inputs, given, strict=True))
            types |= dict.fromkeys((*block.params, *block.buffers), R)
            for node in block.nodes:
                found = _result(node, block, types, graph, symbol)
                if found is None:
                    why = (
                        _why_whole(node, tuple(types[n] for n in node.tensor_inputs), block, graph)
                        if symbol == "s"
                        else ""
                    )
                    return f"{_name(node)} at {node.source or node.name}{why and f': {why}'}", R
                types |= zip(node.outputs, found, strict=True)
            known[block.name, given] = [types[formal] for formal in block.outputs]
        top |= zip(call.outputs, known[block.name, given], strict=True)
    return None, top[graph.output]
