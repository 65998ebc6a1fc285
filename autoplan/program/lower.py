"""Lower a ModelGraph with chosen layouts to per-stage programs: statements with local shapes, and the ledger.

Planning on plain values only: pricing reads the statements, `autoplan.codegen.emit` turns them into source text.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from autoplan.errors import LayoutError
from autoplan.ir.graph import Block, ModelGraph, Node, Value
from autoplan.ir.layout import Axis, ConversionKind, Layout, Step, conversion
from autoplan.ir.symbols import Expr, product
from autoplan.ops.products import adds_bias
from autoplan.ops.record import OpKind, Trait
from autoplan.ops.strategies import Strategy
from autoplan.ops.table import op_has, op_kind
from autoplan.program.problem import Option, Selection
from autoplan.units import dtype_bytes


@dataclass(frozen=True)
class Convert:
    """`target = conversion(source)`; `layout` is the source's layout before the step."""

    target: str
    source: str
    value: Value
    step: Step
    layout: Layout
    result: Layout


@dataclass(frozen=True)
class Op:
    """`targets = op(args)` under a strategy. `bias` is a fused addition."""

    targets: tuple[str, ...]
    node: Node
    args: tuple[str | None, ...]
    strategy: Strategy
    values: tuple[Value, ...]  # outputs
    inputs: tuple[Value, ...]
    bias: str | None = None


Statement = Convert | Op


@dataclass(frozen=True)
class BlockParam:
    """A parameter as the emitted block holds it."""

    attr: str
    value: Value
    stored: Layout
    used: Layout  # the type its uses see; differs from stored where the reduction is deferred


@dataclass(frozen=True)
class LoweredBlock:
    """One emitted class."""

    block: Block
    class_name: str
    inputs: tuple[tuple[str, Value, Layout], ...]
    params: tuple[BlockParam, ...]
    buffers: tuple[tuple[str, Value], ...]
    statements: tuple[Statement, ...]
    outputs: tuple[str, ...]
    output_layouts: tuple[Layout, ...]
    num_dropouts: int


def identifier(name: str) -> str:
    """A Python identifier for a value or module path."""
    text = re.sub(r"\W", "_", name)
    if text[0].isdigit() or keyword.iskeyword(text):
        text = f"_{text}"
    return text


def class_name(block: str) -> str:
    """Class name of an emitted block: tables1 -> Tables1."""
    return "".join(part[:1].upper() + part[1:] for part in re.split(r"\W|_", block) if part)


@dataclass
class _Names:
    used: set[str] = field(default_factory=set)

    def fresh(self, base: str) -> str:
        text, k = identifier(base), 1
        while text in self.used:
            text, k = f"{identifier(base)}_{k}", k + 1
        self.used.add(text)
        return text


# what the text of a block itself uses
_RESERVED = (
    "b s t device rng self torch nn F I P R Tensor Block Stage parameter typed attention dropout cross_entropy_sum "
    "experts context_part context_length slice_ all_gather all_reduce all_to_all reduce_scatter to_partial "
    "to_replicate vary vocab_parallel_embedding vocab_parallel_cross_entropy_sum"
).split()
_FRIENDLY = {"attention": "attended", "dropout": "dropped", "cross_entropy_sum": "loss_sum"}
_TAG = {"R": "full", "I": "same", "S": "shard", "P": "part"}


