"""Activations shared by several pipeline units: the output of an encoder, skip connections.

A value that one unit makes and only the next one takes is kept by one of them. Other values are kept by several units,
or pass through stages that do not use them; a stage holds each once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoplan.cost_models.work import SharedValue
from autoplan.ir.graph import Call, ModelGraph
from autoplan.program.activation_bytes import Activations
from autoplan.program.op_costs import OpCosts
from autoplan.program.statements import LoweredBlock


@dataclass(frozen=True)
class Crossing:
    """A value that calls make: the unit that makes it, the last unit that takes it (or makes it), its bytes here."""

    made: int
    last: int
    num_bytes: float


def crossing_values(
    graph: ModelGraph, units: Sequence[Sequence[str]], lowered: Mapping[str, LoweredBlock], op_costs: OpCosts
) -> dict[str, Crossing]:
    """Return all values that the calls of the units make."""
    spans, out = graph.flow(units).spans(), {}
    for call in graph.calls:
        low = lowered[call.block]
        for value, inside, layout in zip(call.outputs, low.block.outputs, low.output_layouts, strict=True):
            if value in spans:  # no unit makes what parameter-free calls make
                size = op_costs.num_bytes(call.block, low.block.values[inside], layout)
                out[value] = Crossing(*spans[value], size)
    return out


def shared_values(
    graph: ModelGraph,
    units: Sequence[Sequence[str]],
    crossing: Mapping[str, Crossing],
    activation_bytes: Mapping[str, Activations],
    recomputed: frozenset[str],
) -> tuple[SharedValue, ...]:
    """Return the values that more than one call keeps, or that cross more than one cut.

    Args:
        crossing: values that calls make.
        activation_bytes: activations by block.
        recomputed: calls under full recompute; they keep their inputs.
    """
    calls = {c.name: c for c in graph.calls}
    kept: dict[str, list[int]] = {}
    kept_recomputed: dict[str, list[int]] = {}
    for u, unit in enumerate(units):
        for name in unit:
            call = calls[name]
            for value in _keeps(call, activation_bytes[call.block]):
                kept.setdefault(value, []).append(u)
            inputs = {v for v in call.inputs if graph.values[v].requires_grad}
            for value in inputs if name in recomputed else _keeps(call, activation_bytes[call.block]):
                kept_recomputed.setdefault(value, []).append(u)
    out = []
    for value, c in crossing.items():
        plain, under_recompute = (tuple(which.get(value, ())) for which in (kept, kept_recomputed))
        if c.last - c.made > 1 or max(len(plain), len(under_recompute), len({*plain, *under_recompute})) > 1:
            out.append(SharedValue(c.made, c.last, c.num_bytes, plain, under_recompute))
    return tuple(out)


def _keeps(call: Call, activation_bytes: Activations) -> set[str]:
    """Return the inputs and outputs that a call keeps."""
    sizes = (*activation_bytes.saved_inputs, *activation_bytes.saved_outputs)
    return {value for value, size in zip((*call.inputs, *call.outputs), sizes, strict=True) if size}
