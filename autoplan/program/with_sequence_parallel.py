"""Layouts with sequence parallelism, as Megatron has it: norms and residuals are split along the sequence.

Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022: a reduce-scatter and an
all-gather in place of each all-reduce. The program of layouts may find whole values a little faster (few tokens, or the
backward of a product, which gathers its input again), and keeps tp times as many bytes of norms and residuals for it,
and sends tp times as many between stages. Megatron, if its switch is on, does not. Where PyTorch's own kernels run (in
eager and compiled modes), the program of layouts is free.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, replace

from autoplan.ir.graph import ModelGraph
from autoplan.ir.layout import Layout
from autoplan.ops.record import OpKind
from autoplan.ops.table import op_kind
from autoplan.program.choice_kinds import ChoiceKind
from autoplan.program.problem import IntraProblem, LayoutChoice, Option, ValueKey

_RESTRICTION = "sequence parallelism: norms and residuals are split along the sequence"
_SEQUENCES = frozenset("st")  # factors: the sequence, and that of the target
_BETWEEN = frozenset((OpKind.ELEMENTWISE, OpKind.NORM, OpKind.VIEW))  # kinds of ops between products


@dataclass(frozen=True)
class _Residuals:
    """Which values are norms and residuals, by their factors."""

    graph: ModelGraph
    factors: frozenset[str]
    ops: frozenset[str]  # those whose results may be
    params: frozenset[ValueKey]

    @staticmethod
    def of(graph: ModelGraph) -> _Residuals:
        ops = frozenset(
            f"{b.name}/{n.name}" for b in graph.blocks.values() for n in b.nodes if op_kind(n.op) in _BETWEEN
        )
        params = frozenset((b.name, name) for b in graph.blocks.values() for name in b.params)
        return _Residuals(graph, frozenset().union(*filter(_is_of_tokens, _handed_over(graph))), ops, params)

    def has(self, key: ValueKey) -> bool:
        value = self.graph.blocks[key[0]].values[key[1]]
        factors = {factor for dim in value.dims or () for factor in dim}
        if key in self.params or not value.requires_grad:
            return False
        return _is_of_tokens(factors) and factors <= self.factors

    def may_be_decided(self, choice: LayoutChoice) -> bool:
        where = choice.name in self.ops or ChoiceKind.BOUNDARY.subject_of(choice.name) is not None
        return where and all(self.has(key) for option in choice.options for key, _ in option.provides)

    def is_split(self, key: ValueKey, layout: Layout) -> bool:
        dims = self.graph.blocks[key[0]].values[key[1]].dims or ()
        return all(kind.is_shard and dims[kind.dim][kind.factor] in _SEQUENCES for kind in layout)

    def splits(self, option: Option) -> bool:
        return bool(option.provides) and all(self.is_split(key, layout) for key, layout in option.provides)


def with_sequence_parallelism(problem: IntraProblem, graph: ModelGraph) -> IntraProblem:
    """Return the problem in which values between blocks, and their like, are split along the sequence.

    Their like are the results of norms, views and element-wise ops of the same factors (batch, sequence, hidden size).
    A choice without an option that splits them so (a vector per sample) stays as it is. So does what has no batch or
    two sequences: the biases by position that T5's blocks hand on are split over heads.
    """
    residuals = _Residuals.of(graph)
    decided = {
        choice.name
        for choice in problem.choices
        if residuals.may_be_decided(choice) and any(map(residuals.splits, choice.options))
    }
    if not decided:
        return problem
    filtered = problem.filtered(lambda choice, option: choice.name not in decided or residuals.splits(option))
    return replace(filtered, restrictions=(*filtered.restrictions, _RESTRICTION))


def _is_of_tokens(factors: Set[str]) -> bool:
    return "b" in factors and len(factors & _SEQUENCES) == 1


def _handed_over(graph: ModelGraph) -> Iterator[set[str]]:
    """Yield the factors of every value between blocks that gradients cross."""
    for block in graph.blocks.values():
        for name in (*block.inputs, *block.outputs):
            if block.values[name].requires_grad:
                yield {factor for dim in block.values[name].dims or () for factor in dim}


def crossing_factors(graph: ModelGraph) -> frozenset[str]:
    """Return the factors of values between blocks that gradients cross: batch, sequence and hidden size."""
    return frozenset().union(*_handed_over(graph))
