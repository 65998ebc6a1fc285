"""Find the statements of a lowered block that belong together: recompute regions, and the logits of a loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from autoplan.config.recompute import GROUPS
from autoplan.ir.dataflow import Dataflow
from autoplan.ir.layout import ConversionKind
from autoplan.ops.record import OpKind, OpRecord, Trait
from autoplan.ops.table import op_record
from autoplan.program.statements import Convert, Op, reads_of, writes_of

PRODUCTS = (OpKind.PRODUCT, OpKind.EXPERTS)
_SAME_LOGITS = frozenset((Trait.CAST, Trait.RESIZES))
_Is = Callable[[OpRecord], bool]
# the record that stands for a conversion between layouts
_CONVERSION = OpRecord("", OpKind.OTHER)
Variables = Sequence[tuple[Sequence[str], Sequence[str]]]  # variables that each statement reads, and writes


@dataclass(frozen=True)
class Region:
    """Statements that are recomputed together, at the place of the last of them.

    Attributes:
        group: attention (its core), mlp (the operations between two products) or norms.
        statements: positions, ascending.
        reads: variables made outside the region that it reads, without parameters.
        writes: variables made in the region that statements outside it read.
    """

    group: str
    statements: tuple[int, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def choices(found: Iterable[Region]) -> tuple[str, ...]:
    """Return every way to recompute some of the groups of the regions found, by name."""
    there = [g for g in GROUPS if any(r.group == g for r in found)]
    sets = itertools.chain.from_iterable(itertools.combinations(there, n) for n in range(1, len(there) + 1))
    return tuple("+".join(names) for names in sets)


def variables_of(statements: Sequence[Op | Convert]) -> Variables:
    """Return the variables that each statement reads and writes."""
    return [(reads_of(s), writes_of(s)) for s in statements]


def regions(
    statements: Sequence[Op | Convert], outputs: Sequence[str], groups: Iterable[str] = GROUPS
) -> tuple[Region, ...]:
    """Return the recompute regions of a block. They contain no collective, so that recompute sends nothing.

    Args:
        outputs: variables that the block hands out.
        groups: groups of regions to look for.
    """
    variables = variables_of(statements)
    flow = Flow(statements, variables)
    found = {
        "attention": lambda: set(attention_core(statements, variables)),
        "mlp": flow.activation_functions,
        "norms": flow.norms,
    }
    out, taken = [], set[int]()
    for group in GROUPS:
        if group not in groups:
            continue
        for part in flow.parts(found[group]() - taken):
            region = _region(group, part, flow, outputs)
            if region is not None:
                out.append(region)
                taken |= set(part)
    return tuple(sorted(out, key=lambda r: r.statements[-1]))


def _region(group: str, part: tuple[int, ...], flow: Flow, outputs: Sequence[str]) -> Region | None:
    """Return these statements as a region; None if another statement needs a result before the last of them can run."""
    inside = {v for i in part for v in flow.variables[i][1]}
    users = {v: [i for i in flow.readers.get(v, ()) if i not in part] for v in inside}
    if any(i < part[-1] for mine in users.values() for i in mine):
        return None
    reads = dict.fromkeys(v for i in part for v in flow.variables[i][0] if v not in inside)
    writes = tuple(v for i in part for v in flow.variables[i][1] if users[v] or v in outputs)
    return Region(group, part, tuple(v for v in reads if not v.startswith("self.")), writes)


def _records(statements: Sequence[Op | Convert]) -> list[OpRecord]:
    return [_CONVERSION if isinstance(s, Convert) else op_record(s.node.op) for s in statements]


def is_view(op: OpRecord) -> bool:
    """Return True for views and casts, which hand on the same numbers in another form."""
    return op.kind is OpKind.VIEW or Trait.CAST in op.traits


class Flow(Dataflow):
    """The data flow of a block: who makes and who reads its variables, and the record of each operation."""

    def __init__(self, statements: Sequence[Op | Convert], variables: Variables) -> None:
        super().__init__(variables)
        self.variables = variables
        self.ops = _records(statements)

    def activation_functions(self, megatron: bool = False) -> set[int]:
        """Return the pointwise operations from an activation function to the product that takes their result.

        Args:
            megatron: accept any product or experts as the end, and views on the way; else only a product with weights.
        """

        def ends(op: OpRecord) -> bool:
            return op.kind in PRODUCTS if megatron else op.kind is OpKind.PRODUCT and bool(op.weights)

        def through(op: OpRecord) -> bool:
            return Trait.POINTWISE in op.traits or (megatron and is_view(op))

        out: set[int] = set()
        for i, op in enumerate(self.ops):
            if Trait.ACTIVATION in op.traits:
                out |= self._to_product(i, ends, through) or set()
        return out

    def _to_product(self, start: int, ends: _Is, through: _Is) -> set[int] | None:
        """Return `start` and the statements that follow it; None unless every path from it ends at a product."""
        found = {start}
        if not self.after[start]:
            return None
        for k in self.after[start]:
            if ends(self.ops[k]):
                continue
            further = self._to_product(k, ends, through) if through(self.ops[k]) else None
            if further is None:
                return None
            found |= further
        return found

    def norms(self) -> set[int]:
        """Return norms, as one operation or written out around a reciprocal root."""
        out = {i for i, op in enumerate(self.ops) if op.kind is OpKind.NORM}
        for i, op in enumerate(self.ops):
            if Trait.ROOT in op.traits:
                out |= self._written_out(i)
        return out

    def _written_out(self, root: int) -> set[int]:
        """Return a norm written out around `root`: back to the value that is normed, forward over the rescaling."""
        found, queue, normed = {root}, list(self.before[root]), set[str]()
        while queue:
            i = queue.pop()
            if Trait.VARIANCE not in self.ops[i].traits:
                return set()
            found.add(i)
            if Trait.SQUARE in self.ops[i].traits:
                normed |= set(self.variables[i][0])
            else:
                queue += self.before[i]
        if len(normed) != 1 or not any(Trait.AVERAGES in self.ops[i].traits for i in found):
            return set()
        (value,) = normed
        queue = list(self.after[root])
        while queue:
            i = queue.pop()
            reads = self.variables[i][0]
            others = [v for v in reads if v != value and not v.startswith("self.") and self.makes.get(v) not in found]
            if i not in found and Trait.RESCALES in self.ops[i].traits and not others:
                found.add(i)
                queue += self.after[i]
        made = self.makes.get(value)
        if made is not None and Trait.CAST in self.ops[made].traits and set(self.after[made]) <= found:
            found.add(made)
        return found


def attention_core(
    statements: Sequence[Op | Convert], variables: Sequence[tuple[Sequence[str], Sequence[str]]]
) -> list[int]:
    """Return the statements that selective recompute reruns: fused attention, or softmax between two matrix products.

    Args:
        variables: names that each statement reads, and writes.
    """
    out: set[int] = set()
    ops = _records(statements)
    if not any(op.kind in (OpKind.ATTENTION, OpKind.SOFTMAX) for op in ops):
        return []
    flow = Dataflow(variables)
    for i, op in enumerate(ops):
        if op.kind is OpKind.ATTENTION:
            out.add(i)
        elif op.kind is OpKind.SOFTMAX:
            reach = [_until_matmul(i, ops, way) for way in (flow.before, flow.after)]
            if all(reach):
                out |= {i, *reach[0], *reach[1]}
    return sorted(out)


def _until_matmul(start: int, ops: Sequence[OpRecord], neighbours: Sequence[Sequence[int]]) -> set[int]:
    """Return the statements from `start` to the nearest matmul, inclusive, through element-wise operations and views
    only.
    """
    found: set[int] = set()
    for k in neighbours[start]:
        if ops[k].kind is OpKind.PRODUCT and not ops[k].weights:
            found.add(k)
        elif Trait.IN_CORE in ops[k].traits:
            further = _until_matmul(k, ops, neighbours)
            found |= {k, *further} if further else set()
    return found


def logits(statements: Sequence[Op | Convert]) -> frozenset[str]:
    """Return the variables that hold the logits of a loss: casts and reshapes, and the product that made them."""
    found: set[str] = set()
    for statement in reversed(statements):
        if isinstance(statement, Convert):
            if statement.target in found and statement.step.kind is ConversionKind.TO_REPLICATE:
                found.add(statement.source)
            continue
        op = op_record(statement.node.op)
        same = op.traits & _SAME_LOGITS and not found.isdisjoint(statement.targets)
        if same or op.kind is OpKind.LOSS:
            found.add(str(statement.args[0]))
    return frozenset(found)
