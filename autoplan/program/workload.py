"""Workload: the work of one rank under a solved layout, derived from the statements that code generation emits."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autoplan.config.context_methods import ContextMethod
from autoplan.config.precision import ONE_SCALE
from autoplan.cost_models.work import BlockWork, CommWork, Gathered, OpWork, ParamWork, Recomputed, TiedParam, Workload
from autoplan.ir.graph import Block, ModelGraph, Node
from autoplan.ir.layout import ConversionKind
from autoplan.ops.attention import seen_share
from autoplan.ops.experts import FIRST, SECOND, expert_sizes
from autoplan.ops.products import packed_weights
from autoplan.ops.record import OpKind, Trait
from autoplan.ops.saved import TensorFacts
from autoplan.ops.strategies import Strategy
from autoplan.ops.table import backward_reads_params, flops, op_has, op_kind, op_record, rule_for
from autoplan.program.activation_bytes import Activations, saved_bytes_of
from autoplan.program.activations import activations
from autoplan.program.autocast import weights_of
from autoplan.program.expert_degrees import ExpertDegrees
from autoplan.program.facts import facts_of_model, layer_calls, pipeline_units
from autoplan.program.fusion import Joined, cast_before, fused_traffic, joined_ops, norm_kernels
from autoplan.program.lower import BlockLowering
from autoplan.program.op_costs import OpCosts
from autoplan.program.passes import PassFacts, rewritten
from autoplan.program.problem import Selection, copy_work
from autoplan.program.shared_values import Crossing, crossing_values, kept_at_cuts, shared_values
from autoplan.program.statements import BlockParam, Convert, LoweredBlock, Op, Statement
from autoplan.program.token_dispatch import local_products, on_token_share
from autoplan.program.token_dispatch_layouts import expert_weights
from autoplan.program.unit_memory import unit_memories, with_dispatch

# By names of block and node, whether it adds a vector, and method of the block: node, strategy, and the work of both.
_OpWorks = dict[tuple[str, str, bool, ContextMethod | None], tuple[Node, Strategy, OpWork]]


@dataclass(frozen=True)
class LoweredModel:
    """The part that all workloads of one layout share: the statements of every block, and the activations they keep.

    Attributes:
        like: the same layout under other methods of context parallelism. Blocks whose method is the same are shared.
    """

    op_costs: OpCosts
    blocks: Mapping[str, LoweredBlock]
    activation_bytes: Mapping[str, Activations]
    like: LoweredModel | None = None

    def alike(self, name: str) -> LoweredModel | None:
        """Return `like` if a block has the same method there."""
        return self.like if self.like is not None and _same_method(self.like, name, self.op_costs) else None

    def activations_with(self, experts: ExpertDegrees | None) -> Mapping[str, Activations]:
        """Return the activations of the blocks; a compiler sees other experts where tokens travel to them."""
        return self.activation_bytes if experts is None else self._spread

    @functools.cached_property
    def _spread(self) -> Mapping[str, Activations]:
        if not self.op_costs.kernels.compiled:
            return self.activation_bytes
        with_experts = {n: low for n, low in self.blocks.items() if _has_experts(low.block)}
        return {
            **self.activation_bytes,
            **{n: _activations(low, self.op_costs, spread=True) for n, low in with_experts.items()},
        }

    @functools.cached_property
    def op_works(self) -> _OpWorks:
        """The work of operations before any pass, which all degrees of experts and all methods share; added to."""
        return {} if self.like is None else self.like.op_works

    @functools.cached_property
    def without_experts(self) -> Mapping[str, tuple[LoweredBlock, BlockWork]]:
        """The statements after all passes, and their work, of every block that degrees of experts do not change."""
        same = {n: self.alike(n) for n, low in self.blocks.items() if not _has_experts(low.block)}
        return {n: _finished(self, n, None) if like is None else like.without_experts[n] for n, like in same.items()}

    @functools.cached_property
    def model_flops(self) -> tuple[float, float]:
        """The model flops of all calls, and the part of them that masks hide (`_model_flops`)."""
        return _model_flops(self.op_costs.graph, self.op_costs) if self.like is None else self.like.model_flops


def _same_method(made: LoweredModel, name: str, op_costs: OpCosts) -> bool:
    return made.op_costs.methods.get(name) == op_costs.methods.get(name)


def lower_all(
    graph: ModelGraph, selection: Selection, op_costs: OpCosts, like: LoweredModel | None = None
) -> LoweredModel:
    """Lower every block under a selection that was solved for the sub-axes of `op_costs`.

    Args:
        like: result for the same arguments but for the methods of context parallelism, if there is one already.
    """
    if like is None:
        lowered = {n: BlockLowering(graph, b, selection, op_costs.axes).run() for n, b in graph.blocks.items()}
    else:
        lowered = dict(like.blocks)
    activation_bytes = {
        n: like.activation_bytes[n]
        if like is not None and _same_method(like, n, op_costs)
        else _activations(low, op_costs)
        for n, low in lowered.items()
    }
    return LoweredModel(op_costs, lowered, activation_bytes, like)


def _activations(lowered: LoweredBlock, op_costs: OpCosts, spread: bool = False) -> Activations:
    return activations(
        lowered,
        op_costs.env,
        dtypes=op_costs.remapped,
        device_type=op_costs.device_type,
        kernels=replace(op_costs.kernels, method=op_costs.methods.get(lowered.block.name), spread=spread),
    )


def _has_experts(block: Block) -> bool:
    return any(op_kind(node.op) is OpKind.EXPERTS for node in block.nodes)


def workload(
    graph: ModelGraph,
    selection: Selection,
    op_costs: OpCosts,
    experts: ExpertDegrees | None = None,
    ends: bool = False,
    made: LoweredModel | None = None,
) -> Workload:
    """Return the workload of one rank and micro-batch under `selection`.

    Its `model_flops` follow the published definition of MFU (see `_node_flops`), whatever the kernels compute.

    Args:
        op_costs: sizes on the sub-axes that the selection was solved for.
        made: result of `lower_all` for these arguments, if there is one already.
        experts: degrees of experts if they are not on the ranks of tp, where the selection has them.
        ends: embedding and head are units of their own (see `pipeline_units`).
    """
    experts = _elsewhere(experts, op_costs)
    made = lower_all(graph, selection, op_costs) if made is None else made
    lowered, blocks = _blocks(made, experts)
    activation_bytes = with_dispatch(made.activations_with(experts), lowered, blocks, op_costs, experts)
    unit_calls, layers = pipeline_units(graph, ends), frozenset(layer_calls(graph))
    by_name, free = {c.name: c for c in graph.calls}, graph.free_calls()
    units = [[by_name[n] for n in unit] for unit in unit_calls]
    free_calls = [c for c in graph.calls if c.name in free]
    is_layer = tuple(tuple(c.name in layers for c in unit) for unit in units)
    crossing = crossing_values(graph, unit_calls, lowered, op_costs)
    shared = shared_values(graph, unit_calls, crossing, activation_bytes, layers)
    memory = unit_memories(units, activation_bytes, layers, tuple(shared.values()))
    model_flops, masked_flops = made.model_flops
    return Workload(
        model=graph.name,
        axes=tuple((a.name, a.size) for a in op_costs.axes),
        blocks=blocks,
        units=tuple(tuple(c.block for c in unit) for unit in units),
        unit_calls=unit_calls,
        layers=tuple(map(any, is_layer)),
        is_layer=is_layer,
        free=tuple(c.block for c in free_calls),
        cut_bytes=_cuts(len(units), crossing.values()),
        unit_saved=tuple(m.saved for m in memory),
        unit_selective=tuple(m.selective for m in memory),
        unit_kept=tuple(m.kept for m in memory),
        unit_transient=tuple(m.transient for m in memory),
        unit_recompute_transient=tuple(m.recompute_transient for m in memory),
        tied=_tied(graph, unit_calls, blocks),
        free_saved=float(saved_bytes_of(free_calls, activation_bytes)),
        tokens=float(op_costs.env["b"] * facts_of_model(graph).num_tokens(op_costs.env["s"] * op_costs.context)),
        model_flops=model_flops,
        masked_flops=masked_flops,
        micro_batch_size=op_costs.env["b"],
        seq_len=op_costs.env["s"] * op_costs.context,
        activation_bytes={n: h.figures for n, h in activation_bytes.items()},
        unit_choices=tuple(m.choices for m in memory),
        last_spent=memory[-1].spent,
        shared=tuple(shared.values()),
        kept_at_cuts=kept_at_cuts(graph, unit_calls, crossing, shared, activation_bytes, layers),
    )


def _elsewhere(experts: ExpertDegrees | None, op_costs: OpCosts) -> ExpertDegrees | None:
    """Return the degrees of experts if tokens travel to them; None if experts are split over tp."""
    tp = math.prod(a.size for a in op_costs.axes)
    return experts if experts is not None and experts.dispatches(tp) else None


def _blocks(made: LoweredModel, experts: ExpertDegrees | None) -> tuple[dict[str, LoweredBlock], dict[str, BlockWork]]:
    """Return the statements of every block after all passes, and their work."""
    known = made.without_experts
    found = {n: known[n] if n in known else _finished(made, n, experts) for n in made.blocks}
    return {n: low for n, (low, _) in found.items()}, {n: work for n, (_, work) in found.items()}


def _finished(made: LoweredModel, name: str, experts: ExpertDegrees | None) -> tuple[LoweredBlock, BlockWork]:
    """Return the statements of one block after all passes, and their work."""
    op_costs = made.op_costs
    stack = PassFacts(op_costs.context, op_costs.methods, experts, op_costs.kernels)
    lowered, calls = rewritten(made.blocks[name], stack), op_costs.graph.calls
    work = _block(lowered, made.activations_with(experts)[name], op_costs, made.op_works)
    at_end = name == calls[-1].block and sum(c.block == name for c in calls) == 1
    if at_end and work.gathered is Gathered.TWICE:
        work = replace(work, gathered=Gathered.LAST)
    return lowered, work


def _model_flops(graph: ModelGraph, op_costs: OpCosts) -> tuple[float, float]:
    """Return the model flops of all calls, and the part of them that causal attention masks: half of its scores."""
    found = {}
    for name, block in graph.blocks.items():
        total = masked = 0.0
        for node in block.nodes:
            counted = _node_flops(block, node, op_costs)
            total += counted
            masked += counted / 2 if op_kind(node.op) is OpKind.ATTENTION and node.attrs.get("causal") else 0.0
        found[name] = total, masked
    return (
        op_costs.context * sum(found[c.block][0] for c in graph.calls),
        op_costs.context * sum(found[c.block][1] for c in graph.calls),
    )


def _node_flops(block: Block, node: Node, op_costs: OpCosts) -> float:
    """Return the model flops of one node by the published count, forward and backward, for one rank's tokens.

    6 N + 12 L H Q S per token (Chowdhery et al., PaLM, 2022, appendix B; Megatron-LM counts alike): matrix products and
    attention, 4 b h s s d forward, also where a causal kernel computes half of it; backward twice the forward, and as
    much as the forward where the weight is frozen, which needs no gradient (4 N, as Megatron Bridge counts LoRA). N
    counts the parameters that are multiplied: not tables that are only looked up, and only the experts of one token.
    Recompute is not counted.
    """
    op = op_record(node.op)
    if not op.multiplies:
        return 0.0
    forward = op_costs.number(flops(node, block.values, rule_for(node, block.values)))
    if op.kind is OpKind.ATTENTION:
        forward *= op_costs.shares_of_keys(block, node) * (2.0 if node.attrs.get("causal") else 1.0)
        forward *= seen_share(node, op_costs.num_keys(block, node))  # as Megatron Bridge counts
    if not any(block.values[o].requires_grad for o in node.outputs):
        return forward
    held = weights_of(op_costs.graph, block)
    frozen = any(i in held and not block.values[i].requires_grad for i in node.tensor_inputs[:2])
    return forward * (2.0 if frozen else 3.0)


def _tied(graph: ModelGraph, units: Sequence[Sequence[str]], blocks: Mapping[str, BlockWork]) -> tuple[TiedParam, ...]:
    """Return the parameters that several calls use."""
    unit_of = {name: u for u, unit in enumerate(units) for name in unit}
    block_of = {c.name: c.block for c in graph.calls}
    out = []
    for uses in graph.tied_params.values():
        at = sorted(unit_of[call] for call, _ in uses)
        call, local = uses[0]
        p = next(p for p in blocks[block_of[call]].params if p.name == local)
        out += [TiedParam(first, last, replace(p, again=False)) for first, last in itertools.pairwise(at)]
    return tuple(out)


def _cuts(num_units: int, crossing: Iterable[Crossing]) -> tuple[float, ...]:
    """Return the bytes of all values that cross between unit i and i + 1."""
    out = [0.0] * (num_units - 1)
    for value in crossing:
        for cut in range(value.made, value.last):
            out[cut] += value.num_bytes
    return tuple(out)


def _kernels(
    lowered: LoweredBlock, ops: list[OpWork], position: Mapping[int, int], op_costs: OpCosts
) -> tuple[list[OpWork], Joined]:
    """Return the work of operations as kernels do it, and which of them are one kernel."""
    joined = Joined(frozenset(), frozenset())
    if op_costs.fused:
        joined = joined_ops(lowered, ops, position)
        ops = fused_traffic(lowered, ops, position)
        for k in cast_before(lowered, position):
            if ops[k].matmul_dtype is not None:
                ops[k] = replace(ops[k], attrs=(*ops[k].attrs, ("cast_before", True)))
    elif op_costs.kernels.fused_norms:
        norms = norm_kernels(lowered)
        ops = fused_traffic(lowered, ops, position, norms)
        joined = Joined(frozenset(), frozenset(position[k] for members in norms for k in members[:-1]))
    return ops, joined


def _block(lowered: LoweredBlock, activation_bytes: Activations, op_costs: OpCosts, op_works: _OpWorks) -> BlockWork:
    """Return the work of one call of a block: the sum over its statements. `op_works`: see `LoweredModel`."""
    block = lowered.block
    ops: list[OpWork] = []
    position: dict[int, int] = {}  # statement -> op
    for k, statement in enumerate(lowered.statements):
        if isinstance(statement, Op) or statement.copies:
            position[k] = len(ops)
            if isinstance(statement, Op):
                ops.append(_op_work(block, statement, op_costs, op_works))
            else:
                ops.append(_copy(statement, block, op_costs))
    ops, joined = _kernels(lowered, ops, position, op_costs)
    sent = [_sends(statement, op_costs) for statement in lowered.statements]
    of_layout = _of_layouts(lowered, position, op_costs)
    both = [[*mine, *others] for mine, others in zip(sent, of_layout, strict=False)]
    modules = _recomputed(activation_bytes, ops, position, both) if op_costs.kernels.modules else None
    return BlockWork(
        name=block.name,
        ops=tuple(ops),
        comms=tuple(c for comms in (*sent, *of_layout) for c in comms),  # seconds are summed in this order
        params=_params(lowered, op_costs),
        selective_ops=frozenset(position[k] for k in activation_bytes.selective_ops if k in position),
        joined_ops=joined.modules,
        same_kernel=joined.kernels,
        needed=_needed(activation_bytes.num_rerun, position, both),
        group_ops={
            g: frozenset(position[k] for k in at if k in position) for g, at in activation_bytes.group_ops.items()
        },
        freed_bytes={
            how: float(activation_bytes.saved_bytes - kept) for how, kept in activation_bytes.choice_bytes.items()
        },
        modules=modules,
        gathered=Gathered.TWICE if backward_reads_params(block) else Gathered.DROP,
    )


def _op_work(block: Block, op: Op, op_costs: OpCosts, op_works: _OpWorks) -> OpWork:
    """Return the work of one operation, as passes have changed it."""
    key = block.name, op.node.name, op.bias is not None, op_costs.methods.get(block.name)
    found = op_works.get(key)
    if found is None or found[0] is not op.node or found[1] is not op.strategy:
        work = op_costs.op_work(block, op.node, op.strategy, op.bias is not None)
        found = op_works[key] = op.node, op.strategy, work
    work = found[2]
    if op.logits_dtype is not None:
        work = _of_narrow_logits(work, op_costs.remapped.get(op.logits_dtype, op.logits_dtype))
    if op.token_ranks > 1:
        work = on_token_share(work, op.token_ranks, op_costs)
    if op.experts is not None:
        work = local_products(work, block, op.node, op_costs, op.experts)
    return work


def _copy(statement: Convert, block: Block, op_costs: OpCosts) -> OpWork:
    size = op_costs.num_bytes(block.name, statement.value, statement.layout)
    if statement.step.kind is ConversionKind.ALL_GATHER:
        size *= math.prod(op_costs.axes[i].size for i in statement.step.axes)
    return copy_work(size, op_costs.dtype(statement.value))


def _of_layouts(lowered: LoweredBlock, position: Mapping[int, int], op_costs: OpCosts) -> list[list[CommWork]]:
    """Return the collectives that follow from the layouts alone, by statement and parameter."""
    beside = _products_beside(lowered.statements, position)
    return [
        [replace(c, products=beside.get((k, c.phase), ())) for c in _sends(statement, op_costs, of_layout=True)]
        for k, statement in enumerate((*lowered.statements, *lowered.params))
    ]


def _products_beside(
    statements: Sequence[Statement], position: Mapping[int, int]
) -> Mapping[tuple[int, str], tuple[int, ...]]:
    """Return the products that a gather or reduce-scatter may hide behind, by statement and phase.

    A gather hides behind all products that read it. Its backward, a reduce-scatter, hides behind the product of the
    gradient if there is only one: of several the sum is reduced. A compiler finds no others
    (torch/_inductor/fx_passes/micro_pipeline_tp.py).

    Args:
        position: statement -> op.
    """
    readers: dict[str, list[int]] = {}
    makers: dict[str, int] = {}
    for k, statement in enumerate(statements):
        if not isinstance(statement, Op) or op_kind(statement.node.op) is not OpKind.PRODUCT:
            continue
        if op_record(statement.node.op).weights and statement.args[0] is not None:
            readers.setdefault(statement.args[0], []).append(position[k])
            makers[statement.targets[0]] = position[k]
    out: dict[tuple[int, str], tuple[int, ...]] = {}
    for k, statement in enumerate(statements):
        if not isinstance(statement, Convert):
            continue
        if statement.step.kind is ConversionKind.ALL_GATHER:
            found = tuple(readers.get(statement.target, ()))
            out[k, "forward"], out[k, "backward"] = found, found if len(found) == 1 else ()
        elif statement.step.kind is ConversionKind.REDUCE_SCATTER and statement.source in makers:
            out[k, "forward"] = out[k, "backward"] = (makers[statement.source],)
    return out


_PRICED_AXES = {"cpu": "cp", "cpr": "cp", "replicas": "batch"}  # mesh axis -> priced axis; `part` tells the parts of cp


def _sends(statement: Statement | BlockParam, op_costs: OpCosts, of_layout: bool = False) -> list[CommWork]:
    """Return the priced collectives of a statement: those that follow from the layouts alone, or the others."""
    out = []
    for c in statement.collectives:
        if c.priced and c.of_layout == of_layout:
            axis = c.axes[0] if len(c.axes) == 1 else "tp"
            size = op_costs.number(c.num_elements) * op_costs.sent_width(c)
            out.append(
                CommWork(
                    c.what, c.kind, size, _PRICED_AXES.get(axis, axis), c.phase, c.per,
                    c.routing, c.part, c.behind_attention,
                )
            )  # fmt: skip
    return out


def _needed(num_rerun: int, position: Mapping[int, int], sent: Sequence[Sequence[CommWork]]) -> Recomputed:
    """Return the work of the first statements in a forward.

    Args:
        sent: collectives by statement.
    """
    return Recomputed(
        frozenset(at for k, at in position.items() if k < num_rerun),
        comms=tuple(c for mine in sent[:num_rerun] for c in mine if c.phase == "forward"),
    )


def _recomputed(
    activation_bytes: Activations,
    ops: Sequence[OpWork],
    position: Mapping[int, int],
    sent: Sequence[Sequence[CommWork]],
) -> Recomputed:
    """Return the work of the recomputed modules.

    Args:
        sent: collectives by statement.
    """
    found = [m for mine in activation_bytes.modules.values() for m in mine]
    whole = sorted({k for m in found if m.group != "moe_act" for k in m.statements})
    beside = [ops[position[k]] for m in found if m.group == "moe_act" for k in m.statements if k not in whole]
    return Recomputed(
        frozenset(position[k] for k in whole if k in position),
        tuple(_expert_activation(op) for op in beside),
        tuple(c for k in whole for c in sent[k] if c.phase == "forward"),
    )


def _expert_activation(experts: OpWork) -> OpWork:
    """Return the activation function on the rows that reach this rank: gate and up read, their product written."""
    (hidden, index), attrs = experts.inputs[:2], dict(experts.attrs)
    sizes = expert_sizes(attrs, experts.inputs[FIRST].shape, experts.inputs[SECOND].shape)
    total = attrs.get("num_experts")
    share = sizes.num / int(total) if index.shape[-1] > 1 and isinstance(total, (int, float)) else 1.0
    rows = max(1, round(index.num_elements * share))  # an index of one expert per row: all rows are of this rank
    given, made = (TensorFacts((rows, n), hidden.dtype, True) for n in (sizes.columns, sizes.inner))
    return OpWork("silu", (given,), (made,), (), float(made.num_elements), float(given.num_bytes + made.num_bytes))


def _of_narrow_logits(work: OpWork, dtype: str) -> OpWork:
    """Return an operation as a fused loss leaves it: logits are not cast but read in the dtype of the product."""
    if op_has(work.op, Trait.CAST):
        return replace(work, op="reshape", attrs=(), flops=0.0, moved_bytes=0.0)
    first, *others = work.inputs
    return replace(work, inputs=(replace(first, dtype=dtype), *others))


def _params(lowered: LoweredBlock, op_costs: OpCosts) -> tuple[ParamWork, ...]:
    """Return parameters as one rank stores them: on the ranks of experts if spread over them, else as selected."""
    block, out = lowered.block, []
    experts, packed = expert_weights(block), packed_weights(block)
    again, narrow = _used_before(op_costs.graph, block.name), _narrow_weights(block, op_costs)
    for p in lowered.params:
        if p.spread:
            elements = math.prod(int(op_costs.number(size)) for size in p.value.shape) // math.prod(
                s.ways for s in p.spread
            )
        else:
            elements = math.prod(op_costs.local(block.name, p.value, p.stored))
        name, trained = p.value.name, p.value.requires_grad
        dtype = op_costs.dtype(p.value)
        marks = (name in names for names in (experts, packed, narrow, again))
        out.append(ParamWork(name, elements, dtype, trained, *marks))
    return tuple(out)


def _narrow_weights(block: Block, op_costs: OpCosts) -> frozenset[str]:
    """Return the weights of the block's products in 8 bits with one scale."""
    found = set[str]()
    for node in block.nodes:
        op = op_record(node.op)
        if op_costs.matmul_dtype(block, op.kind) == ONE_SCALE:
            found |= {node.tensor_inputs[i] for i in op.weights}
    return frozenset(found)


def _used_before(graph: ModelGraph, block: str) -> frozenset[str]:
    """Return the parameters of a block that in each of its calls are those of an earlier call."""
    calls = [c.name for c in graph.calls if c.block == block]
    later = Counter(local for uses in graph.tied_params.values() for call, local in uses[1:] if call in calls)
    return frozenset(local for local, count in later.items() if count == len(calls))
