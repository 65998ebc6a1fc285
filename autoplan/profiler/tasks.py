"""The measurements for a model: its operations under every strategy, as the text that codegen emits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from autoplan.codegen.emit import Context, op_text
from autoplan.cost_models.work import OpWork
from autoplan.errors import RuleError
from autoplan.ir.graph import Block, Node
from autoplan.ops.products import adds_bias
from autoplan.ops.record import OpKind, Trait
from autoplan.ops.strategies import Strategy, strategies
from autoplan.ops.table import op_has, op_kind, op_record
from autoplan.ops.text import OpText
from autoplan.profiler.ops import MeasureTask, compiled
from autoplan.program.op_costs import OpCosts
from autoplan.program.statements import LoweredBlock, Op

EXPERTS_PART = "part"  # the axis, of one rank, over which a rank's part of the experts is measured


def _text(op: Op, work: OpWork, ctx: Context) -> str:
    """Return the emitted text in x0, x1, ...; a special form is measured as the plain op on its local shape."""
    if op_has(op.node.op, Trait.RANDOM):  # the same arithmetic, without asking the mesh for this rank's part
        attends = op_kind(op.node.op) is OpKind.ATTENTION
        index = "".join(f"({size}, {size}, ()), " for size in work.inputs[0].shape[: 2 if attends else None])
        if attends:
            shown = op_text(op, ctx, 0)
            return f"{shown[: shown.index(', site=')]}, site=0, index=({index}))"
        emit = op_record(op.node.op).emit
        if emit is None:
            raise RuleError(f"op {op.node.op!r} draws random numbers, and its record has no text")
        return emit(OpText(("x0",), op.node.attrs, (), (), ctx.whole, f"0, ({index})"))
    if op.strategy.special is not None:
        plain = tuple(replace(c, special=None, factor=None) for c in op.strategy.choices)
        # of experts the rows of the others are left out, as by the first rank of those that share them
        over = (("axes", EXPERTS_PART),) if op_kind(op.node.op) is OpKind.EXPERTS else ()
        op = replace(op, strategy=replace(op.strategy, choices=plain), over=over)
    return op_text(op, ctx, 0)


def _statement(block: Block, node: Node, strategy: Strategy, bias: bool) -> Op:
    values, present = block.values, iter(range(len(node.inputs)))
    args = tuple(None if name is None else f"x{next(present)}" for name in node.inputs)
    return Op(
        node.outputs,
        node,
        args,
        strategy,
        tuple(values[n] for n in node.outputs),
        tuple(values[n] for n in node.tensor_inputs),
        f"x{len(node.tensor_inputs)}" if bias else None,
    )


def _bounds(node: Node, work: OpWork) -> dict[int, range]:
    """Return the numbers that integer inputs may have: places in tables, classes, lengths."""
    limits = op_record(node.op).index_limits
    if limits is None:
        return {}
    return limits(node.attrs, [t.shape for t in work.inputs], [t.shape for t in work.outputs])


class _Memory:
    """The order in which the values of a block lie in memory: its ops run on meta tensors, which only carry strides."""

    def __init__(self, block: Block, op_costs: OpCosts) -> None:
        self.strides: dict[str, tuple[int, ...]] = {}
        made: dict[str, torch.Tensor] = {}
        rank0 = OpCosts(op_costs.graph, (), op_costs.env, context=op_costs.context, precision=op_costs.precision)
        ctx = Context(op_costs.graph.factors, (), {})
        for name in (*block.inputs, *block.params, *block.buffers):
            value = block.values[name]
            shape = rank0.local(block.name, value, ())
            made[name] = torch.empty(shape, dtype=getattr(torch, rank0.dtype(value)), device="meta")
        for node in block.nodes:
            (strategy,) = (
                s
                for s in strategies(node, block.values, op_costs.graph.factors, (), op_costs.sizes)
                if s.name in ("R", "-")
            )
            work = rank0.op_work(block, node, strategy)
            if op_has(node.op, Trait.RUNS_ON_DEVICE):
                outs = [torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta") for t in work.outputs]
                if op_kind(node.op) is OpKind.ATTENTION:  # the fused kernels write [b, s, h, d]
                    b, h, s, d = work.outputs[0].shape
                    outs = [torch.empty((b, s, h, d), dtype=outs[0].dtype, device="meta").transpose(1, 2)]
            else:
                text = _text(_statement(block, node, strategy, False), work, ctx)
                task = MeasureTask(work, text, names=dict(op_costs.env))
                with torch.no_grad():
                    result = compiled(task, torch.device("meta"))(*(made[n] for n in node.tensor_inputs))
                outs = list(result) if isinstance(result, (tuple, list)) else [result]
            made |= dict(zip(node.outputs, outs, strict=True))
        self.strides = {name: t.stride() for name, t in made.items()}

    def describe(
        self, names: Sequence[str], work: OpWork
    ) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]]:
        """Return the memory orders and the broadcast dims of the inputs, by position."""
        orders, broadcast = {}, {}
        for i, name in enumerate(names):
            strides = self.strides[name]
            zero = tuple(d for d, stride in enumerate(strides) if stride == 0 and work.inputs[i].shape[d] > 1)
            order = tuple(sorted(range(len(strides)), key=lambda d: (-strides[d], d)))
            dense = [d for d in order if d not in zero]
            if dense != sorted(dense):
                orders[i] = order
            if zero:
                broadcast[i] = zero
        return orders, broadcast


def model_tasks(op_costs: OpCosts) -> list[MeasureTask]:
    """Return every operation of the model under every strategy on the sub-axes of `op_costs`.

    Equal operations occur once; the longest come first.
    """
    found: dict[str, MeasureTask] = {}
    for block in op_costs.graph.blocks.values():
        memory = _Memory(block, op_costs)
        biased = _biased(block)
        for node in block.nodes:
            for strategy in strategies(node, block.values, op_costs.graph.factors, op_costs.axes, op_costs.sizes):
                for bias in (False, True) if node.name in biased else (False,):
                    task = _task(block, node, strategy, bias, op_costs, memory)
                    found.setdefault(task.work.key, task)
    return sorted(found.values(), key=lambda t: -(t.work.flops + t.work.moved_bytes))


def lowered_tasks(lowered: Iterable[LoweredBlock], op_costs: OpCosts) -> list[MeasureTask]:
    """Return the operations of lowered blocks only."""
    found: dict[str, MeasureTask] = {}
    for low in lowered:
        memory = _Memory(low.block, op_costs)
        for statement in low.statements:
            if isinstance(statement, Op):
                task = _task(
                    low.block, statement.node, statement.strategy, statement.bias is not None, op_costs, memory
                )
                found.setdefault(task.work.key, task)
    return sorted(found.values(), key=lambda t: -(t.work.flops + t.work.moved_bytes))


def _biased(block: Block) -> set[str]:
    """Return the names of products whose bias the same kernel may add."""
    out = set()
    makers = {o: n for n in block.nodes for o in n.outputs}
    for node in block.nodes:
        if adds_bias(node) and node.inputs[0] in makers:
            maker = makers[node.inputs[0]]
            if op_kind(maker.op) is OpKind.PRODUCT:
                out.add(maker.name)
    return out


def _task(block: Block, node: Node, strategy: Strategy, bias: bool, op_costs: OpCosts, memory: _Memory) -> MeasureTask:
    work = op_costs.op_work(block, node, strategy, bias)
    groups = {tuple(a.name for a in op_costs.axes): "all"} if len(op_costs.axes) > 1 else {}
    ctx = Context(op_costs.graph.factors, op_costs.axes, groups)
    text = _text(_statement(block, node, strategy, bias), work, ctx)
    names = node.tensor_inputs
    parameters = {i for i, name in enumerate(names) if name in block.params or name in block.buffers}
    if bias:
        parameters.add(len(names))
    orders, broadcast = memory.describe(names, work)
    return MeasureTask(work, text, frozenset(parameters), _bounds(node, work), orders, broadcast, dict(op_costs.env))
