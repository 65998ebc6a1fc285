"""Values of a sequence that stay whole, on every rank, until they meet what is cut.

A text that is joined with an image may first pass layers of its own, which see it in an order or under a mask over
pairs of its tokens. Every rank computes these layers for all of the text, and takes its part of what they make. Their
parameters then get a part of their gradient on every rank, as all others do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from autoplan.ir.graph import Block, ModelGraph, Value
from autoplan.ops.record import Trait
from autoplan.ops.table import op_has
from autoplan.ops.views import OWN_PART, REGROUP

_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True)
class WholeValues:
    """What stays whole.

    Attributes:
        top: values of the graph.
        inside: block -> its values. Of a block without parameters only what it takes and hands out: it makes whole
            sequences anyway.
        nodes: block -> nodes that compute with them alone.
    """

    top: frozenset[str] = _NONE
    inside: Mapping[str, frozenset[str]] = field(default_factory=dict)
    nodes: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def of_block(self, block: str) -> frozenset[str]:
        """Return the values of a block that stay whole."""
        return self.inside.get(block, _NONE)

    def nodes_of(self, block: str) -> frozenset[str]:
        """Return the nodes of a block that compute with whole values alone."""
        return self.nodes.get(block, _NONE)


def cut_factors(value: Value, parts: Iterable[str]) -> set[str]:
    """Return the factors of a value that are cut."""
    return {name for dim in value.dims or () for name in dim} & set(parts)


def whole_values(graph: ModelGraph, parts: Iterable[str], late: Set[str]) -> WholeValues:
    """Return what stays whole: as many values as possible of which all cut factors are among `late`."""
    if not late:
        return WholeValues()
    parts, free = frozenset(parts), graph.free_calls()
    top = {name for name, value in graph.values.items() if _is_late(value, parts, late)}
    calls_of = {name: graph.uses_of(name) for name in graph.blocks}
    given = {*graph.inputs, *(v for call in graph.calls if call.name in free for v in call.outputs)}
    while True:
        inside, nodes = dict[str, frozenset[str]](), dict[str, frozenset[str]]()
        for name, block in graph.blocks.items():
            whole = _everywhere(block.inputs, [call.inputs for call in calls_of[name]], top)
            if free.isdisjoint(call.name for call in calls_of[name]):
                inside[name], nodes[name] = _propagated(block, whole, parts, late)
                continue
            inside[name] = frozenset(whole | _everywhere(block.outputs, [c.outputs for c in calls_of[name]], top))
        left, read = set(graph.inputs), set(graph.values) - given
        for call in graph.calls:
            block = graph.blocks[call.block]
            left |= _outside(call.outputs, block.outputs, inside[call.block])
            read |= _outside(call.inputs, block.inputs, inside[call.block]) if call.name not in free else set()
        found = top & left & read
        if found == top:
            return WholeValues(frozenset(top), inside, nodes)
        top = found


def _outside(actuals: tuple[str, ...], formals: tuple[str, ...], inside: Set[str]) -> set[str]:
    """Return the values of the graph that a call has for those inputs or outputs of its block that stay whole."""
    return {actual for actual, formal in zip(actuals, formals, strict=True) if formal in inside}


def _is_late(value: Value, parts: Set[str], late: Set[str]) -> bool:
    found = cut_factors(value, parts)
    return bool(found) and found <= late


def _everywhere(formals: tuple[str, ...], actuals: list[tuple[str, ...]], top: Set[str]) -> set[str]:
    """Return the inputs or outputs of a block that are whole in all of its calls."""
    return {formal for i, formal in enumerate(formals) if actuals and all(given[i] in top for given in actuals)}


def _propagated(
    block: Block, whole: Set[str], parts: Set[str], late: Set[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the values of a block that are whole if these inputs are, and the nodes that compute with them alone."""
    found, nodes = set(whole), set[str]()
    tables = {name for name in (*block.params, *block.buffers) if cut_factors(block.values[name], parts)}
    for node in block.nodes:
        cut = {name for name in node.tensor_inputs if cut_factors(block.values[name], parts)}
        made = {name for name in node.outputs if cut_factors(block.values[name], parts)}
        if not cut and not op_has(node.op, Trait.FILLS):
            tables |= made
        elif cut & found and cut <= found | tables and all(_is_late(block.values[name], parts, late) for name in made):
            found |= made
            nodes.add(node.name)
    return frozenset(found), frozenset(nodes)


def without_unread(block: Block) -> Block:
    """Return the block without parts of whole values that nothing reads."""
    read = {*block.outputs, *(name for node in block.nodes for name in node.tensor_inputs)}
    unread = {n.outputs[0] for n in block.nodes if n.op in (OWN_PART, REGROUP) and read.isdisjoint(n.outputs)}
    if not unread:
        return block
    nodes = tuple(node for node in block.nodes if unread.isdisjoint(node.outputs))
    values = {name: value for name, value in block.values.items() if name not in unread}
    return without_unread(replace(block, nodes=nodes, values=values))
