"""Attention under a method of context parallelism: shapes, collectives, and bytes saved for the backward.

The runtime is `autoplan.runtime.context` and `autoplan.runtime.ring`. Shapes are those of one rank: [b, h, s / c, d]
before and [b, h / u, s / r, d] after the exchange of Ulysses, with c = u r.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from autoplan.config.context_methods import GATHER, RING, ULYSSES, ContextMethod
from autoplan.errors import RuleError
from autoplan.ir.symbols import Expr
from autoplan.ops.attention import DOCUMENT_DTYPE, drawn_bytes, reads_whole_keys, taking_groups, with_documents
from autoplan.ops.batch import counts_tokens
from autoplan.ops.record import OpKind
from autoplan.ops.saved import Form, OpFacts, SavedRule, SizesOf, TensorFacts, extra_bytes, kept, workspace_bytes
from autoplan.ops.strides import Ints
from autoplan.ops.table import saved_rule
from autoplan.ops.views import OWN_PART
from autoplan.program.statements import Collective, LoweredBlock, Op, Pass
from autoplan.torch_kernels import biased_width
from autoplan.units import DTYPE_BYTES


def exchanged(shape: Ints, method: ContextMethod) -> Ints:
    """Return the local shape of queries, keys or values after the all-to-all."""
    b, heads, s, d = shape
    u = method.ulysses
    return (b, heads * method.repeats(heads) // u, s * u, d)


def context_parallelism(degree: int, methods: Mapping[str, ContextMethod], *, megatron: bool = False) -> Pass:
    """Return the pass that lists the collectives of attention over sequences cut by context parallelism.

    Args:
        degree: ranks that a sequence is cut over.
        methods: method of each block. A block without one, and hand-written kernels without Ulysses, gather keys and
            values as Megatron-LM does.
        megatron: Megatron's kernels run, which gather keys and values again for the backward instead of keeping them.
            A compiler does not send anything twice.
    """

    def counting(lowered: LoweredBlock, op: Op) -> Op:
        return replace(op, over=(("axis", "cp"),)) if counts_tokens(op.node, lowered.block) else op

    def rewritten(lowered: LoweredBlock) -> LoweredBlock:
        lowered = lowered.map_ops(OpKind.FACTORY, lambda op: counting(lowered, op))
        lowered = lowered.map_ops(OpKind.VIEW, _taking_part)
        method = methods.get(lowered.block.name)

        def attending(op: Op) -> Op:
            if reads_whole_keys(op.node, lowered.block.values):
                return op
            if method is None or (megatron and method.ulysses == 1):
                return _as_megatron(lowered, op, degree, megatron)
            return _by_method(lowered, op, method)

        return lowered.map_ops(OpKind.ATTENTION, attending)

    return rewritten


def _taking_part(op: Op) -> Op:
    return replace(op, over=(("axis", "cp"),)) if op.node.op == OWN_PART else op


@dataclass(frozen=True)
class _Sent:
    """Queries, keys, values or output on one rank, before any exchange, with repeated heads."""

    name: str
    num_elements: Expr
    dtype: str
    requires_grad: bool

    def collective(self, kind: str, over: str, phase: str, part: tuple[int, int] | None, ways: int = 1) -> Collective:
        """Return a collective over `ways` times the elements of one rank."""
        return Collective(self.name, kind, (over,), self.num_elements * ways, self.dtype, phase, part=part)


def _tensors(lowered: LoweredBlock, op: Op, method: ContextMethod | None = None) -> list[_Sent]:
    given = [*zip(op.inputs, op.strategy.inputs, strict=True)]
    pairs = [*given[:3], (op.values[0], op.strategy.outputs[0])]
    out = []
    for k, (value, layout) in enumerate(pairs):
        size, heads = lowered.elements(value, layout), lowered.shape(value, layout)[1].value
        size = size.scale(_widened(op, k))
        if method is not None and heads is not None and k in (1, 2):
            size = size * method.repeats(heads)
        out.append(_Sent(value.name, size, value.dtype, value.requires_grad))
    return out


def _widened(op: Op, which: int) -> Fraction:
    """Return the width of queries, keys, values or output as they are sent, over their own.

    With a bias by key they have further columns (`autoplan.runtime.key_bias`).
    """
    if not op.node.attrs.get("key_bias"):
        return Fraction(1)
    widths = [value.shape[3].value or 0 for value in op.inputs[1:3]]
    return Fraction(biased_width(*widths), widths[0 if which < 2 else 1])


def _as_megatron(lowered: LoweredBlock, op: Op, degree: int, regather: bool) -> Op:
    """Gather keys and values of the whole sequence, and reduce-scatter their gradients.

    Args:
        regather: gather them for the backward too; else they are kept.
    """
    out = []
    for sent in _tensors(lowered, op)[1:3]:
        kinds = [("all_gather", "forward")]
        if sent.requires_grad:
            kinds += [("all_gather", "backward")] * regather + [("reduce_scatter", "backward")]
        out += [sent.collective(kind, "cp", phase, None, degree) for kind, phase in kinds]
    return replace(op, collectives=tuple(out))


def _by_method(lowered: LoweredBlock, op: Op, method: ContextMethod) -> Op:
    """List the collectives of `autoplan.runtime.context`. RuleError if the method cannot spread the heads."""
    heads, kv = (lowered.shape(op.inputs[k], op.strategy.inputs[k])[1].value for k in (0, 1))
    op = replace(op, node=with_documents(op.node, lowered.block.values))
    obstacle = method.heads_obstacle(heads or 0, kv or 0)
    if obstacle is not None:
        raise RuleError(f"attention over cut sequences by {method.name}: {obstacle}")
    tensors = _tensors(lowered, op, method)
    neighbours, groups = ("cpu", "cpr") if method.is_product else ("cp", "cp")
    out, over = list[Collective](), list[tuple[str, str]]()
    if method.ulysses > 1:
        over.append((ULYSSES, neighbours))
        for sent in tensors:
            phases = ("forward", "backward")[: 1 + sent.requires_grad]
            out += [sent.collective("all_to_all", neighbours, phase, (method.ulysses, 1)) for phase in phases]
    if method.inner:
        over.append((method.inner, groups))
        out += _INNER[method.inner](tensors, method, groups)
    if op.node.attrs.get("documents"):  # every rank learns the document of every token
        ids, ways = op.inputs[3], 1
        for ranks, axis in ((method.ulysses, neighbours), (method.ranks, groups)):
            ways *= ranks
            size = lowered.elements(ids, op.strategy.inputs[3]) * ways
            if ranks > 1:
                dtype = DOCUMENT_DTYPE if ids.dtype == "bool" else ids.dtype
                out.append(Collective(ids.name, "all_gather", (axis,), size, dtype, "forward", priced=False))
    return replace(op, collectives=tuple(out), over=tuple(over))


def _gathered_keys(tensors: Sequence[_Sent], method: ContextMethod, over: str) -> list[Collective]:
    out, part = [], (method.ranks, method.ulysses)
    for sent in tensors[1:3]:
        out.append(sent.collective("all_gather", over, "forward", part, method.ranks))
        if sent.requires_grad:
            out.append(sent.collective("reduce_scatter", over, "backward", part, method.ranks))
    return out


def _ring(tensors: Sequence[_Sent], method: ContextMethod, over: str) -> list[Collective]:
    """Return the sends of a ring: every step hands on keys and values; in the backward also their gradients."""
    query, key, value, _ = tensors
    both = key.requires_grad or value.requires_grad
    travelling = replace(key, name=f"{key.name}, {value.name}", num_elements=key.num_elements + value.num_elements)
    phases = ["forward"] + ["backward"] * ((query.requires_grad or both) + both)
    part = (method.ranks, method.ulysses)
    steps = [travelling.collective("send_recv", over, phase, part) for phase in phases] * (method.ranks - 1)
    return [replace(step, behind_attention=method.ranks) for step in steps]


_INNER = {GATHER: _gathered_keys, RING: _ring}


def saved_by(method: ContextMethod, gathered: Callable[[int], SavedRule], fused: bool) -> SavedRule:
    """Return the rule of the bytes that attention under `method` keeps, and needs while it runs.

    Args:
        gathered: gives the rule of attention over keys gathered from a number of ranks.
        fused: kernels gather again for the backward, and support windows.
    """

    def facts_of(f: OpFacts) -> OpFacts:
        shapes = [exchanged(t.shape, method) for t in f.inputs[:3]]
        q, k, v = (replace(t, shape=shape) for t, shape in zip(f.inputs[:3], shapes, strict=True))
        attrs = {**f.attrs, "window": None} if fused else f.attrs
        return replace(f, attrs=attrs, inputs=(q, k, v), outputs=(_like(q, v),))

    def rule_of(f: OpFacts) -> SavedRule:
        if method.is_ring:
            return _ring_rule(method.ranks)
        if method.inner == GATHER and not fused:
            return gathered(method.ranks)
        return taking_groups(f) if fused else saved_rule(f)

    def extra(f: OpFacts) -> tuple[int, ...]:
        inner = facts_of(f)
        rule = rule_of(inner)
        sizes = []
        for name in kept(inner, rule):
            tensors = inner.inputs if name[0] == "x" else inner.outputs
            sizes.append(tensors[int(name[1:])].num_bytes)
        return (*sizes, *extra_bytes(inner, rule))

    def workspace(f: OpFacts) -> tuple[int, ...]:
        inner = facts_of(f)
        sizes = workspace_bytes(inner, rule_of(inner))
        sent = 2 * max(t.num_bytes for t in inner.inputs)  # by rank, before and behind the all-to-all
        return tuple(size + sent for size in sizes)

    if method.ulysses == 1:
        return _ring_rule(method.ranks) if method.is_ring else gathered(method.ranks)
    return SavedRule((), Form.NEW, extra=extra, workspace=workspace)


def _like(q: TensorFacts, v: TensorFacts) -> TensorFacts:
    return replace(q, shape=(*q.shape[:3], v.shape[3]))


def _wide(f: OpFacts) -> int:
    """Return the bytes of an element of the sums over the steps of a ring."""
    return max(4, DTYPE_BYTES[f.inputs[0].dtype])


def _ring_extra(ways: int) -> SizesOf:
    def extra(f: OpFacts) -> tuple[int, ...]:
        q = f.inputs[0]
        return (q.num_elements // q.shape[-1] * _wide(f), *drawn_bytes(f, ways))

    return extra


def _ring_workspace(f: OpFacts) -> tuple[int, ...]:
    """Return bytes while a ring runs.

    Forward: keys and values here, on their way in and packed, and wide sums. Backward: also their gradients.
    """
    q, k, v = f.inputs[:3]
    travelling = k.num_bytes + v.num_bytes
    summed = (k.num_elements + v.num_elements) * _wide(f)
    forward = 3 * travelling + q.num_elements // q.shape[-1] * v.shape[-1] * _wide(f)
    return (forward, 5 * travelling + 2 * summed + q.num_elements * _wide(f))


_ALL = (0, 1, 2)


def _ring_rule(ways: int) -> SavedRule:
    kept = (("x0", _ALL), ("x1", _ALL), ("x2", _ALL), ("y0", _ALL))
    return SavedRule(kept, Form.NEW, extra=_ring_extra(ways), workspace=_ring_workspace)


def frozen(chosen: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return a mapping from block to method as a hashable key."""
    return tuple(sorted(chosen.items()))
