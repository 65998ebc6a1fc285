"""Workload: what one rank does under a solved layout, read off the very statements that code generation emits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from autoplan.config.recompute import MODULES, modules_choice
from autoplan.cost_models.work import (
    Again,
    BlockWork,
    CommWork,
    Gathered,
    OpWork,
    ParamWork,
    SharedValue,
    TensorWork,
    Workload,
)
from autoplan.errors import PinError
from autoplan.ir.graph import Block, Call, ModelGraph, Node
from autoplan.ir.layout import ConversionKind
from autoplan.ops.attention import window_share
from autoplan.ops.record import OpKind, Trait
from autoplan.ops.table import backward_reads_params, flops, op_has, op_kind, op_record, rule_for
from autoplan.program.activation_bytes import OFFLOAD, Activations, peak_bytes_of, saved_bytes_of
from autoplan.program.activations import activations
from autoplan.program.expert_degrees import ExpertDegrees
from autoplan.program.fusion import fused_works, joined_ops
from autoplan.program.lower import BlockLowering
from autoplan.program.op_costs import OpCosts
from autoplan.program.passes import Stack, rewritten
from autoplan.program.pins import layer_calls, pipeline_units
from autoplan.program.problem import Selection, copy_work
from autoplan.program.shared_values import shared_values
from autoplan.program.statements import BlockParam, Convert, LoweredBlock, Op, Statement
from autoplan.program.token_dispatch import local_products, on_own_tokens, travelled_bytes
from autoplan.program.token_dispatch_layouts import expert_weights


@dataclass(frozen=True)
class Lowered:
    """What all workloads of one layout share: the statements of every block, and what they keep."""

    works: OpCosts
    blocks: Mapping[str, LoweredBlock]
    held: Mapping[str, Activations]


def lower_all(graph: ModelGraph, selection: Selection, works: OpCosts) -> Lowered:
    """Every block under a selection, which was solved for the sub-axes of `works`."""
    lowered = {n: BlockLowering(graph, b, selection, works.axes).run() for n, b in graph.blocks.items()}
    held = {
        n: activations(
            low,
            graph.factors,
            works.axes,
            works.env,
            dtypes=works.remapped,
            device_type=works.device_type,
            kernels=replace(works.kernels, method=works.methods.get(n)),
        )
        for n, low in lowered.items()
    }
    return Lowered(works, lowered, held)


def workload(
    graph: ModelGraph,
    selection: Selection,
    works: OpCosts,
    experts: ExpertDegrees | None = None,
    ends: bool = False,
    made: Lowered | None = None,
) -> Workload:
    """The workload of one rank and micro-batch under `selection`.

    Args:
        works: sizes on the sub-axes that the selection was solved for.
        made: what `lower_all` made of these, if there is one already.
        experts: where experts are instead of where the selection has them; None, or on the ranks of tp: there.
        ends: embedding and head are units of their own (see `pipeline_units`).

    Its `model_flops` are those of the published definition of MFU (see `_model_flops`), whatever the kernels compute.
    """
    if experts is not None and not experts.dispatches(math.prod(a.size for a in works.axes)):
        experts = None
    made = lower_all(graph, selection, works) if made is None else made
    lowered, held = made.blocks, made.held
    _check_modules(works.kernels.modules, held)
    stack = Stack(works.context, works.methods, experts, works.kernels)
    lowered = {n: rewritten(low, stack) for n, low in lowered.items()}
    blocks = {n: _block(low, held[n], works) for n, low in lowered.items()}
    end = graph.calls[-1].block
    if blocks[end].gathered is Gathered.AGAIN and sum(c.block == end for c in graph.calls) == 1:
        blocks[end] = replace(blocks[end], gathered=Gathered.LAST)
    if experts is not None:
        held = {n: _without_other_experts(held[n], low, blocks[n], works) for n, low in lowered.items()}
        if experts.executed:
            held = {n: _with_travelled_rows(held[n], low, works, experts) for n, low in lowered.items()}
    calls = {c.name: c for c in graph.calls}
    units = pipeline_units(graph, ends)
    layers = set(layer_calls(graph))
    free_calls = graph.free_calls()
    free_names = [c.name for c in graph.calls if c.name in free_calls]
    memory = [_unit_memory([calls[n] for n in unit], held, blocks, layers) for unit in units]
    shared = shared_values(graph, units, lowered, held, works, frozenset(layers))
    if shared:
        memory = [_without(m, u, shared) for u, m in enumerate(memory)]
    per_call = {n: _block_flops(blk, works) for n, blk in graph.blocks.items()}
    return Workload(
        model=graph.name,
        axes=tuple((a.name, a.size) for a in works.axes),
        blocks=blocks,
        units=tuple(tuple(calls[n].block for n in unit) for unit in units),
        unit_calls=units,
        layers=tuple(any(n in layers for n in unit) for unit in units),
        is_layer=tuple(tuple(n in layers for n in unit) for unit in units),
        free=tuple(calls[n].block for n in free_names),
        cut_bytes=_cuts(graph, units, lowered, works),
        unit_saved=tuple(m.saved for m in memory),
        unit_selective=tuple(
            size - sum(held[calls[n].block].saved_bytes - held[calls[n].block].selective_bytes for n in unit)
            for size, unit in zip((m.saved for m in memory), units, strict=True)
        ),
        unit_kept=tuple(m.kept for m in memory),
        unit_transient=tuple(m.transient for m in memory),
        unit_transient_again=tuple(m.transient_again for m in memory),
        tied=_tied(graph, units, lowered, works),
        free_saved=float(saved_bytes_of([calls[n] for n in free_names], held)),
        tokens=float(works.env["b"] * works.env["s"] * works.context),
        model_flops=works.context * sum(per_call[c.block][0] for c in graph.calls),
        masked_flops=works.context * sum(per_call[c.block][1] for c in graph.calls),
        micro_batch_size=works.env["b"],
        seq_len=works.env["s"] * works.context,
        held={
            n: (
                *(h.saved_bytes, h.kept_bytes, h.transient_bytes, h.selective_bytes, h.recompute_transient_bytes),
                *(h.choice_bytes[choice] for choice in sorted(h.choice_bytes)),
            )
            for n, h in held.items()
        },
        unit_choices=tuple(
            _unit_choices([calls[n] for n in unit if n in layers], held, m.saved)
            for m, unit in zip(memory, units, strict=True)
        ),
        shared=shared,
    )


def _check_modules(asked: Sequence[str], held: Mapping[str, Activations]) -> None:
    """PinError for a module that no layer has."""
    for name in asked:
        if not any(name in h.modules for h in held.values()):
            there = [m for m in MODULES if any(m in h.available for h in held.values())]
            raise PinError(
                f"recompute names the module {name!r}, which no layer of the model has; it has {', '.join(there)}; "
                f"nearest legal: {modules_choice([there[0]] if there else ())}"
            )


def _block_flops(block: Block, works: OpCosts) -> tuple[float, float]:
    """Model flops of a block's nodes, and of them what causal attention does not see: half of its scores."""
    total = masked = 0.0
    for node in block.nodes:
        counted = _model_flops(block, node, works)
        total += counted
        masked += counted / 2 if op_kind(node.op) is OpKind.ATTENTION and node.attrs.get("causal") else 0.0
    return total, masked


