"""Batch norm in training mode: the mean over a whole micro-batch, and the update of running statistics."""

from __future__ import annotations

from autoplan.ir.graph import Node
from autoplan.ir.symbols import Expr, Shape
from autoplan.ops.arguments import Args, IrOp, IrResult
from autoplan.ops.language import OpRule, Role
from autoplan.ops.record import OpKind, OpRecord, Trait
from autoplan.ops.saved import Form, keeps
from autoplan.ops.text import OpText, py

SPLIT = ("b", "s")  # symbols that are split over data- and context-parallel ranks


def _mean(a: Args) -> IrResult:
    """Return the sum over the elements of this rank, then over the ranks that share a micro-batch, and the division."""
    number = Expr.of(a["number"])
    over = tuple(symbol for symbol in SPLIT if symbol in number.symbols)
    summed = IrOp("sum", (a["x"],), {"dims": a["dims"], "keepdim": True})
    whole = IrOp("batch_sum", ("$0",), {"over": over})
    return [summed, whole, IrOp("div_scalar", ("$0",), {"scalar": number})]


def _running(a: Args) -> IrResult:
    tensors = (a["mean"], a["variance"], *a["running"])
    return IrOp("running_statistics", tensors, {"momentum": a.get("momentum"), "scalar": Expr.of(a["number"])})


def _rule(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    """Return the rule of statistics of all channels, as the buffers have them."""
    inputs = tuple((("c",),) if shape else () for shape in ins)
    return OpRule(inputs, ((),), (Role.OTHER,) * len(ins), frozenset({"c"}))


def _text(t: OpText) -> str:
    momentum, number = t.attrs["momentum"], py(t.whole(t.attrs["scalar"]))
    return f"running_statistics({', '.join(t.args)}, momentum={momentum!r}, number={number})"


RECORDS = (
    OpRecord(
        "running_statistics",
        OpKind.ELEMENTWISE,
        _rule,
        keeps(form=Form.NEW),
        _text,
        {"autoplan.running_statistics.default": _running},
        variable="num_batches",
        has=(Trait.UPDATES,),
    ),
    # a sum, a sum over ranks and a division
    OpRecord("batch_mean", OpKind.REDUCTION, aten={"autoplan.batch_mean.default": _mean}),
)
