"""May the batch be split? Types along the batch, from the same rules as the layouts.

Data parallelism and micro-batches compute the loss in parts and add them up, so along the batch every value must be a
shard (it has the batch), replicated (it has not), or a pending sum, and the loss must end as a pending sum. A mean over
the batch, a sum that goes through a non-linear op, or a term that is the same in every part would be counted wrongly:
refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoplan.cost_models.graph import Block, ModelGraph, Node, Value
from autoplan.cost_models.layout import AxisType, P, R, shard
from autoplan.cost_models.symbols import Expr
from autoplan.rules.strategies import axis_choices

# made anew in every part, with the part's own batch size and no values that depend on the position in it
_FILLS = frozenset({"expand", "full"})


def _places(value: Value, factors: Mapping[str, Expr]) -> list[AxisType]:
    """Where the batch sits in a value."""
    return [
        shard(dim, position)
        for dim, names in enumerate(value.dims or ())
        for position, name in enumerate(names)
        if "b" in factors[name].symbols
    ]


def _result(
    node: Node, block: Block, types: Mapping[str, AxisType], factors: Mapping[str, Expr]
) -> list[AxisType] | None:
    """Types of a node's outputs, or None if it cannot be computed in parts."""
    inputs = tuple(types[n] for n in node.tensor_inputs)
    places = [_places(block.values[n], factors) for n in node.outputs]
    if any(len(p) > 1 for p in places):
        return None
    if all(t is R for t in inputs) and (not any(places) or node.op in _FILLS):
        return [p[0] if p else R for p in places]
    for choice in axis_choices(node, block.values, factors):
        shards = [[t] if t.is_shard else [] for t in choice.outputs]
        if choice.inputs == inputs and shards == places and choice.special is None:
            split = choice.factor is not None
            return None if node.op == "mean" and split and P in choice.outputs else list(choice.outputs)
    return None


def batch_obstacle(graph: ModelGraph) -> str | None:
    """Why the batch of this model cannot be computed in parts (naming op and source line), or None if it can."""
    factors = graph.factors
    top: dict[str, AxisType] = {}
    for name in graph.inputs:
        places = _places(graph.values[name], factors)
        top[name] = places[0] if places else R
    known: dict[tuple[str, tuple[AxisType, ...]], list[AxisType]] = {}  # layers are calls of one block, called alike
    for call in graph.calls:
        block, given = graph.blocks[call.block], tuple(top[actual] for actual in call.inputs)
        if (block.name, given) not in known:
            types = dict(zip(block.inputs, given, strict=True))
            types |= dict.fromkeys((*block.params, *block.buffers), R)
            for node in block.nodes:
                found = _result(node, block, types, factors)
                if found is None:
                    return f"{node.op} at {node.source or node.name} cannot be computed sample by sample and added up"
                types |= zip(node.outputs, found, strict=True)
            known[block.name, given] = [types[formal] for formal in block.outputs]
        top |= zip(call.outputs, known[block.name, given], strict=True)
    if top[graph.output] is not P:
        return "the loss is not a sum over the samples of the batch"
    return None