def _model_flops(block: Block, node: Node, works: OpCosts) -> float:
    """Model flops of one node as the field counts them, forward and backward, of one context-parallel rank's tokens.

    6 N + 12 L H Q S per token (Chowdhery et al., PaLM, 2022, appendix B; Megatron-LM counts alike): matrix products
    and attention, 4 b h s s d forward, also where a causal kernel computes half of it; backward twice the forward. N is
    the parameters that are multiplied: a table that is only looked up is not, experts are those of a token. What is
    computed again is not counted.
    """
    op = op_record(node.op)
    if not op.multiplies:
        return 0.0
    forward = works.number(flops(node, block.values, rule_for(node, block.values)))
    if op.kind is OpKind.ATTENTION:
        forward *= works.context * (2.0 if node.attrs.get("causal") else 1.0)
        forward *= window_share(node, works.num_keys(block, node))  # as Megatron Bridge counts
    return forward * (3.0 if any(block.values[o].requires_grad for o in node.outputs) else 1.0)


@dataclass(frozen=True)
class _UnitMemory:
    """Bytes of one unit; the transients count beyond what it and the units before it keep."""

    saved: float
    kept: float
    transient: float
    transient_again: float


def _unit_memory(
    calls: Sequence[Call], held: Mapping[str, Activations], blocks: Mapping[str, BlockWork], layers: Set[str]
) -> _UnitMemory:
    """Walks the unit as `activations.peak_bytes_of` walks a stage."""
    again = frozenset(c.name for c in calls if c.name in layers)
    plain, repeated = (
        (
            sum(held[c.block].kept_bytes if c.name in names else held[c.block].saved_bytes for c in calls),
            peak_bytes_of(calls, held, names),
        )
        for names in (frozenset[str](), again)
    )
    return _UnitMemory(
        float(plain[0]), float(repeated[0]), float(plain[1] - plain[0]), float(repeated[1] - repeated[0])
    )


