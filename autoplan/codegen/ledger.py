"""Which collectives of its block a call performs.

Layers that are alike are calls of one block, whose collectives are those of all its statements. What no later call
reads, such as the last text of layers that change an image and a text, gets no gradient: the backward of what made it
does not run in that call.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from autoplan.ir.graph import ModelGraph
from autoplan.program.statements import Collective, LoweredBlock, with_gradient, writes_of


def with_gradients(graph: ModelGraph, lowered: Mapping[str, LoweredBlock]) -> dict[str, set[str]]:
    """Return the variables of every call that get a gradient."""
    found, values = dict[str, set[str]](), {graph.output}
    for call in reversed(graph.calls):
        block = lowered[call.block]
        made = zip(block.outputs, call.outputs, strict=True)
        found[call.name] = with_gradient(block.statements, [var for var, name in made if name in values])
        given = zip(block.inputs, call.inputs, strict=True)
        values |= {name for of, name in given if of.var in found[call.name]}
    return found


def sent(lowered: LoweredBlock, gradients: Set[str]) -> list[Collective]:
    """Return the collectives of a call: those of the forward, and of what has a gradient.

    Args:
        gradients: the variables that get one.
    """
    makers = [(writes_of(statement), statement.collectives) for statement in lowered.statements]
    makers += [((f"self.{p.attr}",), p.collectives) for p in lowered.params]
    return [
        collective
        for made, collectives in makers
        for collective in collectives
        if collective.phase == "forward" or not gradients.isdisjoint(made)
    ]
