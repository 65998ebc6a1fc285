"""Carry sums over the layers of a model from layer to layer.

A loss of routers is computed behind the last layer, from the logits of all routers: tokens x experts of every layer,
which a pipeline would send over all of its cuts. The loss needs little of them: counts and sums over the tokens, added
up layer by layer. Every node outside the layers that leads to such a value without a parameter, and that depends on no
layer later than some layer, moves directly behind that layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from autoplan.capture.trace import Trace
from autoplan.ir.dataflow import Dataflow
from autoplan.ir.graph import Node
from autoplan.ops.record import Trait
from autoplan.ops.table import op_has, op_record
from autoplan.ops.views import WHOLE_VIEW


def simplify(trace: Trace) -> None:
    """Rewrite counts into a form that can be split over the tokens, and sums without their initial zeros."""
    maker = {out: node for node in trace.nodes for out in node.outputs}
    same: dict[str, str] = {}
    for i, node in enumerate(trace.nodes):
        node = replace(node, inputs=tuple(same.get(x, x) if x else x for x in node.inputs))
        if node.op == "histc":
            node = replace(node, inputs=(_whole_numbers(trace, maker, str(node.inputs[0])),))
        if node.op == "scatter_add" and _zeros(maker, str(node.inputs[0])) and not node.attrs["dim"]:
            bins = trace.values[node.outputs[0]].shape[0]
            node = replace(node, op="weighted_count", inputs=node.inputs[1:], attrs={"num": bins})
        if node.op == "add" and len(node.tensor_inputs) == 2:
            left, right = node.tensor_inputs
            for zeros, other in ((left, right), (right, left)):
                a, b = trace.values[other], trace.values[node.outputs[0]]
                if _zeros(maker, zeros) and (a.shape, a.dtype) == (b.shape, b.dtype):
                    same[node.outputs[0]] = other
                    break
        trace.nodes[i] = node
    if same:
        _rename(trace, same)


def _zeros(maker: Mapping[str, Node], value: str) -> bool:
    node = maker.get(value)
    return node is not None and node.op == "full" and node.attrs["scalar"] == 0


def _flattens(node: Node) -> bool:
    """Return True for a view that has every element of its input once."""
    return op_record(node.op).saved is WHOLE_VIEW


def _whole_numbers(trace: Trace, maker: Mapping[str, Node], value: str) -> str:
    """Return the whole numbers behind casts and flattening views of `value`; `value` itself if there are none."""
    at = value
    while (node := maker.get(at)) is not None and (_flattens(node) or op_has(node.op, Trait.CAST)):
        at = str(node.inputs[0])
        if trace.values[at].dtype == "int64" and (maker.get(at) is None or not _flattens(maker[at])):
            return at
    return value


def _rename(trace: Trace, same: Mapping[str, str]) -> None:
    """Rename values outside the nodes, which have their new names already."""
    trace.output = same.get(trace.output, trace.output)
    trace.results = {name: same.get(value, value) for name, value in trace.results.items()}
    trace.repeats = [replace(r, inputs=tuple(same.get(x, x) for x in r.inputs)) for r in trace.repeats]
    for of in (trace.layer_inputs, trace.layer_outputs):
        for layer, values in of.items():
            of[layer] = [same.get(x, x) for x in values]


def hoist(trace: Trace, pure: set[str]) -> None:
    """Move the nodes that lead to sums over the tokens of earlier layers.

    Args:
        trace: without nodes that the loss does not need; changed in place.
        pure: values that depend on no parameter.
    """
    places, updated = _places(trace), trace.updated_buffers()
    late = {i for i, last in places.before.items() if 0 <= places.depth[trace.nodes[i].outputs[0]] < last}
    flow = Dataflow([(set(n.tensor_inputs) - pure, n.outputs) for n in trace.nodes])
    moved: set[int] = set()
    for i in late:
        if all(not size.symbols for out in trace.nodes[i].outputs for size in trace.values[out].shape):
            found = {i, *flow.leading_to([i], late.__contains__)}
            if not any(_stays(trace, trace.nodes[k], updated) for k in found):
                moved |= found
    behind: dict[int, list[tuple[str, int]]] = {}
    for kind, index in trace.order:
        if kind == "node" and index in moved:
            place = places.ends[places.depth[trace.nodes[index].outputs[0]]]
            behind.setdefault(place, []).append((kind, index))
    order: list[tuple[str, int]] = []
    for place, entry in enumerate([*trace.order, None]):
        order += behind.get(place, [])
        if entry is not None and not (entry[0] == "node" and entry[1] in moved):
            order.append(entry)
    trace.order = order


@dataclass
class _Places:
    """The positions of nodes among the layers, counted from 0.

    Attributes:
        depth: value -> the last layer that it depends on; -1: none.
        before: node outside layers -> the last layer before it.
        ends: per layer, the end of the glue behind it in the order of the trace.
    """

    depth: dict[str, int] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)


def _places(trace: Trace) -> _Places:
    out, seen = _Places(), dict[str, int]()
    for place, (kind, index) in enumerate(trace.order):
        layer = trace.repeats[index].layer if kind == "repeat" else trace.region[trace.nodes[index].name]
        if layer and layer not in seen:
            seen[layer] = len(seen)
            out.ends.append(place + 1)
        out.ends[-1:] = [place + 1] if out.ends else []
        if kind == "repeat":
            out.depth |= dict.fromkeys(trace.repeats[index].outputs, seen[layer])
            continue
        node = trace.nodes[index]
        deep = seen[layer] if layer else max((out.depth.get(x, -1) for x in node.tensor_inputs), default=-1)
        out.depth |= dict.fromkeys(node.outputs, deep)
        if not layer:
            out.before[index] = len(seen) - 1
    return out


def _stays(trace: Trace, node: Node, updated: Set[str]) -> bool:
    """Return True for a node that must not be moved: it draws random numbers, or uses a parameter or updated buffer."""
    return op_has(node.op, Trait.RANDOM) or any(x in trace.params or x in updated for x in node.tensor_inputs)
