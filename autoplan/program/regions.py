"""Which statements of a lowered block belong together: what may be computed again, the logits of a loss."""

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
# of the statements of a block: what stands for a conversion between layouts
_CONVERSION = OpRecord("", OpKind.OTHER)
Variables = Sequence[tuple[Sequence[str], Sequence[str]]]  # what each statement reads and writes


@dataclass(frozen=True)
class Region:
    """Statements that are computed again together, and run together at the place of the last of them.

    Attributes:
        group: attention (its core), mlp (what is between two products), norms.
        statements: positions, ascending.
        reads: variables from outside, without parameters; writes: those of it that statements outside read.
    """

    group: str
    statements: tuple[int, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def choices(found: Iterable[Region]) -> tuple[str, ...]:
    """Every way to compute some groups of regions again, by name."""
    there = [g for g in GROUPS if any(r.group == g for r in found)]
    sets = itertools.chain.from_iterable(itertools.combinations(there, n) for n in range(1, len(there) + 1))
    return tuple("+".join(names) for names in sets)


def variables_of(statements: Sequence[Op | Convert]) -> Variables:
    """What each statement reads and writes."""
    return [(reads_of(s), writes_of(s)) for s in statements]


def regions(
    statements: Sequence[Op | Convert], outputs: Sequence[str], groups: Iterable[str] = GROUPS
) -> tuple[Region, ...]:
    """The regions of a block. Collectives between operations are in none: what is computed again sends nothing more.

    Args:
        outputs: variables that the block hands out.
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
    """These statements as a region; None if another one needs a result before the last of them can run."""
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
    """True for views and casts, which hand on the same numbers in another form."""
    return op.kind is OpKind.VIEW or Trait.CAST in op.traits


class Flow(Dataflow):
    """Who makes and who reads the variables of a block, and what its operations are."""

    def __init__(self, statements: Sequence[Op | Convert], variables: Variables) -> None:
        super().__init__(variables)
        self.variables = variables
        self.ops = _records(statements)

    def activation_functions(self, megatron: bool = False) -> set[int]:
        """Pointwise operations from an activation function on to the product that takes their result.

        Args:
            megatron: any product or experts, and behind views; else a product with weights.
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
        """`start` and what follows; None unless a product is all that they lead to."""
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
        """Norms, as one operation or written out around a reciprocal root."""
        out = {i for i, op in enumerate(self.ops) if op.kind is OpKind.NORM}
        for i, op in enumerate(self.ops):
            if Trait.ROOT in op.traits:
                out |= self._written_out(i)
        return out

    def _written_out(self, root: int) -> set[int]:
        """Of a root of a mean: back to the value that is normed, on over what scales it."""
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
    """Statements that selective recompute runs again: fused attention, or softmax between two matrix products.

    Args:
        variables: what each statement reads and writes.
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
    """Statements from `start` to the nearest matmul, it included, through element-wise operations and views only."""
    found: set[int] = set()
    for k in neighbours[start]:
        if ops[k].kind is OpKind.PRODUCT and not ops[k].weights:
            found.add(k)
        elif Trait.IN_CORE in ops[k].traits:
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
        op = op_record(statement.node.op)
        same = op.traits & _SAME_LOGITS and not found.isdisjoint(statement.targets)
        if same or op.kind is OpKind.LOSS:
            found.add(str(statement.args[0]))
    return frozenset(found)
