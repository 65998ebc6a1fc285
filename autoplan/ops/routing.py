"""Ops of routers and experts: choices, counts, experts, sums over the ranks that share a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoplan.errors import CaptureError, RuleError
from autoplan.ir.graph import Node, Value
from autoplan.ir.layout import P
from autoplan.ir.symbols import Expr, Shape
from autoplan.ops.arguments import Args, IrOp, IrResult, Lowering, default
from autoplan.ops.labels import dim_labels
from autoplan.ops.language import OpRule, Role, bind, parse
from autoplan.ops.record import IndexSizes, OpKind, OpRecord, Trait, other
from autoplan.ops.saved import Form, Gradient, OpFacts, keeps
from autoplan.ops.text import Emitter, OpText
from autoplan.units import DTYPE_BYTES

# -- choices -----------------------------------------------------------------------------------------------------------


def _topk_arguments(a: Args) -> IrResult:
    if not a.get("largest", True):
        raise CaptureError("topk with largest=False is not supported; negate its input")
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
            raise CaptureError(f"{op} over all elements is not supported; give it a dim")
        return IrOp(op, (a["self"],), {"dim": a["dim"], "keepdim": bool(a.get("keepdim", False))})

    return build


def _extreme_rule(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    """Return the rule of the largest along a dim and its index, or of the index alone."""
    dim = node.attrs["dim"] % len(ins[0])
    labels = dim_labels(ins[0])
    out = labels[:dim] + ([()] if node.attrs["keepdim"] else []) + labels[dim + 1 :]
    return OpRule((tuple(labels),), (tuple(out),) * len(outs), (Role.OTHER,), frozenset(labels[dim]))


def _gather(a: Args) -> IrResult:
    return IrOp("gather", (a["self"], a["index"]), {"dim": a["dim"]})


def _scatter(a: Args) -> IrResult:
    return IrOp("scatter", (a["self"], a["index"]), {"dim": a["dim"], "scalar": a["value"]})


def _indexed(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    """Return the rule of gather and scatter: the index selects along one dim; all other dims have equal sizes."""
    dim = node.attrs["dim"] % len(ins[0])
    if any(a != b for i, (a, b) in enumerate(zip(ins[0], ins[1], strict=True)) if i != dim):
        raise RuleError(f"{node.name}: the index must have the input's size in every dim but {dim}")
    source, index = dim_labels(ins[0]), dim_labels(ins[0])
    index[dim] = () if ins[1][dim].value == 1 else ("picked",)
    out = source if node.op == "scatter" else index
    whole = frozenset({"picked", *source[dim]})
    return OpRule((tuple(source), tuple(index)), (tuple(out),), (Role.OTHER, Role.INDEX), whole)


def _one_hot(a: Args) -> IrResult:
    return IrOp("one_hot", (a["self"],), {"num_classes": a["num_classes"]})


# -- counts ------------------------------------------------------------------------------------------------------------


def _histc(a: Args) -> IrResult:
    bins, low, high = a.get("bins", 100), a.get("min", 0), a.get("max", 0)
    if not low < high:
        raise CaptureError("histc between the extremes of its data is not supported; give it min and max")
    return IrOp("histc", (a["self"],), {"bins": bins, "min": low, "max": high})


def _bins(attrs: Mapping[str, Any], inputs: IndexSizes, outputs: IndexSizes) -> dict[int, int]:
    return {0: int(outputs[0][0])}


def _scatter_add(a: Args) -> IrResult:
    return IrOp("scatter_add", (a["self"], a["index"], a["src"]), {"dim": a["dim"]})


# -- experts -----------------------------------------------------------------------------------------------------------


def _experts_arguments(a: Args) -> IrResult:
    tensors = tuple(a[n] for n in ("hidden", "index", "weights", "gate_up", "down"))
    names = ("num_experts", "top_k", "intermediate_size", "activation", "gated")
    return IrOp("experts", tensors, {n: a[n].value if hasattr(a[n], "value") else a[n] for n in names})


_LINE = parse("[t,i!], #[t,k!], [t,k!] * [e@expert_parallel,f,i!] * [e@expert_parallel,o!,f] -> [t,o!]")


def _experts_rule(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    """Return the rule of experts of a mixture.

    Tokens can be split with whole weights; experts and their inner size can be split into a pending sum. Rows of a
    gated first projection are `gate, up`: as in a fused projection, each is split by itself. The outer size is not
    split: only the last of the products would shrink.
    """
    sizes = {"count": Expr.of(2), "f": ins[4][2]}
    rule = bind(_LINE, ins, outs)
    if not node.attrs["gated"]:
        return rule
    first = (rule.inputs[3][0], ("count", *rule.inputs[3][1]), *rule.inputs[3][2:])
    inputs = (*rule.inputs[:3], first, rule.inputs[4])
    return OpRule(inputs, rule.outputs, rule.roles, rule.whole | {"count"}, rule.special, sizes)


def _experts_flops(node: Node, ins: Sequence[Value], out: Value, rule: OpRule) -> Expr:
    """Return the flops of every token through top_k experts of three (gate, up, down) or two products."""
    tokens, hidden = ins[0].shape
    products = 3 if node.attrs["gated"] else 2
    return tokens * hidden * (int(node.attrs["intermediate_size"]) * int(node.attrs["top_k"]) * 2 * products)


def experts_rows(f: OpFacts) -> tuple[int, int, int, int]:
    """Return the rows (a token once per expert that takes it), hidden and inner size, and bytes of an element.

    Tokens are assumed to be spread evenly over the experts, so a rank with a part of them has that part of the rows.
    """
    hidden, index, _, _, down = f.inputs[:5]
    here, total = down.shape[0], int(f.attrs.get("num_experts") or down.shape[0])
    return -(-index.num_elements * here // total), hidden.shape[-1], down.shape[-1], DTYPE_BYTES[hidden.dtype]


def _experts_extra(f: OpFacts) -> tuple[int, ...]:
    """Return bytes besides tokens and routing weights: the token of each row, and the first product.

    Not counted: 4 bytes per expert for the end of its rows, if all experts are one product (autoplan.runtime.experts).
    """
    rows, _, inner, width = experts_rows(f)
    first = inner * (2 if f.attrs.get("gated", True) else 1)
    return (rows * DTYPE_BYTES["int64"], rows * first * width)


def _experts_workspace(f: OpFacts) -> tuple[int, ...]:
    # forward: the activated gate and its product with up; or that product and the result of the experts; or this result
    # and the same weighted. Backward: the activated gate, its product with up, gradients of both, of the gate and of
    # the first product; or arriving gradients and, of the values between the products, the first two and its gradient
    rows, hidden, inner, width = experts_rows(f)
    return (rows * 2 * max(inner, hidden) * width, rows * max(6 * inner, 4 * inner + hidden) * width)


def _experts_text(t: OpText) -> str:
    return f"experts({', '.join(t.args)}, activation={t.attrs['activation']!r}, gated={bool(t.attrs['gated'])}{t.over})"


def _num_experts(attrs: Mapping[str, Any], inputs: IndexSizes, outputs: IndexSizes) -> dict[int, int]:
    return {1: int(attrs["num_experts"])}  # all experts: a rank with a part of them has that part of the rows


# -- sums over ranks ---------------------------------------------------------------------------------------------------


def _batch_sum(t: OpText) -> str:
    return f"all_reduce({t.args[0]}, {t.over}, dst=R)" if t.over else t.args[0]


def _batch_part(t: OpText) -> str:
    return f"to_partial({t.args[0]}, {t.over}, src=R)" if t.over else t.args[0]


def _over_ranks(name: str, text: Emitter, *traits: Trait) -> OpRecord:
    saved = keeps(form=Form.NEW, gradient=Gradient.PASS)
    return OpRecord(name, OpKind.COLLECTIVE, "~[*a] -> [*a]", saved, text, has=traits)


_TOPK = "torch.topk({0}, {k}, dim={dim}, sorted={sorted})"
_MAX = "torch.max({0}, dim={dim}, keepdim={keepdim})"

RECORDS = (
    other(
        "topk", _topk_rule, "torch.topk({0}, {k}, dim={dim}, sorted={sorted})", _topk_arguments, "y1<0", Trait.CHOOSES
    ),
    other("argmax", _extreme_rule, "torch.argmax({0}, dim={dim}, keepdim={keepdim})", _extreme_arguments("argmax")),
    other(
        "max",
        _extreme_rule,
        "torch.max({0}, dim={dim}, keepdim={keepdim})",
        _extreme_arguments("max"),
        "y1<0",
        aten="max.dim",
    ),
    other("gather", _indexed, "{0}.gather({dim}, {1})", _gather, "x0<0 x1<0"),
    other("scatter", _indexed, "{0}.scatter({dim}, {1}, {scalar})", _scatter, "x1<0", aten="scatter.value"),
    other("one_hot", "#[*a] -> [*a,c!]", "F.one_hot({0}, {num_classes})", _one_hot, "", Trait.CHOOSES),
    OpRecord(
        "histc",
        OpKind.COUNT,
        "#[*a] -> [c!]",
        keeps(form=Form.NEW),
        "torch.histc({0}.float(), bins={bins}, min={min}, max={max})",
        default("histc", _histc),
        index_limits=_bins,
        has=(Trait.CHOOSES,),
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
    # as captured: `autoplan.capture.passes.hoist` turns one that counts into a weighted_count, others have no rule
    OpRecord("scatter_add", OpKind.OTHER, aten=default("scatter_add", _scatter_add)),
    OpRecord(
        "experts",
        OpKind.EXPERTS,
        _experts_rule,
        keeps("x0<0,2,3,4 x2<0,2,3,4", form=Form.NEW, extra=_experts_extra, workspace=_experts_workspace),
        _experts_text,
        {"autoplan.experts.default": _experts_arguments},
        flops=_experts_flops,
        special={"expert_parallel": P},
        weights=(3, 4),
        factor_names={"e": "experts", "f": "expert_out", "count": "chunks"},
        index_limits=_num_experts,
        has=(Trait.RUNS_ON_DEVICE,),
    ),
    _over_ranks("batch_sum", _batch_sum, Trait.SUMS_RANKS),
    _over_ranks("batch_part", _batch_part),
)
