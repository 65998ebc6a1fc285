"""Factor inference: every dim of every value as a product of named factors, consistent over the whole model.

Each dim starts as one unknown factor. A rule says which dims share a label; equal labels are unified. If one side is a
product (a reshape splits `heads*head_dim`, a flatten joins `b*s`), the other side is refined to match. Refinement
travels backwards into parameters: the rows of `q_proj.weight` become `kv g d` because its output is later viewed as
heads.

One dim may be cut in two ways without a common refinement: 56 rows of an image as 8 windows of 7, and as 28 pairs. The
value is then handed to one of its users through a `regroup`, behind which that dim is another one, whole on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from autoplan.errors import GraphError, RuleError
from autoplan.ir.dataflow import Classes
from autoplan.ir.graph import Block, Dim, ModelGraph, Node, Runs, Value, check
from autoplan.ir.symbols import Expr
from autoplan.ops.language import OpRule
from autoplan.ops.table import op_record, rule_for
from autoplan.ops.views import REGROUP

# names for factors, best first: the first op that gives one of these to a dim (`OpRecord.factor_names`) names it
_BEST_FIRST = ("kv", "group", "head", "vocab", "hidden", "experts", "expert_out", "chunks", "out", "in")


class _Factors(Classes[int]):
    """Classes of equal factors; a factor may be split into an ordered list of others."""

    def __init__(self) -> None:
        super().__init__()
        self.size: list[Expr] = []
        self.split: dict[int, tuple[int, ...]] = {}
        self.hints: dict[int, list[str]] = {}

    def new(self, size: Expr) -> int:
        self.size.append(size)
        return len(self.size) - 1

    def atoms(self, factors: list[int]) -> list[int]:
        out: list[int] = []
        for factor in factors:
            root = self.find(factor)
            out.extend(self.atoms(list(self.split[root])) if root in self.split else [root])
        return out

    def _split(self, factor: int, major: Expr, minor: Expr) -> None:
        self.split[factor] = (self.new(major), self.new(minor))

    def unify(self, left: list[int], right: list[int]) -> bool:
        """Make two products the same list of factors. False if they have no common refinement."""
        a, b = self.atoms(left), self.atoms(right)
        while a and b:
            x, y = self.find(a[0]), self.find(b[0])
            if x in self.split or y in self.split:
                a, b = self.atoms(a), self.atoms(b)
                continue
            if x == y:
                a, b = a[1:], b[1:]
                continue
            sx, sy = self.size[x], self.size[y]
            if sx == sy:
                self.join(x, y)
                self.hints.setdefault(y, []).extend(self.hints.pop(x, []))
                a, b = a[1:], b[1:]
                continue
            quotient = sx.divide(sy)
            if quotient is not None:
                self._split(x, sy, quotient)
                continue
            quotient = sy.divide(sx)
            if quotient is None:
                return False
            self._split(y, sx, quotient)
        return not a and not b


class _Regroup(Exception):
    """A dim has no common factors with another: `mended` returns the block `block` with a regroup between them."""

    def __init__(self, block: str, mended: Callable[[Block], Block]) -> None:
        super().__init__(block)
        self.block, self.mended = block, mended


class _Inference:
    def __init__(self, graph: ModelGraph) -> None:
        self.graph, self.table = graph, _Factors()
        self.dims: dict[tuple[str, str], list[list[int]]] = {}
        # in order of definition, whatever the order of the mappings: names of factors depend on it
        for name in dict.fromkeys((*graph.inputs, *(out for call in graph.calls for out in call.outputs))):
            self._fresh("", graph.values[name])
        for block in dict.fromkeys(call.block for call in graph.calls):
            of = graph.blocks[block]
            for name in (*of.inputs, *of.params, *of.buffers, *(out for node in of.nodes for out in node.outputs)):
                self._fresh(block, of.values[name])

    def _fresh(self, scope: str, value: Value) -> None:
        self.dims[scope, value.name] = [self._of_size(size) for size in value.shape]

    def _of_size(self, size: Expr) -> list[int]:
        """Return a new factor of this size; none for a size of 1."""
        return [] if size.value == 1 else [self.table.new(size)]

    def _join(self, what: str, left: list[list[int]], right: list[list[int]]) -> None:
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            if not self.table.unify(a, b):
                raise GraphError(f"{what}: dim {i} has no common factors")

    def run(self) -> ModelGraph:
        for block in self.graph.blocks.values():
            for node in block.nodes:
                self._apply(block, node, rule_for(node, block.values))
        for call in self.graph.calls:
            block = self.graph.blocks[call.block]
            pairs = [*zip(call.inputs, block.inputs, strict=True), *zip(call.outputs, block.outputs, strict=True)]
            for k, (actual, formal) in enumerate(pairs):
                for i, (a, b) in enumerate(zip(self.dims["", actual], self.dims[block.name, formal], strict=True)):
                    if not self.table.unify(a, b):
                        if not self._as_large(a, b):
                            raise GraphError(f"call {call.name}, {actual}: dim {i} has another size")
                        edge = _regrouped_input if k < len(call.inputs) else _regrouped_output
                        raise _Regroup(block.name, partial(edge, formal, i))
        first: dict[str, tuple[str, str]] = {}
        for call in self.graph.calls:
            for local, full in call.params.items():
                if full in first:
                    self._join(f"tied parameter {full}", self.dims[first[full]], self.dims[call.block, local])
                first.setdefault(full, (call.block, local))
        return self._result()

    def _apply(self, block: Block, node: Node, rule: OpRule) -> None:
        op, where, names = node.op, node.source or node.name, [*node.tensor_inputs, *node.outputs]
        known: dict[str, list[int]] = {}
        for k, (name, labels) in enumerate(zip(names, [*rule.inputs, *rule.outputs], strict=True)):
            value = block.values[name]
            for i, dim in enumerate(labels):
                mine = self.dims[block.name, name][i]
                theirs: list[int] = []
                for label in dim:
                    if label not in known and len(dim) == 1:
                        known[label] = list(mine)
                    elif label not in known:
                        if label not in rule.sizes:
                            raise RuleError(f"{op} at {where}: label {label} shares a dim and has no size")
                        known[label] = self._of_size(rule.sizes[label])
                    theirs += known[label]
                    self._hint(op, label, known[label])
                if not self.table.unify(theirs, mine):
                    if k < len(node.tensor_inputs) and name not in block.params and self._as_large(theirs, mine):
                        raise _Regroup(block.name, partial(_regrouped_operand, node, k, i))
                    raise RuleError(
                        f"{op} at {where}: dim {i} of {name} ({value.shape[i]}) does not match the other operands"
                    )

    def _as_large(self, left: list[int], right: list[int]) -> bool:
        sizes = []
        for factors in (left, right):
            size = Expr.of(1)
            for atom in self.table.atoms(factors):
                size = size * self.table.size[atom]
            sizes.append(size)
        return sizes[0] == sizes[1]

    def _hint(self, op: str, label: str, factors: list[int]) -> None:
        name = op_record(op).factor_names.get(label)
        if name is None:
            return
        atoms = self.table.atoms(factors)
        if len(atoms) == 1:
            self.table.hints.setdefault(atoms[0], []).append(name)

    def _names(self) -> dict[int, str]:
        rank = {name: i for i, name in enumerate(_BEST_FIRST)}
        order: dict[int, None] = {}
        for dims in self.dims.values():
            for dim in dims:
                for atom in self.table.atoms(dim):
                    order[atom] = None
        names: dict[int, str] = {}
        used: dict[str, int] = {}
        for atom in order:
            size = self.table.size[atom]
            hints = sorted(self.table.hints.get(atom, []), key=lambda h: rank[h])
            base = str(size) if str(size).isidentifier() else hints[0] if hints else "f"
            used[base] = used.get(base, 0) + 1
            names[atom] = base if used[base] == 1 else f"{base}{used[base]}"
        return names

    def _result(self) -> ModelGraph:
        names = self._names()

        def dims(scope: str, name: str) -> tuple[Dim, ...]:
            return tuple(tuple(names[a] for a in self.table.atoms(dim)) for dim in self.dims[scope, name])

        values = {n: replace(v, dims=dims("", n)) for n, v in self.graph.values.items()}
        blocks = {
            name: replace(block, values={n: replace(v, dims=dims(name, n)) for n, v in block.values.items()})
            for name, block in self.graph.blocks.items()
        }
        factors = {name: self.table.size[atom] for atom, name in names.items()}
        found = self.graph.with_factors(factors, values, blocks)
        return replace(found, parts=self._parts(found)) if found.parts else found

    def _parts(self, found: ModelGraph) -> dict[str, Runs]:
        """Return the runs of factors by their new names."""
        renamed: dict[str, set[str]] = {}  # one that is joined in one place alone has several names
        pairs = [(self.graph.values, found.values)]
        pairs += [(block.values, found.blocks[name].values) for name, block in self.graph.blocks.items()]
        for old, new in pairs:
            for name, value in old.items():
                for dim, made in zip(value.dims or (), new[name].dims or (), strict=False):
                    for before, after in zip(dim, made, strict=True) if len(dim) == len(made) else ():
                        renamed.setdefault(before, set()).add(after)
        lost = next((name for name in self.graph.parts if name not in renamed), None)
        if lost is not None:
            raise GraphError(f"the factor {lost}, of which ranks have parts, is in no value any more")
        return {after: runs for name, runs in self.graph.parts.items() for after in sorted(renamed[name])}


def infer_factors(graph: ModelGraph) -> ModelGraph:
    """Return the graph, checked, with the dims of every value as factors.

    Raises:
        RuleError, GraphError: an op does not fit; the message names it.
    """
    while True:  # ends: every dim of an operand is regrouped at most once
        try:
            result = _Inference(graph).run()
            break
        except _Regroup as found:
            block = found.mended(graph.blocks[found.block])
            graph = replace(graph, blocks={**graph.blocks, found.block: block})
    check(result)
    return result


def _regroup(block: Block, value: str, dim: int, source: str) -> tuple[Node, Value]:
    """Return the node that regroups a dim of a value of the block, and what it returns."""
    count = sum(node.op == REGROUP for node in block.nodes)
    name = REGROUP if not count else f"{REGROUP}_{count}"
    node = Node(name, REGROUP, (value,), (name,), {"dim": dim}, "", source)
    return node, replace(block.values[value], name=name)


def _regrouped_operand(at: Node, operand: int, dim: int, block: Block) -> Block:
    """Regroup a dim of operand number `operand` (without None) of a node."""
    value = at.tensor_inputs[operand]
    made, out = _regroup(block, value, dim, at.source)
    places = [i for i, name in enumerate(at.inputs) if name is not None]
    inputs = tuple(made.name if i == places[operand] else name for i, name in enumerate(at.inputs))
    nodes = [n for node in block.nodes for n in ((made, replace(at, inputs=inputs)) if node is at else (node,))]
    return replace(block, nodes=tuple(nodes), values={**block.values, out.name: out})


def _regrouped_input(value: str, dim: int, block: Block) -> Block:
    """Regroup a dim of an input of the block before its first use."""
    made, out = _regroup(block, value, dim, "")
    nodes = [replace(n, inputs=tuple(made.name if x == value else x for x in n.inputs)) for n in block.nodes]
    outputs = tuple(made.name if x == value else x for x in block.outputs)
    return replace(block, nodes=(made, *nodes), outputs=outputs, values={**block.values, out.name: out})


def _regrouped_output(value: str, dim: int, block: Block) -> Block:
    """Regroup a dim of an output of the block at its end."""
    made, out = _regroup(block, value, dim, "")
    outputs = tuple(made.name if x == value else x for x in block.outputs)
    return replace(block, nodes=(*block.nodes, made), outputs=outputs, values={**block.values, out.name: out})


@dataclass(frozen=True)
class Occurrence:
    """One place of a label: tensor `operand` (inputs then outputs), tensor dim, and the places of its factors there."""

    operand: int
    dim: int
    start: int
    count: int


def occurrences(rule: OpRule, values: list[Value], factors: Mapping[str, Expr]) -> dict[str, list[Occurrence]]:
    """Return all places of every label.

    Args:
        values: the operands followed by the outputs.

    Raises:
        GraphError: the values have no factors yet.
    """
    out: dict[str, list[Occurrence]] = {}
    for k, (value, labels) in enumerate(zip(values, [*rule.inputs, *rule.outputs], strict=True)):
        if value.dims is None:
            raise GraphError(f"{value.name} has no factors yet; run infer_factors")
        for i, dim in enumerate(labels):
            position = 0
            for label in dim:
                count = len(value.dims[i]) if len(dim) == 1 else _span(value, i, position, rule.sizes[label], factors)
                out.setdefault(label, []).append(Occurrence(k, i, position, count))
                position += count
    return out


def _span(value: Value, dim: int, start: int, want: Expr, factors: Mapping[str, Expr]) -> int:
    """Return how many factors from `start` multiply to `want`."""
    have = (value.dims or ())[dim]
    total, count = Expr.of(1), 0
    while total != want:
        if start + count >= len(have):
            raise GraphError(f"{value.name} dim {dim}: factors {' '.join(have)} do not cover a part of size {want}")
        total = total * factors[have[start + count]]
        count += 1
    return count
