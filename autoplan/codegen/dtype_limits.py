"""Inputs that a program takes in one dtype alone, or in a few: the runtime refuses others by the name of the input.

Without that an operation raises torch's own words on the ranks that run it, when the others wait for them already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autoplan.ir.graph import Block, ModelGraph, Node
from autoplan.ops.record import OpKind
from autoplan.ops.table import op_record
from autoplan.runtime.spec import DtypeLimit

_INDEX, _CLASSES = ("int64", "int32"), ("int64", "uint8")  # that torch takes as rows of a table, as classes of a loss
_NUMBERS = {OpKind.EMBEDDING: _INDEX, OpKind.OTHER: _INDEX, OpKind.LOSS: _CLASSES}
_HANDS_ON = (OpKind.VIEW, OpKind.ELEMENTWISE, OpKind.JOIN)


def dtype_limits(graph: ModelGraph) -> tuple[DtypeLimit, ...]:
    """Return the dtypes that operations allow for inputs of the graph which have no others there."""
    reached: _Reached = {n: frozenset((n,)) for n in graph.inputs}
    found: dict[str, set[str]] = {}
    for call in graph.calls:
        block = graph.blocks[call.block]
        pairs = zip(block.inputs, call.inputs, strict=True)
        mine = {inside: reached[outside] for inside, outside in pairs if outside in reached}
        for node in block.nodes:
            for inputs, allowed in _limits_of_node(block, node, mine):
                for name in inputs:
                    dtypes = {graph.values[name].dtype, *allowed}
                    found[name] = found.get(name, dtypes) & dtypes
            _follow(block, node, mine)
        outside = zip(block.outputs, call.outputs, strict=True)
        reached |= {whole: mine[part] for part, whole in outside if part in mine}
    return tuple(DtypeLimit(name, tuple(sorted(dtypes))) for name, dtypes in sorted(found.items()) if dtypes)


_Reached = dict[str, frozenset[str]]  # value -> inputs of the graph in whose dtype it is


def _limits_of_node(block: Block, node: Node, mine: _Reached) -> Iterator[tuple[frozenset[str], tuple[str, ...]]]:
    """Yield inputs that a node limits to their own dtype, and the others that it takes."""
    read = [name for name in node.tensor_inputs if name in mine]
    for name in read:
        if (allowed := _as_numbers(block, node, name)) is not None:
            yield mine[name], allowed
    inputs = _of_kind(block, read, mine, True)
    if inputs and op_record(node.op).one_dtype and sum(_is_float(block, name) for name in node.tensor_inputs) > 1:
        yield inputs, ()


def _follow(block: Block, node: Node, mine: _Reached) -> None:
    """Note the inputs in whose dtype the results of a node are."""
    if op_record(node.op).kind is OpKind.FACTORY:
        return
    read = [name for name in node.tensor_inputs if name in mine]
    floats, integers = _of_kind(block, read, mine, True), _of_kind(block, read, mine, False)
    for out in node.outputs:
        mine[out] = floats if _is_float(block, out) else integers if _hands_on(block, node, out) else frozenset()


def _of_kind(block: Block, names: Iterable[str], mine: _Reached, is_float: bool) -> frozenset[str]:
    return frozenset().union(*(mine[name] for name in names if _is_float(block, name) is is_float))


def _is_float(block: Block, name: str) -> bool:
    return "float" in block.values[name].dtype


def _hands_on(block: Block, node: Node, out: str) -> bool:
    """Return True if a node makes integers of the dtype of those that it reads."""
    return op_record(node.op).kind in _HANDS_ON and block.values[out].dtype != "bool"


def _as_numbers(block: Block, node: Node, name: str) -> tuple[str, ...] | None:
    """Return the dtypes in which a node takes integers as rows, indices or classes; None if it takes none so."""
    record = op_record(node.op)
    if _is_float(block, name) or block.values[name].dtype == "bool" or record.kind not in _NUMBERS:
        return None
    if record.index_limits is not None:
        shapes = [[size.value or 0 for size in block.values[each].shape] for each in node.tensor_inputs]
        if name not in {node.inputs[position] for position in record.index_limits(node.attrs, shapes, [])}:
            return None
    return _NUMBERS[record.kind]
