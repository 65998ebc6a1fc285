"""Memory traffic of element-wise operations that run together in one kernel.

Fused programs (torch.compile; norms, activations, rotary embeddings of Megatron and Transformer Engine) run connected
element-wise operations, views and reductions over the last dim as one kernel. It reads each external input once, keeps
intermediate values in registers, and writes the values that other operations need. Two operations are in one kernel if
one feeds the other and no product, attention or collective lies on any path between them.

    forward    external inputs read, outputs that leave written
    backward   gradients of those outputs read, external inputs read again if any operation's derivative needs them,
               gradients of the inputs written. Additions alone pass gradients on: where one joins two branches, both
               gradients are read and their sum written

The bytes are spread evenly over the operations of a kernel as the attributes `fused_forward_bytes` and
`fused_backward_bytes`, which `cost_models.kernels.operations` prices instead of their own traffic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from autoplan.cost_models.work import OpWork
from autoplan.ir.dataflow import Classes, Dataflow
from autoplan.ops.record import OpKind, Trait
from autoplan.ops.saved import TensorFacts
from autoplan.ops.table import op_has, op_kind, op_record
from autoplan.program.regions import Flow
from autoplan.program.statements import Convert, LoweredBlock, Op, reads_of, writes_of


class _Kernels:
    """The kernels of a block: which of its statements run together."""

    def __init__(self, lowered: LoweredBlock) -> None:
        self.lowered = lowered
        self.flow = Dataflow([(reads_of(s), writes_of(s)) for s in lowered.statements])
        self.made = self.flow.makes
        self.classes = Classes[int]()
        level: dict[int, int] = {}
        for k, before in enumerate(self.flow.before):
            level[k] = max((level[p] + (not self._fused(p)) for p in before), default=0)
            if self._fused(k):
                self.classes.find(k)
                for p in before:
                    if self._fused(p) and level[p] == level[k]:
                        self.classes.join(p, k)

    def _fused(self, k: int) -> bool:
        statement = self.lowered.statements[k]
        return isinstance(statement, Op) and op_record(statement.node.op).fuses and statement.bias is None

    def kernels(self) -> list[list[int]]:
        """Return the statements of each kernel."""
        return list(self.classes.members().values())

    def base(self, name: str) -> str:
        """Return the value that `name` is a view of."""
        while (k := self.made.get(name)) is not None:
            statement = self.lowered.statements[k]
            if isinstance(statement, Convert) or not op_record(statement.node.op).as_view or not reads_of(statement):
                return name
            name = reads_of(statement)[0]
        return name


def norm_kernels(lowered: LoweredBlock) -> list[tuple[int, ...]]:
    """Return the statements of each norm that is written out in operations."""
    flow = Flow.of(lowered.statements)
    return flow.parts(flow.norms())


def fused_traffic(
    lowered: LoweredBlock,
    ops: Sequence[OpWork],
    position: Mapping[int, int],
    parts: Sequence[Sequence[int]] | None = None,
) -> list[OpWork]:
    """Return `ops` with the memory traffic of their kernels.

    Args:
        position: statement -> its index in `ops`.
        parts: the statements of each kernel; None: of all that element-wise operations make.
    """
    kernels = _Kernels(lowered)
    tensors: dict[str, TensorFacts] = {}
    for k, statement in enumerate(lowered.statements):
        if isinstance(statement, Op) and k in position:
            work = ops[position[k]]
            tensors.update(zip(reads_of(statement), work.inputs, strict=False))
            tensors.update(zip(statement.targets, work.outputs, strict=False))
    out = list(ops)
    for members in kernels.kernels() if parts is None else parts:
        inside = set(members)
        computing = [k for k in members if not op_record(ops[position[k]].op).as_view]
        if not computing:
            continue
        read: dict[str, TensorFacts] = {}
        written: dict[str, TensorFacts] = {}
        for k in members:
            statement = lowered.statements[k]
            for name in reads_of(statement):
                source = kernels.base(name)
                if kernels.made.get(source) not in inside:
                    tensor = tensors.get(source, tensors[name])
                    read[source] = tensor
            for name in writes_of(statement):
                source = kernels.base(name)
                leaves = set(kernels.flow.readers.get(name, ())) - inside or name in lowered.outputs
                if kernels.made.get(source) in inside and leaves:
                    written[source] = tensors[source]
        forward, backward = _traffic(read, written, [ops[position[k]].op for k in computing])
        for k in computing:
            work, shares = out[position[k]], [round(size / len(computing)) for size in (backward, forward)]
            bytes_of = zip(("fused_backward_bytes", "fused_forward_bytes"), shares, strict=True)
            out[position[k]] = replace(work, attrs=(*work.attrs, *bytes_of))
    return out


class Joined(NamedTuple):
    """Indices of operations that hand-written modules (Megatron, Transformer Engine) start together with another one.

    Attributes:
        modules: in one call of Python. Products that read the same value are one (`linear_qkv`, `linear_fc1`), as are
            products of their results; trained and frozen weights (adapters) make one product each. A norm is part of
            the products that read it (`LayerNormLinear`). Operations of an element-wise kernel count as element-wise.
        kernels: in one kernel: these products, and all operations of an element-wise kernel but its last. Rotary
            embeddings, which concatenate, had none in Megatron before the end of 2023.
    """

    modules: frozenset[int]
    kernels: frozenset[int]


def joined_ops(lowered: LoweredBlock, ops: Sequence[OpWork], position: Mapping[int, int]) -> Joined:
    """Return the indices in `ops` of operations that start together with another one."""
    kernels = _Kernels(lowered)
    readers: dict[str, list[int]] = {}
    for k, statement in enumerate(lowered.statements):
        for name in reads_of(statement):
            readers.setdefault(kernels.base(name), []).append(k)
    first: dict[tuple[str, bool], str] = {}  # (input, trained) -> result of the first product that reads it
    same: dict[str, str] = {}  # result of a joined product -> result of the first one
    fused = [[position[k] for k in sorted(members) if k in position] for members in kernels.kernels()]
    norms, products = set[int](), set[int]()
    for k, statement in enumerate(lowered.statements):
        if k not in position or not isinstance(statement, Op):
            continue
        if op_kind(statement.node.op) is OpKind.NORM:
            read_by = readers.get(statement.targets[0], [])
            if read_by and all(_is_product(lowered, j) for j in _behind_converts(lowered, readers, read_by)):
                norms.add(position[k])
        elif _is_product(lowered, k):
            source = kernels.base(reads_of(statement)[0])
            weight = ops[position[k]].inputs[1]
            key = same.get(source, source), weight.requires_grad
            if key in first:
                products.add(position[k])
                same[statement.targets[0]] = first[key]
            else:
                first[key] = statement.targets[0]
    return Joined(frozenset(products.union(norms, *fused)), frozenset(products.union(*_inside_kernels(ops, fused))))


def _inside_kernels(ops: Sequence[OpWork], fused: Iterable[Sequence[int]]) -> Iterator[Sequence[int]]:
    """Yield of every element-wise kernel the operations that start no other one: all but the last."""
    for members in fused:
        if all(op_kind(ops[k].op) is not OpKind.JOIN for k in members):
            yield [k for k in members if not op_record(ops[k].op).as_view][:-1]


def cast_before(lowered: LoweredBlock, position: Mapping[int, int]) -> frozenset[int]:
    """Return the indices of products whose left operand an earlier product has read, and cast.

    Queries, keys and values, gate and up are one product each in hand-written modules; a compiler casts a value once.
    """
    kernels = _Kernels(lowered)
    read: set[str] = set()
    out = set()
    for k, statement in enumerate(lowered.statements):
        if k in position and _is_product(lowered, k):
            source = kernels.base(reads_of(statement)[0])
            if source in read:
                out.add(position[k])
            read.add(source)
    return frozenset(out)


def _is_product(lowered: LoweredBlock, k: int) -> bool:
    statement = lowered.statements[k]
    return isinstance(statement, Op) and op_kind(statement.node.op) is OpKind.PRODUCT


def _behind_converts(
    lowered: LoweredBlock, readers: Mapping[str, Sequence[int]], statements: Sequence[int]
) -> list[int]:
    """Return the operations that read a value, directly or through its conversions and views."""
    out = []
    for k in statements:
        statement = lowered.statements[k]
        if isinstance(statement, Convert):
            out += _behind_converts(lowered, readers, readers.get(statement.target, ()))
        elif not op_record(statement.node.op).as_view:
            out.append(k)
    return out


def _traffic(
    read: Mapping[str, TensorFacts], written: Mapping[str, TensorFacts], ops: Sequence[str]
) -> tuple[float, float]:
    """Return the bytes of the forward and of the backward of one kernel."""
    forward = float(sum(t.num_bytes for t in (*read.values(), *written.values())))
    gradients = [t for t in read.values() if t.requires_grad]
    arriving = float(sum(t.num_bytes for t in written.values() if t.requires_grad))
    if not gradients or not arriving:
        return forward, 0.0
    if all(op_has(op, Trait.PASSES_GRADIENT) for op in ops):  # no derivative needs an input
        joined = max(t.num_bytes for t in written.values()) if len(gradients) > 1 else 0
        return forward, 3.0 * joined
    leaving = float(sum(t.num_bytes for t in gradients))
    return forward, arriving + sum(t.num_bytes for t in read.values()) + leaving
