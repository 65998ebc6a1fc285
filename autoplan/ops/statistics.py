"""Buffers that a training forward updates: one that gets a new value, and the running statistics of batch norm.

Batch norm is the mean over a whole micro-batch, and the update of its statistics.
"""

from __future__ import annotations

from typing import Any

from autoplan.ir.graph import Node
from autoplan.ir.symbols import Expr, Shape
from autoplan.ops.arguments import Args, IrOp, IrResult
from autoplan.ops.labels import dim_labels
from autoplan.ops.language import OpRule, Role
from autoplan.ops.record import OpKind, OpRecord, Trait
from autoplan.ops.saved import Form, keeps
from autoplan.ops.text import OpText, py

SPLIT = ("b", "s")  # symbols that are split over data- and context-parallel ranks


def _batch_norm(a: Args) -> IrResult:
    """Return the operations of a norm: two means over the ranks that share a micro-batch, the update, the scaling."""
    out, number, momentum = list[IrOp](), Expr.of(a["number"]), a.get("momentum")
    statistics = tuple(Expr.of(size) for size in a["statistics"])
    channels, wide = (statistics[1],), "float32" if a["wide"] else None

    def add(op: str, *tensors: str, shape: Shape | None = None, dtype: str | None = wide, **attrs: Any) -> str:
        out.append(IrOp(op, tensors, attrs, shape, dtype))
        return f"#{len(out) - 1}"

    def spread(parameter: str) -> str:
        return add("reshape", parameter, shape=statistics, dtype="")

    def mean(of: str) -> str:
        dims, over = [dim for dim in range(len(statistics)) if dim != 1], [n for n in SPLIT if n in number.symbols]
        summed = add("sum", of, shape=statistics, dims=dims, keepdim=True)
        whole = add("batch_sum", summed, shape=statistics, over=tuple(over))
        return add("div_scalar", whole, shape=statistics, scalar=number)

    x = add("to", a["x"]) if wide else a["x"]
    middle = mean(x)
    centered = add("sub", x, middle)
    variance = mean(add("square", centered))
    if a["running"]:
        both = [add("reshape", add("detach", of, shape=statistics), shape=channels) for of in (middle, variance)]
        add("running_statistics", *both, *a["running"], shape=(), momentum=momentum, scalar=number)
    scale = add("rsqrt", add("add_scalar", variance, shape=statistics, scalar=a["eps"]), shape=statistics)
    if a.get("weight") is not None:
        scale = add("mul", scale, spread(a["weight"]), shape=statistics)
    found = add("mul", centered, scale)
    if a.get("bias") is not None:
        found = add("add", found, spread(a["bias"]))
    if wide:
        out.append(IrOp("to", (found,), {}))
    return out


def _rule(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    """Return the rule of statistics of all channels, as the buffers have them."""
    inputs = tuple((("c",),) if shape else () for shape in ins)
    return OpRule(inputs, ((),), (Role.OTHER,) * len(ins), frozenset({"c"}))


def _one_value(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    """Return the rule of a new value of a buffer: whole on every rank, as the buffer is."""
    labels = tuple(dim_labels(ins[0]))
    return OpRule((labels, labels), (labels,), (Role.OTHER, Role.OTHER), frozenset(x for dim in labels for x in dim))


def _update_text(t: OpText) -> str:
    value, buffer = t.args
    return f"update_buffer({value}, {buffer}, self, {buffer!r})"


def _text(t: OpText) -> str:
    momentum, number = t.attrs["momentum"], py(t.whole(t.attrs["scalar"]))
    return f"running_statistics({', '.join(t.args)}, momentum={momentum!r}, number={number})"


UPDATE = "update_buffer"  # its inputs: the new value, without a gradient, and the buffer

RECORDS = (
    OpRecord(
        UPDATE,
        OpKind.ELEMENTWISE,
        _one_value,
        keeps(form=Form.NEW),
        _update_text,
        variable="stored",
        has=(Trait.UPDATES,),
    ),
    OpRecord(
        "running_statistics",
        OpKind.ELEMENTWISE,
        _rule,
        keeps(form=Form.NEW),
        _text,
        variable="num_batches",
        has=(Trait.UPDATES,),
    ),
    # one op of a trace, which becomes others
    OpRecord("batch_norm", OpKind.NORM, aten={"autoplan.batch_norm.default": _batch_norm}),
)
