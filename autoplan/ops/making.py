"""Ops that join or make tensors, masks of triangles, sums along a dim; and priced work outside of the graph."""

from __future__ import annotations

from autoplan.errors import FormError, RuleError
from autoplan.ir.graph import Node
from autoplan.ir.symbols import Expr, Shape
from autoplan.ops.arguments import Args, IrOp, IrResult, Lowering, by_name, default
from autoplan.ops.labels import dim_labels, linear_rule, whole_dim
from autoplan.ops.language import OpRule, Role
from autoplan.ops.record import Linear, OpKind, OpRecord, Trait, other
from autoplan.ops.saved import Form, Gradient, keeps
from autoplan.ops.text import OpText, literal, shape_arguments, shape_text


def _cat(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    dim = node.attrs["dim"] % len(outs[0])
    out = dim_labels(outs[0])
    operands, whole = [], {*out[dim]}
    for k, shape in enumerate(ins):
        labels = list(out)
        labels[dim] = () if shape[dim].value == 1 else (f"part{k}",)
        whole |= {*labels[dim]}
        operands.append(tuple(labels))
    return OpRule(tuple(operands), (tuple(out),), (Role.ADD,) * len(ins), frozenset(whole))


def _pad_arguments(a: Args) -> IrResult:
    if a.get("mode", "constant") != "constant":
        raise FormError(f"pad mode {a['mode']!r} is not supported; use 'constant'")
    return IrOp("pad", (a["self"],), {"pad": tuple(a["pad"]), "value": a.get("value") or 0})


def _pad(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    """Return the rule of padding: a padded dim is whole, also if as much is cut off at its other end."""
    labels, pad = dim_labels(ins[0]), node.attrs["pad"]
    out, whole = list(labels), set()
    for i in range(len(labels)):
        last = len(labels) - 1 - i  # the last dim comes first
        if any(amount != 0 for amount in pad[2 * last : 2 * last + 2]):
            out[i] = (f"changed{i}",)
            whole |= {f"changed{i}", *labels[i]}
    return OpRule((tuple(labels),), (tuple(out),), (Role.OTHER,), frozenset(whole))


def _repeat_interleave(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    """Return the rule of repeating every element of a dim: the dim becomes `it x repeats`."""
    labels = dim_labels(ins[0])
    if node.attrs["dim"] is None and len(labels) != 1:
        raise RuleError(f"{node.name}: repeat_interleave without a dim flattens; reshape its input first")
    dim = (node.attrs["dim"] or 0) % len(labels)
    out = list(labels)
    out[dim] = (*labels[dim], "repeats")
    sizes = {"repeats": Expr.of(node.attrs["repeats"]), **{x: ins[0][dim] for x in labels[dim]}}
    return linear_rule(labels, out, {"repeats"}, sizes=sizes)


def _repeat_text(t: OpText) -> str:
    return f"{t.args[0]}.repeat_interleave({t.attrs['repeats']}, dim={t.attrs['dim'] or 0})"


def _triangle(name: str) -> OpRecord:
    return other(name, _last_two_whole, f"{{0}}.{name}({{diagonal}})", by_name(name, diagonal=0))


def _last_two_whole(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    labels = dim_labels(ins[0])
    return linear_rule(labels, list(labels), {label for dim in labels[-2:] for label in dim})


# -- factories ---------------------------------------------------------------------------------------------------------


def _factory(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    labels = dim_labels(outs[0])
    return OpRule((), (tuple(labels),), (), frozenset(label for dim in labels for label in dim))


def _arange(t: OpText) -> str:
    if t.over:
        return f"context_positions(s, {t.over}, torch.{t.attrs['dtype']}, device)"
    start = f"{literal(t.attrs['start'])}, " if t.attrs["start"] else ""
    return f"torch.arange({start}{literal(t.attrs['end'])}, dtype=torch.{t.attrs['dtype']}, device=device)"


def _full(t: OpText) -> str:
    shape = shape_text(t.outputs[0]) + ("," if len(t.outputs[0]) == 1 else "")
    return f"torch.full(({shape}), {literal(t.attrs['scalar'])}, dtype=torch.{t.attrs['dtype']}, device=device)"


def _constant(t: OpText) -> str:
    values = ", ".join(literal(v) for v in t.attrs["values"])
    whole = f"torch.tensor([{values}], dtype=torch.{t.attrs['dtype']}, device=device)"
    return whole if len(t.outputs[0]) == 1 else f"{whole}.reshape({shape_arguments(t.outputs[0])})"


def _fill(scalar: float) -> Lowering:
    return lambda a: IrOp("full", (), {"scalar": scalar})


_FILLS = {
    **{f"aten.{name}.default": by_name("full", "", "scalar=fill_value") for name in ("full", "full_like")},
    "aten.scalar_tensor.default": by_name("full", "", "scalar=s"),
    **{f"aten.{name}.default": _fill(0) for name in ("zeros", "zeros_like")},
    **{f"aten.{name}.default": _fill(1) for name in ("ones", "ones_like")},
}
_MADE = keeps(form=Form.NEW)
_PASS = keeps(form=Form.NEW, gradient=Gradient.PASS)

RECORDS = (
    OpRecord(
        "cat",
        OpKind.JOIN,
        _cat,
        _PASS,
        lambda t: f"torch.cat([{', '.join(t.args)}], dim={t.attrs['dim']})",
        default("cat", lambda a: IrOp("cat", tuple(a["tensors"]), {"dim": a.get("dim", 0)})),
        Linear.ALL,
        has=(Trait.FOLLOWS, Trait.KEEPS_NUMBERS),
    ),
    OpRecord(
        "pad",
        OpKind.OTHER,
        _pad,
        _PASS,
        "F.pad({0}, {pad}, value={value})",
        {f"aten.{name}.default": _pad_arguments for name in ("pad", "constant_pad_nd")},
        has=(Trait.KEEPS_NUMBERS,),
    ),
    other(
        "repeat_interleave",
        _repeat_interleave,
        _repeat_text,
        by_name("repeat_interleave", "self", "repeats", dim=None),
        "",
        Trait.KEEPS_NUMBERS,
        aten="repeat_interleave.self_int",
    ),
    other("cumsum", whole_dim, "{0}.cumsum({dim})", by_name("cumsum", "self", "dim")),
    _triangle("tril"),
    _triangle("triu"),
    OpRecord(
        "arange",
        OpKind.FACTORY,
        _factory,
        _MADE,
        _arange,
        {
            "aten.arange.default": lambda a: IrOp("arange", (), {"start": 0, "end": a["end"]}),
            "aten.arange.start": by_name("arange", "", "start", "end"),
        },
        has=(Trait.TAKES_DTYPE,),
    ),
    # a tensor of numbers in a forward; the capture writes them into the node
    OpRecord("constant", OpKind.FACTORY, _factory, _MADE, _constant, has=(Trait.TAKES_DTYPE,)),
    OpRecord("full", OpKind.FACTORY, _factory, _MADE, _full, _FILLS, has=(Trait.TAKES_DTYPE, Trait.FILLS)),
    # not ops of the graph: `autoplan.cost_models.costs` prices them, `autoplan.profiler` measures them
    OpRecord("optimizer_adamw", OpKind.UPDATE),
    OpRecord("grad_accumulate", OpKind.UPDATE),
)