def _unit_choices(layers: Sequence[Call], held: Mapping[str, Activations], saved: float) -> dict[str, float]:
    """Bytes that a unit keeps under every choice that all of its layers know."""
    names = [held[c.block].choice_bytes.keys() for c in layers]
    common = [n for n in names[0] if all(n in other for other in names)] if names else []
    return {n: saved - sum(held[c.block].saved_bytes - held[c.block].choice_bytes[n] for c in layers) for n in common}


def _without(memory: _UnitMemory, unit: int, shared: Sequence[SharedValue]) -> _UnitMemory:
    """A unit's memory without what is held once by all units of a stage together."""
    saved = sum(v.num_bytes * v.kept.count(unit) for v in shared)
    again = sum(v.num_bytes * v.kept_again.count(unit) for v in shared)
    return replace(memory, saved=memory.saved - saved, kept=memory.kept - again)


def _without_other_experts(held: Activations, lowered: LoweredBlock, block: BlockWork, works: OpCosts) -> Activations:
    """Gradients of the experts that other ranks hold are not made here."""
    if works.kernels.handwritten:
        return held  # nor are those of the experts that are here, see `autoplan.program.megatron_kernels`
    away = 0
    for stored, p in zip(lowered.params, block.params, strict=True):
        if p.expert:
            whole = math.prod(works.local(lowered.block.name, stored.value, stored.stored))
            away = max(away, (whole - p.num_elements) * works.width(stored.value))
    return replace(
        held,
        transient_bytes=max(0, held.transient_bytes - away),
        recompute_transient_bytes=max(0, held.recompute_transient_bytes - away),
    )


def _with_travelled_rows(
    held: Activations, lowered: LoweredBlock, works: OpCosts, experts: ExpertDegrees
) -> Activations:
    """Rows that came from other ranks, and what experts elsewhere made of ours, are kept as well."""
    block = lowered.block
    size = sum(
        travelled_bytes(block, node, works, experts) for node in block.nodes if op_kind(node.op) is OpKind.EXPERTS
    )
    return replace(
        held,
        saved_bytes=held.saved_bytes + size,
        selective_bytes=held.selective_bytes + size,
        recompute_transient_bytes=held.recompute_transient_bytes + size,
    )


def _tied(
    graph: ModelGraph, units: Sequence[Sequence[str]], lowered: Mapping[str, LoweredBlock], works: OpCosts
) -> tuple[tuple[int, int, float], ...]:
    """Parameters that several units use: the gradient of the last use waits for the first."""
    unit_of = {name: u for u, unit in enumerate(units) for name in unit}
    block_of = {c.name: c.block for c in graph.calls}
    out = []
    for full, uses in graph.tied_params().items():
        if graph.params[full].trainable:
            at = sorted(unit_of[call] for call, _ in uses)
            call, local = uses[0]
            low = lowered[block_of[call]]
            p = next(p for p in low.params if p.value.name == local)
            out.append((at[0], at[-1], works.num_bytes(low.block.name, p.value, p.stored)))
    return tuple(out)


