"""Trace: the flat graph of a model as IR nodes, after the translation of ATen and before the cut into blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from autoplan.ir.dataflow import Dataflow
from autoplan.ir.graph import Node, Value


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
