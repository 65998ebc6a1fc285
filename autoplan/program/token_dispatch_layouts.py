"""Layouts for token dispatch: every rank of tensor parallelism sends its own tokens to experts.

The experts' operation takes and gives tokens split over the sequence. Expert weights belong to the ranks of ep x etp
instead of tp: no storage is chosen for them here, and their bytes do not count.
"""

from __future__ import annotations

from dataclasses import replace

from autoplan.errors import InfeasibleError
from autoplan.ir.graph import Block, ModelGraph
from autoplan.ir.layout import I, R
from autoplan.ops.experts import FIRST, SECOND_BIAS
from autoplan.ops.record import OpKind
from autoplan.ops.table import nodes_with, op_kind, rule_for
from autoplan.program.problem import IntraProblem, LayoutChoice, Option, ValueKey

_RESTRICTION = "tokens travel to experts from where tensor parallelism splits the sequence"


def expert_weights(block: Block) -> frozenset[str]:
    """Return the values of a block that hold the weights and biases of experts, expert by expert."""
    return frozenset(
        name for node in block.nodes if op_kind(node.op) is OpKind.EXPERTS for name in node.tensor_inputs[FIRST:]
    )


def inner_place(block: Block, name: str) -> tuple[int, int]:
    """Return (dim, position) of the factor of an expert weight or bias that is cut where experts are.

    It is the inner size of experts: of gate and up alike in the first product, and of the second product. The second
    bias has none: each part of an expert adds its own columns of it (autoplan.runtime.experts).
    """
    node = next(n for n in block.nodes if op_kind(n.op) is OpKind.EXPERTS and name in n.tensor_inputs[FIRST:])
    at = node.tensor_inputs.index(name)
    if at == SECOND_BIAS:
        return 1, 0
    labels = rule_for(node, block.values).inputs[at]
    dim = next(i for i, found in enumerate(labels) if "f" in found)
    return dim, labels[dim].index("f")


def with_token_dispatch(problem: IntraProblem, graph: ModelGraph, state_slack: float | None) -> IntraProblem:
    """Return the problem with only the expert strategies that split the tokens over all of tensor parallelism.

    Args:
        state_slack: factor of the problem's state budget over the least possible state. The budget shrinks by the part
            for expert weights, which no longer count.

    Raises:
        InfeasibleError: some experts cannot run on a part of the tokens; the message names them.
    """
    nodes = {f"{b.name}/{n.name}": (b, n) for b, n in nodes_with(graph, OpKind.EXPERTS)}
    weights: set[ValueKey] = {(b.name, name) for b in graph.blocks.values() for name in expert_weights(b)}
    least, choices = 0.0, []
    for choice in problem.choices:
        if choice.name in nodes:
            block, node = nodes[choice.name]
            own = tuple(o for o in choice.options if _own(o, (block.name, node.tensor_inputs[0])))
            if not own:
                raise InfeasibleError(f"{choice.name}: the sequence cannot be split over tensor parallelism")
            choices.append(replace(choice, options=own))
        elif _stores(choice, weights):
            least += choice.weight * min(o.state_bytes for o in choice.options)
            whole = next(o for o in choice.options if all(t in (R, I) for _, layout in o.provides for t in layout))
            choices.append(replace(choice, options=(replace(whole, state_bytes=0.0),)))
        else:
            choices.append(choice)
    budget = problem.state_budget_bytes
    if budget is not None and state_slack is not None:
        budget -= state_slack * least
    restrictions = (*problem.restrictions, _RESTRICTION)
    return replace(problem, choices=tuple(choices), state_budget_bytes=budget, restrictions=restrictions)


def _own(option: Option, hidden: ValueKey) -> bool:
    """Return True if an option of experts takes tokens that are split on every axis by the token dim."""
    layouts = [layout for key, layout in option.requires if key == hidden]
    return all(t.is_shard and t.dim == 0 for layout in layouts for t in layout)


def _stores(choice: LayoutChoice, weights: set[ValueKey]) -> bool:
    return choice.is_store and any(key in weights for key, _ in choice.options[0].provides)
