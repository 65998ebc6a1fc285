"""Records of views: the same memory in another shape, or a part of it; each with its rule, strides and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoplan.ir.graph import Node
from autoplan.ir.symbols import Expr, Shape, product
from autoplan.ops.arguments import Alias, Args, IrOp, IrResult, Lowering, by_name, default
from autoplan.ops.labels import Refinement, align, dim_labels, linear_rule
from autoplan.ops.language import OpRule, Role
from autoplan.ops.record import Builder, Linear, OpKind, OpRecord, Trait
from autoplan.ops.saved import Form, Gradient, SavedRule, keeps
from autoplan.ops.strides import Ints, ViewStrides, broadcast, reshaped
from autoplan.ops.text import Emitter, OpText, literal, py

INT_MAX = 2**63 - 1
REGROUP = "regroup"
OWN_PART = "own_part"
Attrs = Mapping[str, Any]
Strides = list[Ints | None]

WHOLE_VIEW = keeps(form=Form.VIEW, gradient=Gradient.PASS)  # every element of the input once
PART = keeps(form=Form.VIEW)  # its gradient is padded with zeros, or summed


def _view(
    name: str,
    rule: str | Builder,
    text: str | Emitter,
    strides: ViewStrides,
    aten: Mapping[str, Lowering],
    *traits: Trait,
    saved: SavedRule = WHOLE_VIEW,
    linear: Linear = Linear.ALL,
    factor_names: Mapping[str, str] | None = None,
) -> OpRecord:
    names, has = factor_names or {}, (Trait.KEEPS_NUMBERS, *traits)
    kind = OpKind.VIEW
    return OpRecord(name, kind, rule, saved, text, aten, linear, strides=strides, factor_names=names, has=has)


def _part(
    name: str,
    rule: Builder,
    text: str | Emitter,
    strides: ViewStrides,
    aten: Mapping[str, Lowering],
    factor_names: Mapping[str, str] | None = None,
) -> OpRecord:
    """Return the record of a view of a part of a tensor; spmd_types does not know it to be linear."""
    args = name, rule, text, strides, aten, Trait.FOLLOWS
    return _view(*args, saved=PART, linear=Linear.NO, factor_names=factor_names)


# -- the whole tensor in another shape ---------------------------------------------------------------------------------


def _reshape(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    """Return the rule of a reshape. Dims behind the first without a common refinement cannot be split."""
    (before,), (after,) = ins, outs
    i, j, front = _front(before, after)
    a, b = dim_labels(before[i:], "x"), dim_labels(after[j:], "y")
    whole = {label for dim in (*a, *b) for label in dim}
    return linear_rule([*front.left, *a], [*front.right, *b], whole, sizes=front.sizes)


def _front(before: Shape, after: Shape) -> tuple[int, int, Refinement]:
    """Return how many dims in front have a common refinement (all, but where others mix), and the refinement."""
    for i in range(len(before), 0, -1):
        for j in range(len(after), 0, -1):
            if product(before[:i]) == product(after[:j]) and (found := align(before[:i], after[:j])) is not None:
                return i, j, found
    return 0, 0, Refinement([], [], {})


def _regroup(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    before, after = dim_labels(ins[0]), dim_labels(outs[0])
    dim = node.attrs["dim"]
    after[dim] = ("regrouped",)
    return linear_rule(before, after, {*before[dim], "regrouped"})


def _own_part_text(t: OpText) -> str:
    return f"own_part({t.args[0]}, {t.over}, {t.attrs['dim']}, {t.attrs['runs']!r})" if t.over else t.args[0]


def _own_part_strides(attrs: Attrs, shape: Ints, strides: Ints, new: Sequence[Ints]) -> Strides:
    return [strides if new[0] == shape else None]  # parts are copied


def _reshape_strides(attrs: Attrs, shape: Ints, strides: Ints, new: Sequence[Ints]) -> Strides:
    return [reshaped(shape, strides, new[0])]


def _transpose(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    labels = dim_labels(ins[0])
    out = list(labels)
    d0, d1 = (d % len(labels) for d in (node.attrs["dim0"], node.attrs["dim1"]))
    out[d0], out[d1] = out[d1], out[d0]
    return linear_rule(labels, out)


def _transpose_strides(attrs: Attrs, shape: Ints, strides: Ints, new: Sequence[Ints]) -> Strides:
    out = list(strides)
    a, b = (attrs[k] % len(out) for k in ("dim0", "dim1"))
    out[a], out[b] = out[b], out[a]
    return [tuple(out)]


def _permute(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    labels = dim_labels(ins[0])
    return linear_rule(labels, [labels[d % len(labels)] for d in node.attrs["dims"]])


def _permute_strides(attrs: Attrs, shape: Ints, strides: Ints, new: Sequence[Ints]) -> Strides:
    return [tuple(strides[d] for d in attrs["dims"])]


def _unsqueeze(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    labels = dim_labels(ins[0])
    out = list(labels)
    out.insert(node.attrs["dim"] % (len(labels) + 1), ())
    return linear_rule(labels, out)


def _unsqueeze_strides(attrs: Attrs, shape: Ints, strides: Ints, new: Sequence[Ints]) -> Strides:
    dim = attrs["dim"] % (len(shape) + 1)
    inner = strides[dim] * shape[dim] if dim < len(shape) else 1
    return [(*strides[:dim], inner, *strides[dim:])]


def _squeeze(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    labels = dim_labels(ins[0])
    dim = node.attrs["dim"] % len(labels)
    if ins[0][dim].value != 1:  # torch leaves such a dim as it is
        return linear_rule(labels, labels)
    return linear_rule(labels, labels[:dim] + labels[dim + 1 :])


def _squeeze_strides(attrs: Attrs, shape: Ints, strides: Ints, new: Sequence[Ints]) -> Strides:
    return [strides] if len(new[0]) == len(shape) else _select_strides(attrs, shape, strides, new)


def _squeeze_text(t: OpText) -> str:
    # torch leaves a dim that is not 1 as it is; its shard may be 1
    return f"{t.args[0]}.squeeze({t.attrs['dim']})" if t.inputs[0][t.attrs["dim"]].value == 1 else t.args[0]


def _same_strides(attrs: Attrs, shape: Ints, strides: Ints, new: Sequence[Ints]) -> Strides:
    return [strides for _ in new]


# -- parts of it, and more than it -------------------------------------------------------------------------------------


def _expand(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    out = dim_labels(outs[0])
    skip = len(outs[0]) - len(ins[0])
    inside = [() if size.value == 1 else out[skip + i] for i, size in enumerate(ins[0])]
    return linear_rule(inside, out)


def _expand_strides(attrs: Attrs, shape: Ints, strides: Ints, new: Sequence[Ints]) -> Strides:
    return [broadcast(shape, strides, new[0])]


def _slice_arguments(a: Args) -> IrResult:
    start = a.get("start") or 0
    end = a.get("end")
    end = INT_MAX if end is None else end
    step = a.get("step", 1)
    if start == 0 and end == INT_MAX and step == 1:
        return Alias(a["self"])
    return IrOp("slice", (a["self"],), {"dim": a.get("dim", 0), "start": start, "end": end, "step": step})


def _slice(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    """Return the rule of a slice: dims carry over, except the one that changes size, which cannot be split."""
    labels = dim_labels(ins[0])
    dim = node.attrs["dim"] % len(labels)
    out = list(labels)
    out[dim] = () if outs[0][dim].value == 1 else ("changed",)
    return linear_rule(labels, out, {"changed", *labels[dim]})


def _slice_strides(attrs: Attrs, shape: Ints, strides: Ints, new: Sequence[Ints]) -> Strides:
    dim = attrs["dim"] % len(shape)
    return [(*strides[:dim], strides[dim] * attrs["step"], *strides[dim + 1 :])]


def _slice_text(t: OpText) -> str:
    dim = t.attrs["dim"] % len(t.inputs[0])
    start, end, step = t.attrs["start"], t.attrs["end"], t.attrs["step"]
    stop = "" if isinstance(end, int) and end >= 2**62 else literal(end)
    part = f"{literal(start) if start else ''}:{stop}" + (f":{step}" if step != 1 else "")
    if dim == len(t.inputs[0]) - 1:
        return f"{t.args[0]}[..., {part}]"
    return f"{t.args[0]}[{', '.join([':'] * dim + [part])}]"


def _select(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    labels = dim_labels(ins[0])
    dim = node.attrs["dim"] % len(labels)
    return linear_rule(labels, labels[:dim] + labels[dim + 1 :], set(labels[dim]))


def _select_strides(attrs: Attrs, shape: Ints, strides: Ints, new: Sequence[Ints]) -> Strides:
    dim = attrs["dim"] % len(shape)
    return [strides[:dim] + strides[dim + 1 :]]


def _chunk(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    """Return the rule of equal chunks: the dim is `count x rest`, and only the rest can be split.

    An example is a fused q, k, v projection.
    """
    dim = node.attrs["dim"] % len(ins[0])
    labels = dim_labels(ins[0])
    out = list(labels)
    if all(o[dim] == outs[0][dim] for o in outs):
        labels[dim], out[dim] = ("count", "rest"), ("rest",)
        sizes = {"count": Expr.of(len(outs)), "rest": outs[0][dim]}
        return OpRule((tuple(labels),), (tuple(out),) * len(outs), (Role.LINEAR,), frozenset({"count"}), sizes=sizes)
    results, whole = [], {*labels[dim]}
    for k in range(len(outs)):
        part = list(labels)
        part[dim] = (f"part{k}",)
        whole.add(f"part{k}")
        results.append(tuple(part))
    return OpRule((tuple(labels),), tuple(results), (Role.LINEAR,), frozenset(whole))


def _chunk_text(t: OpText) -> str:
    dim = t.attrs["dim"]
    sizes = [shape[dim] for shape in t.outputs]
    if all(s == sizes[0] for s in sizes):
        only = "[0]" if len(sizes) == 1 else ""
        return f"{t.args[0]}.chunk({len(sizes)}, dim={dim}){only}"
    return f"{t.args[0]}.split([{', '.join(py(s) for s in sizes)}], dim={dim})"


def _permute_dims(a: Args) -> IrResult:
    return IrOp("permute", (a["self"],), {"dims": tuple(a["dims"])})


def _permute_text(t: OpText) -> str:
    return f"{t.args[0]}.permute({', '.join(map(str, t.attrs['dims']))})"


_RESHAPING = (
    "view.default reshape.default _unsafe_view.default view_as.default flatten.using_ints unflatten.int "
    "squeeze.default squeeze.dims"  # which dims are 1 is a matter of the whole tensor, not of a part of the batch
)
_RESHAPES = {f"aten.{name}": by_name("reshape") for name in _RESHAPING.split()}
_CHUNKS = {f"aten.{x}": by_name("chunk", dim=0) for x in ("chunk.default", "split.Tensor", "split_with_sizes.default")}
_TRANSPOSES: Mapping[str, Lowering] = {
    "aten.transpose.int": by_name("transpose", "self", "dim0", "dim1"),
    "aten.t.default": lambda a: IrOp("transpose", (a["self"],), {"dim0": 0, "dim1": 1}),
}
_DETACHES = {**default("detach"), "aten.detach_.default": by_name("detach")}
_UNSQUEEZE = default("unsqueeze", by_name("unsqueeze", "self", "dim"))
_SQUEEZE = {"aten.squeeze.dim": by_name("squeeze", "self", "dim")}
_SELECT = {"aten.select.int": by_name("select", "self", "dim", "index")}
_SHAPED = "{0}.reshape({shape})"
_EXPAND = (Trait.IN_CORE, Trait.RESIZES, Trait.FILLS)

RECORDS = (
    _view("reshape", _reshape, _SHAPED, _reshape_strides, _RESHAPES, Trait.FOLLOWS, Trait.IN_CORE, Trait.RESIZES),
    _view("transpose", _transpose, "{0}.transpose({dim0}, {dim1})", _transpose_strides, _TRANSPOSES, Trait.FOLLOWS),
    _view("permute", _permute, _permute_text, _permute_strides, default("permute", _permute_dims), Trait.FOLLOWS),
    _view("unsqueeze", _unsqueeze, "{0}.unsqueeze({dim})", _unsqueeze_strides, _UNSQUEEZE, Trait.FOLLOWS),
    _view("squeeze", _squeeze, _squeeze_text, _squeeze_strides, _SQUEEZE, Trait.FOLLOWS),
    _view("detach", "~[*a] -> [*a]", "{0}.detach()", _same_strides, _DETACHES, Trait.STOPS_GRADIENT, linear=Linear.NO),
    _view(REGROUP, _regroup, "{0}.view_as({0})", _same_strides, {}),  # made by `ops.factors`, never by a capture
    # this rank's part of a dim that ranks of context parallelism share; made by `capture.passes.sequences`
    _view(OWN_PART, _regroup, _own_part_text, _own_part_strides, {}, saved=PART, linear=Linear.NO),
    _view("expand", _expand, "{0}.expand({shape})", _expand_strides, default("expand"), *_EXPAND, saved=PART),
    _part("slice", _slice, _slice_text, _slice_strides, {"aten.slice.Tensor": _slice_arguments}),
    _part("select", _select, "{0}.select({dim}, {index})", _select_strides, _SELECT),
    _part("chunk", _chunk, _chunk_text, _same_strides, _CHUNKS, factor_names={"count": "chunks"}),
)
