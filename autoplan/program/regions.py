"""Find the statements of a lowered block that belong together: recompute regions, and the logits of a loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from autoplan.config.recompute import GROUPS
from autoplan.ir.dataflow import Dataflow
from autoplan.ir.graph import Block
from autoplan.ir.layout import ConversionKind
from autoplan.ops.record import OpKind, OpRecord, Trait
from autoplan.ops.table import op_record
from autoplan.program.statements import Convert, Op, reads_of, writes_of

PRODUCTS = (OpKind.PRODUCT, OpKind.EXPERTS)
_SAME_LOGITS = frozenset((Trait.CAST, Trait.RESIZES))
_Is = Callable[[OpRecord], bool]
# the record that stands for a conversion between layouts
CONVERSION = OpRecord("", OpKind.OTHER)


@dataclass(frozen=True)
class Region:
    """Statements that are recomputed together, at the place of the last of them.

    Attributes:
        group: attention (its core), mlp (the operations between two products) or norms; or the name of a module of
            Megatron's (`program.megatron_modules`).
        statements: positions, ascending.
        reads: variables made outside the region that it reads, without parameters.
        writes: variables made in the region that statements outside it read.
    """

    group: str
    statements: tuple[int, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def statements_by_group(found: Sequence[Region]) -> dict[str, tuple[int, ...]]:
    """Return the positions of the statements of every group of regions."""
    groups = sorted({r.group for r in found})
    return {group: tuple(i for r in found if r.group == group for i in r.statements) for group in groups}


def choices(found: Iterable[Region]) -> tuple[str, ...]:
    """Return every way to recompute some of the groups of the regions found, by name."""
    there = [g for g in GROUPS if any(r.group == g for r in found)]
    sets = itertools.chain.from_iterable(itertools.combinations(there, n) for n in range(1, len(there) + 1))
    return tuple("+".join(names) for names in sets)


def regions(flow: Flow, outputs: Sequence[str], groups: Iterable[str] = GROUPS) -> tuple[Region, ...]:
    """Return the recompute regions of a block. They contain no collective, so that recompute sends nothing.

    Args:
        outputs: variables that the block hands out.
        groups: groups of regions to look for.
    """
    found = {"attention": flow.attention_core, "mlp": flow.activation_functions, "norms": flow.norms}
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
    found = region_of(group, part, flow, outputs)
    early = any(i < part[-1] and i not in part for v in found.writes for i in flow.readers.get(v, ()))
    return None if early else found


def region_of(group: str, part: Collection[int], flow: Flow, outputs: Sequence[str]) -> Region:
    """Return these statements as a region, with the variables that it reads from outside and hands out."""
    places = tuple(sorted(part))
    made = {v for i in places for v in flow.variables[i][1]}
    reads = dict.fromkeys(
        v for i in places for v in flow.variables[i][0] if v not in made and not v.startswith("self.")
    )
    used = {v for v in made if v in outputs or any(k not in part for k in flow.readers.get(v, ()))}
    return Region(group, places, tuple(reads), tuple(v for i in places for v in flow.variables[i][1] if v in used))


def is_view_or_cast(op: OpRecord) -> bool:
    """Return True for views and casts, which hand on the same numbers in another form."""
    return op.kind is OpKind.VIEW or Trait.CAST in op.traits


class Flow(Dataflow):
    """The data flow of a block: the variables that each statement reads and writes, and the record of its operation."""

    def __init__(self, variables: Sequence[tuple[tuple[str, ...], tuple[str, ...]]], ops: Sequence[OpRecord]) -> None:
        self.variables = variables
        self.ops = ops
        super().__init__(variables)

    @classmethod
    def of(cls, statements: Sequence[Op | Convert]) -> Flow:
        """Return the data flow of lowered statements."""
        ops = [CONVERSION if isinstance(s, Convert) else op_record(s.node.op) for s in statements]
        return cls([(reads_of(s), writes_of(s)) for s in statements], ops)

    @classmethod
    def of_block(cls, block: Block) -> Flow:
        """Return the data flow of a block before it has layouts: one statement per node, and no conversions."""
        held = {name: f"self.{name}" for name in (*block.params, *block.buffers)}
        nodes = [(tuple(held.get(v, v) for v in n.tensor_inputs), tuple(n.outputs)) for n in block.nodes]
        return cls(nodes, [op_record(n.op) for n in block.nodes])

    def activation_functions(self, megatron: bool = False) -> set[int]:
        """Return the pointwise operations from an activation function to the product that takes their result.

        Args:
            megatron: accept any product or experts as the end, and views on the way; else only a product with weights.
        """

        def ends(op: OpRecord) -> bool:
            return op.kind in PRODUCTS if megatron else op.kind is OpKind.PRODUCT and bool(op.weights)

        def through(op: OpRecord) -> bool:
            return Trait.POINTWISE in op.traits or (megatron and is_view_or_cast(op))

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
        # by hand: what may follow depends on what was found
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

    def attention_core(self) -> set[int]:
        """Return the statements that selective recompute reruns: fused attention, or softmax between two products."""
        out: set[int] = set()
        for i, op in enumerate(self.ops):
            if op.kind is OpKind.ATTENTION:
                out.add(i)
            elif op.kind is OpKind.SOFTMAX:
                reach = [self._until_matmul(i, way) for way in (self.before, self.after)]
                if all(reach):
                    out |= {i, *reach[0], *reach[1]}
        return out

    def _until_matmul(self, start: int, way: Sequence[Sequence[int]]) -> set[int]:
        """Return the statements from `start` to the nearest matmuls, through element-wise operations and views only."""
        found: set[int] = set()
        for k in way[start]:
            if self.ops[k].kind is OpKind.PRODUCT and not self.ops[k].weights:
                found.add(k)
            elif Trait.IN_CORE in self.ops[k].traits:
                further = self._until_matmul(k, way)
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
