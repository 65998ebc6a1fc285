"""Inputs whose numbers are rows of a table or classes of a loss: the runtime refuses others by the name of the input.

Without that a lookup in a table that ranks of tensor parallelism share gives zeros where PyTorch raises.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.ir.graph import Block, Call, ModelGraph, Node
from autoplan.ops.record import OpKind
from autoplan.ops.table import op_record
from autoplan.runtime.spec import IndexLimit

_READERS = frozenset((OpKind.EMBEDDING, OpKind.LOSS))


def index_limits(graph: ModelGraph) -> tuple[IndexLimit, ...]:
    """Return the limits of the inputs that such operations read as they are, or in another shape."""
    given = {name: name for name in graph.inputs}  # value -> the input whose elements it has, each once
    found: dict[IndexLimit, None] = {}
    for call in graph.calls:
        block = graph.blocks[call.block]
        pairs = zip(block.inputs, call.inputs, strict=True)
        mine = {inside: given[outside] for inside, outside in pairs if outside in given}
        for node in block.nodes:
            if _keeps_elements(block, node) and node.tensor_inputs[0] in mine:
                mine[node.outputs[0]] = mine[node.tensor_inputs[0]]
            found |= dict.fromkeys(_limits_of(graph, call, node, mine))
        outside = zip(block.outputs, call.outputs, strict=True)
        given |= {whole: mine[part] for part, whole in outside if part in mine}
    return tuple(found)


def _keeps_elements(block: Block, node: Node) -> bool:
    """Return True for a view that has every element of its input."""
    if op_record(node.op).kind is not OpKind.VIEW or len(node.tensor_inputs) != 1 or len(node.outputs) != 1:
        return False
    return block.values[node.tensor_inputs[0]].num_elements == block.values[node.outputs[0]].num_elements


def _limits_of(graph: ModelGraph, call: Call, node: Node, inputs: dict[str, str]) -> Iterator[IndexLimit]:
    """Yield the limits that a node sets to inputs of the model. `inputs`: value of its block -> input."""
    record = op_record(node.op)
    if record.kind not in _READERS or record.index_limits is None:
        return
    values = graph.blocks[call.block].values
    shapes = [[size.value or 0 for size in values[name].shape] for name in node.tensor_inputs]
    for position, legal in record.index_limits(node.attrs, shapes, []).items():
        name, size = node.inputs[position], legal.stop
        if name not in inputs or not size:  # a size that depends on the batch is none here
            continue
        table = call.params.get(node.inputs[0] or "")
        of = f"{table} has {size} rows" if table is not None else f"the loss has {size} classes"
        yield IndexLimit(inputs[name], size, node.attrs.get("ignore_index"), of)
