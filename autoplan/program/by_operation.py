"""Recompute by operation: which results a layer keeps, and which statements its backward runs again.

As torchtitan's selective activation checkpointing does it by default (`SelectiveAC`, torchtitan/distributed/
activation_checkpoint.py): results of attention, of every second product with a weight, of all other products, of
reduce-scatters and of all-to-alls are kept. What else a backward reads is computed again from these and from the
inputs of the layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from autoplan.ir.layout import ConversionKind
from autoplan.ops.record import OpKind
from autoplan.ops.table import op_record
from autoplan.program.gradients import GradientStep
from autoplan.program.statements import Convert, Op
from autoplan.program.stored_tensors import StoredTensor

_KEPT_CONVERSIONS = (ConversionKind.REDUCE_SCATTER, ConversionKind.ALL_TO_ALL)


class ByOperation(NamedTuple):
    """What recompute by operation does. `kept`: storages besides inputs; `rerun`: positions of statements, in order."""

    kept: frozenset[int]
    rerun: tuple[int, ...]


def by_operation(
    statements: Sequence[Op | Convert], steps: Sequence[GradientStep], tensors: Mapping[str, StoredTensor]
) -> ByOperation:
    """Return what a layer keeps and computes again.

    Args:
        steps: what every statement reads, makes and keeps for the backward.
        tensors: by variable.
    """
    keeps = _kept_statements(statements)
    needed: Set[int] = frozenset[int]().union(*(step.saved for step in steps))
    kept: set[int] = set()
    rerun: list[int] = []
    for i in reversed(range(len(steps))):
        read = {tensors[v].storage for v in steps[i].reads}
        made = ({tensors[v].storage for v in steps[i].writes} - read) | set(steps[i].extra)
        if not made & needed:
            continue
        if i in keeps:
            kept |= made & needed
        else:
            rerun.append(i)
            needed |= read
    return ByOperation(frozenset(kept), tuple(reversed(rerun)))


def _kept_statements(statements: Sequence[Op | Convert]) -> set[int]:
    """Return the positions of the statements whose results are kept."""
    out, products = set(), 0
    for i, statement in enumerate(statements):
        if isinstance(statement, Convert):
            if statement.step.kind in _KEPT_CONVERSIONS:
                out.add(i)
            continue
        op = op_record(statement.node.op)
        of_weight = op.kind is OpKind.PRODUCT and bool(op.weights)
        products += of_weight
        if op.kind is OpKind.ATTENTION or (op.kind is OpKind.PRODUCT and (not of_weight or products % 2)):
            out.add(i)
    return out
