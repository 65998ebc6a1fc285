"""The graph of a module in evaluation, beside that of its training.

A forward that updates buffers while it trains computes something else in evaluation: batch norm with its running
statistics, a codebook that stays. Of the random numbers that a forward draws some are left in evaluation (the noise of
an autoencoder) and others are not (paths that are dropped). So it is captured a second time, as the module is in
`eval()`. What its forward
writes to buffers even then is left out of that graph: an evaluation changes nothing. Other models get a second graph if
a comparison of values shows that they need it (`autoplan.verify.evaluation`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from autoplan.errors import CaptureError
from autoplan.ir.graph import Block, ModelGraph, Node
from autoplan.ops.record import Trait
from autoplan.ops.statistics import UPDATE
from autoplan.ops.table import op_has, updated_buffers


def with_evaluation(model: nn.Module, capture: Callable[[frozenset[str]], ModelGraph]) -> ModelGraph:
    """Return the graph that `capture` makes, with that of the evaluation if the forward updates buffers or draws.

    Args:
        capture: captures the model in the mode that it has. It is given the buffers that change although this forward
            may not change them.
    """
    graph = capture(frozenset())
    return evaluation_beside(model, graph, capture) if updated_by(graph) or draws(graph) else graph


def evaluation_beside(
    model: nn.Module, graph: ModelGraph, capture: Callable[[frozenset[str]], ModelGraph]
) -> ModelGraph:
    """Return a graph with that of the evaluation, or with the reason why there is none.

    Args:
        capture: as for `with_evaluation`.
    """
    if not trains(model):
        return replace(graph, evaluation=without_updates(graph))
    try:
        with in_evaluation(model):
            return replace(graph, evaluation=without_updates(capture(updated_by(graph))))
    except CaptureError as exc:
        return replace(graph, no_evaluation=f"the module in eval() cannot be captured: {exc}")


def updated_by(graph: ModelGraph) -> frozenset[str]:
    """Return the buffers that a graph updates, by their names in the model."""
    blocks = {name: updated_buffers(block.nodes, block.buffers) for name, block in graph.blocks.items()}
    return frozenset(call.buffers[x] for call in graph.calls for x in blocks[call.block])


def draws(graph: ModelGraph) -> bool:
    """Return True if the forward draws random numbers, other than for dropout."""
    ops = {node.op for block in graph.blocks.values() for node in block.nodes}
    return any(op_has(op, Trait.RANDOM) and not op_has(op, Trait.DROPS) for op in ops)


def trains(model: nn.Module) -> bool:
    """Return True if a module of the model is in training mode."""
    return any(module.training for module in model.modules())


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Let all modules be in evaluation.

    Their flags are set one by one: a `train()` of the user's own may do more than that (merge weights).
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


def without_updates(graph: ModelGraph) -> ModelGraph:
    """Return a graph whose forward writes to no buffer; what reads a buffer after an update has the new value."""
    results: dict[str, set[str]] = {}
    blocks = {call.name: call.block for call in graph.calls}
    for result in graph.results:
        results.setdefault(blocks[result.call], set()).add(result.value)
    return replace(graph, blocks={n: _without_updates(b, results.get(n, set())) for n, b in graph.blocks.items()})


def _without_updates(block: Block, results: set[str]) -> Block:
    needed, kept = {*block.outputs, *results}, list[Node]()
    for node in reversed(block.nodes):
        if needed & set(node.outputs):
            if node.op == UPDATE:
                dtype = block.values[node.outputs[0]].dtype
                node = replace(node, op="to", inputs=node.inputs[:1], attrs={"dtype": dtype})
            kept.append(node)
            needed |= set(node.tensor_inputs)
    made = {name for node in kept for name in node.outputs}
    values = {*block.inputs, *block.params, *block.buffers, *made}
    return replace(block, nodes=tuple(kept[::-1]), values={n: v for n, v in block.values.items() if n in values})
