"""Trace: the flat graph of a model as IR nodes, after the translation of ATen and before the cut into blocks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autoplan.ir.dataflow import Dataflow
from autoplan.ir.graph import Node, Value
from autoplan.ops.statistics import UPDATE
from autoplan.ops.table import updated_buffers


@dataclass(frozen=True)
class Repeat:
    """A layer that is identical to an earlier one, `first`, with the values that enter and leave it."""

    layer: str
    first: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass
class Trace:
    """The translated flat graph, before it is cut into blocks.

    Attributes:
        region: node name -> layer, "" outside layers.
        within: node name -> the calls of modules that made it, from outside inwards (`capture.places.calls_of`). Nodes
            that passes add have none.
        roots: layer -> the module that the names inside it are relative to, where that is another one.
        params, buffers: value -> full name in the model.
        layer_inputs, layer_outputs: layer -> values that enter and leave it.
        results: what the model returns besides the loss, where the loss depends on it: name -> value.
        changing: full names of buffers that count as changed: another graph of the model changes them.
        of_micro_batches: values that updates of buffers are made of: the batch size in them is that of a micro-batch.
        order: program order: ("node", index into `nodes`) or ("repeat", index into `repeats`).
    """

    values: dict[str, Value] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    region: dict[str, str] = field(default_factory=dict)
    within: dict[str, tuple[str, ...] | None] = field(default_factory=dict)
    roots: dict[str, str] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)
    layer_inputs: dict[str, list[str]] = field(default_factory=dict)
    layer_outputs: dict[str, list[str]] = field(default_factory=dict)
    repeats: list[Repeat] = field(default_factory=list)
    order: list[tuple[str, int]] = field(default_factory=list)
    output: str = ""
    results: dict[str, str] = field(default_factory=dict)
    of_micro_batches: set[str] = field(default_factory=set)
    changing: frozenset[str] = frozenset()

    def flow(self) -> Dataflow:
        """Return the dependences among `nodes`, by index."""
        return Dataflow([(node.tensor_inputs, node.outputs) for node in self.nodes])

    def append(self, node: Node, layer: str) -> None:
        """Add a node at the end of the layer ("": outside layers)."""
        self.insert(len(self.order), node, layer)

    def insert(self, place: int, node: Node, layer: str = "") -> None:
        """Add a node before entry `place` of the program order, in the layer ("": outside layers)."""
        self.region[node.name] = layer
        self.order.insert(place, ("node", len(self.nodes)))
        self.nodes.append(node)

    def insert_after(self, index: int, node: Node) -> None:
        """Add a node directly after node number `index`, in the same layer."""
        self.insert(self.order.index(("node", index)) + 1, node, self.region[self.nodes[index].name])

    def updated_buffers(self) -> frozenset[str]:
        """Return the values of the buffers that change between forwards."""
        elsewhere = {value for value, full in self.buffers.items() if full in self.changing}
        return updated_buffers(self.nodes, self.buffers) | elsewhere

    def update(self, buffer: str, value: str) -> None:
        """Add a node that gives a buffer a new value: where the value is made, or in the layer that holds the buffer.

        Args:
            buffer, value: values of the trace.
        """
        layer, place = self._made_at(buffer, value)
        given, name = self.values[value], f"update:{self.buffers[buffer]}"
        self.values[f"{name}.value"] = replace(given, name=f"{name}.value", requires_grad=False)
        self.values[name] = replace(self.values[buffer], name=name)
        self.insert(place, Node(f"{name}.value", "detach", (value,), (f"{name}.value",), {}, "", ""), layer)
        self.insert(place + 1, Node(name, UPDATE, (f"{name}.value", buffer), (name,), {}, "", ""), layer)

    def _made_at(self, buffer: str, value: str) -> tuple[str, int]:
        """Return the layer, and the place in the program order, directly behind the node that makes a value."""
        last = -1
        for place, (kind, index) in enumerate(self.order):
            if kind == "repeat" and value in self.repeats[index].outputs:
                return "", place + 1
            if kind == "node" and value in self.nodes[index].outputs:
                return self.region[self.nodes[index].name], place + 1
        layers = [layer for layer in self.layer_inputs if self.buffers[buffer].startswith(f"{layer}.")]
        layer = max(layers, key=len, default="")
        for place, (kind, index) in enumerate(self.order):  # a parameter, say: behind its last use
            if kind == "node" and self.region[self.nodes[index].name] == layer:
                used = {value, buffer} & set(self.nodes[index].tensor_inputs)
                last = place if used or layer else last
        return layer, last + 1
