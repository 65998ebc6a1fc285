"""Ops of routers: choices, counts, sums over the ranks that share a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoplan.errors import FormError
from autoplan.ir.graph import Node
from autoplan.ir.symbols import Shape
from autoplan.ops.arguments import Args, IrOp, IrResult, Lowering, by_name, default
from autoplan.ops.labels import dim_labels
from autoplan.ops.language import OpRule, Role
from autoplan.ops.record import IndexSizes, OpKind, OpRecord, Trait, other
from autoplan.ops.saved import Form, Gradient, keeps
from autoplan.ops.text import Emitter, OpText

# -- choices -----------------------------------------------------------------------------------------------------------


def _topk_arguments(a: Args) -> IrResult:
    if not a.get("largest", True):
        raise FormError("topk with largest=False is not supported; negate its input")
    return IrOp("topk", (a["self"],), {"k": a["k"], "dim": a.get("dim", -1), "sorted": bool(a.get("sorted", True))})


def _topk_rule(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    """Return the rule of the values and indices of the largest along a dim."""
    dim = node.attrs["dim"] % len(ins[0])
    labels = dim_labels(ins[0])
    out = list(labels)
    out[dim] = () if outs[0][dim].value == 1 else ("top",)
    return OpRule((tuple(labels),), (tuple(out),) * 2, (Role.OTHER,), frozenset({"top", *labels[dim]}))


def _extreme_arguments(op: str) -> Lowering:
    """Return the lowering of an extreme along one dim; over all elements there is no index."""

    def build(a: Args) -> IrResult:
        if a.get("dim") is None:
            raise FormError(f"{op} over all elements is not supported; give it a dim")
        return IrOp(op, (a["self"],), {"dim": a["dim"], "keepdim": bool(a.get("keepdim", False))})

    return build


def _extreme_rule(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    """Return the rule of the largest along a dim and its index, or of the index alone."""
    dim = node.attrs["dim"] % len(ins[0])
    labels = dim_labels(ins[0])
    out = labels[:dim] + ([()] if node.attrs["keepdim"] else []) + labels[dim + 1 :]
    return OpRule((tuple(labels),), (tuple(out),) * len(outs), (Role.OTHER,), frozenset(labels[dim]))


def _indexed(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    """Return the rule of gather and scatter: the index selects along one dim; other dims of equal size are split."""
    dim = node.attrs["dim"] % max(1, len(ins[0]))  # a tensor without dims counts as one with a single element
    source, index = dim_labels(ins[0]), dim_labels(ins[1], "picked")
    whole = {label for labels in (source, index) for at in labels for label in at}
    for i, (mine, theirs) in enumerate(zip(ins[0], ins[1], strict=False)):
        if i != dim and mine == theirs:
            index[i] = source[i]
            whole -= {*source[i]}
    out = source if node.op == "scatter" else index
    return OpRule((tuple(source), tuple(index)), (tuple(out),), (Role.OTHER, Role.INDEX), frozenset(whole))


# -- counts ------------------------------------------------------------------------------------------------------------


def _histc(a: Args) -> IrResult:
    bins, low, high = a.get("bins", 100), a.get("min", 0), a.get("max", 0)
    if not low < high:
        raise FormError("histc between the extremes of its data is not supported; give it min and max")
    return IrOp("histc", (a["self"],), {"bins": bins, "min": low, "max": high})


def _bins(attrs: Mapping[str, Any], inputs: IndexSizes, outputs: IndexSizes) -> dict[int, range]:
    return {0: range(int(outputs[0][0]))}


def _added(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    """Return the rule of a sum into the places of an index along one dim; other dims have equal sizes, or are whole."""
    dim = node.attrs["dim"] % len(ins[0]) if ins[0] else 0
    target, source = dim_labels(ins[0]), dim_labels(ins[2], "s")
    whole = {x for labels in (target, source) for at in labels for x in at}
    for i in range(len(target)):
        if i != dim and ins[0][i] == ins[1][i] == ins[2][i]:
            source[i] = target[i]
            whole -= {*target[i]}
    index = [() if size.value == 1 else labels for size, labels in zip(ins[1], source, strict=True)]
    return OpRule(
        (tuple(target), tuple(index), tuple(source)),
        (tuple(target),),
        (Role.OTHER, Role.INDEX, Role.OTHER),
        frozenset(whole),
    )


# -- sums over ranks ---------------------------------------------------------------------------------------------------


def _batch_sum(t: OpText) -> str:
    return f"all_reduce({t.args[0]}, {t.over}, dst=R)" if t.over else t.args[0]


def _batch_part(t: OpText) -> str:
    return f"to_partial({t.args[0]}, {t.over}, src=R)" if t.over else t.args[0]


def _batch_extreme(t: OpText) -> str:
    return f"extreme({t.args[0]}, {t.over}, largest={t.attrs['largest']})" if t.over else t.args[0]


def _over_ranks(name: str, text: Emitter, *traits: Trait) -> OpRecord:
    saved = keeps(form=Form.NEW, gradient=Gradient.PASS)
    return OpRecord(name, OpKind.COLLECTIVE, "~[*a] -> [*a]", saved, text, has=traits)


_TOPK = "torch.topk({0}, {k}, dim={dim}, sorted={sorted})"
_SCATTER, _ONE_HOT = by_name("scatter", "self index", "dim", "scalar=value"), by_name("one_hot", "self", "num_classes")
_MAX = "torch.max({0}, dim={dim}, keepdim={keepdim})"

RECORDS = (
    other("topk", _topk_rule, _TOPK, _topk_arguments, "y1<0", Trait.CHOOSES),
    other("argmax", _extreme_rule, "torch.argmax({0}, dim={dim}, keepdim={keepdim})", _extreme_arguments("argmax")),
    other("max", _extreme_rule, _MAX, _extreme_arguments("max"), "y1<0", aten="max.dim"),
    other("gather", _indexed, "{0}.gather({dim}, {1})", by_name("gather", "self index", "dim"), "x0<0 x1<0"),
    other("scatter", _indexed, "{0}.scatter({dim}, {1}, {scalar})", _SCATTER, "x1<0", aten="scatter.value"),
    other("one_hot", "#[*a] -> [*a,c!]", "F.one_hot({0}, {num_classes})", _ONE_HOT, "", Trait.CHOOSES),
    OpRecord(
        "histc",
        OpKind.COUNT,
        "#[*a] -> [c!]",
        keeps(form=Form.NEW),
        "torch.histc({0} if {0}.is_floating_point() else {0}.float(), bins={bins}, min={min}, max={max})",
        default("histc", _histc),
        index_limits=_bins,
        has=(Trait.CHOOSES, Trait.STOPS_GRADIENT),
    ),
    OpRecord(
        "weighted_count",
        OpKind.COUNT,
        "#[*a] * [*a] -> [c!]",
        keeps("x0<1", form=Form.NEW),
        "{1}.new_zeros({num}).scatter_add(0, {0}.flatten(), {1}.flatten())",
        index_limits=_bins,
        has=(Trait.CHOOSES,),
    ),
    # `autoplan.capture.passes.hoist` turns one that counts into a weighted_count
    OpRecord(
        "scatter_add",
        OpKind.OTHER,
        _added,
        keeps("x1<0,2", form=Form.NEW),
        "{0}.scatter_add({dim}, {1}, {2})",
        default("scatter_add", by_name("scatter_add", "self index src", "dim")),
        index_limits=lambda attrs, inputs, outputs: {1: range(int(inputs[0][attrs["dim"]]))},
    ),
    _over_ranks("batch_sum", _batch_sum, Trait.SUMS_RANKS),
    _over_ranks("batch_part", _batch_part),
    _over_ranks("batch_extreme", _batch_extreme, Trait.EXTREME_OF_RANKS),
)
