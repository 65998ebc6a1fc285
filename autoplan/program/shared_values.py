"""Activations shared by several pipeline units: the output of an encoder, skip connections.

A value that one unit makes and only the next one takes is kept by one of them. Other values are kept by several units,
or pass through stages that do not use them; a stage holds each once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoplan.cost_models.work import SharedValue
from autoplan.ir.graph import Call, ModelGraph
from autoplan.program.activation_bytes import Activations
from autoplan.program.op_costs import OpCosts
from autoplan.program.statements import LoweredBlock


def shared_values(
    graph: ModelGraph,
    units: Sequence[Sequence[str]],
    lowered: Mapping[str, LoweredBlock],
    activation_bytes: Mapping[str, Activations],
    op_costs: OpCosts,
    again: frozenset[str],
) -> tuple[SharedValue, ...]:
    """Return the values that more than one call keeps, or that cross more than one cut.

    Args:
        activation_bytes: activations by block.
        again: calls under full recompute; they keep their inputs.
    """
    calls = {c.name: c for c in graph.calls}
    made: dict[str, tuple[int, float]] = {}
    last: dict[str, int] = {}
    kept: dict[str, list[int]] = {}
    kept_recomputed: dict[str, list[int]] = {}
    for u, unit in enumerate(units):
        for name in unit:
            call = calls[name]
            low = lowered[call.block]
            for value, inside, layout in zip(call.outputs, low.block.outputs, low.output_layouts, strict=True):
                made[value] = (u, op_costs.num_bytes(call.block, low.block.values[inside], layout))
            for value in call.inputs:
                last[value] = u
            for value in _keeps(call, activation_bytes[call.block]):
                kept.setdefault(value, []).append(u)
            inputs = {v for v in call.inputs if graph.values[v].requires_grad}
            for value in inputs if name in again else _keeps(call, activation_bytes[call.block]):
                kept_recomputed.setdefault(value, []).append(u)
    out = []
    for value, (first, size) in made.items():
        plain, recomputed = (tuple(which.get(value, ())) for which in (kept, kept_recomputed))
        end = last.get(value, first)
        if end - first > 1 or max(len(plain), len(recomputed), len({*plain, *recomputed})) > 1:
            out.append(SharedValue(first, end, size, plain, recomputed))
    return tuple(out)


def _keeps(call: Call, activation_bytes: Activations) -> set[str]:
    """Return the inputs and outputs that a call keeps."""
    sizes = (*activation_bytes.saved_inputs, *activation_bytes.saved_outputs)
    return {value for value, size in zip((*call.inputs, *call.outputs), sizes, strict=True) if size}
