"""The table of ops: one record per op, merged from the families. An op without a record is an error, never a guess."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from autoplan.errors import RuleError
from autoplan.ir.graph import Block, ModelGraph, Node, Value
from autoplan.ir.layout import AxisType
from autoplan.ir.symbols import Expr, Shape
from autoplan.ops import (
    attention,
    convolutions,
    draws,
    elementwise,
    experts,
    fourier,
    generic,
    losses,
    making,
    norms,
    products,
    recurrent,
    routing,
    scans,
    statistics,
    views,
)
from autoplan.ops.arguments import Lowering
from autoplan.ops.language import OpRule, Role
from autoplan.ops.record import Linear, OpKind, OpRecord, Trait
from autoplan.ops.saved import Form, OpFacts, SavedRule
from autoplan.units import REAL_PARTS

_FAMILIES = (
    elementwise,
    views,
    products,
    attention,
    norms,
    losses,
    routing,
    experts,
    making,
    draws,
    convolutions,
    recurrent,
    scans,
    statistics,
    fourier,
    generic,
)


def merged_records(records: Iterable[OpRecord]) -> dict[str, OpRecord]:
    """Return records by name. RuleError for a name, an ATen op or a special form that two of them give."""
    out: dict[str, OpRecord] = {}
    taken: dict[str, str] = {}
    for found in records:
        for name in (found.name, *found.aten, *found.special):
            if name in taken:
                raise RuleError(f"{name!r} is given twice: in the records of {taken[name]!r} and {found.name!r}")
            taken[name] = found.name
        out[found.name] = found
    return out


RECORDS: Mapping[str, OpRecord] = merged_records(r for family in _FAMILIES for r in family.RECORDS)
ATEN: Mapping[str, Lowering] = {target: lowering for r in RECORDS.values() for target, lowering in r.aten.items()}
# type of the output under a split of a marked label; the runtime module of that name does the work
SPECIAL_OUTPUT: Mapping[str, AxisType] = {name: kind for r in RECORDS.values() for name, kind in r.special.items()}


def op_record(op: str, where: str = "") -> OpRecord:
    """Return the record of an op or of priced work. RuleError names the op, `where` it is and what to write."""
    found = RECORDS.get(op)
    return found if found is not None else _unknown(op, where)


def op_kind(op: str) -> OpKind:
    """Return the kind of an op for layouts, prices and memory."""
    return op_record(op).kind


def op_has(op: str, trait: Trait) -> bool:
    """Return True if the op has a trait."""
    return trait in op_record(op).traits


def nodes_with(graph: ModelGraph, wanted: OpKind) -> list[tuple[Block, Node]]:
    """Return all nodes of a kind, with their blocks."""
    return [(b, n) for b in graph.blocks.values() for n in b.nodes if op_kind(n.op) is wanted]


def _unknown(op: str, where: str) -> NoReturn:
    at = f" at {where}" if where else ""
    raise RuleError(
        f"op {op!r}{at} has no record; add one to a family in autoplan/ops, e.g. to elementwise.RECORDS if it is a "
        f"function of each element: _unary({op!r}, 'torch.{op}({{0}})', keeps('x0<0'), Trait.FOLLOWS)"
    )


def rule_for(node: Node, values: Mapping[str, Value]) -> OpRule:
    """Return the bound rule of a node. RuleError names the op, the source line, and what to write."""
    build = op_record(node.op, node.source or node.name).build
    if build is None:
        raise RuleError(f"op {node.op!r} at {node.source or node.name} cannot be sharded: its record has no rule")
    ins = [values[name].shape for name in node.tensor_inputs]
    outs = [values[name].shape for name in node.outputs]
    if _along_no_dim(node, ins, outs):
        role = Role.LINEAR if op_record(node.op).linear is Linear.ALL else Role.OTHER
        return OpRule(((),) * len(ins), ((),) * len(outs), (role,) * len(ins))
    try:
        return build(node, ins, outs)
    except RuleError as exc:
        raise RuleError(f"{node.op} at {node.source or node.name}: {exc}") from exc


def _along_no_dim(node: Node, ins: Sequence[Shape], outs: Sequence[Shape]) -> bool:
    """Return True for an op along a dim of a tensor without dims, which PyTorch takes for one of a single element."""
    return any(name in node.attrs for name in ("dim", "dims")) and bool(ins) and not any((*ins, *outs))


def updated_buffers(nodes: Iterable[Node], buffers: Iterable[str]) -> frozenset[str]:
    """Return those of the buffers that the nodes write to."""
    written = {x for node in nodes if op_has(node.op, Trait.UPDATES) for x in node.tensor_inputs}
    return frozenset(written & set(buffers))


def flops(node: Node, values: Mapping[str, Value], rule: OpRule) -> Expr:
    """Return the forward arithmetic of one node, whole (not sharded), in floating point operations."""
    out, count = values[node.outputs[0]], op_record(node.op).flops
    found = out.num_elements if count is None else count(node, [values[x] for x in node.tensor_inputs], out, rule)
    return found * 4 if out.dtype in REAL_PARTS else found


def saved_rule(f: OpFacts) -> SavedRule:
    """Return the rule of what an operation keeps for its backward, for its form. RuleError names what to write."""
    found = op_record(f.op)
    form = None if found.saved_form is None else found.saved_form(f)
    rule = found.saved if form is None else form
    if rule is None:
        raise RuleError(f"what {f.op!r} keeps for its backward is not known: its record has no `saved`")
    return rule


def backward_reads_params(block: Block) -> bool:
    """Return False if the backward of a block needs none of its parameters, like that of an embedding, only shapes."""
    stored = set(block.params)  # and views of them
    for node in block.nodes:
        rule, used = op_record(node.op).saved, [i for i, x in enumerate(node.inputs) if x in stored]
        if used and (rule is None or any(f"x{i}" == name for name, _ in rule.keeps for i in used)):
            return True
        if used and rule is not None and rule.form is Form.VIEW:
            stored |= set(node.outputs)
    return False