def _cuts(
    graph: ModelGraph, units: tuple[tuple[str, ...], ...], lowered: Mapping[str, LoweredBlock], works: OpCosts
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


def _block(lowered: LoweredBlock, held: Activations, works: OpCosts) -> BlockWork:
    """The work of one call of a block: the sum over its statements."""
    block = lowered.block
    ops: list[OpWork] = []
    position: dict[int, int] = {}  # statement -> op
    for k, statement in enumerate(lowered.statements):
        if isinstance(statement, Op) or statement.copies:
            position[k] = len(ops)
            ops.append(
                _op_work(block, statement, works) if isinstance(statement, Op) else _copy(statement, block, works)
            )
    joined: frozenset[int] = frozenset()
    if works.fused:
        joined = joined_ops(lowered, ops, position)
        ops = fused_works(lowered, ops, position)
    sent = [_sends(statement, works) for statement in lowered.statements]
    of_layout = [_sends(statement, works, of_layout=True) for statement in (*lowered.statements, *lowered.params)]
    modules = None
    if works.kernels.modules:
        both = [[*mine, *others] for mine, others in zip(sent, of_layout, strict=False)]
        modules = _again(held, ops, position, both)
    return BlockWork(
        name=block.name,
        ops=tuple(ops),
        comms=tuple(c for comms in (*sent, *of_layout) for c in comms),  # sums of seconds are made in this order
        params=tuple(_param(p, lowered, works) for p in lowered.params),
        selective_ops=frozenset(position[k] for k in held.selective_ops if k in position),
        joined_ops=joined,
        group_ops={g: frozenset(position[k] for k in at if k in position) for g, at in held.group_ops.items()},
        offloaded_bytes=float(held.saved_bytes - held.choice_bytes[OFFLOAD]),
        modules=modules,
        gathered=Gathered.AGAIN if backward_reads_params(block) else Gathered.DROP,
    )


def _op_work(block: Block, op: Op, works: OpCosts) -> OpWork:
    """The work of one operation, as passes have changed it."""
    work = works.op_work(block, op.node, op.strategy, op.bias is not None)
    if op.logits_dtype is not None:
        work = _of_narrow_logits(work, works.remapped.get(op.logits_dtype, op.logits_dtype))
    if op.token_ranks > 1:
        work = on_own_tokens(work, op.token_ranks, works)
    if op.experts is not None:
        work = local_products(work, block, op.node, works, op.experts)
    return work


def _copy(statement: Convert, block: Block, works: OpCosts) -> OpWork:
    size = works.num_bytes(block.name, statement.value, statement.layout)
    if statement.step.kind is ConversionKind.ALL_GATHER:
        size *= math.prod(works.axes[i].size for i in statement.step.axes)
    return copy_work(size, works.dtype(statement.value))


_PRICED_AXES = {"cpu": "cp", "cpr": "cp", "replicas": "batch"}  # of the mesh; parts of cp are said by `part`


def _sends(statement: Statement | BlockParam, works: OpCosts, of_layout: bool = False) -> list[CommWork]:
    """The priced collectives of a statement: those that follow from the layouts alone, or the others."""
    out = []
    for c in statement.collectives:
        if c.priced and c.of_layout == of_layout:
            axis = c.axes[0] if len(c.axes) == 1 else "tp"
            size = works.number(c.num_elements) * works.sent_width(c)
            out.append(
                CommWork(
                    c.what, c.kind, size, _PRICED_AXES.get(axis, axis), c.phase, c.per,
                    c.top_k, c.part, c.behind_attention,
                )
            )  # fmt: skip
    return out


def _again(
    held: Activations,
    ops: Sequence[OpWork],
    position: Mapping[int, int],
    sent: Sequence[Sequence[CommWork]],
) -> Again:
    """What the modules that are computed again do.

    Args:
        sent: collectives by statement.
    """
    found = [m for mine in held.modules.values() for m in mine]
    whole = sorted({k for m in found if m.name != "moe_act" for k in m.statements})
    beside = [ops[position[k]] for m in found if m.name == "moe_act" for k in m.statements if k not in whole]
    return Again(
        frozenset(position[k] for k in whole if k in position),
        tuple(_expert_activation(op) for op in beside),
        tuple(c for k in whole for c in sent[k] if c.phase == "forward"),
    )


def _expert_activation(experts: OpWork) -> OpWork:
    """Of the rows that reach this rank: gate and up read, their product written."""
    hidden, index, _, gate_up, down = experts.inputs[:5]
    total = dict(experts.attrs).get("num_experts")
    share = down.shape[0] / int(total) if index.shape[-1] > 1 and isinstance(total, (int, float)) else 1.0
    rows = max(1, round(index.num_elements * share))  # with one expert each: those that came to this rank
    given, made = (TensorWork((rows, n), hidden.dtype, True) for n in (gate_up.shape[1], down.shape[2]))
    return OpWork("silu", (given,), (made,), (), float(made.num_elements), float(given.num_bytes + made.num_bytes))


def _of_narrow_logits(work: OpWork, dtype: str) -> OpWork:
    """What a fused loss leaves of an operation: logits are not cast, it reads them in the dtype of the product."""
    if op_has(work.op, Trait.CAST):
        return replace(work, op="reshape", attrs=(), flops=0.0, moved_bytes=0.0)
    first, *others = work.inputs
    return replace(work, inputs=(replace(first, dtype=dtype), *others))


def _param(p: BlockParam, lowered: LoweredBlock, works: OpCosts) -> ParamWork:
    """A parameter as one rank stores it: laid out over the ranks of experts instead of the selection's sub-axes if it
    is spread over them."""
    if p.spread:
        elements = math.prod(int(works.number(size)) for size in p.value.shape) // math.prod(s.ways for s in p.spread)
    else:
        elements = math.prod(works.local(lowered.block.name, p.value, p.stored))
    expert = p.value.name in expert_weights(lowered.block)
    return ParamWork(p.value.name, elements, works.dtype(p.value), p.value.requires_grad, expert)
