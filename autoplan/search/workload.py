"""Workload: what one rank does under a solved layout, read off the very statements that code generation emits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autoplan.cost_models.graph import Block, ModelGraph, Node
from autoplan.cost_models.layout import Axis
from autoplan.cost_models.units import DTYPE_BYTES
from autoplan.cost_models.work import BlockWork, CommWork, OpWork, ParamWork, Workload
from autoplan.rules.table import flops, rule_for
from autoplan.search.activations import Activations, activations, saved_bytes_of
from autoplan.search.lower import BlockLowering, Convert, LoweredBlock, collectives
from autoplan.search.pins import layer_calls, pipeline_units
from autoplan.search.problem import COPIES, Selection, copy_work
from autoplan.search.works import Works


@dataclass(frozen=True)
class ExpertDegrees:
    """Expert parallelism: experts over `ep` ranks, each expert over `etp`. Folded from dp * cp * tp."""

    ep: int = 1
    etp: int = 1


def workload(graph: ModelGraph, selection: Selection, works: Works, experts: ExpertDegrees | None = None) -> Workload:
    """The workload of one rank and micro-batch under `selection`.

    Args:
        works: sizes on the sub-axes that the selection was solved for.
        experts: None: experts are laid out as the selection says.
    """
    lowered = {n: BlockLowering(graph, b, selection, works.axes).run() for n, b in graph.blocks.items()}
    held = {
        n: activations(low, graph.factors, works.axes, works.env, dtypes=works.remapped, device_type=works.device_type)
        for n, low in lowered.items()
    }
    blocks = {n: _block(low, held[n], works, experts) for n, low in lowered.items()}
    calls = {c.name: c for c in graph.calls}
    units = pipeline_units(graph)
    layers = set(layer_calls(graph))
    free_calls = graph.free_calls()
    free_names = [c.name for c in graph.calls if c.name in free_calls]
    saved, before, so_far = [], float(saved_bytes_of([calls[n] for n in free_names], held)), list(free_names)
    for unit in units:
        so_far += unit
        now = float(saved_bytes_of([calls[n] for n in so_far], held))
        saved.append(now - before)
        before = now
    per_call = {
        b: sum(
            works.number(flops(n, blk.values, rule_for(n, blk.values)))
            * (works.context if n.op == "attention" else 1)
            * (3.0 if any(blk.values[o].requires_grad for o in n.outputs) else 1.0)
            for n in blk.nodes
            if n.op in _COUNTED
        )
        for b, blk in graph.blocks.items()
    }
    return Workload(
        model=graph.name,
        axes=tuple((a.name, a.size) for a in works.axes),
        blocks=blocks,
        units=tuple(tuple(calls[n].block for n in unit) for unit in units),
        unit_calls=units,
        layers=tuple(any(n in layers for n in unit) for unit in units),
        free=tuple(calls[n].block for n in free_names),
        cut_bytes=_cuts(graph, units, lowered, works),
        unit_saved=tuple(saved),
        unit_selective=tuple(
            size - sum(held[calls[n].block].saved_bytes - held[calls[n].block].selective_bytes for n in unit)
            for size, unit in zip(saved, units, strict=True)
        ),
        unit_kept=tuple(float(sum(held[calls[n].block].kept_bytes for n in unit)) for unit in units),
        free_saved=float(saved_bytes_of([calls[n] for n in free_names], held)),
        tokens=float(works.env["b"] * works.env["s"] * works.context),
        model_flops=works.context * sum(per_call[c.block] for c in graph.calls),
        micro_batch_size=works.env["b"],
        seq_len=works.env["s"] * works.context,
    )


# Model flops as the field counts them: matrix products and attention (a causal one at half), backward twice the forward
# (Chowdhery et al., PaLM, 2022, appendix B). What a kernel computes again is not counted.
_COUNTED = frozenset(("linear", "matmul", "attention", "experts"))


def _cuts(
    graph: ModelGraph, units: tuple[tuple[str, ...], ...], lowered: Mapping[str, LoweredBlock], works: Works
) -> tuple[float, ...]:
    """Bytes of all values that cross between unit i and i + 1."""
    calls = {c.name: c for c in graph.calls}
    made: dict[str, tuple[int, float]] = {}
    last_use: dict[str, int] = {}
    for i, unit in enumerate(units):
        for name in unit:
            call = calls[name]
            low = lowered[call.block]
            for value, inside, layout in zip(call.outputs, low.block.outputs, low.output_layouts, strict=True):
                made[value] = (i, works.num_bytes(call.block, low.block.values[inside], layout))
            for value in call.inputs:
                last_use[value] = i
    out = [0.0] * (len(units) - 1)
    for value, (first, size) in made.items():
        for cut in range(first, last_use.get(value, first)):
            out[cut] += size
    return tuple(out)


def _block(lowered: LoweredBlock, held: Activations, works: Works, experts: ExpertDegrees | None) -> BlockWork:
    block = lowered.block
    ops: list[OpWork] = []
    comms: list[CommWork] = []
    position: dict[int, int] = {}  # statement -> op
    for k, statement in enumerate(lowered.statements):
        if isinstance(statement, Convert):
            if statement.step.kind in COPIES:
                size = works.num_bytes(block.name, statement.value, statement.layout)
                if statement.step.kind.name == "ALL_GATHER":
                    size *= _span(works.axes, statement.step.axes)
                position[k] = len(ops)
                ops.append(copy_work(size, works.dtype(statement.value)))
            continue
        work = works.op_work(block, statement.node, statement.strategy, statement.bias is not None)
        if statement.node.op == "experts" and experts is not None:
            comms += _expert_comms(block, statement.node, works, experts)
        if statement.node.op == "attention" and works.context > 1:
            comms += _context_comms(work)
        position[k] = len(ops)
        ops.append(work)
    ratio = {v.name: works.width(v) / DTYPE_BYTES[v.dtype] for v in block.values.values()}
    for c in collectives(lowered, works.graph.factors, works.axes):
        scale = ratio.get(c.what, 1.0)
        axis = c.axes[0] if len(c.axes) == 1 else "tp"
        comms.append(CommWork(c.what, c.kind, works.number(c.bytes) * scale, axis, c.phase, c.per))
    params = tuple(_param(lowered, i, works, experts) for i in range(len(lowered.params)))
    return BlockWork(
        name=block.name,
        ops=tuple(ops),
        comms=tuple(comms),
        params=params,
        transient_bytes=float(held.transient_bytes),
        recompute_transient_bytes=float(held.recompute_transient_bytes),
        selective_ops=frozenset(position[k] for k in held.selective_ops if k in position),
    )


def _span(axes: tuple[Axis, ...], indices: tuple[int, ...]) -> int:
    out = 1
    for i in indices:
        out *= axes[i].size
    return out


def _param(lowered: LoweredBlock, index: int, works: Works, experts: ExpertDegrees | None) -> ParamWork:
    p = lowered.params[index]
    block = lowered.block
    expert = any(n.op == "experts" and p.value.name in n.tensor_inputs for n in block.nodes)
    if expert and experts is not None:  # laid out over ep x etp instead of the selection's sub-axes
        whole = math.prod(int(works.number(size)) for size in p.value.shape)
        elements = whole // (experts.ep * experts.etp)
    else:
        elements = math.prod(works.local(block.name, p.value, p.stored))
    return ParamWork(p.value.name, elements, works.dtype(p.value), p.value.requires_grad, expert)


def _context_comms(work: OpWork) -> list[CommWork]:
    """Keys and values of the whole sequence are gathered for each use, their gradients reduced and scattered."""
    out = []
    for name, tensor in zip(("key", "value"), work.inputs[1:3], strict=True):
        out.append(CommWork(name, "all_gather", float(tensor.num_bytes), "cp", "forward"))
        if tensor.requires_grad:
            out.append(CommWork(name, "all_gather", float(tensor.num_bytes), "cp", "backward"))
            out.append(CommWork(name, "reduce_scatter", float(tensor.num_bytes), "cp", "backward"))
    return out


def _expert_comms(block: Block, node: Node, works: Works, experts: ExpertDegrees) -> list[CommWork]:
    """Tokens travel to their experts and back, forward and backward (dispatch and combine)."""
    if experts.ep == 1:
        return []
    hidden = block.values[node.tensor_inputs[0]]
    tokens = works.number(hidden.num_elements) * works.width(hidden) / _span(works.axes, tuple(range(len(works.axes))))
    num_bytes = tokens * float(node.attrs["top_k"])
    out = []
    for what, phase in (
        ("dispatch", "forward"),
        ("combine", "forward"),
        ("combine", "backward"),
        ("dispatch", "backward"),
    ):
        out.append(CommWork(what, "all_to_all", num_bytes, "ep", phase))
    return out