class BlockLowering:
    """Statements of one block under a selection."""

    def __init__(self, graph: ModelGraph, block: Block, selection: Selection, axes: Sequence[Axis]) -> None:
        self.graph, self.block, self.selection, self.axes = graph, block, selection, tuple(axes)
        self.names = _Names(set(_RESERVED))
        self.native: dict[str, Layout] = {}
        self.var: dict[tuple[str, Layout], str] = {}
        self.statements: list[Statement] = []
        self.uses: dict[str, set[Layout]] = {}
        for option in selection.values():
            for (where, value), layout in option.provides:
                if where == block.name:
                    self.native[value] = layout
            for (where, value), layout in option.requires:
                if where == block.name:
                    self.uses.setdefault(value, set()).add(layout)

    def option(self, node: Node) -> Option:
        """The chosen option of a node."""
        return self.selection[f"{self.block.name}/{node.name}"]

    def run(self) -> LoweredBlock:
        """Lower the block."""
        inputs = []
        for name in self.block.inputs:
            var = self.names.fresh(name)
            self.var[name, self.native[name]] = var
            inputs.append((var, self.block.values[name], self.native[name]))
        params = [self._param(name) for name in self.block.params]
        buffers = []
        for name in self.block.buffers:
            attr = self.names.fresh(name)
            self.var[name, self.native[name]] = f"self.{attr}"
            buffers.append((attr, self.block.values[name]))
        fused = self._fused_biases()
        skip = {bias.name for bias in fused.values()}
        for node in self.block.nodes:
            if node.name not in skip:
                self._node(node, fused.get(node.name))
        outputs, layouts = [], []
        for name in self.block.outputs:
            layout = self._boundary(name)
            outputs.append(self._get(name, layout))
            layouts.append(layout)
        return LoweredBlock(
            block=self.block,
            class_name=class_name(self.block.name),
            inputs=tuple(inputs),
            params=tuple(params),
            buffers=tuple(buffers),
            statements=tuple(self.statements),
            outputs=tuple(outputs),
            output_layouts=tuple(layouts),
            num_dropouts=sum(op_has(n.op, Trait.RANDOM) for n in self.block.nodes),
        )

    def _boundary(self, name: str) -> Layout:
        """The layout in which the block hands out a value."""
        for choice, option in self.selection.items():
            if choice.startswith("boundary "):
                for key, layout in option.requires:
                    if key == (self.block.name, name):
                        return layout
        return self.native[name]

    def _param(self, name: str) -> BlockParam:
        value, stored = self.block.values[name], self.native[name]
        attr = self.names.fresh(name)
        uses = self.uses.get(name, {stored})
        used = stored
        if len(uses) == 1:  # every use sees one type: the reduction of its gradient waits until the end of the step
            used = next(iter(uses))
        self.var[name, used] = f"self.{attr}"
        self.native[name] = used
        return BlockParam(attr, value, stored, used)

    def _fused_biases(self) -> dict[str, Node]:
        """linear node -> the bias addition that can be computed with it."""
        consumers: dict[str, list[Node]] = {}
        for node in self.block.nodes:
            for name in node.tensor_inputs:
                consumers.setdefault(name, []).append(node)
        out = {}
        for node in self.block.nodes:
            if (
                op_kind(node.op) is not OpKind.PRODUCT
                or len(consumers.get(node.outputs[0], [])) != 1
                or node.outputs[0] in self.block.outputs
            ):
                continue
            follower = consumers[node.outputs[0]][0]
            if not adds_bias(follower) or follower.inputs[0] != node.outputs[0]:
                continue
            produced = dict(self.option(node).provides)[self.block.name, node.outputs[0]]
            wanted = dict(self.option(follower).requires)[self.block.name, node.outputs[0]]
            if produced == wanted and not any(t.kind_name == "P" for t in produced):
                out[node.name] = follower
        return out

    def _node(self, node: Node, bias: Node | None) -> None:
        strategy = self._strategy(node)
        args = [
            None if name is None else self._get(name, dict(self.option(node).requires)[self.block.name, name])
            for name in node.inputs
        ]
        final = bias or node
        bias_arg = None
        if bias is not None:
            wanted = dict(self.option(bias).requires)[self.block.name, str(bias.inputs[1])]
            bias_arg = self._get(str(bias.inputs[1]), wanted)
        targets = []
        for name in final.outputs:
            base, _, rest = name.partition("_")
            var = self.names.fresh(_FRIENDLY.get(name, _FRIENDLY.get(base, base) + (f"_{rest}" if rest else "")))
            self.var[name, self.native[name]] = var
            targets.append(var)
        values = self.block.values
        self.statements.append(
            Op(
                tuple(targets),
                node,
                tuple(args),
                strategy,
                tuple(values[n] for n in final.outputs),
                tuple(values[n] for n in node.tensor_inputs),
                bias_arg,
            )
        )

    def _strategy(self, node: Node) -> Strategy:
        strategy = self.option(node).strategy
        if strategy is None:
            raise LayoutError(f"{node.name} has no strategy")
        return strategy

    def _get(self, name: str, layout: Layout) -> str:
        """The variable that holds `name` in `layout`, converting once if needed."""
        if (name, layout) in self.var:
            return self.var[name, layout]
        steps = conversion(self.native[name], layout)
        if steps is None:
            raise LayoutError(f"{name} cannot be converted from {self.native[name]} to {layout}")
        current = self.native[name]
        for step in steps:
            after = tuple(step.target if i in step.axes else t for i, t in enumerate(current))
            if (name, after) not in self.var:
                target = self.names.fresh(f"{name}_{_TAG[step.target.kind_name]}")
                self.statements.append(
                    Convert(target, self.var[name, current], self.block.values[name], step, current, after)
                )
                self.var[name, after] = target
            current = after
        return self.var[name, layout]


