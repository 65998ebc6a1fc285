"""Which statements of a lowered block belong together: the core of attention, the logits of a loss."""

from __future__ import annotations

from collections.abc import Sequence

from autoplan.cost_models.layout import ConversionKind
from autoplan.search.handwritten import LOSSES
from autoplan.search.lower import Convert, Op

_IN_CORE = frozenset("mul_scalar div_scalar add masked_fill where to dropout reshape expand".split())
_SAME_LOGITS = frozenset("to reshape".split())


def attention_core(
    statements: Sequence[Op | Convert], variables: Sequence[tuple[Sequence[str], Sequence[str]]]
) -> list[int]:
    """Statements that selective recompute runs again: fused attention, or softmax between two matrix products.

    Args:
        variables: what each statement reads and writes.
    """
    out: set[int] = set()
    ops = ["" if isinstance(s, Convert) else s.node.op for s in statements]
    if "attention" not in ops and "softmax" not in ops:
        return []
    makes = {v: i for i, (_, writes) in enumerate(variables) for v in writes}
    before = [[makes[v] for v in reads if v in makes] for reads, _ in variables]
    after: list[list[int]] = [[] for _ in variables]
    for i, sources in enumerate(before):
        for k in sources:
            after[k].append(i)
    for i, op in enumerate(ops):
        if op == "attention":
            out.add(i)
        elif op == "softmax":
            reach = [_until_matmul(i, ops, way) for way in (before, after)]
            if all(reach):
                out |= {i, *reach[0], *reach[1]}
    return sorted(out)


def _until_matmul(start: int, ops: Sequence[str], neighbours: Sequence[Sequence[int]]) -> set[int]:
    """Statements from `start` to the nearest matmul, it included, through element-wise operations and views only."""
    found: set[int] = set()
    for k in neighbours[start]:
        if ops[k] == "matmul":
            found.add(k)
        elif ops[k] in _IN_CORE:
            further = _until_matmul(k, ops, neighbours)
            found |= {k, *further} if further else set()
    return found


def logits(statements: Sequence[Op | Convert]) -> frozenset[str]:
    """Variables that are the logits of a loss: cast or seen in another shape, back to the product that made them."""
    found: set[str] = set()
    for statement in reversed(statements):
        if isinstance(statement, Convert):
            if statement.target in found and statement.step.kind is ConversionKind.TO_REPLICATE:
                found.add(statement.source)
            continue
        same = statement.node.op in _SAME_LOGITS and not found.isdisjoint(statement.targets)
        if same or statement.node.op in LOSSES:
            found.add(str(statement.args[0]))
    return frozenset(found)
