"""Which parts of a trace are needed, and which depend on no parameter."""

from __future__ import annotations

from collections.abc import Set

from autoplan.capture.trace import Trace
from autoplan.ops.record import Trait
from autoplan.ops.table import op_has, op_record


def live_entries(trace: Trace, wanted: Set[str], updates: bool) -> list[tuple[str, int]]:
    """Return the entries of the program order that these values need.

    Args:
        updates: also the nodes that write to buffers, and what they need.
    """
    needed, keep = set(wanted), list[tuple[str, int]]()
    write = {trace.region[node.name] for node in trace.nodes if updates and op_has(node.op, Trait.UPDATES)}
    for kind, index in reversed(trace.order):
        if kind == "repeat":
            repeat = trace.repeats[index]
            if needed & set(repeat.outputs) or repeat.first in write:
                needed |= used_by_repeat(trace, index) | asked_of_first(trace, index, needed)
                keep.append((kind, index))
        else:
            node = trace.nodes[index]
            if needed & set(node.outputs) or (updates and op_has(node.op, Trait.UPDATES)):
                needed |= set(node.tensor_inputs)
                keep.append((kind, index))
    return keep[::-1]


def drop_dead(trace: Trace, wanted: Set[str]) -> None:
    """Keep the nodes that the loss and these values need, and those that write to buffers, in program order."""
    keep = live_entries(trace, {trace.output} | wanted, updates=True)
    live = sorted(index for kind, index in keep if kind == "node")
    number = {index: i for i, index in enumerate(live)}
    trace.nodes = [trace.nodes[index] for index in live]
    trace.order = [(kind, number[index] if kind == "node" else index) for kind, index in keep]


def used_by_repeat(trace: Trace, index: int) -> set[str]:
    """Return the inputs that a merged layer uses: those at the places that its first layer uses or passes through."""
    repeat = trace.repeats[index]
    first = repeat.first
    used = {x for n in trace.nodes if trace.region[n.name] == first for x in n.tensor_inputs}
    used |= set(trace.layer_outputs[first])
    return {mine for mine, theirs in zip(repeat.inputs, trace.layer_inputs[first], strict=True) if theirs in used}


def asked_of_first(trace: Trace, index: int, needed: Set[str]) -> set[str]:
    """Return the outputs that a first layer has to make because a layer that repeats it is asked for them."""
    repeat = trace.repeats[index]
    leaving = trace.layer_outputs[repeat.first]
    return {theirs for mine, theirs in zip(repeat.outputs, leaving, strict=True) if mine in needed}


_NOT_PURE = (Trait.DROPS, Trait.SUMS_RANKS, Trait.EXTREME_OF_RANKS)


def pure_values(trace: Trace) -> set[str]:
    """Return the values that depend on inputs, sizes, draws, and buffers that the forward does not change."""
    pure = set(trace.inputs) | (set(trace.buffers) - trace.updated_buffers())
    for kind, index in trace.order:
        if kind == "node":
            node = trace.nodes[index]
            if (
                not trace.region[node.name]
                and op_record(node.op).traits.isdisjoint(_NOT_PURE)
                and all(x in pure for x in node.tensor_inputs)
            ):
                pure |= set(node.outputs)
    return pure