def local_factors(value: Value, layout: Layout, factors: Mapping[str, Expr], axes: Sequence[Axis]) -> list[list[Expr]]:
    """Per dim the local sizes of its factors."""
    out = [[factors[f] for f in dim] for dim in value.dims or ()]
    for axis, kind in zip(axes, layout, strict=True):
        if kind.is_shard:
            out[kind.dim][kind.factor] = out[kind.dim][kind.factor].scale(Fraction(1, axis.size))
    return out


def local_shape(value: Value, layout: Layout, factors: Mapping[str, Expr], axes: Sequence[Axis]) -> list[Expr]:
    """Local size of every dim."""
    return [product(dim) for dim in local_factors(value, layout, factors, axes)]


def local_bytes(value: Value, layout: Layout, factors: Mapping[str, Expr], axes: Sequence[Axis]) -> Expr:
    """Bytes of the local tensor."""
    return product(local_shape(value, layout, factors, axes)) * dtype_bytes(value.dtype)


@dataclass(frozen=True)
class PlannedCollective:
    """A collective of a block: what the ledger lists for each of its calls."""

    what: str
    kind: str
    axes: tuple[str, ...]
    bytes: Expr
    phase: str
    per: str


def collectives(lowered: LoweredBlock, factors: Mapping[str, Expr], axes: Sequence[Axis]) -> list[PlannedCollective]:
    """Every collective of one call of the block, forward, backward and once per step."""
    out = []

    def group(indices: Sequence[int]) -> tuple[str, ...]:
        return tuple(axes[i].name for i in indices)

    for statement in lowered.statements:
        if isinstance(statement, Convert):
            step = statement.step
            size = local_bytes(statement.value, statement.layout, factors, axes)
            if step.kind is ConversionKind.ALL_GATHER:
                for i in step.axes:
                    size = size * axes[i].size
            forward, backward = step.collectives
            if forward:
                out.append(
                    PlannedCollective(statement.value.name, forward, group(step.axes), size, "forward", "micro_batch")
                )
            if backward and statement.value.requires_grad:
                out.append(
                    PlannedCollective(statement.value.name, backward, group(step.axes), size, "backward", "micro_batch")
                )
        elif statement.strategy.special == "vocab_cross_entropy":
            logits, target = statement.inputs
            width = dtype_bytes(logits.dtype) if logits.dtype not in ("bfloat16", "float16") else 4
            tokens = product(local_shape(target, statement.strategy.inputs[1], factors, axes)) * width
            sums = 3 if statement.node.attrs.get("label_smoothing") else 2
            name, over = statement.node.name, tuple(a.name for a in axes)
            out.append(PlannedCollective(name, "all_reduce", over, tokens, "forward", "micro_batch"))
            out.append(PlannedCollective(name, "all_reduce", over, tokens * sums, "forward", "micro_batch"))
    for param in lowered.params:
        pending = [i for i, (a, b) in enumerate(zip(param.stored, param.used, strict=True)) if a != b]
        if pending and param.value.requires_grad:
            size = local_bytes(param.value, param.stored, factors, axes)
            out.append(PlannedCollective(param.value.name, "all_reduce", group(pending), size, "backward", "step"))
    return out
