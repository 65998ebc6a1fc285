"""Activations shared by several pipeline units: the output of an encoder, skip connections.

A value that one unit makes and only the next one takes is kept by one of them at most. A pipeline that is cut between
them holds it on both sides, on one of them as the same tensor (`kept_at_cuts`). Other values are kept by several units,
or pass through stages that do not use them; a stage holds each once.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from autoplan.config.recompute import FULL, NONE, SELECTIVE
from autoplan.cost_models.work import KeptAtCut, SharedValue
from autoplan.ir.graph import Call, ModelGraph
from autoplan.program.activation_bytes import Activations, common_choices
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
) -> dict[str, SharedValue]:
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
    out = {}
    for value, c in crossing.items():
        plain, under_recompute = (tuple(which.get(value, ())) for which in (kept, kept_recomputed))
        if c.last - c.made > 1 or max(len(plain), len(under_recompute), len({*plain, *under_recompute})) > 1:
            out[value] = SharedValue(c.made, c.last, c.num_bytes, plain, under_recompute)
    return out


def kept_at_cuts(
    graph: ModelGraph,
    units: Sequence[Sequence[str]],
    crossing: Mapping[str, Crossing],
    shared: Container[str],
    activation_bytes: Mapping[str, Activations],
    layers: frozenset[str],
) -> tuple[KeptAtCut, ...]:
    """Return by cut what the units before and behind it keep of the values that cross there.

    Args:
        crossing: values that calls make.
        shared: those that count as shared, and not here.
        activation_bytes: activations by block.
        layers: calls that recompute applies to.
    """
    calls = {c.name: c for c in graph.calls}
    each = [[calls[name] for name in unit] for unit in units]
    at: list[dict[str, float]] = [{} for _ in units[1:]]
    for value, c in crossing.items():
        if c.last == c.made + 1 and value not in shared:
            at[c.made][value] = c.num_bytes
    known: dict[object, KeptAtCut] = {}  # equal cuts are summed once
    out = []
    for here, maker, taker in zip(at, each, each[1:], strict=False):
        taken = _taken(taker, here, activation_bytes)
        made = _made(maker, here.keys() - taken.values())  # the one that takes it may keep it
        sent, received = (tuple((*place, here[v]) for place, v in some.items()) for some in (made, taken))
        kinds = [tuple((c.block, c.name in layers) for c in unit) for unit in (maker, taker)]
        key = (sent, received, *kinds)
        if key not in known:
            known[key] = KeptAtCut(
                _kept(maker, sent, activation_bytes, layers, inputs=False),
                _kept(taker, received, activation_bytes, layers, inputs=True),
            )
        out.append(known[key])
    return tuple(out)


_Place = tuple[int, int]  # a call of a unit, by number, and the position of its input or output


def _taken(
    calls: Sequence[Call], values: Container[str], activation_bytes: Mapping[str, Activations]
) -> dict[_Place, str]:
    """Return the inputs of some calls among `values` that their call keeps under some recompute choice."""
    return {
        (k, i): value
        for k, call in enumerate(calls)
        for i, value in enumerate(call.inputs)
        if value in values and any(ends.inputs[i] for ends in activation_bytes[call.block].ends.values())
    }


def _made(calls: Sequence[Call], values: Container[str]) -> dict[_Place, str]:
    """Return the outputs of some calls among `values`."""
    return {(k, i): value for k, call in enumerate(calls) for i, value in enumerate(call.outputs) if value in values}


def _kept(
    calls: Sequence[Call],
    places: Sequence[tuple[int, int, float]],
    activation_bytes: Mapping[str, Activations],
    layers: frozenset[str],
    inputs: bool,
) -> dict[str, float]:
    """Return by recompute choice of a unit the bytes of some of its inputs, or outputs, that it keeps.

    Args:
        places: call, position, and bytes of every one.
    """
    if not places:
        return {}
    out = {}
    for how in (NONE, SELECTIVE, FULL, *common_choices([activation_bytes[c.block] for c in calls if c.name in layers])):
        out[how] = 0.0
        for k, i, size in places:
            call = calls[k]
            chosen = how if call.name in layers or how == SELECTIVE else NONE
            ends = activation_bytes[call.block].ends[chosen]
            out[how] += min(size, (ends.inputs if inputs else ends.outputs)[i])
    return out


def _keeps(call: Call, activation_bytes: Activations) -> set[str]:
    """Return the inputs and outputs that a call keeps."""
    sizes = (*activation_bytes.saved_inputs, *activation_bytes.saved_outputs)
    return {value for value, size in zip((*call.inputs, *call.outputs), sizes, strict=True) if size}
