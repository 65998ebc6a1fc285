"""Segments of a trace: the nodes of layers, of the glue around them, and of parameter-free tables."""

from __future__ import annotations

from dataclasses import dataclass, field

from autoplan.capture.trace import Trace
from autoplan.ir.dataflow import Dataflow
from autoplan.ir.graph import Node, of_the_batch


@dataclass
class Segment:
    """A run of nodes that becomes one call."""

    name: str
    kind: str  # "layer" | "repeat" | "glue" | "tables"
    nodes: list[Node] = field(default_factory=list)
    repeat: int = -1


def segments_of(trace: Trace, pure: set[str]) -> list[Segment]:
    """Return the runs of nodes that become calls, in order. `pure`: values that depend on no parameter."""
    tables = _tables([trace.nodes[i] for kind, i in trace.order if kind == "node"], trace, pure)
    in_tables = {n.name for segment in tables for n in segment.nodes}
    out: list[Segment] = []
    for kind, index in trace.order:
        if kind == "repeat":
            out.append(Segment(trace.repeats[index].layer, "repeat", repeat=index))
        elif trace.nodes[index].name not in in_tables:
            node = trace.nodes[index]
            layer = trace.region[node.name]
            kind = "layer" if layer else "glue"
            if not out or out[-1].kind != kind or (layer and out[-1].name != layer):
                out.append(Segment(layer, kind))
            out[-1].nodes.append(node)
    _name_glue(out)
    return [*tables, *out]


def _name_glue(segments: list[Segment]) -> None:
    """Name the segments outside the layers: embed before them, head behind them, numbered glue between."""
    if len(segments) == 1:
        segments[0].name = segments[0].name or "model"
        return
    for i, segment in enumerate(s for s in segments if s.kind == "glue"):
        segment.name = "embed" if segment is segments[0] else "head" if segment is segments[-1] else f"glue{i}"


def _tables(nodes: list[Node], trace: Trace, pure: set[str]) -> list[Segment]:
    """Return the connected parts of the parameter-free nodes outside layers.

    Nodes that follow from the denominator of the loss are apart from those that it is counted by, which run before.
    """
    mine = [n for n in nodes if not trace.region[n.name] and set(n.outputs) <= pure]
    flow = Dataflow([(n.tensor_inputs, n.outputs) for n in mine])
    given = [i for i, n in enumerate(mine) if not all(map(of_the_batch, n.tensor_inputs))]
    late = {*given, *flow.following(given)}
    parts = [*flow.parts(set(range(len(mine))) - late), *flow.parts(late)]
    names = (f"tables{i}" if i else "tables" for i in range(len(parts)))
    return [Segment(name, "tables", [mine[k] for k in part]) for name, part in zip(names, parts, strict=True)]
