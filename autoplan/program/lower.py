"""Lower the blocks of a ModelGraph to statements under chosen layouts."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autoplan.errors import LayoutError
from autoplan.ir.fresh import FreshNames
from autoplan.ir.graph import Block, ModelGraph, Node, Value
from autoplan.ir.layout import Axis, ConversionKind, ConversionStep, Layout, conversion
from autoplan.ir.symbols import Expr, product
from autoplan.ops.products import adds_bias
from autoplan.ops.record import OpKind, Trait
from autoplan.ops.strategies import Strategy
from autoplan.ops.table import RECORDS, op_has, op_kind
from autoplan.program.choice_kinds import ChoiceKind
from autoplan.program.problem import COPIES, Option, Selection
from autoplan.program.statements import (
    BlockInput,
    BlockParam,
    Collective,
    Convert,
    LoweredBlock,
    Op,
    Statement,
    local_shape,
)


def identifier(name: str) -> str:
    """Return a Python identifier for the name of a value or module."""
    text = re.sub(r"\W", "_", name)
    if text[0].isdigit() or keyword.iskeyword(text):
        text = f"_{text}"
    return text


def class_name(block: str) -> str:
    """Return the class name of an emitted block: tables1 -> Tables1."""
    return "".join(part[:1].upper() + part[1:] for part in re.split(r"\W|_", block) if part)


# names that the emitted text of a block uses itself
RESERVED = (
    "b s t device rng self torch nn F I P R Tensor Block Stage parameter typed attention draw dropout "
    "cross_entropy_sum experts extreme context_part context_length context_positions own_part slice_ all_gather "
    "all_reduce all_to_all reduce_scatter to_partial to_replicate update_buffer vary vocab_parallel_embedding "
    "vocab_parallel_cross_entropy_sum"
).split()
_FRIENDLY = {op.name: op.variable for op in RECORDS.values() if op.variable is not None}
_TAG = {"R": "full", "I": "same", "S": "shard", "P": "part"}


class BlockLowering:
    """Lowers one block to statements under a selection of layouts.

    Args:
        held: attributes of the emitted class that hold parameters and buffers; others get new names.
    """

    def __init__(
        self,
        graph: ModelGraph,
        block: Block,
        selection: Selection,
        axes: Sequence[Axis],
        held: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.graph = graph
        self.block = block
        self.selection = selection
        self.axes: tuple[Axis, ...] = tuple(axes)
        self.held = held
        self.names: FreshNames = FreshNames(RESERVED)
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
        """Return the chosen option of a node."""
        return self.selection[f"{self.block.name}/{node.name}"]

    def run(self) -> LoweredBlock:
        """Return the lowered block."""
        inputs = []
        for name in self.block.inputs:
            var = self.names.fresh(identifier(name))
            self.var[name, self.native[name]] = var
            inputs.append(BlockInput(var, self.block.values[name], self.native[name]))
        params = [self._param(name) for name in self.block.params]
        buffers = []
        for name in self.block.buffers:
            attr = self._attribute(name)
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
            factors=self.graph.factors,
            axes=self.axes,
            class_name=class_name(self.block.name),
            inputs=tuple(inputs),
            params=tuple(params),
            buffers=tuple(buffers),
            statements=tuple(self.statements),
            outputs=tuple(outputs),
            output_layouts=tuple(layouts),
            num_draws=sum(op_has(n.op, Trait.RANDOM) for n in self.block.nodes),
        )

    def _attribute(self, name: str) -> str:
        return self.held.get(name) or self.names.fresh(identifier(name))

    def _boundary(self, name: str) -> Layout:
        """Return the layout in which the block hands out a value."""
        for choice, option in self.selection.items():
            if ChoiceKind.BOUNDARY.subject_of(choice) is not None:
                for key, layout in option.requires:
                    if key == (self.block.name, name):
                        return layout
        return self.native[name]

    def _param(self, name: str) -> BlockParam:
        value, stored = self.block.values[name], self.native[name]
        attr = self._attribute(name)
        uses = self.uses.get(name, {stored})
        used = stored
        if len(uses) == 1:  # all uses take one type: its gradient is reduced once, at the end of the step
            used = next(iter(uses))
        self.var[name, used] = f"self.{attr}"
        self.native[name] = used
        pending = [i for i, (a, b) in enumerate(zip(stored, used, strict=True)) if a != b]
        sums: tuple[Collective, ...] = ()
        if pending and value.requires_grad:
            size = product(local_shape(value, stored, self.graph.factors, self.axes))
            sums = (self._collective(value, "all_reduce", pending, size, "backward", "step"),)
        return BlockParam(attr, value, stored, used, sums)

    def _collective(
        self, value: Value, kind: str, axes: Sequence[int], size: Expr, phase: str, per: str = "micro_batch"
    ) -> Collective:
        names = tuple(self.axes[i].name for i in axes)
        return Collective(value.name, kind, names, size, value.dtype, phase, per, of_layout=True)

    def _sends(self, value: Value, step: ConversionStep, layout: Layout) -> tuple[Collective, ...]:
        """Return the collectives of one conversion of a value that has `layout`."""
        forward, backward = step.collectives
        kinds = [("forward", forward)] if forward else []
        kinds += [("backward", backward)] if backward and value.requires_grad else []
        if not kinds:
            return ()
        size = product(local_shape(value, layout, self.graph.factors, self.axes))
        if step.kind is ConversionKind.ALL_GATHER:
            for i in step.axes:
                size = size * self.axes[i].size
        return tuple(self._collective(value, kind, step.axes, size, phase) for phase, kind in kinds)

    def _fused_biases(self) -> dict[str, Node]:
        """Return the bias addition that can be computed with a linear node, by name of that node."""
        consumers: dict[str, list[Node]] = {}
        for node in self.block.nodes:
            for name in node.tensor_inputs:
                consumers.setdefault(name, []).append(node)
        out, later = {}, {name for node in self.block.nodes for name in node.outputs}
        for node in self.block.nodes:
            later -= set(node.outputs)
            if (
                op_kind(node.op) is not OpKind.PRODUCT
                or len(consumers.get(node.outputs[0], [])) != 1
                or node.outputs[0] in self.block.outputs
            ):
                continue
            follower = consumers[node.outputs[0]][0]
            if not adds_bias(follower) or follower.inputs[0] != node.outputs[0] or follower.inputs[1] in later:
                continue
            produced = dict(self.option(node).provides)[self.block.name, node.outputs[0]]
            wanted = dict(self.option(follower).requires)[self.block.name, node.outputs[0]]
            if produced == wanted and not any(t.kind_name == "P" for t in produced):
                out[node.name] = follower
        return out

    def _node(self, node: Node, bias: Node | None) -> None:
        strategy = self._strategy(node)
        layouts = iter(layout for _, layout in self.option(node).requires)  # one value may be read in two layouts
        args = [None if name is None else self._get(name, next(layouts)) for name in node.inputs]
        final = bias or node
        bias_arg = None
        if bias is not None:
            wanted = dict(self.option(bias).requires)[self.block.name, str(bias.inputs[1])]
            bias_arg = self._get(str(bias.inputs[1]), wanted)
        targets = []
        for name in final.outputs:
            base, _, rest = name.partition("_")
            friendly = _FRIENDLY.get(name, _FRIENDLY.get(base, base) + (f"_{rest}" if rest else ""))
            var = self.names.fresh(identifier(friendly))
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
        """Return the variable that holds `name` in `layout`; the conversion is emitted at most once."""
        if (name, layout) in self.var:
            return self.var[name, layout]
        steps = conversion(self.native[name], layout)
        if steps is None:
            raise LayoutError(f"{name} cannot be converted from {self.native[name]} to {layout}")
        current = self.native[name]
        for step in steps:
            after = tuple(step.target if i in step.axes else t for i, t in enumerate(current))
            if (name, after) not in self.var:
                target = self.names.fresh(identifier(f"{name}_{_TAG[step.target.kind_name]}"))
                value = self.block.values[name]
                sends, copies = self._sends(value, step, current), step.kind in COPIES
                self.statements.append(
                    Convert(target, self.var[name, current], value, step, current, after, sends, copies)
                )
                self.var[name, after] = target
            current = after
        return self.var[name, layout]
