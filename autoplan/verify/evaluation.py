"""Compare what a program evaluates with the module in `eval()`: the loss, in float64, in this process.

A program evaluates with the graph of its training, without dropout, unless the capture made a graph of the evaluation.
Where the two give another loss, the evaluation is captured too: auxiliary heads and terms of a loss that only training
has. A graph that is not its module is left out, so that an evaluation is refused and never wrong.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import CodeType
from typing import Any

from torch import nn

from autoplan.capture.evaluation import in_evaluation, trains
from autoplan.errors import CaptureError
from autoplan.ir.graph import Block, ModelGraph, Node
from autoplan.ops.record import Trait
from autoplan.ops.table import op_has
from autoplan.verify.check import TOLERANCE, choose_sizes, without_values
from autoplan.verify.one_device import compile_one_device, load_stage
from autoplan.verify.runs import ADVICE, NotComparable, VerifyTask, copies_of, run_graph, run_module
from autoplan.verify.sample import draw_batch, has_mask
from autoplan.verify.wide import wide_batch


def verified_evaluation(task: VerifyTask, limit_s: float, capture: Callable[[], ModelGraph]) -> ModelGraph:
    """Return the graph of a task with a graph of its evaluation if it needs one, compared with the module in `eval()`.

    A comparison that costs more than `limit_s`, or that the module cannot run, is left out.

    Args:
        capture: returns the graph with that of the evaluation.
    """
    graph = task.graph
    if graph.no_evaluation or without_values(task.model):
        return graph
    if graph.evaluation is None:
        if not trains(task.model) or not _reads_mode(task):
            return graph
        if _difference(replace(task, graph=_without_dropout(graph)), limit_s) is None:
            return graph
        graph = capture()
    if graph.evaluation is None:
        return graph
    found = _difference(replace(task, graph=graph.evaluation), limit_s)
    return graph if found is None else replace(graph, evaluation=None, no_evaluation=f"{found}. {ADVICE}")


def _difference(task: VerifyTask, limit_s: float) -> str | None:
    """Return how the loss of a graph differs from that of the module in `eval()`; None if it does not, as far as is
    known."""
    sizes, _ = choose_sizes(task, limit_s)
    if sizes is None:
        return None
    for moved, whole in itertools.product((True, False), (True, False) if has_mask(task.example) else (False,)):
        batch = wide_batch(draw_batch(task.graph, task.example, sizes, whole_sample=whole))
        tensors = copies_of(task.model, moved)
        try:
            with in_evaluation(task.model):
                want = float(run_module(task, tensors, batch, backward=False).loss)
        except NotComparable:
            continue
        try:
            compiled = compile_one_device(task.graph)
            got = float(run_graph(task, load_stage(compiled.text), compiled, tensors, batch, backward=False).loss)
        except CaptureError as exc:
            return str(exc)
        if abs(got - want) <= TOLERANCE * abs(want):
            return None
        return f"the captured evaluation gives the loss {got:.9g}, the module in eval() {want:.9g}"
    return None


def _without_dropout(graph: ModelGraph) -> ModelGraph:
    """Return a graph whose dropouts keep everything, as they do in a program that evaluates."""

    def kept(node: Node) -> Node:
        return replace(node, attrs={**node.attrs, "p": 0.0}) if op_has(node.op, Trait.DROPS) else node

    def block(of: Block) -> Block:
        return replace(of, nodes=tuple(map(kept, of.nodes)))

    return replace(graph, blocks={name: block(of) for name, of in graph.blocks.items()})


def _reads_mode(task: VerifyTask) -> bool:
    """Return True if code of the model or of its loss reads the mode of a module; torch's own only do for dropout, and
    where they update buffers."""
    return any("training" in _names(code) for code in _codes(task.model, task.loss_fn))


def _codes(model: nn.Module, loss_fn: Any) -> Iterator[CodeType]:
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    for cls in classes:
        if cls.__module__.split(".")[0] not in ("torch", "builtins"):
            yield from (f.__code__ for f in vars(cls).values() if inspect.isfunction(f))
    own = getattr(loss_fn, "__func__", loss_fn)
    if inspect.isfunction(own):
        yield own.__code__


def _names(code: CodeType) -> set[str]:
    """Return the names of attributes that code reads, with the functions inside it."""
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names, inner))
