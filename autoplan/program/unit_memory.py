"""Activation memory of a pipeline unit: a layer with the glue after it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from autoplan.cost_models.work import BlockWork, SharedValue
from autoplan.ir.graph import Call
from autoplan.ops.record import OpKind
from autoplan.ops.table import op_kind
from autoplan.program.activation_bytes import Activations, common_choices, peak_bytes_of
from autoplan.program.expert_degrees import ExpertDegrees
from autoplan.program.op_costs import OpCosts
from autoplan.program.statements import LoweredBlock
from autoplan.program.token_dispatch import travelled_bytes


@dataclass(frozen=True)
class UnitMemory:
    """Bytes of one unit and micro-batch on one rank.

    Attributes:
        saved: kept without recompute.
        selective: kept if the attention core is recomputed.
        kept: kept if all of its layers are recomputed.
        spent: freed by the first part of a split backward (`Activations.spent_bytes`).
        choices: kept under every other recompute choice that all of its layers know.
        transient: the most beyond the bytes that it and the units before it keep, without recompute.
        recompute_transient: the most beyond the bytes that it and the units before it keep, with full recompute.
    """

    saved: float
    selective: float
    kept: float
    transient: float
    recompute_transient: float
    choices: Mapping[str, float]
    spent: float = 0.0

    def without_shared(self, unit: int, shared: Sequence[SharedValue]) -> UnitMemory:
        """Return the memory without the values that all units of a stage hold once together."""
        if not shared:
            return self
        saved = sum(v.num_bytes * v.kept.count(unit) for v in shared)
        recomputed = sum(v.num_bytes * v.kept_recomputed.count(unit) for v in shared)
        return replace(
            self,
            saved=self.saved - saved,
            selective=self.selective - saved,
            kept=self.kept - recomputed,
            choices={name: size - saved for name, size in self.choices.items()},
        )


def unit_memories(
    units: Sequence[Sequence[Call]],
    activation_bytes: Mapping[str, Activations],
    layers: Set[str],
    shared: Sequence[SharedValue],
) -> list[UnitMemory]:
    """Return the memory of every unit, without the values that several units of a stage hold once together."""
    known: dict[object, UnitMemory] = {}  # equal units are summed once
    out = []
    for u, calls in enumerate(units):
        kind = tuple((c.block, c.name in layers) for c in calls)
        if kind not in known:
            known[kind] = _memory(calls, activation_bytes, layers)
        out.append(known[kind].without_shared(u, shared))
    return out


def _memory(calls: Sequence[Call], activation_bytes: Mapping[str, Activations], layers: Set[str]) -> UnitMemory:
    """Return the memory of the unit of these calls, by the walk of `activation_bytes.peak_bytes_of`.

    Args:
        activation_bytes: activations by block.
        layers: names of the calls that recompute applies to.
    """
    of = activation_bytes
    recomputed = frozenset(c.name for c in calls if c.name in layers)
    saved = float(sum(of[c.block].saved_bytes for c in calls))
    kept = float(sum(of[c.block].kept_bytes if c.name in recomputed else of[c.block].saved_bytes for c in calls))
    mine = [of[c.block] for c in calls if c.name in layers]
    return UnitMemory(
        saved=saved,
        selective=saved - sum(of[c.block].saved_bytes - of[c.block].selective_bytes for c in calls),
        kept=kept,
        transient=float(peak_bytes_of(calls, of)) - saved,
        recompute_transient=float(peak_bytes_of(calls, of, recomputed)) - kept,
        choices={n: saved - sum(a.saved_bytes - a.choice_bytes[n] for a in mine) for n in common_choices(mine)},
        spent=float(sum(of[c.block].spent_bytes for c in calls)),
    )


def with_dispatch(
    activation_bytes: Mapping[str, Activations],
    lowered: Mapping[str, LoweredBlock],
    blocks: Mapping[str, BlockWork],
    op_costs: OpCosts,
    experts: ExpertDegrees | None,
) -> Mapping[str, Activations]:
    """Return the activations of all blocks with spread experts; they were counted for a layout with experts on tp.

    Gradients of experts on other ranks are not made here. If the program runs with token dispatch, rows from other
    ranks and the results of experts on other ranks are kept as well.
    """
    if experts is None:
        return activation_bytes
    out = {}
    for name, low in lowered.items():
        out[name] = activation_bytes[name]
        if not op_costs.kernels.adds_gradients:
            out[name] = _without_gradients(out[name], low, blocks[name], op_costs)
        if experts.executed:
            nodes = [node for node in low.block.nodes if op_kind(node.op) is OpKind.EXPERTS]
            rows = sum(travelled_bytes(low.block, node, op_costs, experts) for node in nodes)
            out[name] = _with_rows(out[name], rows)
    return out


def _without_gradients(a: Activations, lowered: LoweredBlock, block: BlockWork, op_costs: OpCosts) -> Activations:
    """Return the activations without the gradients of experts that other ranks hold.

    One operation makes the gradients of all its parameters, so that they are there together; beside that moment, others
    are as full as they were.
    """
    away: Counter[str] = Counter()  # by the operation that takes the parameters
    users = {name: node.name for node in lowered.block.nodes for name in node.tensor_inputs}
    for stored, p in zip(lowered.params, block.params, strict=True):
        if p.expert:
            whole = math.prod(op_costs.local(lowered.block.name, stored.value, stored.stored))
            away[users[stored.value.name]] += (whole - p.num_elements) * op_costs.width(stored.value)
    if not away:
        return a
    transient = max(a.without_expert_gradients, a.transient_bytes - min(away.values()))
    return replace(
        a,
        transient_bytes=transient,
        recompute_transient_bytes=a.recompute_transient_bytes - (a.transient_bytes - transient),
    )


def _with_rows(a: Activations, size: int) -> Activations:
    return replace(
        a,
        saved_bytes=a.saved_bytes + size,
        selective_bytes=a.selective_bytes + size,
        recompute_transient_bytes=a.recompute_transient_bytes + size,
    )
